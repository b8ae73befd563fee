"""The class of gradient-synchronisation strategies, and how one is found by name.

A training step on every rank, whatever the strategy:

    sync = build_strategy("bucketed", ranks)
    call = sync.attach(model)                        # once; call this module instead of `model` from here on
    optimizer = sync.build_optimizer(make, groups)   # once; make(groups) -> torch.optim.Optimizer

    for micro, (inputs, targets) in enumerate(batches):
        last = micro == len(batches) - 1
        with nullcontext() if last else sync.no_sync():   # decided before the forward pass
            (call.loss(inputs, targets) / len(batches)).backward()
    sync.finish(wait=False)                          # clipping and the optimizer wait for gradients they read
    norm = sync.clip_gradients(max_norm)             # equal on every rank; not finite if any rank's is not
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from lmkit.core.step import Sync, clip_for, gradient_norm
from lmkit.errors import LmkitError, UsageError
from lmkit.parallel.collectives import Averager, Traffic
from lmkit.parallel.ranks import Ranks
from lmkit.plugins import wrong_result
from lmkit.recipe.recipe import strategy_mistakes
from lmkit.recipe.tables import ParallelConfig
from lmkit.registry import STRATEGIES

if TYPE_CHECKING:
    from lmkit.parallel.buckets import WatchedBuckets

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def build_strategy(strategy: str | ParallelConfig, ranks: Ranks) -> Strategy:
    """Make a strategy from its name (or an alias), or from a recipe's [parallel] table.

    Raises:
        UsageError: no such strategy, or a key or option that it does not use.
        LmkitError: what is registered makes no strategy.
    """
    if isinstance(strategy, str):
        strategy = ParallelConfig(strategy=STRATEGIES.entry(strategy).name)
    if mistakes := list(strategy_mistakes(strategy)):
        hint = "take the option out, or another strategy"
        raise UsageError("parallel.wrong_option", "; ".join(mistakes), hint=hint)
    made = STRATEGIES.load(strategy.strategy)(ranks, strategy)
    if not isinstance(made, Strategy):
        raise wrong_result(STRATEGIES, strategy.strategy, f"{type(made).__name__}, no Strategy")
    return made


class Strategy(Sync):
    """Train one model on all ranks. Subclasses, which may be plugins (CONTRIBUTING.md), reduce the gradients.

    A parameter that this rank did not use contributes zeros. If no rank used it, its `grad` is None afterwards, as
    with PyTorch's DDP.

    Attributes:
        gather: how weights that other ranks updated arrive: "reads peers" (copies from their GPUs' memory),
            "collective", or None if every rank updates all weights. Set by `build_optimizer`.
    """

    buckets: WatchedBuckets | None = None
    """The buckets of strategies that communicate inside the backward pass."""
    averages = True
    """Whether ranks train together: they begin with rank 0's values, and `finish` averages their gradients."""

    def __init__(self, ranks: Ranks, config: ParallelConfig) -> None:
        self.ranks = ranks
        self.config = config
        self.traffic = Traffic()
        self.parameters: list[nn.Parameter] = []
        self.gather: str | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self.is_accumulating = False

    def not_captured(self) -> str:
        """Return why no CUDA graph captures a step; empty if one may."""
        facts = STRATEGIES.facts(self.config.strategy)
        if self.ranks.device.type != "cuda" or "nccl" not in str(dist.get_backend_config()):
            return "the ranks do not communicate by NCCL"
        if facts.steps_alike and not facts.rival:
            return ""
        why = "is PyTorch's" if facts.rival else "makes steps that differ"
        return f"{self.config.strategy} {why}"

    def attach(self, model: nn.Module, *, fingerprint: str = "") -> nn.Module:
        """Compare the ranks' models, take rank 0's values, install hooks; return the module to call.

        Args:
            model: on this rank's device; for a strategy that shards parameters it may be on "meta".
            fingerprint: also compared between ranks, such as a digest of the recipe and the data.

        Raises:
            LmkitError: on every rank, if models (names, ties, shapes, dtypes, frozen parameters) or fingerprints
                differ.
        """
        self._model = model
        self.parameters = trainable_parameters(model)
        if self.ranks.world_size > 1 and self.averages:
            check_same_model(model, self.ranks, fingerprint)
            broadcast_tensors(self._of_first(model))
            self._averager = Averager(self.ranks, self.traffic)
            self._install()
        return model

    def build_optimizer(self, make: MakeOptimizer, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        """Make the optimizer for these parameter groups. A strategy that shards passes `make` this rank's shards."""
        self._optimizer = make(list(groups))
        return self._optimizer

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the gradients of the passes inside, without communication. Enter it before the forward pass.

        Every backward pass of a step but the last belongs inside. Strategies that communicate during the backward
        pass raise an LmkitError if it is entered, or the next pass begins, before `finish` or `reset` was called.
        """
        if self.buckets is not None:
            self.buckets.pause()
        before, self.is_accumulating = self.is_accumulating, True
        try:
            yield
        finally:
            self.is_accumulating = before
            if self.buckets is not None:
                self.buckets.is_paused = before

    @torch.no_grad()
    def finish(self, *, wait: bool = True) -> None:
        """Average the gradients over the ranks. Call it after the last backward pass of a step.

        Args:
            wait: if False, the last gradients may still be in flight; `clip_gradients` and the optimizer's step wait
                for them. Use False only if nothing else reads the gradients.
        """
        if self.ranks.world_size == 1 or not self.averages:
            return
        unused = self._without_gradient()
        for index in unused:
            self.parameters[index].grad = torch.zeros_like(self.parameters[index])
        without = self._reduce(unused, wait=wait)
        try:
            for index in without:
                self.parameters[index].grad = None
        except (TypeError, IndexError) as error:
            found = f"{without!r} from _reduce, not a list of indices"
            raise wrong_result(STRATEGIES, self.config.strategy, found) from error

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Scale the reduced gradients to a global norm of at most `max_norm` (inf: measure only). Our AdamW scales
        them when its step reads them; `parameter.grad` then stays as it is.

        Returns:
            The norm before scaling, a scalar on the device, equal on every rank. The host does not wait for it.
        """
        gradients = present_gradients(self.parameters)
        norm = gradient_norm(gradients)
        clip_for(self._optimizer, gradients, norm, max_norm)
        return norm

    def wait_for_weights(self) -> None:
        """Make all weights whole. Call it before anything but the model's call, `loss` and `state_dict` reads them;
        before writing to parameters, call a barrier, too."""

    def end_step(self) -> None:
        """Wait (on GPUs: on the current stream) for what is in flight: a graph may be replayed next. Collective."""

    def weights_to_save(self) -> Mapping[str, torch.Tensor] | None:
        """Return the weights that this rank saves, by the names of checkpoints, on any device; None: rank 0 has them
        all. Collective."""
        return None

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> bool:
        """Load this rank's share of the weights, one at a time, by the names of checkpoints. Return False if nothing
        was loaded, because the rank holds the model's whole weights."""
        return False

    def reset(self) -> None:
        """Drop a step that raised in the backward pass, or whose gradients are not needed: instead of `finish`, on
        all ranks and after the same passes."""

    # What subclasses define

    def _install(self) -> None:
        """Install hooks; called only if there is more than one rank."""

    def _of_first(self, model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the tensors of which every rank takes rank 0's values in `attach`."""
        return (*model.named_parameters(), *model.named_buffers())

    def _without_gradient(self) -> list[int]:
        """Return the indices of the parameters that have no gradient on this rank."""
        return [index for index, parameter in enumerate(self.parameters) if parameter.grad is None]

    def _reduce(self, unused: Sequence[int], *, wait: bool) -> Sequence[int]:
        """Make every parameter's `grad` the mean over the ranks; return the indices of the parameters that had one on
        no rank. This rank did not use the `unused` ones, whose gradients are zeros. `wait`: see `finish`."""
        raise UsageError(
            "parallel.no_reduce",
            f"strategy {self.config.strategy!r}: its class {type(self).__name__} has no method _reduce",
            hint="CONTRIBUTING.md shows a strategy",
        )


@STRATEGIES.register("none", order=1, aliases=("Local No DDP",))
class NoSync(Strategy):
    """Leave gradients as they are. Parameters are not broadcast from rank 0 either."""

    averages = False


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that get gradients, in the order of registration; tied parameters once."""
    return list(filter(attrgetter("requires_grad"), model.parameters()))


def forward_units(model: nn.Module, named: Set[nn.Module] = frozenset()) -> Iterator[nn.Module]:
    """Yield the layers in the order of registration: the model's children, and the members of its lists of layers.
    Modules that contain `named` ones count as such lists."""
    for child in model.children():
        is_list = isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if is_list or not named.isdisjoint(itertools.islice(child.modules(), 1, None)):
            yield from forward_units(child, named)
        else:
            yield child


def present_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of the parameters that have one."""
    return list(filter(torch.is_tensor, map(attrgetter("grad"), parameters)))


def check_same_model(model: nn.Module, ranks: Ranks, fingerprint: str = "") -> None:
    """Raise an LmkitError on every rank if the ranks differ; see `Strategy.attach`. Collective."""
    first_name: dict[torch.Tensor, str] = {}  # tied names share one tensor
    described = "\n".join(
        f"{name} {first_name.setdefault(tensor, name)} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"
        for named in (model.named_parameters(remove_duplicate=False), model.named_buffers())
        for name, tensor in named
    )
    for what, text in (("model", described), ("recipe or data", fingerprint)):
        digests = [""] * ranks.world_size
        dist.all_gather_object(digests, hashlib.sha256(text.encode()).hexdigest())
        differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if differing:
            raise LmkitError(
                "parallel.ranks_differ",
                f"rank {', '.join(map(str, differing))}: {what} differs from rank 0's",
                hint="start every rank with the same recipe, overrides, token files and version of lmkit",
            )


@torch.no_grad()
def broadcast_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Give every rank rank 0's values of tensors, of any dtype and strides. Collective."""
    sent = []
    for _, tensor in named:
        flat = tensor.detach().reshape(-1)  # collectives ignore strides; this copies if the memory has gaps
        # Backends do not know every dtype: send bytes.
        sent.append((tensor, flat, dist.broadcast(flat.view(torch.uint8), src=0, async_op=True)))
    for tensor, flat, work in sent:
        assert work is not None  # asynchronous
        work.wait()
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))
