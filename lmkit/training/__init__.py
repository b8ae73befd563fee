"""Train language models: from a recipe with `train`, or in a loop of one's own.

A loop of one's own, on one process or on several ranks:

    from lmkit.core.batches import RandomTokens
    from lmkit.recipe.tables import ModelConfig
    from lmkit.training import build_step, load_checkpoint, save_checkpoint

    config = ModelConfig(vocab_size=64, context_length=16, d_model=32, d_ff=96, num_layers=2, num_heads=4)
    step = build_step(config)
    batches = RandomTokens(64, batch_size=8, context_length=16, seed=0)
    for number in range(20):
        outcome = step(*batches.batch(number), lr=1e-2)
    save_checkpoint(step.model, step.optimizer, 20, "model.safetensors")
    assert load_checkpoint("model.safetensors", step.model, step.optimizer) == 20

A whole run, as `lmkit train` makes it, with metrics, evaluation and exact resume:

    from lmkit.recipe.load import load_recipe
    from lmkit.training import train

    result = train(load_recipe("quickstart", ["train.steps=100"]))
"""

from lmkit.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "CheckpointWriter": "resume",
        "Evaluation": "evaluation",
        "HeldOut": "evaluation",
        "LossScale": "precision",
        "Outcome": "step",
        "Step": "step",
        "TrainResult": "session",
        "Trainer": "trainer",
        "TrainingStep": "setup",
        "build_step": "setup",
        "evaluate": "evaluation",
        "evaluate_choices": "judging",
        "evaluate_documents": "judging",
        "evaluate_run": "judging",
        "export_model": "exchange",
        "import_model": "exchange",
        "load_checkpoint": "resume",
        "load_weights": "weights",
        "model_weights": "weights",
        "newest_checkpoint": "checkpoint",
        "open_checkpoint": "checkpoint",
        "open_weights": "weights",
        "save_checkpoint": "resume",
        "train": "session",
        "verify_path": "verify",
        "verify_resume": "verify",
        "weights_of": "weights",
    },
)
