"""GPU kernels and their launchers, grouped by operation. No autograd and no modules: see `lmkit.attention` and
`optim`.

* `flash`: attention in portable Triton; `hopper`: attention for Hopper GPUs in Gluon;
* `adamw`: the optimizer's update in one pass over memory;
* `launch`: cheap launches; `versions`: what differs between the minors of Triton.
"""
