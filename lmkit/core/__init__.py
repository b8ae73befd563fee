"""The ideas of training and generation in plain PyTorch.

On a CPU this code is what runs; on a GPU it calls kernels. Other packages replace parts of it by faster forms, and
add what one process does not need: `lmkit.model` and `lmkit.kernels`, `lmkit.attention` (other kernels),
`lmkit.optim`, `lmkit.tokenizer` (merges of large texts), `lmkit.training` (checkpoints, CUDA graphs),
`lmkit.parallel` (ZeRO-1, FSDP), `lmkit.measure` (profilers). Arguments and methods that nothing here uses are theirs.

    batches = TokenBatches(tokens, batch_size=32, context_length=256, seed=0, accumulation=2)
    model = TransformerLM(config)                      # equal initial weights on every rank
    optimizer = AdamW(decay_groups(model.parameters(), weight_decay=0.1))
    step = Step(model.loss, optimizer, Sync(model.parameters()), max_norm=1.0)
    for i in range(1000):
        lr = cosine_lr(i + 1, lr=1e-3, min_lr=1e-4, warmup_steps=100, total_steps=1000)
        loss = step(*batches.batch(i), lr=lr)

The model attends with `attention.reference`; `attention.flash_torch` is another kernel, which a recipe may name.
"Collective" in a docstring: every rank must call the function, in the same order.

Files of this package import PyTorch, NumPy, `regex` and one another, and nothing else of lmkit. Read them in this
order: `bpe`, `batches`, `model` with `attention` and `loss`, `adamw`, `muon`, `schedule`, `buckets`, `step`,
`sampling`, `kv_cache`. `autograd` and `ranges` are helpers.
"""
