"""FlashAttention-2 in portable Triton, for NVIDIA GPUs from sm_80 on and for Triton's interpreter.

* `forward.flash_forward` and `backward.flash_backward` launch the kernels, which stand in the same files;
* `tiles` has what the kernels share, `tuning` the choice of tile sizes.
"""
