"""What a `Decoder` must write with the kernels' step, on any device: run by Triton's interpreter, and on GPUs."""

from __future__ import annotations

import torch

from lmkit.generation import Decoder
from lmkit.kernels.decode.reference import Ends, Sampling
from lmkit.model.transformer import TransformerLM
from lmkit.recipe.tables import ModelConfig


def model_of(device: str, dtype: torch.dtype = torch.float32, **fields) -> TransformerLM:
    """A small model, opinionated enough for its guesses to differ."""
    sizes = {
        "vocab_size": 101,
        "context_length": 300,
        "d_model": 64,
        "d_ff": 96,
        "num_layers": 2,
        "num_heads": 4,
    }
    torch.manual_seed(0)
    model = TransformerLM(ModelConfig(**{**sizes, **fields}))
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
        for layer in model.layers:
            layer.attn.output_proj.weight.mul_(3)
            layer.ln1.weight.uniform_(0.5, 1.5)
    return model.to(device, dtype).eval()


def write(decoder: Decoder, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Write `new` tokens after each prompt, one prompt a row, seeds 5, 6..."""
    decoder.start(range(len(prompts)), prompts, seeds=range(5, 5 + len(prompts)))
    texts: list[list[int]] = [[] for _ in prompts]
    longest = max(map(len, prompts))
    for number in range(new):
        decoder.step(longest + number)
        tokens, _ = decoder.newest().read()
        for text, token in zip(texts, tokens, strict=False):
            text.append(token)
    return texts


def prompts_of(lengths: tuple[int, ...], vocab_size: int = 101) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def check_equals_plain_step(
    rows: int, lengths: tuple[int, ...], sampling: Sampling, device: str, new: int = 2, **fields
) -> None:
    """The kernels' step in float32 writes what PyTorch's operations write in float64."""
    model, prompts = model_of(device, **fields), prompts_of(lengths)
    options = {"sampling": sampling, "ends": Ends(-1, 1000), "vocab_size": 100, "never": [3]}
    mine = write(Decoder(model, rows, kernels=True, **options), prompts, new)
    exact = write(Decoder(model.double(), len(prompts), kernels=False, **options), prompts, new)
    assert mine == exact
