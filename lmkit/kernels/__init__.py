"""GPU kernels and their launchers, grouped by operation. No modules.

The plain forms are in `lmkit.attention`, `lmkit.optim` and `lmkit.model.operations`; attention and AdamW have their
autograd there, too. The file of every other operation has the kernels, the autograd function and the operator for
torch.compile.

* `flash`: attention in portable Triton; `hopper`: attention for Hopper GPUs in Gluon;
* `norm`: residual sum and RMSNorm; `rope`: rotary positions in place;
* `swiglu`; `swiglu_fp8`: with its cast; `fp8`: casts to fp8; `embedding`: its gradient;
* `cross_entropy`: the head's product and the loss, a chunk of tokens at a time;
* `adamw`: the optimizer's update in one pass over memory;
* `decode`: a step of generation;
* `launch`: cheap launches; `operators`: definition of operators; `versions`: differences between Triton's minors.
"""
