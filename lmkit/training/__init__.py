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

The model of a run, of a checkpoint or of a Hugging Face folder, for a loop of one's own:

    from lmkit.training import open_weights

    model = open_weights("artifacts/runs/quickstart").model(device="cpu")

A whole run, as `lmkit train` makes it, with metrics, evaluation and exact resume:

    from lmkit.recipe.load import load_recipe
    from lmkit.training import train

    result = train(load_recipe("quickstart", ["train.steps=100"]))
"""

from lmkit.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "resume": ("CheckpointWriter", "load_checkpoint", "save_checkpoint"),
        "evaluation": ("Evaluation", "HeldOut", "evaluate"),
        "precision": ("LossScale",),
        "step": ("Outcome", "Step"),
        "session": ("TrainResult", "train"),
        "trainer": ("Trainer",),
        "setup": ("TrainingStep", "build_step"),
        "judging": ("evaluate_choices", "evaluate_documents", "evaluate_run"),
        "exchange": ("export_model", "import_model"),
        "weights": ("load_weights", "model_weights", "open_weights", "weights_of"),
        "checkpoint": ("newest_checkpoint", "open_checkpoint"),
        "verify": ("verify_path", "verify_resume"),
    },
)
