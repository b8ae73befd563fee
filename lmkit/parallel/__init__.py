"""Ranks, and gradient synchronisation between them: strategies from naive to FSDP, launching, failures.

In an existing process group, or in a single process:

    model = DataParallel(model, "bucketed", bucket_mb=25)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)

    model = FSDP(model, compute_dtype=torch.bfloat16)     # shards parameters and gradients, too
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

`lmkit.parallel.strategy` describes the interface of strategies that the trainer uses.
"""

from lmkit.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "modules": ("DataParallel", "FSDP", "ShardedOptimizer", "gather_full_parameters"),
        "strategy": ("ParallelConfig", "Strategy", "build_strategy"),
        "ranks": ("Ranks", "process_group"),
        "launch": ("spawn_ranks",),
    },
)
