"""The Transformer language model and its parts; `lmkit.model.transformer.TransformerLM` is the whole."""
