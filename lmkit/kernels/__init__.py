"""GPU kernels and their launchers, grouped by operation. No modules.

The plain forms are in `lmkit.attention`, `lmkit.optim` and `lmkit.model.operations`; attention and AdamW have their
autograd there, too. The file of every other operation has the kernels and the autograd function.

* `flash`: attention in portable Triton; `hopper`: attention for Hopper GPUs in Gluon;
* `norm`: residual sum and RMSNorm, and RMSNorm of heads; `rope`: rotary positions in place;
* `swiglu`, also with a cast to fp8; `fp8`: casts; `embedding`: its gradient;
* `cross_entropy`: the head's product and the loss, a chunk of tokens at a time;
* `adamw`: the optimizer's update in one pass over memory;
* `decode`: a step of generation;
* `launch`: cheap launches; `operators`: attention as custom operators; `versions`: what Triton's minors differ in.
"""
