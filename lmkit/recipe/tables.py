"""The tables of a recipe: one frozen pydantic class per TOML table.

The docstring below a key is its documentation: `lmkit recipe show` prints it. The files of benches have theirs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from lmkit.recipe.depth import TOKENS_PER_PARAMETER
from lmkit.recipe.model_table import PRESETS as PRESETS
from lmkit.recipe.model_table import ModelConfig as ModelConfig
from lmkit.recipe.model_table import check_heads as check_heads
from lmkit.recipe.values import (
    CorpusSource,
    Count,
    Int64,
    NonNegativeFloat,
    Only,
    OptimizerName,
    PositiveFloat,
    PositiveInt,
    ScheduleName,
    StrategyName,
    Table,
    Workers,
)
from lmkit.recipe.vocabulary import END_OF_TEXT, MAX_TOKEN_BYTES, MAX_VOCABULARY, NUM_BYTES
from lmkit.registry import SCHEDULES
from lmkit.storage.inputs import in_home


class RunConfig(Table):
    """`[run]`: the name and folder of a run, and what makes it repeatable."""

    name: str = "run"
    """Names the run folder, `<folder>/<name>`."""
    folder: Path = Path("artifacts/runs")
    """Parent of all run folders."""
    seed: Int64 = 0
    """Determines the initial weights and the order of batches."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` uses CUDA if there is a GPU, else the CPU; `cuda` without a GPU is an error."""
    deterministic: bool = False
    """On GPUs, use only kernels that return the same bits every time (slower). CPU runs always repeat."""
    threads: Workers = 0
    """CPU threads of torch; 0: torch decides. A bit-for-bit repeat needs the same number."""

    @field_validator("name")
    @classmethod
    def _is_a_folder_name(cls, name: str) -> str:
        # A folder that somebody renamed may be called "stories (copy)".
        if re.fullmatch(r"\w[^/\x00-\x1f\x7f]{0,99}", name) is None:
            raise ValueError(
                f"{name[:40]!r} is not a valid name: use 1 to 100 letters, digits and signs other than '/', "
                "and begin with a letter, a digit or '_'"
            )
        return name

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder / self.name


class CorpusConfig(Table):
    """`[corpus]`: the text to train on and the part of it that is held out."""

    source: CorpusSource = "synth"
    """`synth`: generated stories, offline. `files`: your own text. `chat`: conversations, JSON lines of messages, of
    which the assistant's words are learned. A dataset (`tinystories`, `owt`) is downloaded."""
    folder: Annotated[Path, Only("corpus.source", but=("synth", "files", "chat"))] = Path("artifacts/data")
    """Downloads are kept here, shared by all runs."""
    size_mb: Annotated[PositiveFloat, Only("corpus.source", among=("synth",))] = 20.0
    """Size of the generated training text, in 10^6 bytes."""
    seed: Annotated[Int64, Only("corpus.source", among=("synth",))] = 0
    """Seed of the generator."""
    train: tuple[Path, ...] = ()
    """Text files, or JSON objects in files that end in `.jsonl`, `.ndjson` or `.json`; compressed (`.gz`) or a pipe,
    too (`files`, `chat`). A byte order mark at the beginning is left out. `weight` 0 or `train` false leaves a text
    out; a conversation or message with it is read and not learned."""
    valid: tuple[Path, ...] = ()
    """Held-out files (`files`, `chat`); if empty, about `valid_fraction` of the text, its last documents."""
    valid_fraction: Annotated[
        float,
        Field(gt=0, lt=1),
        Only("corpus.source", among=("synth", "files", "chat")),
        Only("corpus.valid", among=((),)),
    ] = 0.05
    """The part of the text that is held out."""
    field: Annotated[str, Only("corpus.source", among=("files",))] = "text"
    """The key of a JSON object that holds the text."""
    separator: Annotated[str | None, Field(min_length=1), Only("corpus.source", but=("chat",))] = None
    """What ends a document in text files; default: the tokenizer's end-of-text token, as its file writes it, or
    `<|endoftext|>` in downloads. The text of a JSON object is one document."""
    errors: Literal["strict", "replace"] = "strict"
    """Invalid UTF-8: stop and name the byte offset, or replace it by U+FFFD."""

    @model_validator(mode="after")
    def _files_are_named(self) -> CorpusConfig:
        has_files = self.source in ("files", "chat")
        if has_files and not self.train:
            raise ValueError(f'source = "{self.source}" needs train = ["some/file"]')
        if not has_files and (self.train or self.valid):
            raise ValueError(f'train and valid belong to source = "files" or "chat", not "{self.source}"')
        return self


