"""Models of transformers with random weights, of every kind that lmkit imports."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmkit.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}
GROUPED = {"num_key_value_heads": 2}
TIED = {"tie_word_embeddings": True}
LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}
FACTORS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10_000.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_parameters": LLAMA3 | FACTORS}


def make_theirs(kind: str, changes: dict[str, Any], seed: int = 0, scale: float = 0.1) -> Any:
    """A model of transformers with random weights, also of norms and biases."""
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, scale)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(1.0)
    return model


def log_p(model: torch.nn.Module, ids: list[int]) -> list[float]:
    """Return log p of each id but the first, one pass for all, in float64."""
    logits = model.double()(torch.tensor([ids[:-1]]))[0].detach().log_softmax(-1)
    return [logits[i, token].item() for i, token in enumerate(ids[1:])]


def spoil(folder: Path) -> None:
    """Give the model in a folder finite weights with which it predicts no finite numbers."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(3e38)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def byte_tokenizer() -> Tokenizer:
    return Tokenizer.from_merges([(b"h", b"e"), (b" ", b"t"), (b" t", b"he")], ["<|endoftext|>", "<|pad|>"])


def their_folder(
    parent: Path,
    kind: str = "Llama",
    changes: dict[str, Any] | None = None,
    scale: float = 0.1,
    **options: Any,
) -> Path:
    """A Hugging Face folder `theirs`; options are those of `save_pretrained`."""
    path = parent / "theirs"
    make_theirs(kind, changes or {}, scale=scale).save_pretrained(path, **options)
    (path / "generation_config.json").unlink()  # it names token 2 as the end of a text
    byte_tokenizer().save(path / "tokenizer.json")
    return path


def write_lines(name: str, records: Iterable[Any]) -> Path:
    path = Path(name)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
