"""The kernel of all layers on a CPU: its source, compiled by g++ with the GPU's instructions of `emulated.cpp`."""

import copy
import ctypes
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from lmkit.generation import Decoder
from lmkit.kernels.decode import layers
from lmkit.kernels.decode.products import Stream
from lmkit.kernels.decode.reference import Ends, Sampling

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "generation"))
checks = importlib.import_module("decoder_checks")

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif(sys.platform != "linux", reason="the emulator switches threads as Linux does"),
]


def emulated(folder: Path, **macros: int) -> ctypes.CDLL:
    flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-U_FORTIFY_SOURCE", "-fno-strict-aliasing"]
    flags += [f"-D{name}={value}" for name, value in macros.items()]
    library = folder / f"layers-{len(list(folder.iterdir()))}.so"
    source = ["-I", str(layers.SOURCES), str(HERE / "emulated.cpp")]
    subprocess.run(["g++", *flags, *source, "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def model_of(shape: dict[str, int]):
    fields = {"d_model": "WIDTH", "d_ff": "HIDDEN", "num_heads": "HEADS", "num_kv_heads": "KV_HEADS"}
    return checks.model_of("cpu", torch.bfloat16, **{key: shape[name] for key, name in fields.items()})


SHAPES = [
    {"WIDTH": 128, "HIDDEN": 96, "HEADS": 4, "KV_HEADS": 4, "HEAD_DIM": 32, "CTAS": 9, "SPLITS": 2}
    | {"PIECE": 256, "STAGES": 3, "ALONE": 20},
    {"WIDTH": 256, "HIDDEN": 2208, "HEADS": 4, "KV_HEADS": 1, "HEAD_DIM": 64, "CTAS": 8, "SPLITS": 8}
    | {"PIECE": 512, "STAGES": 3, "ALONE": 0},
    {"WIDTH": 512, "HIDDEN": 320, "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 128, "CTAS": 16, "SPLITS": 4}
    | {"PIECE": 256, "STAGES": 4, "ALONE": 0},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_is_as_good_as_the_model_in_the_same_dtype(tmp_path, shape):
    code = emulated(tmp_path, **shape)
    width = shape["WIDTH"]
    model = model_of(shape)
    decoder = Decoder(model, 1, sampling=Sampling(0.0), ends=Ends(-1, 1000), kernels=False)
    exact_model = copy.deepcopy(model).double()
    stream = Stream(*(torch.zeros(1, width, dtype=torch.bfloat16) for _ in range(2)), torch.zeros(width))
    cache = decoder.keys, decoder.values, decoder.state.place
    kernel = layers.LayersKernel(
        code, decoder.layers, *cache, model.rope.cos_sin, stream, model.ln_final.weight, model.config.norm_eps
    )
    for length in (1, 2, 9, 130, 280):
        ids = torch.randint(101, (1, length), generator=torch.Generator().manual_seed(length))
        decoder.start([0], [ids[0].tolist()], seeds=[0])
        found = []
        for descending in (False, True):
            code.set_descending(descending)
            stream.total[:] = model.token_embeddings.weight[ids[0, -1:]]
            kernel()
            scale = (stream.parts[: width // 2].sum() / width + model.config.norm_eps).rsqrt()
            found.append(F.linear(stream.normed.double(), model.lm_head.weight.double())[0] * scale)
        assert torch.equal(*found)
        with torch.inference_mode():
            exact, rival = exact_model(ids)[0, -1], model(ids)[0, -1]
        assert (found[0] - exact).norm() <= 2 * (rival - exact).norm()
