"""FlashAttention for Hopper GPUs (H100, H200) in Gluon: warp-specialised, TMA, asynchronous tensor cores.

* `unsupported_reason(q, k, v)`: None, or why these kernels cannot take the request;
* `forward(q, k, v, causal=..., scale=...)` -> (out, lse);
* `backward(dout, q, k, v, out, lse, causal=..., scale=..., deterministic=...)` -> (dq, dk, dv).

Shapes are (batch, heads, seq, head_dim) with any strides the copy engine takes, head_dim a multiple of 8 from 40
to 256 (`support.py` says why); causal means query i sees keys j <= i. Inside, heads are D = 64, 128 or 256 wide and
filled up with zeros. Read `forward_kernel.py` first; `backward_kernel.py` and `query_gradient_kernel.py` build on its
ideas, `narrow_gradient_kernel.py` (fast: D = 64, and 128 where it is long and unmasked) and
`wide_gradient_kernel.py` (256) on theirs.
"""

from lmkit.kernels.hopper.backward_launcher import backward
from lmkit.kernels.hopper.forward_launcher import forward
from lmkit.kernels.hopper.support import unsupported_reason

__all__ = ["backward", "forward", "unsupported_reason"]
