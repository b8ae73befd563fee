"""What `lmkit bench` measures: cases x variants, one file each, their rows and their reports."""
