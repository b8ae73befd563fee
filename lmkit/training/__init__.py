"""One step, the loop, evaluation, checkpoints and exact resume, metrics. `session` wires them."""
