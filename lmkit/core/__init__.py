"""The ideas of training and generation in plain PyTorch.

On a CPU this code is what runs; on a GPU it calls kernels. Other packages replace parts of it by faster forms, and
add what one process does not need: `lmkit.model` and `lmkit.kernels`, `lmkit.attention` (other kernels),
`lmkit.optim`, `lmkit.tokenizer` (merges of large texts), `lmkit.training` (checkpoints, CUDA graphs),
`lmkit.parallel` (ZeRO-1, FSDP), `lmkit.measure` (profilers). Arguments and methods that nothing here uses are theirs.

"Collective" in a docstring: every rank must call the function, in the same order.

Files of this package import PyTorch, NumPy, `regex` and one another, and nothing else of lmkit. Read them in this
order: `bpe`, `batches`, `model` with `attention` and `loss`, `adamw`, `muon`, `schedule`, `buckets`, `step`,
`sampling`, `kv_cache`. `autograd` and `ranges` are helpers.
"""
