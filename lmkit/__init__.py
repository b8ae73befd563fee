"""Build language models from scratch and measure how fast every part is."""

__version__ = "0.2.0.dev0"
