"""Triton's interpreter (TRITON_INTERPRET=1): kernels run on the CPU, in NumPy, slowly, for tests and for reading."""

import triton
from triton.runtime import interpreter

# Fixed when the process starts: Triton reads the variable when it decorates a kernel.
INTERPRETED: bool = triton.knobs.runtime.interpret


def let_scalars_index() -> None:
    """Makes loop bounds work with NumPy 2.4 and later in the interpreter of Triton 3.6.

    Triton holds a scalar as an array of one element and calls `int()` on it, which NumPy 2.4 refuses. Does
    nothing the second time.
    """
    patch = interpreter._patch_lang_tensor
    if getattr(patch, "lets_scalars_index", False):
        return

    def patch_and_mend(tensor: type, scope: object) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())  # type: ignore[attr-defined]

    patch_and_mend.lets_scalars_index = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patch_and_mend
