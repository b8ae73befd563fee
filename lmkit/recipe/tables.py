"""The tables of a recipe: one frozen pydantic class per TOML table.

The docstring below a key is its documentation: `lmkit recipe show` prints it. The files of benches have theirs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from lmkit.recipe import END_OF_TEXT, MAX_TOKEN_BYTES, MAX_VOCABULARY, NUM_BYTES
from lmkit.recipe.values import (
    AttentionName,
    CorpusSource,
    Count,
    Int64,
    NonNegativeFloat,
    OperationsName,
    OptimizerName,
    Paths,
    PositiveFloat,
    PositiveInt,
    ScheduleName,
    StrategyName,
    Table,
    Workers,
)
from lmkit.registry import ATTENTION, DATASETS
from lmkit.storage.inputs import in_home

TOKENS_PER_PARAMETER = 20.0
"""Default of `train.tokens_per_parameter`."""
OWN = "own"
"""Marks a key of [model] that, unless it has its default, makes another function than Llama's; see
`ModelConfig.switches`."""

PRESETS: dict[str, dict[str, int]] = {
    "tiny": {"d_model": 192, "d_ff": 512, "num_layers": 4, "num_heads": 6},
    "small": {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "medium": {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16},
    "large": {"d_model": 1280, "d_ff": 5120, "num_layers": 36, "num_heads": 20},
    "xl": {"d_model": 1600, "d_ff": 6400, "num_layers": 48, "num_heads": 25},
    "2.7b": {"d_model": 2560, "d_ff": 10240, "num_layers": 32, "num_heads": 32},
}
"""Sizes named after GPT-2 and GPT-3 (Brown et al. 2020, table 2.1). SwiGLU's third matrix and an untied head make the
models larger than their namesakes; `lmkit recipe show` prints the parameter count."""

Checkpointing = Literal["none", "block", "attention"]


class ModelConfig(Table):
    """`[model]`: the shape of the Transformer. A preset fills in what the recipe leaves out."""

    preset: Literal["tiny", "small", "medium", "large", "xl", "2.7b"] | None = None
    """Sets d_model, d_ff, num_layers and num_heads unless the recipe gives them."""
    depth: Annotated[int, Field(ge=1, le=1024)] | None = None
    """One dial, the number of layers: width, heads, batch, learning rate and steps follow from it unless the recipe
    gives them."""
    vocab_size: PositiveInt | None = None
    """Default: the vocabulary size of the token file."""
    context_length: PositiveInt = 256
    """Tokens that the model sees at once."""
    d_model: PositiveInt = 192
    """Width of the residual stream."""
    d_ff: PositiveInt = 512
    """Width of the feed-forward part: three matrices of d_model x d_ff."""
    num_layers: Annotated[int, Field(gt=0, le=10_000)] = 4
    """Transformer blocks."""
    num_heads: PositiveInt = 6
    """Attention heads."""
    d_head: PositiveInt | None = None
    """Channels of a head, as Qwen3's `head_dim`. Default: d_model / num_heads."""
    num_kv_heads: PositiveInt | None = None
    """Fewer than `num_heads`: grouped-query attention (Ainslie et al. 2023). Default: `num_heads`."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the wavelengths of rotary position embeddings (Su et al. 2021)."""
    rope_scaling: Literal["none", "linear", "llama3"] = "none"
    """Slower rotations for longer contexts: all of them (`linear`, Chen et al. 2023), or those of long wavelengths
    (`llama3`, as in Llama 3.1)."""
    rope_factor: PositiveFloat = 1.0
    """How much slower, with `rope_scaling`."""
    rope_low_freq_factor: PositiveFloat = 1.0
    """`llama3`: wavelengths of more than `rope_original_context` / this are scaled in full."""
    rope_high_freq_factor: PositiveFloat = 4.0
    """`llama3`: wavelengths of less than `rope_original_context` / this are not scaled."""
    rope_original_context: PositiveInt = 8192
    """`llama3`: tokens that the model saw at once before its wavelengths were scaled."""
    qkv_bias: Annotated[bool, OWN] = False
    """Add a bias to queries, keys and values, as Qwen2 does."""
    qk_norm: Annotated[bool, OWN] = False
    """RMSNorm of each head's query and key, in front of RoPE, with one gain for all heads (as Qwen3)."""
    attention_window: Annotated[PositiveInt | None, OWN] = None
    """Tokens that a short layer sees, itself among them; see `attention_pattern`."""
    attention_pattern: Annotated[str, Field(pattern="^[SL]+$")] = "SSSL"
    """`attention_window`: short and long layers, repeated from the first. A long layer sees all earlier tokens; the
    last is long."""
    separate_documents: bool = False
    """In training and evaluation a token sees its own document only; generation reads whole prompts nevertheless.
    `data.sampling = "packed"` sets it."""
    zero_init: bool = False
    """Start the matrices that write to the residual stream from zeros: each block begins as the identity."""
    norm_eps: Annotated[PositiveFloat, Field(lt=1)] = 1e-5
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = False
    """Share one matrix between the input embedding and the head."""
    attention: AttentionName = "sdpa"
    """The attention kernel; `lmkit env` lists the kernels that run here."""
    operations: OperationsName = "auto"
    """What runs around the matrix products: kernels ("fused") or PyTorch's operations ("plain"). "auto" takes "fused"
    where they run. Compiled blocks are left to the compiler."""
    activation_checkpointing: Literal["none", "block", "attention", "selective"] = "none"
    """Recompute activations in the backward pass: less memory, more time. `block` keeps the inputs of blocks,
    `attention` the outputs of attention, too; `selective` as much as `activation_gb` allows, the dearest first."""
    activation_gb: PositiveFloat | None = None
    """`selective`: GB (10^9 bytes) that the blocks keep of a micro-batch on a rank; at least their inputs."""
    compile: Literal["none", "block", "whole"] = "none"
    """Use torch.compile on each block (starts sooner) or on the whole stack."""

    @model_validator(mode="after")
    def _fits_together(self) -> ModelConfig:
        if self.preset is not None and self.depth is not None:
            raise ValueError("preset and depth both give the sizes; leave one out")
        check_heads(self.d_model if self.d_head is None else self.width_of_heads, self.num_heads)
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.kv_heads}")
        low, high = self.rope_low_freq_factor, self.rope_high_freq_factor
        if low >= high:
            raise ValueError(f"rope_low_freq_factor {low} is not below rope_high_freq_factor {high}")
        if (self.activation_checkpointing == "selective") != (self.activation_gb is not None):
            raise ValueError('activation_checkpointing = "selective" and activation_gb need each other')
        for key in ("attention_window", "separate_documents"):
            if getattr(self, key) and not ATTENTION.facts(self.attention).windows:
                raise ValueError(
                    f'{key}: attention = "{self.attention}" takes none; use {kernels_with_first()}'
                )
        return self

    @property
    def switches(self) -> frozenset[str]:
        """The keys that make another function than Llama's and do not have their defaults.

        Code that computes the model by itself (a decode step, an exchange format) lists the switches that it
        implements, and is not used for a model with others.
        """
        fields = type(self).model_fields.items()
        return frozenset(key for key, it in fields if OWN in it.metadata and getattr(self, key) != it.default)

    def to_dict(self) -> dict[str, Any]:
        """Return the values by key; tools for Hugging Face's models, such as PEFT, ask a model's `config` for it."""
        return self.model_dump(mode="json") | {"tie_word_embeddings": self.tie_embeddings}

    def window(self, layer: int) -> int | None:
        """Return how many tokens a layer's tokens see at most; None: all earlier ones."""
        pattern = self.attention_pattern
        is_long = layer == self.num_layers - 1 or pattern[layer % len(pattern)] == "L"
        return None if is_long else self.attention_window

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_dim(self) -> int:
        return self.d_head or self.d_model // self.num_heads

    @property
    def width_of_heads(self) -> int:
        """Channels of all queries, and of attention's output."""
        return self.num_heads * self.head_dim


