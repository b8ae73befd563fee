"""Attention kernels: portable Triton here, Gluon for Hopper GPUs in `hopper`. No autograd: see `lmkit.attention`."""