TRAINED = Only("tokenizer.path", among=(None,))


class TokenizerConfig(Table):
    """`[tokenizer]`: byte-level BPE, trained on the training part of the corpus or read from a file."""

    vocab_size: Annotated[int, Field(gt=0, le=MAX_VOCABULARY)] = 10_000
    """256 bytes + merges + special tokens."""
    special_tokens: Annotated[tuple[str, ...], TRAINED] = (END_OF_TEXT,)
    """Never split, never merged across."""
    max_token_bytes: Annotated[PositiveInt, TRAINED] = MAX_TOKEN_BYTES
    """No merge makes a longer token: one endless word would otherwise become tokens as long as the corpus."""
    workers: Annotated[Workers, TRAINED] = 0
    """Threads for training; 0: one per CPU. The result does not depend on it."""
    path: Path | None = None
    """Use this tokenizer.json instead of training one."""
    end_of_text: str | None = None
    """The special token that ends every document; default: what the files beside `path` say, else a conventional name
    such as `<|endoftext|>` or `</s>`."""
    chat_template: Literal["plain", "chatml", "llama3"] | None = None
    """What stands around the messages of `corpus.source = "chat"`; default: the chat_template.json beside `path`, or
    `plain`, which needs no special token but that at the end of a text."""

    @model_validator(mode="after")
    def _room_for_bytes_and_specials(self) -> TokenizerConfig:
        if len(set(self.special_tokens)) != len(self.special_tokens) or "" in self.special_tokens:
            raise ValueError("special_tokens must be distinct and not empty")
        if self.path is None and self.end_of_text not in (None, *self.special_tokens):
            raise ValueError(f"end_of_text {self.end_of_text!r} is not in special_tokens")
        minimum = NUM_BYTES + len(self.special_tokens)
        if self.vocab_size < minimum:
            raise ValueError(
                f"vocab_size is {self.vocab_size}: must be at least {minimum} "
                f"(256 bytes; special tokens: {len(self.special_tokens)})"
            )
        return self


OF_TOKENS = Only("data.source", among=("tokens",))


class DataConfig(Table):
    """`[data]`: token files and how batches are drawn from them."""

    train: Annotated[Path | None, OF_TOKENS] = None
    """Token file (.npy); default: the file that `lmkit run` made in the run folder."""
    valid: Annotated[Path | None, OF_TOKENS] = None
    """Held-out token file; default: the file that `lmkit run` made."""
    source: Literal["tokens", "random"] = "tokens"
    """`random` draws uniform token ids and needs no file (for benchmarks)."""
    sampling: Annotated[Literal["windows", "shuffled", "documents", "packed"], OF_TOKENS] = "windows"
    """Sequences start anywhere in the file (`windows`), or at the beginning of a document (`documents`). An epoch has
    every token once if they are cut one after the other and come in random order (`shuffled`), or are filled with
    whole documents, which do not see one another (`packed`)."""
    workers: Workers = 0
    """Threads that encode the corpus; 0: one per CPU. The result does not depend on it."""


Beta = Annotated[float, Field(ge=0, lt=1)]
OF_MOMENTS = Only("optimizer.name", but=("sgd",))


class OptimizerConfig(Table):
    """`[optimizer]`: the optimizer and its learning-rate schedule."""

    name: OptimizerName = "adamw"
    """`adamw` (Loshchilov and Hutter 2019), `adamw_host` (with its state in the host's memory), `muon` (Jordan 2024),
    `sgd`, or a registered optimizer of your own."""
    lr: Annotated[PositiveFloat, Field(le=1e6)] = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    betas: Annotated[tuple[Beta, Beta], OF_MOMENTS] = (0.9, 0.95)
    """Decay of the running means of gradient and squared gradient, per step."""
    eps: Annotated[PositiveFloat, Field(le=1e6), OF_MOMENTS] = 1e-8
    """Added to the root of the mean square."""
    weight_decay: Annotated[float, Field(ge=0, le=1e6)] = 0.1
    """Applied to matrices only, not to norm gains."""
    schedule: ScheduleName = "cosine"
    """Shape of the decay after the warm-up."""
    warmup_steps: Count = 0
    """Steps in which the rate rises linearly from 0."""
    cooldown_steps: Annotated[Count | None, Only("optimizer.schedule", among=SCHEDULES)] = None
    """Steps in which the rate falls at the end; default: 40% of `train.steps`."""
    min_lr: Annotated[NonNegativeFloat, Only("optimizer.schedule", but=("constant",))] = 0.0
    """Learning rate at the end of the schedule, at `train.steps`."""
    options: dict[str, int | float | str | bool] = Field(default_factory=dict)
    """`[optimizer.options]`: the optimizer's own options, if it has any."""

    @model_validator(mode="after")
    def _ends_below_its_top(self) -> OptimizerConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} is larger than lr {self.lr}")
        return self


