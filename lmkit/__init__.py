"""Build language models from scratch and measure how fast every part is."""

__version__ = "0.1.0"
