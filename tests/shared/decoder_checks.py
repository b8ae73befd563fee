"""What a `Decoder` must write with the kernels' step, on any device: run by Triton's interpreter, and on GPUs."""

import torch

from lmkit.core.sampling import Sampling
from lmkit.generation import Decoder
from lmkit.generation.decoder import layer_weights
from lmkit.model.transformer import TransformerLM
from lmkit.recipe.tables import ModelConfig


def model_of(device: str, dtype: torch.dtype = torch.float32, **fields) -> TransformerLM:
    """A small model, opinionated enough for its guesses to differ."""
    config = ModelConfig(vocab_size=101, context_length=300, d_model=64, d_ff=96, num_layers=2, num_heads=4)
    torch.manual_seed(0)
    model = TransformerLM(config.changed(**fields))
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
        for layer in model.layers:
            layer.attn.output_proj.weight.mul_(3)
            layer.ln1.weight.uniform_(0.5, 1.5)
            for name, x in layer.attn.named_parameters():
                if x.dim() == 1:  # a bias, or the gain of a norm of heads
                    x.uniform_(0.5, 1.5)
                    x.mul_(torch.randn_like(x).sign() if "bias" in name else 1)
    return model.to(device, dtype).eval()


def write(decoder: Decoder, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Write `new` tokens after each prompt, one prompt a row, seeds 5, 6..."""
    decoder.start(range(len(prompts)), prompts, seeds=range(5, 5 + len(prompts)))
    texts: list[list[int]] = [[] for _ in prompts]
    longest = max(map(len, prompts))
    for number in range(new):
        decoder.step(longest + number)
        for text, token in zip(texts, decoder.state.drawn.tolist(), strict=False):
            text.append(token)
    return texts


def prompts_of(lengths: tuple[int, ...], vocab_size: int = 101) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def make_exact_in_fp8(model: TransformerLM) -> None:
    """Make fp8 weights the same numbers: each row has the largest number of e4m3 times a power of two."""
    matrices = [matrix for layer in model.layers for matrix in layer_weights(layer)]
    for matrix in (*matrices, model.lm_head.weight):
        if isinstance(matrix, torch.Tensor) and matrix.dim() == 2:
            scale = 2.0 ** (matrix.abs().amax(1, keepdim=True) / 448).log2().ceil()
            matrix.copy_((matrix / scale).to(torch.float8_e4m3fn).float() * scale)
            matrix[:, 0] = 448 * scale[:, 0]


def check_equals_plain_step(
    rows: int,
    lengths: tuple[int, ...],
    sampling: Sampling,
    device: str,
    new: int = 2,
    weights="same",
    **fields,
) -> None:
    """The kernels' step in float32 writes what PyTorch's operations write in float64."""
    model, prompts = model_of(device, **fields), prompts_of(lengths)
    if weights == "fp8":
        make_exact_in_fp8(model)
    options = {"sampling": sampling, "most": 1000, "vocab_size": 100, "never": [3]}
    mine = write(Decoder(model, rows, kernels=True, weights=weights, **options), prompts, new)
    exact = write(Decoder(model.double(), len(prompts), kernels=False, **options), prompts, new)
    assert mine == exact
