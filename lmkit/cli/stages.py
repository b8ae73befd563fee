"""What the stages of `lmkit run` do: corpus -> tokenizer -> token files -> training -> evaluation -> stories.

`STAGES`, at the end, lists them. The stages that need torch import it when they run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lmkit.cli.ranks import alone
from lmkit.cli.stage_record import Outputs
from lmkit.data.chat import encode_chat
from lmkit.data.corpora import prepare_corpus
from lmkit.data.encoding import encode_corpus
from lmkit.data.token_files import mask_path, sidecar_path
from lmkit.recipe.run_folder import CHAT_TEMPLATE, STORIES, TOKENIZER, token_file
from lmkit.storage import write_atomic
from lmkit.tokenizer import Tokenizer, train_tokenizer
from lmkit.tokenizer.chat import read_template, template_for

if TYPE_CHECKING:
    from lmkit.cli.pipeline import Pipeline

log = logging.getLogger("lmkit")


def _make_corpus(run: Pipeline) -> Outputs:
    files = prepare_corpus(run.corpus, run.folder / "corpus", progress=run.progress)
    return {"train": list(files.train), "valid": list(files.valid)}


def _make_tokenizer(run: Pipeline) -> Outputs:
    table = run.tokenizer
    if table.path is not None:
        tokenizer = Tokenizer.load(table.path)
    else:
        tokenizer = train_tokenizer(
            run.record.outputs("corpus")["train"],
            vocab_size=table.vocab_size,
            special_tokens=table.special_tokens,
            max_token_bytes=table.max_token_bytes,
            workers=table.workers,
            errors=run.corpus.errors,
            progress=run.progress,
        )
    run.refuse_to_replace_tokenizer(tokenizer)
    path, beside = run.folder / TOKENIZER, run.folder / CHAT_TEMPLATE
    template = template_for(table, source=run.corpus.source)
    if template is None:
        beside.unlink(missing_ok=True)
    else:
        template.check(tokenizer, table.path or path)
        template.save(beside)
    tokenizer.save(path)
    return {"tokenizer": [path, beside][: 1 if template is None else 2]}


def _encode(run: Pipeline) -> Outputs:
    tokenizer = Tokenizer.load(run.folder / TOKENIZER)
    outputs = {}
    for part, sources in run.record.outputs("corpus").items():
        path = token_file(run.folder, part)
        workers, errors = run.recipe.data.workers, run.corpus.errors
        sidecar_path(path).unlink(missing_ok=True)  # a damaged one would not be replaced
        if run.corpus.source == "chat":
            template = read_template(run.folder / CHAT_TEMPLATE)
            encode_chat(sources, path, tokenizer, template, progress=run.progress)
            outputs[part] = [path, sidecar_path(path), mask_path(path)]
            continue
        encode_corpus(
            sources, path, tokenizer, workers=workers, errors=errors, force=True, progress=run.progress
        )
        outputs[part] = [path, sidecar_path(path)]
    return outputs


def _train(run: Pipeline) -> Outputs:
    from lmkit.generation import write_samples
    from lmkit.training.run_data import open_data
    from lmkit.training.session import train

    if run.would_set_aside():  # --from train; otherwise `opened` did it
        open_data(run.recipe)  # refuses damaged token files while the checkpoints are in their place
        run.set_aside()
    run.record.begin("train")
    run.record.forget(("evaluate", "generate"))
    run.tell_ranks("train")
    parallel, is_alone = run.recipe.parallel, os.environ.get("WORLD_SIZE", "1") == "1"
    if run.nproc == 1 and is_alone and "strategy" in parallel.model_fields_set:
        log.info('parallel.strategy: "%s" has no effect on one rank (see --nproc)', parallel.strategy)
    result = train(run.recipe, nproc=run.nproc, lock=run.lock, write_texts=write_samples)
    assert result is not None
    newest = [] if result.checkpoint is None else sorted(Path(result.checkpoint).iterdir())
    return {"training": [run.write("training", result)], "checkpoints": [run.checkpoints, *newest]}


def _evaluate(run: Pipeline) -> Outputs:
    from lmkit.training.atomic_checkpoint import saved_steps
    from lmkit.training.evaluation import EvaluateResult
    from lmkit.training.judging import evaluate_run

    # The training ends with an evaluation: use it if it is of the newest checkpoint.
    found = run.read("training", "step").get("evaluation")
    newest = saved_steps(run.checkpoints)[-1]
    if found is not None and found["checkpoint"] == str(newest.path) and run.redone[:1] != ["evaluate"]:
        return {"evaluation": [run.write("evaluation", EvaluateResult(**found))]}
    with alone():
        result = evaluate_run(run.folder, device=run.recipe.run.device)
    return {"evaluation": [run.write("evaluation", result)]}


def _generate(run: Pipeline) -> Outputs:
    from lmkit.cli.generate import continue_prompts

    with alone():
        result = continue_prompts(run.folder, device=run.recipe.run.device)
    path = run.folder / STORIES
    write_atomic(path, str(result))
    return {"stories": [path]}


STAGES: dict[str, Callable[[Pipeline], Outputs]] = {
    "corpus": _make_corpus,
    "tokenizer": _make_tokenizer,
    "encode": _encode,
    "train": _train,
    "evaluate": _evaluate,
    "generate": _generate,
}
