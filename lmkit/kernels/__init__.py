"""Attention kernels: portable Triton here, Gluon for Hopper GPUs in `hopper`. No autograd: see `lmkit.attention`.

`adamw` is the optimizer's: see `lmkit.optim.adamw`.
"""
