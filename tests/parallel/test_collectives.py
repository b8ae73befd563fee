"""Averaging where the backend lacks something, and the count of what is moved. No ranks needed."""

from types import SimpleNamespace

import pytest
import torch

from lmkit.parallel import collectives
from lmkit.parallel.collectives import Averager, Traffic
from lmkit.parallel.ranks import Ranks


def test_gloo_reduces_cuda_tensors_one_by_one(monkeypatch):
    """It has no grouped call for them. (On GPUs: tests/gpu.)"""
    reduced, waited = [], []

    def all_reduce(tensor, op, group, async_op):
        reduced.append((tensor.name, op, group, async_op))
        return SimpleNamespace(wait=lambda: waited.append(tensor.name))

    monkeypatch.setattr(collectives.dist, "get_backend_config", lambda: "cpu:gloo,cuda:gloo")
    monkeypatch.setattr(collectives.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(collectives.torch, "_foreach_div_", lambda tensors, by: waited.append(by))
    tensors = [
        SimpleNamespace(name=n, nbytes=8, dtype=torch.float32, device=SimpleNamespace(type="cuda"))
        for n in "ab"
    ]
    traffic = Traffic()
    pending = Averager(Ranks(world_size=2), traffic).all_reduce(tensors)
    assert reduced == [(name, collectives.dist.ReduceOp.SUM, None, True) for name in "ab"]
    assert waited == []
    assert pending.wait() == tensors
    assert waited == ["a", "b", 2]
    assert (traffic.calls, traffic.payload_bytes) == (2, 16)


def test_link_bytes_are_those_of_a_ring():
    traffic = Traffic()
    traffic.count(400, world_size=4, passes=2, calls=2)  # of an all-reduce
    traffic.count(400, world_size=4)
    assert (traffic.calls, traffic.payload_bytes) == (3, 800)
    assert traffic.link_bytes == pytest.approx(600 + 300)
    traffic.reset()
    assert traffic == Traffic()


def test_tensors_of_several_dtypes_are_averaged_by_dtype(monkeypatch):
    """The weights of a bfloat16 training: matrices in bfloat16, gains in float32."""
    seen = []

    def reduce(tensors, options=None):
        """Two ranks with equal tensors: the sum is twice as large."""
        seen.append([tensor.dtype for tensor in tensors])
        torch._foreach_mul_(tensors, 2)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(collectives.dist, "get_backend_config", lambda: "cpu:gloo")
    monkeypatch.setattr(
        collectives.dist, "group", SimpleNamespace(WORLD=SimpleNamespace(allreduce_coalesced=reduce))
    )
    monkeypatch.setattr(collectives.dist, "all_reduce", lambda tensor, **options: reduce([tensor]))
    tensors = [torch.ones(3), torch.ones(2, dtype=torch.bfloat16), torch.ones(1)]
    found = Averager(Ranks(world_size=2), Traffic()).all_reduce(tensors).wait()
    assert seen == [[torch.float32] * 2, [torch.bfloat16]]
    assert [tensor.tolist() for tensor in found] == [[1.0] * 3, [1.0] * 2, [1.0]]
