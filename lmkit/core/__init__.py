"""The readable form of every idea of lmkit, which is also what runs on a CPU and around the kernels on a GPU.

Files of this package import PyTorch, NumPy, `regex` and one another, and nothing else of lmkit. Read them in this
order: `bpe`, `batches`, `model` with `attention` and `loss`, `step`, `adamw`, `muon`, `schedule`, `buckets`,
`sampling`, `kv_cache`. `autograd` and `ranges` are helpers.
"""
