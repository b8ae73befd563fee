"""AdamW whose state lies in the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmkit.optim.adamw import MASTER, AdamW
from lmkit.registry import OPTIMIZERS

if TYPE_CHECKING:
    from lmkit.optim.adamw import Update, _Kind
    from lmkit.recipe.tables import OptimizerConfig


class HostAdamW(AdamW):
    """`AdamW`, updated by the CPU from state in the host's memory: float32 weights and moments, 12 bytes a parameter
    (ZeRO-Offload, Ren et al. 2021, on one GPU).

    A step copies the gradients to the host and the weights back, and waits for both. The state is that of `AdamW`
    with masters, on the CPU; each optimizer loads the state of the other.
    """

    state_device = torch.device("cpu")
    writes_copies = False

    def _forget_tensors(self) -> None:
        super()._forget_tensors()
        self._versions: dict[Tensor, int] = {}  # of parameters after the last step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what `closure`, called first, returns."""
        loss = super().step(closure)
        for group in self.param_groups:
            self._versions.update({param: param._version for param in group["params"]})
        return loss

    @property
    def captured(self) -> Any:
        """Raise an AttributeError, for `hasattr`."""
        raise AttributeError("a CUDA graph cannot capture what the CPU computes")

    def keep_masters(self, masters: Mapping[Tensor, Tensor]) -> None:
        super().keep_masters({param: _on_host(master) for param, master in masters.items()})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an AdamW into the host's memory, without a copy on the GPU."""
        self._versions.clear()
        groups = state_dict["param_groups"]
        super().load_state_dict({"state": {}, "param_groups": groups})
        saved = [index for group in groups for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved, params, strict=True):
            if state := state_dict["state"].get(index):
                self.state[param] = {name: _on_host(value) for name, value in state.items()}

    def _updates(self, group: dict[str, Any]) -> dict[_Kind, list[Update]]:
        for param in group["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            if MASTER not in state:
                state[MASTER] = _on_host(param)
            elif self._versions.get(param, param._version) != param._version:  # somebody wrote to it
                given = _on_host(param)
                if not torch.equal(given, state[MASTER].to(param.dtype).float()):
                    state[MASTER] = given
        by_kind = super()._updates(group)
        return {
            kind: [update._replace(grad=update.grad.to("cpu")) for update in updates]
            for kind, updates in by_kind.items()
        }


def _on_host(x: Tensor) -> Tensor:
    """Return a float32 copy in the host's memory."""
    return x.detach().to("cpu", torch.float32, copy=True)


@OPTIMIZERS.register("adamw_host", order=4, keeps_masters=True, on_host=True, state_of="adamw")
def make_host_adamw(groups: list[dict[str, Any]], options: OptimizerConfig) -> HostAdamW:
    """Make the optimizer of the recipe's table `[optimizer]`."""
    return HostAdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps)
