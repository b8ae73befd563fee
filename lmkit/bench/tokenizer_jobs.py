"""Do one job with one tokenizer, once, in a process of its own: `python -m lmkit.bench.tokenizer_jobs JOB`.

JOB is a `Job` as JSON; the result is one JSON object on stdout. Only the job is timed: text file to merges, or text
file to a file of ids. Every tokenizer gets the text in the way that suits it best.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lmkit.bench.tokenizer import Job
from lmkit.data.shards import open_tokens
from lmkit.storage.inputs import read_input
from lmkit.tokenizer import END_OF_TEXT, PATTERN, Tokenizer, train_tokenizer
from lmkit.tokenizer.chunks import exact_chunks
from lmkit.tokenizer.engine import new_encoder
from lmkit.tokenizer.pretokenize import SpecialTokens

Timed = Callable[[], Any]
"""The timed part of a job; everything that it needs is prepared."""


def closed_text(path: str) -> bytes:
    """Return a text that ends with the end of its last document, as `lmkit data encode` reads it."""
    data, end = read_input(path), END_OF_TEXT.encode()
    return data.rstrip() if not data or data.rstrip().endswith(end) else data + end


def train_ours(job: Job) -> Timed:
    return lambda: train_tokenizer([Path(job.text)], vocab_size=job.vocab_size, workers=job.workers)


def train_huggingface(job: Job) -> Timed:
    os.environ["RAYON_NUM_THREADS"] = str(job.workers)
    from tokenizers import Tokenizer as HuggingFace
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    tokenizer = HuggingFace(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=job.vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    return lambda: tokenizer.train([job.text], trainer)


def encode_ours(job: Job) -> Timed:
    from lmkit.data.encoding import encode_corpus

    tokenizer = Tokenizer.load(job.tokenizer)
    new_encoder(tokenizer.merge_table)  # compiles, if that was never done on this machine
    return lambda: encode_corpus([Path(job.text)], Path(job.output), tokenizer, workers=job.workers)


def encode_huggingface(job: Job) -> Timed:
    os.environ["RAYON_NUM_THREADS"] = str(job.workers)
    from tokenizers import Tokenizer as HuggingFace

    tokenizer = HuggingFace.from_file(job.tokenizer)
    end: Any = tokenizer.token_to_id(END_OF_TEXT)

    def encode() -> None:
        ids: list[int] = []
        documents = closed_text(job.text).decode().split(END_OF_TEXT)
        for i, document in enumerate(tokenizer.encode_batch_fast(documents)):
            ids += [end, *document.ids] if i else document.ids
        np.array(ids, np.uint32).tofile(job.output)

    return encode


def encode_tiktoken(job: Job) -> Timed:
    """Encode with tiktoken. Two threads are slower than one, so workers are processes."""
    context = multiprocessing.get_context("spawn")
    begin = context.Barrier(job.workers + 1)
    parts = [(job, number, begin) for number in range(job.workers)]
    processes = [context.Process(target=_encode_in_process, args=part) for part in parts]
    for process in processes:
        process.start()
    begin.wait()  # all have loaded

    def encode() -> None:
        begin.wait()
        for process in processes:
            process.join()

    return encode


def _encode_in_process(job: Job, number: int, begin: Any) -> None:
    import tiktoken

    tokenizer = Tokenizer.load(job.tokenizer)
    special = tokenizer.special_ids
    ranks = {token: key for key, token in tokenizer.vocab.items() if key not in special.values()}
    encoding = tiktoken.Encoding("bench", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)
    begin.wait()
    begin.wait()
    data = closed_text(job.text)
    edges = [max(0, data.find(b"\n", len(data) * i // job.workers)) for i in range(1, job.workers)]
    first, end = [0, *edges][number], [*edges, len(data)][number]
    specials = SpecialTokens({END_OF_TEXT: 0})
    with open(f"{job.output}.{number}", "wb") as file:
        for chunk in exact_chunks([data[first:end]], specials):
            encoding.encode_to_numpy(chunk.data.decode(), allowed_special={END_OF_TEXT}).tofile(file)


VARIANTS: dict[tuple[str, str], Callable[[Job], Timed]] = {
    ("train", "lmkit"): train_ours,
    ("train", "tokenizers"): train_huggingface,
    ("encode", "lmkit"): encode_ours,
    ("encode", "tokenizers"): encode_huggingface,
    ("encode", "tiktoken"): encode_tiktoken,
}


def run(job: Job) -> dict[str, Any]:
    """Do the job; return its seconds and a hash of the ids that does not depend on the number of files."""
    work = VARIANTS[job.task, job.variant](job)
    outputs: list[Path] = []  # files of ids, in the order of the text
    if job.variant == "tiktoken":
        outputs = [Path(f"{job.output}.{i}") for i in range(job.workers)]
    elif job.task == "encode":
        outputs = [Path(job.output)]
    for path in outputs:
        path.unlink(missing_ok=True)  # replacing an older file would take time
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    digest = hashlib.sha256()
    for path in outputs:
        is_ours = path.suffix == ".npy"
        ids = np.asarray(open_tokens(path).tokens) if is_ours else np.frombuffer(read_input(path), "<u4")
        digest.update(ids.astype("<u4").tobytes())
    return {"seconds": seconds, "ids": digest.hexdigest()}


if __name__ == "__main__":
    print(json.dumps(run(Job(**json.loads(sys.argv[1])))))
