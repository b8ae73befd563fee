"""`lmkit generate`."""

from pathlib import Path
from typing import Annotated

import typer

from lmkit.cli.options import DebugOption, DeviceOption, JsonOption, PluginOption, SetOption, given
from lmkit.cli.render import show, write


def register(app: typer.Typer) -> None:
    """Add the command to the root."""
    app.command(epilog='Example: lmkit generate artifacts/runs/quickstart --prompt "One day, Lily"')(generate)


def generate(
    run: Annotated[Path, typer.Argument(help="A run folder or a checkpoint folder.")],
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            "-p",
            help="Text to continue; repeatable. Empty: a new document. Only the end of a very long one is read.",
            show_default=False,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Tokens of each text, at most.", show_default=False)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="How daring; 0 takes the likeliest token.", show_default=False)
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Choose among this many of the likeliest tokens; 0: among all.", show_default=False
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Choose among the likeliest tokens that together have this probability; 1: among all.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Another seed, another text.", show_default=False),
    ] = None,
    stop_at_end: Annotated[
        bool | None,
        typer.Option(help="End where the model ends the document, or write on.", show_default=False),
    ] = None,
    allow_special: Annotated[
        bool,
        typer.Option(
            "--allow-special", help="Read <|endoftext|> and its like in a prompt as tokens, not as text."
        ),
    ] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json; left out: the run's.", show_default=False)
    ] = None,
    device: DeviceOption = "auto",
    set_: SetOption = None,
    plugin: PluginOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write text with a trained model.

    Options that are left out are taken from the run's [generate] table.
    """
    from lmkit.commands import generate as command

    flags = given(
        generate__prompts=prompt,
        generate__max_new_tokens=max_new_tokens,
        generate__temperature=temperature,
        generate__top_k=top_k,
        generate__top_p=top_p,
        generate__seed=seed,
        generate__stop_at_end=stop_at_end,
    )
    streamed: list[str] = []

    def stream(piece: str) -> None:
        streamed.append(piece)
        write(piece)

    result = command.run(
        run,
        tokenizer=tokenizer,
        overrides=set_ or (),
        flags=flags,
        device=device,
        allow_special=allow_special,
        stream=None if as_json else stream,
    )
    if streamed:
        stream("\n")
    else:
        show(result, as_json=as_json)
