from __future__ import annotations

import random
from pathlib import Path

import pytest
import safetensors.torch
import torch

from lmkit.errors import LmkitError
from lmkit.storage import sha256_file
from lmkit.training.tensor_files import parse_tensors, read_verified, write_tensors


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "layers.0.weight": torch.randn(5, 7, generator=generator),
        "odd": torch.randn(3, generator=generator).to(torch.bfloat16),
        "half": torch.randn(2, 2, generator=generator).half(),
        "double": torch.randn(3, generator=generator, dtype=torch.float64),
        "step": torch.tensor(12, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "bytes": torch.arange(5, dtype=torch.uint8),
    }


def test_reads_back_what_was_written_and_so_does_the_library(tmp_path: Path) -> None:
    tensors, path = some_tensors(), tmp_path / "t.safetensors"
    entry = write_tensors(path, tensors)
    assert (entry.sha256, entry.bytes) == (sha256_file(path), path.stat().st_size)
    for loaded in (
        parse_tensors(read_verified(path, entry), path=path),
        safetensors.torch.load_file(path),
    ):
        assert loaded.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert loaded[name].dtype == tensor.dtype
            assert loaded[name].shape == tensor.shape
            assert torch.equal(loaded[name], tensor)


def test_fault_45_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    entry = write_tensors(path, some_tensors())
    whole = path.read_bytes()
    generator = random.Random(45)
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(LmkitError, match="checksum error"):
            read_verified(path, entry)


def test_fault_64_loaded_tensors_survive_the_file_being_overwritten(tmp_path: Path) -> None:
    tensors, path = some_tensors(), tmp_path / "t.safetensors"
    loaded = parse_tensors(read_verified(path, write_tensors(path, tensors)), path=path)
    path.write_bytes(b"")  # a tensor in a memory map would now end the process with SIGBUS
    assert torch.equal(loaded["layers.0.weight"], tensors["layers.0.weight"])
    loaded["layers.0.weight"] += 1  # and it is writable memory of its own


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00" * 8, b"\xff" * 64, b"\x80\x04K\x01."],
    ids=["empty", "no header", "giant header", "pickle"],
)
def test_other_content_is_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(LmkitError, match="not a safetensors file"):
        parse_tensors(data, path=tmp_path / "x")
