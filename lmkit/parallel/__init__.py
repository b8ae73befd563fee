"""Ranks, and gradient synchronisation between them: strategies from naive to ZeRO-1, launching, failures.

Inside a process group that is already there (or in a single process):

    model = DataParallel(model, "bucketed", bucket_mb=25)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)

`lmkit.parallel.protocol` describes the interface of strategies that the trainer uses.
"""

from lmkit.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "DataParallel": "data_parallel",
        "GradientSync": "protocol",
        "ParallelConfig": "protocol",
        "Ranks": "ranks",
        "ShardedOptimizer": "zero1_optimizer",
        "Strategy": "protocol",
        "build_strategy": "protocol",
        "process_group": "ranks",
        "spawn_ranks": "launch",
    },
)
