"""What the shell's completion offers for the value of an option: names, without importing what they name.

The registries hold classes that need torch, which takes seconds to import; a completion has to answer at
once. The names that curvlab brings are therefore written here as well, and a test holds them to the
registries; those of other packages are read from their entry points, whose modules are not imported.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    import click

__all__ = ["GROUPS", "NAMES", "complete_name"]

NAMES: dict[str, tuple[str, ...]] = {
    "provider": ("fisher", "gauss-newton", "hessian", "pch", "pch-1", "pch-2"),
    "solver": ("cg", "ea-cg", "exact", "kfi", "sm-kfi"),
    "criterion": ("bce", "cross-entropy", "mse", "robust", "tukey"),
    "arch": (
        "autoencoder",
        "cifar10-fcnn",
        "cnn",
        "digits-fcnn",
        "fcnn",
        "gpt-nano",
        "imagenet10-fcnn",
        "lenet",
        "mlp-mixer",
        "resnet",
        "resnet18",
        "resnet8",
        "vit-tiny",
    ),
    "data": (
        "characters",
        "cifar10",
        "cifar10-224",
        "digits",
        "image-folder",
        "imagenet10",
        "synthetic",
        "synthetic-images",
        "synthetic-regression",
    ),
    "optimizer": ("adam", "lbfgs", "muon", "second-order", "sgd"),
    "schedule": ("constant", "cosine", "steps"),
    "executor": ("dask", "process", "serial"),
}
"""The names that curvlab itself registers, by what they name."""

GROUPS = {
    "provider": "curvlab.providers",
    "solver": "curvlab.solvers",
    "criterion": "curvlab.criteria",
    "data": "curvlab.datasets",
    "executor": "curvlab.executors",
}
"""The entry-point groups in which other packages add names."""

OPTIONS = {"providers": "provider", "solvers": "solver", "baselines": "optimizer"}
"""Options that take several names, or call them otherwise."""

PATHS = {"checkpoint": "file", "data_dir": "dir"}
"""Options whose text is a path, which the shell itself completes."""


def complete_name(context: click.Context, option: click.Parameter, typed: str) -> list[Any]:
    """What completes the value of an option, for its `shell_complete`: names, or a path that the shell finds.

    >>> import click
    >>> option = click.Option(["-p", "--provider"])
    >>> complete_name(click.Context(click.Command("compare")), option, "pch")
    ['pch', 'pch-1', 'pch-2']
    """
    name = option.name or ""
    if name in PATHS:
        return [CompletionItem(typed, type=PATHS[name])]
    kind = OPTIONS.get(name, name)
    added = [point.name for point in entry_points(group=GROUPS[kind])] if kind in GROUPS else []
    return [name for name in sorted({*NAMES.get(kind, ()), *added}) if name.startswith(typed)]
