"""One step, the loop, evaluation, checkpoints and exact resume, metrics. `lmkit.commands.train` wires them."""
