"""FlashAttention-2 in portable Triton, for NVIDIA GPUs from sm_80 on and for Triton's interpreter."""
