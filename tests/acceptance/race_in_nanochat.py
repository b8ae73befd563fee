"""The part of `race.py` that runs inside a checkout of nanochat, with its Python; imports nothing of lmkit.

race_in_nanochat.py shards TRAIN.txt VALID.txt    write the text as the Parquet shards that its dataset module reads
race_in_nanochat.py train SEED OPTION ...         run its scripts.base_train with another seed
race_in_nanochat.py score VALID.txt TAG OUT.json  score every document of a text by itself, with a checkpoint
"""

import json
import math
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

END = "<|endoftext|>"
"""Ends a document in the text files."""
ROWS_PER_GROUP = 1024
"""Documents in a row group, as in nanochat's own shards."""
TOKENS_AT_ONCE = 8192

Window = tuple[list[int], int]
"""Ids, of which the last so many are scored, but not the first."""


def documents(path: Path, chunk: int = 1 << 24) -> Iterator[str]:
    """Yield the documents of a text file that are not empty, reading `chunk` characters at a time."""
    rest = ""
    with open(path, encoding="utf-8", newline="") as file:
        while more := file.read(chunk):
            *whole, rest = (rest + more).split(END)
            yield from filter(None, whole)
    if rest:
        yield rest


def windows(ids: Sequence[int], begin: int, context_length: int) -> Iterator[Window]:
    """Cut a document, behind the token `begin`, into windows that score each of its ids once.

    The windows are consecutive; the last one sees a whole context, as in `lmkit evaluate --by-document`.
    """
    whole = [begin, *ids]
    for first in range(0, len(ids), context_length):
        last = min(first + context_length, len(ids))
        yield whole[max(0, last - context_length) : last + 1], last - first


def nats(losses: Callable[[Any, Any], Any], texts: Sequence[Window]) -> list[float]:
    """Return the sum of -log p(id | ids before it) over the scored ids of each window.

    Args:
        losses: (inputs, targets), both (rows, width) int64 -> nats of each target; targets of -1 are not scored. No
            input may change the loss of an earlier place.
    """
    import torch

    found = [0.0] * len(texts)
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i][0]))
    while order:
        width = max(2, len(texts[order[0]][0]) - 1)  # nanochat's model takes no single token
        batch, order = order[: max(1, TOKENS_AT_ONCE // width)], order[max(1, TOKENS_AT_ONCE // width) :]
        inputs = torch.zeros(len(batch), width, dtype=torch.int64)
        targets = torch.full_like(inputs, -1)
        for row, i in enumerate(batch):
            ids, num_scored = texts[i]
            inputs[row, : len(ids) - 1] = torch.tensor(ids[:-1])
            targets[row, len(ids) - 1 - num_scored : len(ids) - 1] = torch.tensor(
                ids[len(ids) - num_scored :]
            )
        scored = losses(inputs, targets).double().cpu().view(len(batch), width).masked_fill(targets < 0, 0.0)
        for i, value in zip(batch, scored.sum(1).tolist(), strict=True):
            found[i] = value
    return found


def write_shards(train: Path, valid: Path) -> None:
    """Write the two texts as shards 0 and 1; nanochat validates on the last one."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from nanochat.dataset import DATA_DIR, index_to_filename

    folder = Path(DATA_DIR)
    folder.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([("text", pa.string())])
    for index, path in enumerate((train, valid)):
        with pq.ParquetWriter(folder / index_to_filename(index), schema) as file:
            group: list[str] = []
            for document in documents(path):
                group.append(document)
                if len(group) == ROWS_PER_GROUP:
                    file.write_table(pa.table({"text": group}, schema))
                    group = []
            if group:
                file.write_table(pa.table({"text": group}, schema))


def train_with_seed(seed: int, options: Sequence[str]) -> None:
    """Run `python -m scripts.base_train` with its fixed seed, 42, moved by `seed`.

    nanochat has no option for the seed: its `compute_init` calls `torch.manual_seed(42)`, which decides the initial
    weights. The order of its documents is that of the shards with every seed.
    """
    import torch

    for module in (torch, torch.cuda):
        fixed = module.manual_seed
        module.manual_seed = lambda value, fixed=fixed: fixed(value + seed)
    sys.argv = ["scripts/base_train.py", *options]
    runpy.run_module("scripts.base_train", run_name="__main__", alter_sys=True)


def score(text: Path, tag: str, out: Path, device: str) -> None:
    """Write the nats, bytes and tokens of all documents of a text under the newest checkpoint of a tag.

    `same_windows` has the bits per byte of some windows as computed here and by nanochat's own `evaluate_bpb`.
    """
    import importlib.metadata

    import torch
    from nanochat.checkpoint_manager import load_model
    from nanochat.flash_attention import USE_FA3
    from nanochat.loss_eval import evaluate_bpb
    from nanochat.tokenizer import get_token_bytes

    model, tokenizer, _ = load_model("base", torch.device(device), phase="eval", model_tag=tag)
    texts: list[Window] = []
    size = tokens = count = 0
    for document in documents(text):
        ids = tokenizer.encode(document)
        size, tokens, count = size + len(document.encode()), tokens + len(ids), count + 1
        texts += windows(ids, tokenizer.get_bos_token_id(), model.config.sequence_len)

    @torch.inference_mode()
    def losses(inputs: Any, targets: Any) -> Any:
        return model(inputs.to(device), targets.to(device), loss_reduction="none")

    context, token_bytes = model.config.sequence_len, get_token_bytes(device=device)
    some = [window for window in texts if window[1] == context][:64]
    same_windows = None
    if some:
        ids = torch.tensor([ids for ids, _ in some], device=device)
        batches = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in ids.split(8)]
        bits = sum(nats(losses, some)) / math.log(2) / int(token_bytes[ids[:, 1:]].sum())
        theirs = evaluate_bpb(model, iter(batches), len(batches), token_bytes)
        same_windows = {"race": bits, "nanochat": theirs}
    versions = {"python": sys.version.split()[0]}
    for name in ("torch", "tiktoken", "rustbpe", "pyarrow"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "?"
    judged = {"nats": sum(nats(losses, texts)), "bytes": size, "tokens": tokens, "documents": count}
    judged |= {"context_length": context, "same_windows": same_windows}
    judged |= {"flash_attention_3": USE_FA3, "versions": versions}
    out.write_text(json.dumps(judged))


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "shards":
        write_shards(Path(arguments[0]), Path(arguments[1]))
    elif command == "train":
        train_with_seed(int(arguments[0]), arguments[1:])
    elif command == "score":
        score(Path(arguments[0]), arguments[1], Path(arguments[2]), arguments[3])
    else:
        raise SystemExit(f"unknown command {command!r}")
