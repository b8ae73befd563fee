"""Text from a trained model: sampling, the KV cache, streaming."""
