"""`lmkit bench generate`: the decode step that `lmkit generate` runs, beside Hugging Face transformers.

Weights are random; the cache of every text holds `context` tokens.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from lmkit.bench.context import Context
from lmkit.bench.harness import time_fields
from lmkit.bench.step import config_of
from lmkit.bench.trainings import COMPARISON, SPREAD, Variant, host_fields, measure_figures
from lmkit.errors import UsageError
from lmkit.measure.limits import Limits
from lmkit.measure.memory import release_memory
from lmkit.measure.tables import Column, Rows
from lmkit.measure.timing import cache_bytes, wall_clock
from lmkit.recipe.tables import Count, ModelConfig, NonNegativeFloat, PositiveFloat, PositiveInt, Table
from lmkit.registry import BENCHES

if TYPE_CHECKING:
    from lmkit.bench.generate_rivals import TransformersWriter
    from lmkit.generation import Decoder
    from lmkit.model.transformer import TransformerLM

    Writer: TypeAlias = "OwnWriter | TransformersWriter"

FEW = 5  # samples of quantities that are not compared between variants
FIRST_STEPS = 3  # untimed; they compile


class Options(Table):
    """`[bench.generate]`: the product of sizes, batch sizes and contexts is measured."""

    sizes: tuple[Literal["tiny", "quickstart", "matrix", "162M", "1.3B", "8B"], ...] = ("tiny",)
    """Models, as in `bench step`."""
    kv_heads: Count = 0
    """Heads of keys and values; 0: as many as query heads."""
    batch_sizes: tuple[PositiveInt, ...] = (1,)
    """Texts at once."""
    contexts: tuple[PositiveInt, ...] = (16,)
    """Tokens in the cache of each text."""
    capacity: PositiveInt = 128
    """Tokens that the cache has room for."""
    variants: tuple[
        Literal["lmkit", "lmkit_fp8", "lmkit_torch", "transformers", "transformers_compiled"], ...
    ] = ("lmkit", "transformers")
    """lmkit (with its kernels if they run here), lmkit_fp8 (with fp8 weights), lmkit_torch (with PyTorch's
    operations), and transformers' Llama with a static cache, eager or compiled. The first is compared with the
    others."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Dtype of weights and cache."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature of lmkit; 0 is greedy. transformers is always greedy."""
    rounds: PositiveInt = 12
    """Interleaved samples of each variant; fewer than 6 give no interval."""
    steps_per_sample: PositiveInt = 16
    """Timed steps of a sample; half as many untimed steps precede them."""
    max_seconds: PositiveFloat = 60.0
    """Seconds of timing per case; whole rounds only."""


class OwnWriter:
    """The decoder that `lmkit generate` runs (options: of `Decoder`); methods as of `TransformersWriter`."""

    def __init__(
        self, model: TransformerLM, batch_size: int, context: int, temperature: float, **options: Any
    ) -> None:
        from lmkit.core.sampling import Sampling
        from lmkit.generation import Decoder

        sampling = Sampling(temperature)
        self.decoder: Decoder = Decoder(model, batch_size, sampling=sampling, most=1 << 40, **options)
        self.context = context
        for cache in (self.decoder.cache.keys, self.decoder.cache.values):
            cache.normal_()
        rows = range(batch_size)
        self.decoder.start(rows, [[row % 100] for row in rows], seeds=rows)

    def refill(self) -> None:
        self.decoder.state.place.fill_(self.context)

    def step(self) -> None:
        self.decoder.step(min(self.decoder.capacity, 2 * self.context))

    def first_token(self) -> None:
        self.decoder.start([0], [[1] * self.context], seeds=[0])
        self.decoder.step(self.context)
        columns, event = self.decoder.newest()
        if event is not None:
            event.synchronize()
        columns[0].tolist()


def check(recipe: Any) -> None:
    """Refuse a cache that the timed steps would overflow, before anything is measured."""
    options = recipe.bench_table("generate")
    # Untimed: the first steps, those of `first_token` (which fills one row only), and those of `host_fields`.
    steps = max(2 * options.steps_per_sample, FIRST_STEPS + 2 * FEW)
    if (room := max(options.contexts) + steps) > options.capacity:
        raise UsageError(
            "bench.capacity",
            f"bench.generate.capacity: {options.capacity} tokens; contexts and what is written need {room}",
            hint="raise capacity, or lower contexts or steps_per_sample",
        )


@BENCHES.register(
    "generate",
    order=3,
    help="A decode step of several texts beside transformers.",
    recipes=("bench_generate", "bench_generate_cpu"),
    example="lmkit bench generate bench_generate_cpu",
    row_keys=("size", "variant", "batch_size", "context"),
)
def generate(context: Context) -> Rows:
    """Return a row per size, batch size, context and variant."""
    import torch

    options = context.options
    limits = context.limits([options.precision])
    cases = [(size, batch_size) for size in options.sizes for batch_size in options.batch_sizes]
    rows: Rows = []
    for case in context.each("models", cases):
        torch.compiler.reset()  # else a rival would recompile with dynamic sizes for the next batch size
        writers: dict[str, Writer] = {}
        for filled in options.contexts:
            found = _measure(*case, filled, context, limits, writers)
            context.keep(found)
            rows += found
        writers.clear()
        release_memory(context.device)
    return rows


def _measure(
    size: str, batch_size: int, filled: int, context: Context, limits: Limits, writers: dict[str, Writer]
) -> Rows:
    """Return one row per variant of one case; `writers` keeps variants for other contexts."""
    from lmkit.model.accounting import least_bytes

    options, device, precision = context.options, context.device, context.options.precision
    config = config_of(size, "", "sdpa")
    config = config.changed(context_length=options.capacity, num_kv_heads=options.kv_heads or None)
    case = {"batch_size": batch_size, "context": filled, "kv_heads": config.kv_heads, "precision": precision}

    def make(variant: str) -> Writer:
        if variant not in writers:
            writers[variant] = _build(variant, config, batch_size, filled, context)
        return writers[variant]

    def more(writer: Writer, _: object) -> dict[str, Any]:
        writer.context = filled
        writer.refill()
        for _ in range(FIRST_STEPS):
            writer.step()
        writer.first_token()
        clock = wall_clock(device)
        first_ms = median(clock.sample_ms(writer.first_token, 1) for _ in range(FEW))
        return {"first_ms": first_ms, **host_fields(writer.step, device)}

    variants = {
        variant: Variant(
            row={"size": size, "variant": variant, "versus": options.variants[0], **case},
            make=partial(make, variant),
            more=more,
            prepare=lambda writer: writer.refill(),
            run=lambda writer: writer.step(),
        )
        for variant in options.variants
    }
    element_bytes = 2 if precision == "bf16" else 4

    def figures(variant: str, samples_ms: list[float]) -> dict[str, Any]:
        fp8 = variant == "lmkit_fp8"
        least = least_bytes(config, batch_size, filled, element_bytes, fp8=fp8)
        fields = time_fields(samples_ms)
        seconds = fields["median_ms"] * 1e-3
        share = least / seconds / limits.copy_bytes_per_s
        fields |= {"tokens_per_s": batch_size / seconds, "least_bytes": least}
        if share <= 1 or least > cache_bytes(device):  # the memory's speed does not limit a cache
            fields["share"] = share
        return fields

    measure_figures(variants, context, limits, figures)
    return [variant.row for variant in variants.values()]


def _build(variant: str, config: ModelConfig, batch_size: int, filled: int, context: Context) -> Writer:
    import torch

    options, device = context.options, context.device
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    torch.manual_seed(context.recipe.run.seed)
    if variant.startswith("transformers"):
        if find_spec("transformers") is None:
            raise UsageError("bench.missing_rival", "transformers is not installed", hint="--variants lmkit")
        from lmkit.bench.generate_rivals import TransformersWriter

        return TransformersWriter(
            config, batch_size, filled, device=device, dtype=dtype, compiled=variant.endswith("compiled")
        )
    from lmkit.model.transformer import TransformerLM

    model = TransformerLM(config, device=device, dtype=dtype).eval()
    ways: dict[str, dict[str, Any]] = {"lmkit_torch": {"kernels": False}, "lmkit_fp8": {"weights": "fp8"}}
    return OwnWriter(model, batch_size, filled, options.temperature, **ways.get(variant, {}))


TITLE, EACH = "Generation", "size"
ABOUT = ("precision", "kv_heads")
_LEAST = "the least bytes of a step (weights, filled cache) / its time, as a share of the copy bandwidth"
_FIRST = "reading one prompt as long as the context and writing its first token"
COLUMNS = (
    Column("size", "size"),
    Column("batch_size", "texts", "d"),
    Column("context", "context", "d"),
    Column("variant", "variant"),
    Column("median_ms", "ms/token", ".3f", instead="status"),
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("share", "bandwidth", ".0%", note=_LEAST, axis="share of the copy bandwidth", better="higher"),
    Column("first_ms", "first ms", ".1f", note=_FIRST),
    Column("host_ms", "host ms", ".3f", note="until a step returns to the host"),
    Column("kv_heads", "key heads", "d", wide=True),
    SPREAD,
    *COMPARISON,
)
