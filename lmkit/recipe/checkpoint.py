"""`[checkpoint]`: when to save, what to keep, where to go on from."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lmkit.recipe.table import Count, Table


class CheckpointConfig(Table):
    interval: int = 0
    """> 0: save every N steps; <= 0: only at the end. The last step is always saved."""
    keep_last: Annotated[int, Field(ge=1)] = 2
    """Checkpoints to keep; older ones are deleted once a newer one is whole."""
    keep_best: Count = 0
    """Also keep this many checkpoints with the lowest validation loss."""
    resume: str = "auto"
    """`auto`: the newest good checkpoint of the run folder, if any; `never`; or a checkpoint folder."""
