"""The plateau of a training run: the network gives the same output whatever it is shown.

Its height is the loss of the best constant output,

    min_c  Σ_i w_i ξ(c, y_i) / Σ_i w_i,

with the criterion's weights w_i over the training targets: the entropy of the class frequencies for
cross-entropy, the variance of the targets for `mse`. Deep sigmoid networks begin there, and a run whose
steps follow the noise of its batches' class counts does not leave it (reports/plateau). A loss within 2 % of
the height lies on the plateau.

The minimum is sought from the class frequencies, or from the mean target, by L-BFGS. With a criterion that is
not convex it is a local one: for `robust` and equally frequent classes, the uniform prediction itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite, isnan, nan
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from curvlab import specs
from curvlab.criteria import Criterion
from curvlab.data import Examples
from curvlab.studies.train.evaluate import CHUNK
from curvlab.studies.train.optimizers import SecondOrderSpec
from curvlab.studies.train.plan import TrainPlan

__all__ = ["LEAST_UPDATES", "LEFT", "Plateau", "plateau_note", "stays_on_plateau"]

LEFT = 0.98
"""A run has left the plateau when its loss is below this share of the height."""
LEAST_UPDATES = 100
"""A run stays on the plateau when its last whole epochs, of at least so many updates, were all there."""
MOST_UPDATES = 600
"""Settings that train left the plateau within so many updates (reports/plateau): more may be enough."""

Targets = Callable[[], Iterator[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Plateau:
    """The height of the plateau, or NaN and the `reason` why there is none.

    >>> from curvlab.criteria import CrossEntropy
    >>> plateau = Plateau.of_classes(CrossEntropy(), torch.arange(10), torch.full((10,), 500.0), outputs=10)
    >>> round(plateau.height, 4), plateau.holds(2.307), plateau.holds(2.2)
    (2.3026, True, False)
    """

    height: float
    reason: str = ""

    @classmethod
    def of(cls, criterion: Criterion, examples: Examples, outputs: int, dtype: torch.dtype) -> Plateau:
        """The plateau of a network with so many `outputs` over all `examples`."""
        if examples.labels is not None:
            labels, counts = examples.labels.unique(return_counts=True)
            return cls.of_classes(criterion, labels, counts.to(dtype), outputs)

        def targets() -> Iterator[tuple[Tensor, Tensor]]:
            for first in range(0, len(examples), CHUNK):
                indices = torch.arange(first, min(first + CHUNK, len(examples)))
                values = examples.targets
                rows = examples.inputs.rows(indices) if values is None else values[indices]
                yield rows, torch.ones(len(rows), dtype=dtype, device=rows.device)

        mean = torch.stack([rows.cpu().double().sum(0) for rows, _ in targets()]).sum(0) / len(examples)
        start = mean if mean.shape == (outputs,) else torch.zeros(outputs, dtype=torch.float64)
        return cls._lowest(criterion, targets, start, dtype)

    @classmethod
    def of_classes(cls, criterion: Criterion, labels: Tensor, counts: Tensor, outputs: int) -> Plateau:
        """The plateau where `labels`, each of them different, occur `counts` times."""
        known = (labels >= 0) & (labels < outputs)
        if int(known.sum()) < 2:
            return cls(nan, "the training examples are of one class, so a constant prediction is right")
        frequencies = torch.zeros(outputs, dtype=torch.float64)
        frequencies[labels[known].cpu()] = (counts[known] / counts[known].sum()).cpu().double()
        # A class that does not occur has a finite logit, which a line search can start from.
        start = frequencies.clamp_min(1e-12).log()
        return cls._lowest(criterion, lambda: iter([(labels, counts)]), start, counts.dtype)

    @classmethod
    def _lowest(cls, criterion: Criterion, targets: Targets, start: Tensor, dtype: torch.dtype) -> Plateau:
        from scipy.optimize import minimize

        def loss(point: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            constant = torch.from_numpy(point).to(dtype)
            total, weight, slope = 0.0, 0.0, np.zeros_like(point)
            for rows, counts in targets():
                logits = constant.to(rows.device).expand(len(rows), -1)
                given = criterion.weights(logits, rows)
                weights = counts if given is None else counts * given
                total += float((weights * criterion.losses(logits, rows)).cpu().double().sum())
                weight += float(weights.cpu().double().sum())
                gradients = weights[:, None] * criterion.gradients(logits, rows)
                slope += gradients.cpu().double().sum(0).numpy()
            return (total / weight, slope / weight) if weight else (nan, slope)

        with torch.no_grad():
            first = start.numpy()
            if not isfinite(loss(first)[0]):
                return cls(nan, "no constant output with a finite loss was found")
            height = float(minimize(loss, first, jac=True, method="L-BFGS-B").fun)
        if not isfinite(height) or height <= 0:
            return cls(nan, f"the best constant output has loss {height:.4g}: no share of it tells a plateau")
        return cls(height)

    def holds(self, loss: float) -> bool:
        """Whether `loss` lies within 2 % of the height; False where either is NaN."""
        return abs(loss - self.height) <= (1 - LEFT) * self.height


def stays_on_plateau(row: Mapping[Any, Any]) -> bool:
    """Whether an epoch's row ends at least `LEAST_UPDATES` updates on the plateau, all in whole epochs."""
    return bool(row.get("plateau_steps", 0) >= LEAST_UPDATES)


def plateau_note(plan: TrainPlan, row: Mapping[Any, Any]) -> str:
    """What was seen of a run that stays on its plateau, by an epoch's row, and what to try.

    >>> row = {"plateau_steps": 500, "train_loss": 2.3076, "constant_loss": 2.3026, "train_accuracy": 0.1}
    >>> print(plateau_note(TrainPlan(optimizer="sgd[lr=0.1]"), row))
    The run stays on its plateau: for 500 updates its training loss, now 2.308, has been within 2 % of 2.303, the loss of the best constant prediction. Try more epochs, a larger batch (100 now), another learning rate (0.1 now), or a second-order step.
    """  # noqa: E501
    tries = _tries(plan, int(row["plateau_steps"]), classes=not isnan(row["train_accuracy"]))
    return (
        f"The run stays on its plateau: for {row['plateau_steps']:.0f} updates its training loss, now "
        f"{row['train_loss']:.4g}, has been within 2 % of {row['constant_loss']:.4g}, the loss of "
        f"the best constant prediction. Try {', '.join(tries[:-1])}, or {tries[-1]}."
    )


def _tries(plan: TrainPlan, updates: int, classes: bool) -> list[str]:
    batch, rate = f"a larger batch ({plan.setup.batch} now)", f"{plan.spec.lr:g} now"
    longer = ["more epochs"] if updates < MOST_UPDATES else []
    if not isinstance(plan.spec, SecondOrderSpec):
        return [*longer, batch, f"another learning rate ({rate})", "a second-order step"]
    balanced = ["batches with equally many examples of each class"] if classes else []
    solver = specs.parse(plan.spec.solver).name
    kfi = [] if solver == "kfi" else [f"the solver `kfi` instead of `{solver}`"]
    return [*longer, batch, f"a smaller learning rate at this batch ({rate})", *balanced, *kfi]
