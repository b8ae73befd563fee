"""PyTorch's own strategies with the interface of lmkit's, for comparison."""
