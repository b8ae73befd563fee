"""FlashAttention for Hopper GPUs (H100, H200) in Gluon: warp-specialised, with TMA and asynchronous wgmma.

* `unsupported_reason(q, k, v)`: None, or why these kernels cannot take the call;
* `forward(q, k, v, causal=..., scale=..., first=...)` -> (out, lse);
* `backward(dout, q, k, v, out, lse, causal=..., scale=..., deterministic=..., first=...)` -> (dq, dk, dv).

Shapes are (batch, heads, seq, head_dim) with any strides that TMA takes, head_dim a multiple of 8 from 40 to 256
(`forward` says why); causal means query i sees keys j <= i, with `first` from first[i] on. Blocks that it hides are
skipped; where it cuts one, the kernels mask. Inside, heads are D = 64, 128 or 256 wide and filled up
with zeros.

| file | content |
|-|-|
| `forward`, `forward_kernel` | which calls these kernels take, the launch; the kernel |
| `backward` | which kernels a backward pass runs, their launches, the small kernels before and after |
| `backward_dq_deterministic` | dQ alone (deterministic, and all of D = 256) |
| `backward_dqdkdv_staggered` | dQ, dK and dV together: D = 64, and long unmasked D = 128 |
| `backward_dqdkdv_lockstep` | dK and dV, optionally with dQ: D = 128, and deterministic D = 64 |
| `backward_dkdv_d256` | dK and dV: D = 256 |
| `schedule`, `tma`, `barriers` | which tile a CTA works on; copies; synchronisation |
| `wgmma` | products; work on their accumulators in registers |

Read `forward_kernel` first. A CTA is a block of threads on one SM (streaming multiprocessor); a warp group is four
warps, which issue a wgmma (a matrix product on the tensor cores) together; a partition is a set of warps with code
of its own; TMA is the unit that copies boxes between global and shared memory.
"""

from typing import TYPE_CHECKING

from lmkit.kernels.versions import INSTALLED_MINOR, SUPPORTED_MINORS, dotted

if TYPE_CHECKING or INSTALLED_MINOR in SUPPORTED_MINORS:
    from lmkit.kernels.hopper.backward import backward
    from lmkit.kernels.hopper.forward import forward, unsupported_reason
else:  # the kernels' Gluon may not even be importable

    def unsupported_reason(q, k, v):
        """Return why these kernels cannot run here: they were not compiled with this minor of Triton."""
        supported = ", ".join(map(dotted, SUPPORTED_MINORS))
        return f"triton is {dotted(INSTALLED_MINOR)}; the Hopper kernels support {supported}"


__all__ = ["backward", "forward", "unsupported_reason"]
