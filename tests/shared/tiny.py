"""The recipe of a model of 2,500 parameters that trains on one thread of the CPU."""

# `table.key=value`, as in `--set`.
TINY = (
    *('run.folder="runs"', 'run.device="cpu"', "run.threads=1", "model.d_model=16", "model.d_ff=32"),
    *("model.num_layers=1", "model.num_heads=2", "model.context_length=8"),
)
RANDOM_TOKENS = ('data.source="random"', "model.vocab_size=64")


def tiny_recipe(*changes: str) -> str:
    """Return the recipe as TOML; changes are lines as those of `TINY`, and later ones win."""
    lines = {line.partition("=")[0]: line for line in (*TINY, *changes)}
    return "\n".join(lines.values()) + "\n"