class TrainConfig(Table):
    """`[train]`: number of steps, batch size, precision, evaluation."""

    init_from: Path | None = None
    """Begin with the weights of this run, checkpoint or Hugging Face folder, and with a fresh optimizer."""
    steps: Annotated[PositiveInt, Only("train.epochs", among=(None,))] = 1000
    """Optimizer steps; the learning-rate schedule spans them."""
    tokens_per_parameter: Annotated[PositiveFloat, Only("model.depth")] = TOKENS_PER_PARAMETER
    """Tokens to train on for each parameter that multiplies; decides `steps`."""
    epochs: Annotated[PositiveFloat, Field(le=1e6)] | None = None
    """Steps that see this many times as many tokens as the token file has."""
    max_minutes: PositiveFloat | None = None
    """Stop after this much wall-clock time; the schedule then follows the fraction of time used."""
    batch_size: PositiveInt = 32
    """Sequences per optimizer step over all ranks; accumulation and ranks divide it."""
    accumulation: PositiveInt = 1
    """Micro-batches per optimizer step."""
    precision: Literal["fp32", "bf16", "fp8", "bf16-autocast", "fp16", "auto"] = "fp32"
    """Dtype of the matrix products. `bf16` holds the matrices in bf16, and fp32 masters in the optimizer; `fp8` does
    the same, and multiplies in fp8 in layers of 1024 or wider, except for gradients of weights (GPUs from sm_90 on);
    `bf16-autocast` and `fp16` cast fp32 weights in every pass; `auto` is `bf16` where the GPU or CPU has instructions
    for it, else `fp32`; `bf16-autocast` in place of `bf16` if the optimizer keeps no masters."""
    cuda_graph: Literal["auto", "on", "off"] = "auto"
    """Capture the training step in a CUDA graph; `auto`: where the host would set the pace. With several ranks
    PyTorch's strategies are not captured."""
    grad_clip: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    log_interval: PositiveInt = 10
    """Log every N steps; the first and the last step are always logged."""
    eval_interval: Count = 200
    """Evaluate on held-out data every N steps; 0: only at the end."""
    eval_batches: Count = 20
    """Batches per evaluation; 0: all held-out data. The last evaluation always uses all of it."""
    sample_interval: Count = 0
    """Write the texts of [generate]'s prompts every N steps, to the log and the metrics; 0: never."""
    tensorboard: bool = False
    """Also write TensorBoard's files, to `tensorboard` in the run folder; needs the extra `lmkit[tensorboard]`."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """If a loss or gradient is not finite: stop before the optimizer step, or skip this step."""
    spike_sigmas: NonNegativeFloat = 0.0
    """> 0: treat a loss or gradient norm that is so many standard deviations above its running mean as not finite,
    from step 21 on."""
    max_skips: Annotated[PositiveInt, Only("train.nonfinite", among=("skip",))] = 10
    """Stop after this many consecutive skipped steps."""

    @model_validator(mode="after")
    def _batch_divides(self) -> TrainConfig:
        if self.batch_size % self.accumulation:
            raise ValueError(
                f"batch_size {self.batch_size} is not divisible by accumulation {self.accumulation}"
            )
        return self


class ParallelConfig(Table):
    """`[parallel]`: how gradients are synchronised between ranks."""

    strategy: StrategyName = "bucketed"
    """With one rank, every strategy is `none`."""
    bucket_mb: PositiveFloat = 50.0
    """Bucket size in MiB (`bucketed`, `torch_ddp`, `zero1`). Small models whose host is slow gain from more."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which fp32 gradients are reduced (`flat`, `overlap`, `bucketed`, `torch_ddp`, `zero1`, `fsdp`)."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """`zero1`, `fsdp`, `torch_fsdp`: fp32 weights, or bf16 weights with fp32 master weights in the shards."""
    gather: Literal["auto", "collective"] = "auto"
    """`zero1`, `fsdp`: read weights from the memory of other GPUs if they reach each other, or use the backend."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """`auto`: nccl on GPUs, gloo on CPUs."""
    timeout_s: Annotated[PositiveFloat, Field(le=1e8)] = 600.0
    """End the job if a rank does not answer for this many seconds."""
    options: dict[str, int | float | str | bool] = Field(default_factory=dict)
    """`[parallel.options]`: the strategy's own. `fsdp`: `reshard_after_forward` (true: free weights until the
    backward pass), `state_dtype` (fp32, or bf16 for weights, gradients and moments), `shard_ranks` (ranks that share
    one copy of the model, say those of a machine; 0: all)."""


class CheckpointConfig(Table):
    """`[checkpoint]`: when to save, how many to keep, where to resume from."""

    interval: int = 0
    """> 0: save every N steps. The last step is always saved."""
    minutes: NonNegativeFloat = 5.0
    """Also save when the last save is this many minutes ago, by the clock of rank 0; 0: no such saves."""
    keep_last: PositiveInt = 2
    """Checkpoints to keep; older ones are deleted once a newer one is complete."""
    keep_best: Annotated[Count, Only("train.eval_interval", but=(0,))] = 0
    """Also keep this many checkpoints with the lowest validation loss."""
    resume: str = "auto"
    """`auto`: the newest good checkpoint of the run folder, if any; `never`; or a checkpoint folder."""

    @field_validator("resume")
    @classmethod
    def _may_be_a_folder(cls, resume: str) -> str:
        return str(in_home(Path(resume))) if resume.startswith("~") else resume


SAMPLED = Only("generate.temperature", but=(0,))


class GenerateConfig(Table):
    """`[generate]`: prompts and sampling."""

    prompts: tuple[str, ...] = ("",)
    """An empty prompt starts from end-of-text: a new document."""
    allow_special: bool = False
    """Read special tokens in prompts as tokens, not as text."""
    max_new_tokens: PositiveInt = 256
    """Largest number of tokens to generate per prompt."""
    temperature: NonNegativeFloat = 0.8
    """Sampling temperature; 0 is greedy."""
    top_k: Annotated[Count, SAMPLED] = 0
    """Sample from the k most likely tokens; 0: from all."""
    top_p: Annotated[float, Field(gt=0, le=1), SAMPLED] = 1.0
    """Sample from the smallest set of tokens whose probability reaches p (Holtzman et al. 2020)."""
    min_p: Annotated[float, Field(ge=0, le=1), SAMPLED] = 0.0
    """Drop tokens less likely than this times the likeliest (Nguyen et al. 2024); 0: none."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Above 1: make tokens that the text holds already less likely (Keskar et al. 2019)."""
    logprobs: bool = False
    """Keep the natural logarithm of each token's probability for `--json` and `--jsonl`: at temperature 1, after the
    repetition penalty."""
    batch_size: Annotated[int, Field(gt=0, le=65_536)] = 16
    """Texts generated at once. On a GPU, 1 is fastest for a single text, 256 for thousands."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of weights and KV cache; `auto`: bf16 on GPUs, fp32 on CPUs."""
    weights: Literal["same", "fp8"] = "same"
    """Dtype of the matrices in decode steps: `same`, that of `precision`; `fp8` (e4m3), rounded when the model is
    loaded, with a scale for each row: faster for large models on a GPU (from sm_89 on), with at most 16 texts at
    once. Prompts are read with the weights of `precision`, which stay in memory."""
    seed: Annotated[Int64, SAMPLED] = 0
    """Seed of the sampling."""
    stop_at_end: bool = True
    """Stop at the tokens that end a text; the tokenizer and the files beside it name them."""


ENABLED = Only("wandb.enabled", among=(True,))


class WandbConfig(Table):
    """`[wandb]`: logging to Weights & Biases; needs the extra `lmkit[wandb]`."""

    enabled: bool = False
    """Log to Weights & Biases, too; metrics.jsonl is always written."""
    project: Annotated[str, ENABLED] = "lmkit"
    """Project of the run."""
    mode: Annotated[Literal["online", "offline"], ENABLED] = "online"
    """`offline` writes files for `wandb sync`."""
