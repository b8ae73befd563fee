"""All layers of a step of a single row as one CUDA kernel (`whole/layers.cuh`): compile it, and call it."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmkit.errors import LmkitError, UsageError
from lmkit.kernels.cuda.build import nvcc
from lmkit.kernels.decode.products import Stream
from lmkit.storage.compiled import load_compiled

SOURCES = Path(__file__).parent / "whole"
MOST_LAYERS = 64
LOG2_E = 1.44269504089


class LayerPointers(ctypes.Structure):
    """`Layer` of layers.cuh."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("qkv", "output", "gate_up", "down", "norm1", "norm2")]


class Arguments(ctypes.Structure):
    """`Arguments` of layers.cuh."""

    _fields_ = [
        ("layers", LayerPointers * MOST_LAYERS),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "place", "cos_sin", "stream", "normed", "parts", "gain")),
        *(
            (name, ctypes.c_void_p)
            for name in ("stream_words", "middle_words", "qkv_words", "attended_words", "hidden_words", "split_words", "turn")
        ),
        ("num_layers", ctypes.c_int),
        ("capacity", ctypes.c_int),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("trace", ctypes.c_void_p),
    ]  # fmt: skip


def shape_of(config: Any, multiprocessors: int) -> dict[str, int] | None:
    """Return the macros of the kernel for a model on a card; None if it does not fit."""
    ctas = min(multiprocessors, 128)
    width, hidden, dim = config.d_model, config.d_ff, config.head_dim
    heads, kv_heads = config.num_heads, config.kv_heads
    splits = 8
    while splits * kv_heads > ctas:
        splits //= 2
    fits = (
        config.num_layers <= MOST_LAYERS
        and splits >= 1
        and dim in (32, 64, 128)
        and heads // kv_heads <= 8
        and width // 2 <= 16 * ctas
        and width % 32 == hidden % 32 == 0
        and min(width, hidden) >= 2 * ctas
    )
    if not fits:
        return None
    return {
        "WIDTH": width, "HIDDEN": hidden, "HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": dim,
        "CTAS": ctas, "SPLITS": splits,
    }  # fmt: skip


@cache
def library(macros: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    """Return the compiled kernel for sm_90; compile it if this machine has not yet."""
    flags = ["-shared", "-O3", "-std=c++17", "-Xcompiler", "-fPIC", "--expt-relaxed-constexpr"]
    flags += ["-gencode", "arch=compute_90a,code=sm_90a", *(f"-D{name}={value}" for name, value in macros)]
    compiler = nvcc()
    sources = sorted(SOURCES.iterdir())
    ingredients = [compiler, *flags, *(source.read_text("utf-8") for source in sources)]
    name = f"layers-{hashlib.sha256('0'.join(ingredients).encode()).hexdigest()[:16]}.so"

    def compile_to(path: Path) -> None:
        command = [compiler, *flags, "-o", str(path), str(SOURCES / "layers.cu")]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode:
            raise LmkitError("generate.build_failed", f"{compiler} failed: {done.stderr[:300]}", hint="")

    return load_compiled(name, compile_to, what="the kernel of all layers")


class LayersKernel:
    """The layers of a step of one row; call it to launch on the current stream.

    Args:
        code: the compiled kernel for the model's shape.
        layers: weights of each layer: norm1, qkv, output, norm2, gate_up, down.
        keys, values: (num_layers, 1, kv_heads, capacity, head_dim) bf16
        stream: `parts` gets a sum for every two features.
        gain: of the norm after the last layer.
    """

    def __init__(
        self,
        code: ctypes.CDLL,
        layers: Sequence[Any],
        keys: Tensor,
        values: Tensor,
        place: Tensor,
        cos_sin: Tensor,
        stream: Stream,
        gain: Tensor,
        eps: float,
    ) -> None:
        self.code = code
        num_layers, _, kv_heads, capacity, head_dim = keys.shape
        weights, device = layers[0], keys.device
        width, hidden = weights.output.shape[0], weights.down.shape[1]

        def words(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        split_words = words(8 * width * 2 + 8 * 1024, torch.int64)
        self.kept = [
            words(width), words(width), words(len(weights.qkv)), words(width), words(hidden), split_words, words(1)
        ]  # fmt: skip
        table = (LayerPointers * MOST_LAYERS)()
        for i, layer in enumerate(layers):
            pointers = (layer.qkv, layer.output, layer.gate_up, layer.down, layer.norm1, layer.norm2)
            assert all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in pointers)
            table[i] = LayerPointers(*(x.data_ptr() for x in pointers))
        tensors = (keys, values, place, cos_sin, stream.total, stream.normed, stream.parts, gain, *self.kept)
        self.tensors = tensors
        scale = head_dim**-0.5 * LOG2_E
        self.trace = torch.zeros(128 * 64 * 32, dtype=torch.int64, device=device)
        self.arguments = Arguments(
            table, *(x.data_ptr() for x in tensors), num_layers, capacity, eps, scale, self.trace.data_ptr()
        )
        assert ctypes.sizeof(self.arguments) == code.arguments_bytes()

    def __call__(self) -> None:
        stream = torch.cuda.current_stream().cuda_stream if self.tensors[0].is_cuda else 0
        code = self.code.launch(ctypes.byref(self.arguments), ctypes.c_void_p(stream))
        if code:
            raise LmkitError("generate.launch_failed", f"the kernel of all layers: error {code}", hint="")
