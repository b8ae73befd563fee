"""`lmkit export` and `lmkit import`: models to and from Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lmkit.cli.options import Commands, PluginOption, option

app = Commands()


@app.add("lmkit export artifacts/runs/quickstart exported --dtype bf16")
def export(
    run: Annotated[Path, typer.Argument(help="A run folder or a checkpoint folder.")],
    folder: Annotated[Path, typer.Argument(help="The new folder.")],
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None, option("Dtype of the weights; default: as they are.")
    ] = None,
    plugin: PluginOption = None,
) -> Any:
    """Write a model as a Hugging Face folder, which transformers opens."""
    from lmkit.training.exchange import export_model

    return export_model(run, folder, dtype=dtype)


@app.add("lmkit import SmolLM-135M artifacts/runs/smollm --context-length 1024", name="import")
def import_(
    folder: Annotated[Path, typer.Argument(help="A Hugging Face folder: Llama, Mistral, Qwen2, Qwen3.")],
    run: Annotated[Path, typer.Argument(help="The new run folder.")],
    context_length: Annotated[
        int | None, option("Tokens that the model sees at once; default, and at most: the folder's.")
    ] = None,
    without_tokenizer: Annotated[
        bool, typer.Option("--without-tokenizer", help="Import the weights alone.")
    ] = False,
    chat_template: Annotated[
        Literal["plain", "chatml", "llama3"] | None,
        option("Template of `lmkit chat`; default: the folder's, if lmkit wrote it."),
    ] = None,
) -> Any:
    """Make a run of a Hugging Face folder, to generate with, evaluate and train.

    Reads safetensors files and a byte-level tokenizer.json, and never a pickle.
    """
    from lmkit.training.exchange import import_model

    return import_model(
        folder,
        run,
        context_length=context_length,
        with_tokenizer=not without_tokenizer,
        chat_template=chat_template,
    )
