"""lmkit: build language models from the bottom up, and find out how fast each part is."""

__version__ = "0.1.0"
