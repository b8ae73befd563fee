"""Parameter names as the plain model has them: those that are saved."""


def plain_name(name: str) -> str:
    """A parameter's name without what torch.compile and DDP put in front of submodules."""
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "module"))
