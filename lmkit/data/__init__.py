"""Corpora -> token files -> batches."""