def kernels_with_first() -> str:
    """Return the names of the attention kernels that can hide a sequence's beginning, for a hint."""
    return ", ".join(name for name in ATTENTION.names if ATTENTION.facts(name).windows)


def check_heads(d_model: int, num_heads: int) -> None:
    """Raise ValueError if a model of this width cannot have this many heads."""
    if d_model % num_heads:
        raise ValueError(f"d_model {d_model} is not divisible by num_heads {num_heads}")
    if d_model // num_heads % 2:
        raise ValueError(f"d_model / num_heads = {d_model // num_heads} is odd, and RoPE rotates pairs")


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
    which the assistant's words are learned. `tinystories`, `owt`, `fineweb_edu` and `climbmix` are downloaded.
    """
    folder: Path = Path("artifacts/data")
    """Downloads are kept here, shared by all runs."""
    shards: PositiveInt | None = None
    """Of a dataset in several training shards (`fineweb_edu` has 1,822 of 0.1 GB, `climbmix` 6,542), the first so
    many; default: one."""
    size_mb: PositiveFloat = 20.0
    """`synth`: size of the generated training text, in 10^6 bytes."""
    seed: Int64 = 0
    """`synth`: seed of the generator."""
    train: tuple[Path, ...] = ()
    """Text files; JSON objects in files that end in `.jsonl`, `.ndjson` or `.json`; rows of `.parquet` (`files`).
    Compressed (`.gz`, `.zst`) or a pipe, too (`files`, `chat`). A glob (`shards/*.parquet`) names its files sorted by
    name. A byte order mark at the beginning is left out. `weight` 0 or `train` false leaves a text out; a
    conversation or message with it is read and not learned."""
    valid: tuple[Path, ...] = ()
    """Held-out files (`files`, `chat`); if empty, about `valid_fraction` of the text, its last documents."""
    valid_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """The part of the text that is held out, without `valid` (`synth`, `files`, `chat`)."""
    field: str = "text"
    """The key of a JSON object, or the column of a Parquet file, that holds the text."""
    separator: Annotated[str | None, Field(min_length=1)] = None
    """What ends a document in text files; default: the tokenizer's end-of-text token, as its file writes it, or
    `<|endoftext|>` in downloads. The text of a JSON object, or of a row, is one document."""
    errors: Literal["strict", "replace"] = "strict"
    """Invalid UTF-8: stop and name the byte offset, or replace it by U+FFFD."""

    @model_validator(mode="after")
    def _files_are_named(self) -> CorpusConfig:
        has_files = self.source in ("files", "chat")
        if has_files and not self.train:
            raise ValueError(f'source = "{self.source}" needs train = ["some/file"]')
        if not has_files and (self.train or self.valid):
            raise ValueError(f'train and valid belong to source = "files" or "chat", not "{self.source}"')
        if self.shards is not None and self.source in ("synth", "files", "chat"):
            raise ValueError(
                f'shards belongs to a dataset that is downloaded, not to source = "{self.source}"'
            )
        if self.source in DATASETS.names and DATASETS.facts(self.source).tokens:
            raise ValueError(
                f'source = "{self.source}" holds tokens, no text: lmkit data download {self.source} --shards 8, then '
                f'data.train = "artifacts/data/{self.source}/*train*.bin" and data.valid, without [corpus]'
            )
        return self


class TokenizerConfig(Table):
    """`[tokenizer]`: byte-level BPE, trained on the training part of the corpus or read from a file."""

    vocab_size: Annotated[int, Field(gt=0, le=MAX_VOCABULARY)] = 10_000
    """256 bytes + merges + special tokens."""
    special_tokens: tuple[str, ...] = (END_OF_TEXT,)
    """Never split, never merged across; of a tokenizer that is trained."""
    max_token_bytes: PositiveInt = MAX_TOKEN_BYTES
    """No merge makes a longer token: one endless word would otherwise become tokens as long as the corpus."""
    workers: Workers = 0
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


class SourceConfig(Table):
    """`[[data.sources]]`: a part of a mixture."""

    train: Paths
    """Token files, as `data.train`."""
    weight: PositiveFloat
    """The share of the rows that come from these files is this over the sum of all weights."""
    name: str | None = None
    """What messages call the source; default: its files."""


class DataConfig(Table):
    """`[data]`: token files and how batches are drawn from them."""

    train: Paths | None = None
    """Token file (.npy; or .bin, as llm.c and modded-nanogpt write them), or several as one: an array of paths, or a
    glob such as `tokens/train_*.npy`, whose files follow one another sorted by name. Files that end in .bin need
    `model.vocab_size`, or `tokenizer.path` for bits per byte, too. Default: the file that `lmkit run` made in the run
    folder."""
    sources: Annotated[tuple[SourceConfig, ...], Field(max_length=32)] = ()
    """Instead of `train`, a mixture of token files: tables `[[data.sources]]` with `train`, `weight` and perhaps a
    `name`. In each block of 1,024 rows each source has its share, to one row, but the heaviest, which takes
    what rounding leaves. Each is sampled as if alone."""
    valid: Paths | None = None
    """Held-out token file, or several; default: the file that `lmkit run` made."""
    source: Literal["tokens", "random"] = "tokens"
    """`random` draws uniform token ids and needs no file (for benchmarks)."""
    sampling: Literal["windows", "shuffled", "documents", "packed"] = "windows"
    """Sequences start anywhere in the file (`windows`), or at the beginning of a document (`documents`). An epoch has
    every token once if they are cut one after the other and come in random order (`shuffled`), or are filled with
    whole documents, which do not see one another (`packed`)."""
    workers: Workers = 0
    """Threads that encode the corpus; 0: one per CPU. The result does not depend on it."""

    @property
    def is_made(self) -> bool:
        """Whether the tokens to train on are those that `lmkit run` makes of the corpus."""
        return self.train is None and not self.sources

    @model_validator(mode="after")
    def _train_or_sources(self) -> DataConfig:
        if self.train is not None and self.sources:
            raise ValueError("train and sources both name tokens to train on; leave out one of them")
        return self


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Table):
    """`[optimizer]`: the optimizer and its learning-rate schedule."""

    name: OptimizerName = "adamw"
    """`adamw` (Loshchilov and Hutter 2019), `adamw_host` (with its state in the host's memory), `muon` (Jordan 2024),
    `sgd`, or a registered optimizer of your own."""
    lr: Annotated[PositiveFloat, Field(le=1e6)] = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    embedding_lr: Annotated[PositiveFloat, Field(le=1e6)] | None = None
    """Peak learning rate of the token embedding, which goes up and down as `lr` does; default: `lr`. Of a tied
    embedding `head_lr` counts."""
    head_lr: Annotated[PositiveFloat, Field(le=1e6)] | None = None
    """The same of the last matrix."""
    gain_lr: Annotated[PositiveFloat, Field(le=1e6)] | None = None
    """The same of gains of norms and of biases."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of the running means of gradient and squared gradient, per step."""
    eps: Annotated[PositiveFloat, Field(le=1e6)] = 1e-8
    """Added to the root of the mean square."""
    weight_decay: Annotated[float, Field(ge=0, le=1e6)] = 0.1
    """Applied to matrices only, not to norm gains. A step takes the learning rate (for embedding and head `lr`) times
    this off each weight."""
    schedule: ScheduleName = "cosine"
    """Shape of the decay after the warm-up."""
    warmup_steps: Count = 0
    """Steps in which the rate rises linearly from 0."""
    cooldown_steps: Count | None = None
    """`wsd`: steps in which the rate falls at the end; default: 40% of `train.steps`."""
    min_lr: NonNegativeFloat = 0.0
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
    steps: PositiveInt = 1000
    """Optimizer steps, without `epochs`; the learning-rate schedule spans them."""
    tokens_per_parameter: PositiveFloat = TOKENS_PER_PARAMETER
    """`model.depth`: tokens to train on for each parameter that multiplies; decides `steps`."""
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
    """Micro-batches per evaluation, of batch_size / accumulation rows; 0: all held-out data, as in the last one."""
    sample_interval: Count = 0
    """Write the texts of [generate]'s prompts every N steps, to the log and the metrics; 0: never."""
    tensorboard: bool = False
    """Also write TensorBoard's files, to `tensorboard` in the run folder; needs the extra `lmkit[tensorboard]`."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """If a loss or gradient is not finite: stop before the optimizer step, or skip this step."""
    spike_sigmas: NonNegativeFloat = 0.0
    """> 0: treat a loss or gradient norm that is so many standard deviations above its running mean as not finite,
    from step 21 on."""
    max_skips: PositiveInt = 10
    """`nonfinite = "skip"`: stop after this many consecutive skipped steps."""

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
    keep_best: Count = 0
    """Also keep this many checkpoints with the lowest validation loss."""
    resume: str = "auto"
    """`auto`: the newest good checkpoint of the run folder, if any; `never`; or a checkpoint folder."""

    @field_validator("resume")
    @classmethod
    def _may_be_a_folder(cls, resume: str) -> str:
        return str(in_home(Path(resume))) if resume.startswith("~") else resume


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
    top_k: Count = 0
    """Sample from the k most likely tokens; 0: from all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens whose probability reaches p (Holtzman et al. 2020)."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
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
    seed: Int64 = 0
    """Seed of the sampling."""
    stop_at_end: bool = True
    """Stop at the tokens that end a text; the tokenizer and the files beside it name them."""


class WandbConfig(Table):
    """`[wandb]`: logging to Weights & Biases; needs the extra `lmkit[wandb]`."""

    enabled: bool = False
    """Log to Weights & Biases, too; metrics.jsonl is always written."""
    project: str = "lmkit"
    """Project of the run."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes files for `wandb sync`."""


# One dial

SIZES = ("d_model", "d_ff", "num_layers", "num_heads")
_UNKNOWN_VOCABULARY = 10_000
_LARGEST = 1e12
_AT_12_LAYERS = {"tokens": 2.2e9, "batch_tokens": 1 << 19, "d_model": 768, "lr": 1e-3}


def from_depth(raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return table -> the keys that follow from `model.depth`, {} without a valid one.

    Rules of thumb from public training logs (nanochat, 2026; Hoffmann et al. 2022 for tokens by parameter), for web
    text and 12 to 26 layers. They are a place to start from, not a result of this project.

    - d_model is 64 depth, rounded up to whole heads, which have 32, 64 (from 256) or 128 channels (from 768);
    - d_ff is 8/3 d_model;
    - a training sees `train.tokens_per_parameter` tokens for each parameter that multiplies;
    - a batch has 2^19 tokens at 12 layers, and grows with the tokens to the power 0.383, in powers of two;
    - the learning rate is 1e-3 at 12 layers, and goes with the square root of batch / d_model.

    Values that `raw`, the tables as the TOML file has them, gives decide what follows from them.
    """
    model = raw.get("model")
    if not isinstance(model, dict) or type(depth := model.get("depth")) is not int or not 1 <= depth <= 1024:
        return {}  # validation refuses it
    train, _, tokenizer = tables = [raw.get(name) or {} for name in ("train", "optimizer", "tokenizer")]
    if not all(isinstance(table, dict) for table in tables):
        return {}
    width = 64 * depth
    head = 128 if width >= 768 else 64 if width >= 256 else 32
    width = max(-(-width // head), 2) * head
    d_ff = -(-8 * width // 3 // 64) * 64
    sizes = {"d_model": width, "d_ff": d_ff, "num_layers": depth, "num_heads": width // head}
    sizes |= {key: value for key in SIZES if (value := _number(model, key))}
    vocabulary = _number(model, "vocab_size") or _number(tokenizer, "vocab_size") or _UNKNOWN_VOCABULARY
    d_model, d_ff, layers, _ = (sizes[key] for key in SIZES)
    parameters = layers * d_model * (4 * d_model + 3 * d_ff) + vocabulary * d_model
    tokens = (_number(train, "tokens_per_parameter") or TOKENS_PER_PARAMETER) * parameters
    context = _number(model, "context_length") or 256
    wanted = _AT_12_LAYERS["batch_tokens"] * (tokens / _AT_12_LAYERS["tokens"]) ** 0.383 / context
    batch = _number(train, "batch_size") or 1 << max(3, round(wanted).bit_length() - 1)
    batch_share = batch * context / _AT_12_LAYERS["batch_tokens"]
    lr = _AT_12_LAYERS["lr"] * (batch_share * _AT_12_LAYERS["d_model"] / d_model) ** 0.5
    return {
        "model": sizes,
        "train": {"batch_size": batch, "steps": max(1, round(tokens / (batch * context)))},
        "optimizer": {"lr": float(f"{lr:.2g}")},
    }


def _number(table: Mapping[str, Any], key: str) -> Any:
    """Return a positive number, or None: validation refuses everything else, or has a default."""
    value = table.get(key)
    return value if isinstance(value, (int, float)) and 0 < value < _LARGEST else None
