"""GPU kernels and their launchers, grouped by operation. No modules.

For attention and AdamW, `lmkit.attention` and `optim` have the plain forms and autograd. The file of every other
operation has all of it: the plain form, the kernels, the autograd function, and the operator for torch.compile.

* `flash`: attention in portable Triton; `hopper`: attention for Hopper GPUs in Gluon;
* `norm`: residual sum and RMSNorm; `rope`: rotary positions in place; `swiglu`; `embedding`: its gradient;
* `cross_entropy`: the head's product and the loss, a chunk of tokens at a time;
* `adamw`: the optimizer's update in one pass over memory;
* `decode`: a step of generation, and its plain form;
* `launch`: cheap launches; `operators`: definition of operators; `versions`: differences between Triton's minors.
"""
