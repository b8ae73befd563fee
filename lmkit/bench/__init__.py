"""Benchmarks, one file each: cases x variants -> rows -> tables, pictures and reports."""
