"""The ideas of training and generation in plain PyTorch.

This code runs on a CPU, and around the kernels on a GPU. Other packages replace parts of it by faster forms, and add
what one process does not need: `lmkit.kernels`, `lmkit.tokenizer` (merges of large texts), `lmkit.training`
(checkpoints, CUDA graphs), `lmkit.parallel` (ZeRO-1, FSDP).

Files of this package import PyTorch, NumPy, `regex` and one another, and nothing else of lmkit. Read them in this
order: `bpe`, `batches`, `model` with `attention` and `loss`, `step`, `adamw`, `muon`, `schedule`, `buckets`,
`sampling`, `kv_cache`. `autograd` and `ranges` are helpers.
"""
