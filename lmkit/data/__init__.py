"""Corpora, token files and batches: text files -> token ids -> the batches of a training run.

    from lmkit.data import TokenBatches, encode_corpus, open_tokens, write_stories
    from lmkit.tokenizer import train_tokenizer

    write_stories("stories.txt", size_mb=20, seed=0)
    tokenizer = train_tokenizer("stories.txt", vocab_size=2048)
    encode_corpus("stories.txt", "tokens.npy", tokenizer)

    tokens = open_tokens("tokens.npy", tokenizer_sha256=tokenizer.sha256).tokens
    batches = TokenBatches(tokens, batch_size=16, context_length=128, seed=0)
    inputs, targets = batches.batch(step=0)  # each int64 (1, 16, 128)

Only the batches need torch. A dataset to download registers itself, see `lmkit.data.download`.
"""

from lmkit import lazy

__getattr__, __dir__, __all__ = lazy.exports(
    __name__,
    {
        "synth": ("generate_stories", "write_stories"),
        "download": ("Dataset", "RemoteFile", "download_dataset"),
        "corpora": ("CorpusFiles", "plain_text_files", "prepare_corpus"),
        "encoding": ("encode_corpus",),
        "shards": ("open_tokens",),
        "token_files": ("TokenFile", "TokenFileWriter", "TokenMeta"),
        "lmkit.core.batches": ("BatchSource", "RandomTokens", "TokenBatches", "evaluation_windows"),
    },
)
