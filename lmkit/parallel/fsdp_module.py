"""A module whose parameters, gradients and optimizer state are sharded over the ranks of the process group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from lmkit.parallel.fsdp import Fsdp
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.tables import ParallelConfig


class FSDP(nn.Module):
    """Wrap a module so that every rank holds a share of its parameters, gradients and optimizer state.

        model = FSDP(model, compute_dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        loss_function(model(inputs), targets).backward()   # each rank with its own part of the batch
        optimizer.step()

    `parameters` and `named_parameters` return this rank's elements, flat. A backward pass adds the mean gradients of
    all ranks to theirs. The optimizer must update every element by itself. Every rank must call the same layers in
    the same order; see `lmkit.parallel.fsdp` for what a layer is. `state_dict` returns the whole module's weights on
    the CPU; `load_state_dict` takes whole weights.

    Args:
        module: the same on every rank; all take rank 0's values. On "meta", layers are initialised one by one.
        compute_dtype: dtype to which gathered fp32 weights and inputs are cast; None: no cast.
        reshard_after_forward: free a layer's weights between its forward and its backward pass.

    Attributes:
        module: the wrapped module.

    Raises:
        LmkitError: the modules differ between ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        reshard_after_forward: bool = True,
    ) -> None:
        super().__init__()
        config = ParallelConfig(strategy="fsdp", options={"reshard_after_forward": reshard_after_forward})
        self._sync = _FinishedByThePass(Ranks.current(), config)
        self._sync.compute_dtype = compute_dtype
        self._compute_dtype = compute_dtype
        self._sync.attach(module)
        self.module = module
        self._slices = self._sync.slices

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._sync.notice_the_step()
        args, kwargs = tree_map(self._cast, (args, kwargs))
        return self.module(*args, **kwargs)

    def _cast(self, value: Any) -> Any:
        is_wide = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        return value.to(self._compute_dtype) if is_wide and self._compute_dtype is not None else value

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's elements of every parameter that trains; of small ones it may have none."""
        for name, parameter in self.module.named_parameters(prefix=prefix):
            if parameter in self._slices:
                yield name, self._slices[parameter]


def gather_full_parameters(model: FSDP) -> dict[str, torch.Tensor]:
    """Return the whole parameters by name, on every rank, in the dtype that they had before. Collective."""
    return model._sync.whole_weights()


class _FinishedByThePass(Fsdp):
    """`fsdp` for any optimizer: the end of a backward pass puts the gradients into the slices' `grad`."""

    saves_everywhere = True

    @property
    def slices(self) -> dict[nn.Parameter, nn.Parameter]:
        """Parameter -> this rank's elements; without any a new parameter without elements."""
        return {
            parameter: flat.slices.get(parameter, nn.Parameter(flat.shard.new_empty(0)))
            for flat in self._flats
            if flat.trains
            for parameter in flat.parameters
        }

    def notice_the_step(self) -> None:
        """Free gathered weights, which the step may have made stale, and gradients that were set to None."""
        self.refresh()
        for flat in self._flats:
            flat.notice_released()

    def _end_pass(self) -> None:
        super()._end_pass()
        self.finish()
