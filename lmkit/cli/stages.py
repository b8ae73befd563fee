"""What the stages of `lmkit run` do: corpus -> tokenizer -> token files -> training -> evaluation -> stories.

`STAGES` lists them, and `summary` collects what they left. The stages that need torch import it when they run.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lmkit.cli.console import Result
from lmkit.cli.ranks import alone
from lmkit.cli.stage_record import Outputs
from lmkit.data.chat import encode_chat
from lmkit.data.corpora import prepare_corpus
from lmkit.data.encoding import encode_corpus
from lmkit.data.token_files import open_tokens, parts_of, sidecar_path
from lmkit.errors import some_of
from lmkit.measure.tables import size_of, statement
from lmkit.parallel.place import read_place
from lmkit.recipe.run_folder import BESIDE_TOKENIZER, CHAT_TEMPLATE, STORIES, TOKENIZER, token_file
from lmkit.storage import write_atomic
from lmkit.storage.inputs import read_input
from lmkit.tokenizer import Tokenizer, train_tokenizer
from lmkit.tokenizer.chat import read_template, template_for

if TYPE_CHECKING:
    from lmkit.cli.pipeline import Pipeline

log = logging.getLogger("lmkit")


def _make_corpus(run: Pipeline) -> Outputs:
    _warn_of_repeated(run)
    files = prepare_corpus(run.corpus, run.folder / "corpus", mark=run.mark, progress=run.progress)
    return {"train": list(files.train), "valid": list(files.valid)}


def _warn_of_repeated(run: Pipeline) -> None:
    """Warn of files whose content would be both learned and held out."""
    key = "valid" if run.corpus.valid else "train"
    content, repeated = run.record.content, []
    learned = set(content["corpus.train"] if key == "valid" else ())
    for path, digest in zip(getattr(run.corpus, key), content[f"corpus.{key}"], strict=True):
        if digest in learned:
            repeated.append(str(path))
        elif key == "train":
            learned.add(digest)
    if repeated:
        message = (
            "corpus.%s: %s: has the content of a file in corpus.train: held-out text may have been learned"
        )
        log.warning(message, key, some_of(repeated))


def _make_tokenizer(run: Pipeline) -> Outputs:
    table = run.tokenizer
    if table.path is not None:
        tokenizer = Tokenizer.load(table.path, end_of_text=table.end_of_text).for_training()
    else:
        tokenizer = train_tokenizer(
            run.record.outputs("corpus")["train"],
            vocab_size=table.vocab_size,
            special_tokens=table.special_tokens,
            end_of_text=table.end_of_text,
            separator=run.mark,
            max_token_bytes=table.max_token_bytes,
            workers=table.workers,
            errors=run.corpus.errors,
            progress=run.progress,
        )
    run.refuse_to_replace_tokenizer(tokenizer)
    path = run.folder / TOKENIZER
    template = template_for(table, tokenizer, source=run.corpus.source)
    if template is not None:
        template.check(tokenizer, table.path or path)
    for name in BESIDE_TOKENIZER:  # of the tokenizer before
        (run.folder / name).unlink(missing_ok=True)
    if template is not None:
        template.save(run.folder / CHAT_TEMPLATE)
    tokenizer.save(path)
    return {
        "tokenizer": [path, *(run.folder / name for name in BESIDE_TOKENIZER if (run.folder / name).exists())]
    }


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
        else:
            encode_corpus(
                sources,
                path,
                tokenizer,
                workers=workers,
                errors=errors,
                separator=run.mark,
                force=True,
                progress=run.progress,
            )
        outputs[part] = [part for part in parts_of(path) if part.exists()]
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
    parallel, is_alone = run.recipe.parallel, read_place().world_size == 1
    if run.nproc == 1 and is_alone and "strategy" in parallel.model_fields_set:
        log.info('parallel.strategy: "%s" has no effect on one rank (see --nproc)', parallel.strategy)
    result = train(
        run.recipe, nproc=run.nproc, lock=run.lock, write_samples=write_samples, checks_tokens=False
    )
    assert result is not None
    newest = [] if result.checkpoint is None else sorted(Path(result.checkpoint).iterdir())
    return {"training": [run.write("training", result)], "checkpoints": [run.checkpoints, *newest]}


def _evaluate(run: Pipeline) -> Outputs:
    from lmkit.training.checkpoint import saved_steps
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


def summary(run: Pipeline, done: dict[str, str]) -> Result:
    """Collect what the stages left in the run folder; sizes in bytes, speeds in tokens per second."""
    evaluation = run.read("evaluation", "loss", "perplexity", "bits_per_byte")
    training = run.read("training", "parameters", "step")
    train, valid = (open_tokens(token_file(run.folder, part)).meta for part in ("train", "valid"))
    story = read_input(run.folder / STORIES).decode("utf-8", "replace")
    bits = evaluation["bits_per_byte"]
    held_out = [f"loss {evaluation['loss']:.4f}"]
    held_out += [f"perplexity {value:.2f}" for value in [evaluation["perplexity"]] if value is not None]
    held_out += [f"{value:.4f} bits per byte" for value in [bits] if value is not None]
    parameters, steps, speed = training["parameters"], training["step"], training.get("tokens_per_second")
    corpus_bytes = train.num_bytes + valid.num_bytes
    lines = [
        "",
        story.strip(),
        "",
        f"corpus      {size_of(corpus_bytes)} of text",
        f"tokenizer   {train.vocab_size:,} tokens",
        f"token files {train.num_tokens:,} to train on, {valid.num_tokens:,} held out",
        f"model       {parameters:,} parameters, {steps:,} steps"
        + ("" if speed is None else f", {speed:,.0f} tokens/s"),
        f"held out    {', '.join(held_out)}",
        f"run folder  {run.folder}",
        statement("another story", f"lmkit generate {shlex.quote(str(run.folder))} --seed 1"),
    ]
    fields = {
        "folder": run.folder,
        "stages": done,
        "corpus_bytes": corpus_bytes,
        "vocab_size": train.vocab_size,
        "train_tokens": train.num_tokens,
        "valid_tokens": valid.num_tokens,
        "parameters": parameters,
        "steps": steps,
        "tokens_per_second": speed,
        "loss": evaluation["loss"],
        "perplexity": evaluation["perplexity"],
        "bits_per_byte": bits,
        "files": {path.name: path for path in sorted(run.folder.iterdir()) if path.name != ".lock"},
        "story": story,
    }
    return Result("\n".join(lines), fields)
