"""FlashAttention-2 in CUDA C++, for NVIDIA GPUs from sm_75 on. README.md explains it to a reader of kernels.

* `flash.flash_forward` and `flash.flash_backward` call the kernels, which nvcc compiles on first use;
* the source: `primitives.cuh`, `tiles.cuh`, `forward.cuh`, `backward.cuh`, `naive.cuh`; `flash.cu` launches.
"""
