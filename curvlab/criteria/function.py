"""Any twice differentiable function of (logits, target) of one example, through torch.func.

The function sees one example: logits (K,) and its target without the batch dimension. It is batched by
`vmap`, so branches on values must be written with `torch.where`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import grad, vjp, vmap

from curvlab.criteria.base import Criterion, check_logits
from curvlab.exceptions import ProblemError
from curvlab.measure.device import readable

__all__ = ["FunctionCriterion"]

CLASSES_TRIED = 256


@dataclass(frozen=True)
class FunctionCriterion(Criterion):
    """A user's loss of one example; `sampler(logits, uniforms)` draws one target, both (K,).

    >>> absolute = FunctionCriterion(lambda logits, target: (logits - target).abs().sum(), name="absolute")
    >>> absolute.gradients(torch.tensor([[2.0, -1.0]]), torch.zeros(1, 2))
    tensor([[ 1., -1.]])
    """

    convex: ClassVar[None] = None
    likelihood: ClassVar[bool] = False

    function: Callable[[Tensor, Tensor], Tensor]
    sampler: Callable[[Tensor, Tensor], Tensor] | None = None
    name: str = "function"  # type: ignore[misc]  # each user function has its own
    batched: Callable[[Tensor, Tensor], Tensor] | None = None
    """What the user gave, perhaps for a batch: its value must then be the mean, or the sum, of examples."""

    def check(self, logits: Tensor, targets: Tensor) -> None:
        """Raise `ProblemError` unless the function is a scalar of one example, twice differentiable."""
        check_logits(logits, targets)
        if not readable(logits) or not readable(targets) or not len(logits):
            return
        if targets.is_floating_point() and not bool(torch.isfinite(targets).all()):
            raise ProblemError("`targets` is not finite; expected finite numbers")
        # One example shows whether the function is a scalar and can be differentiated twice.
        row, target = logits[:1].detach(), targets[:1]
        try:
            values = self.losses(row, target)
            if values.shape == (1,) and values.is_floating_point():
                self.hessian_products(row, target, torch.ones_like(row))
        except Exception as error:
            raise ProblemError(
                f"criterion `{self.name}` fails on one example, with logits of shape {tuple(row.shape[1:])} "
                f"and a target of shape {tuple(target.shape[1:])}: {error}. Expected a function of one "
                "example that torch.func can batch and differentiate twice (write branches with "
                "torch.where, and give one_hot its num_classes)"
            ) from error
        if not values.is_floating_point():
            raise ProblemError(
                f"criterion `{self.name}` gives {values.dtype} for one example; expected a floating-point "
                "number: whole numbers have no gradient"
            )
        if values.shape != (1,):
            raise ProblemError(
                f"criterion `{self.name}` gives shape {tuple(values.shape[1:])} for one example; "
                "expected a scalar: sum or average over the outputs"
            )
        self._check_one_example(logits.detach(), targets)
        singles = self._all_losses(logits.detach(), targets)
        self._check_batch_mean(logits.detach(), targets, singles)
        self._check_class_weights(row, target)

    def check_targets(self, logits: Tensor, targets: Tensor) -> None:
        """Shapes, dtypes and devices alone: the function itself speaks up where it is called."""
        check_logits(logits, targets)

    def _all_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """ξ_i of all examples: bad labels, and values that are no number, are found here."""
        try:
            singles = self.losses(logits, targets)
        except Exception as error:
            raise ProblemError(
                f"criterion `{self.name}` fails on some of {len(logits)} examples, though not on the first: "
                f"{error}. Check the targets: labels go from 0 to {logits.shape[1] - 1}"
            ) from error
        if not bool(torch.isfinite(singles).all()):
            raise ProblemError(
                f"criterion `{self.name}` is not finite for {int((~torch.isfinite(singles)).sum())} of "
                f"{len(singles)} examples by themselves (ignored labels?): it is no mean of the examples. "
                f"Use `cross-entropy` with `ignore_index`, or leave these examples out"
            )
        return singles

    def _check_class_weights(self, row: Tensor, target: Tensor) -> None:
        """The same on one example of each class, which shows weights that the batch at hand does not.

        The labels of a batch may all be of one class, or of one weight; those of the next are not.
        """
        classes = row.shape[1]
        if self.batched is None or target.is_floating_point() or target.ndim != 1 or classes < 2:
            return
        labels = torch.arange(min(classes, CLASSES_TRIED), device=target.device).to(target.dtype)
        logits = row.expand(len(labels), classes).contiguous()
        try:
            singles = self.losses(logits, labels)
        except Exception:
            return  # targets that are no labels
        counted = torch.isfinite(singles)  # a class that is ignored does no harm where no example has it
        if int(counted.sum()) > 1:
            self._check_batch_mean(logits[counted], labels[counted], singles[counted])

    def _check_batch_mean(self, logits: Tensor, targets: Tensor, singles: Tensor) -> None:
        """Refuse what is no plain mean of its examples: class weights, `ignore_index`, pairs of examples."""
        if self.batched is None or len(logits) < 2:
            return
        try:
            whole = self.batched(logits, targets)
        except Exception:
            return  # a function of one example, which takes no batch
        if not isinstance(whole, Tensor) or whole.shape != () or not self._means(logits, targets, singles):
            return
        expected = torch.stack([singles.mean(), singles.sum()])
        slack = 1e-4 if logits.dtype == torch.float32 else 1e-8
        if not bool(torch.isclose(whole.to(expected), expected, rtol=slack, atol=slack).any()):
            raise ProblemError(
                f"criterion `{self.name}` gives {float(whole):.6g} for the batch and "
                f"{float(singles.mean()):.6g} on average for its examples alone: it weighs them, or lets "
                f"them depend on each other. Use a criterion of curvlab with class weights, or "
                f"FunctionCriterion(f) for a function that is meant for one example"
            )

    def _check_one_example(self, logits: Tensor, targets: Tensor) -> None:
        """Refuse a function that averages over the first dimension: for it, outputs would be examples.

        A function of one example, with K outputs, that is given several by mistake returns their sum, their
        mean, or nothing of use. K times the mean is what a mean over examples becomes when it is given one.
        """
        outputs = logits.shape[1]
        count = 2 if outputs > 2 else 3  # any but the number of outputs
        if outputs == 1 or len(logits) < count:
            return
        try:
            whole = self.function(logits[:count], targets[:count])
        except Exception:
            return
        mean = self.losses(logits[:count], targets[:count]).mean()
        if whole.shape == () and bool(mean != 0) and bool(torch.isclose(whole, outputs * mean, rtol=1e-4)):
            raise ProblemError(
                f"criterion `{self.name}` is written for a batch: of {count} examples together it gives "
                f"{float(whole):.4g}, of each alone {float(mean):.4g} on average, {outputs} times less: "
                f"it takes the {outputs} outputs for examples. Expected a function of one example, of "
                f"logits of shape ({outputs},) and a target, with no mean over the batch"
            )

    def _means(self, logits: Tensor, targets: Tensor, singles: Tensor) -> bool:
        """Whether what the user gave is meant for a batch: a torch loss is, a function if it averages.

        An example twice over has the mean of one; a function of one example makes anything of it.
        """
        if self.batched is None or isinstance(self.batched, nn.Module):
            return self.batched is not None
        try:
            twice = self.batched(
                logits[:1].expand(2, *logits.shape[1:]), targets[:1].expand(2, *targets.shape[1:])
            )
        except Exception:
            return False  # it takes batches of other sizes by accident, being meant for one example
        return twice.shape == () and bool(torch.isclose(twice.to(singles), singles[0], rtol=1e-5))

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Give ξ_i by `vmap`."""
        return vmap(self.function)(logits, targets)

    def gradients(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Give ∇ξ_i by `vmap` of `grad`."""
        return vmap(grad(self.function))(logits, targets)

    def hessian_products(self, logits: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        """Give ∇²ξ_i v_i, never the matrices."""
        product = self._products(logits, targets)
        if vectors.ndim == 2:
            return product(vectors)
        return vmap(product)(vectors.flatten(0, -3)).reshape(vectors.shape)

    def mean_hessian(self, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Give Σ_i weights_i ∇²ξ_i, one row of it after the other."""
        product = self._products(logits, targets)
        identity = torch.eye(logits.shape[1], dtype=logits.dtype, device=logits.device)
        rows = torch.stack([product(weights[:, None] * unit).sum(0) for unit in identity])
        return (rows + rows.T) / 2

    def sample(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """Draw targets with `sampler`; refused without one."""
        if self.sampler is None:
            raise self._has_no_labels()
        return vmap(self.sampler)(logits, uniforms)

    def label_factor(self, logits: Tensor) -> Tensor:
        """Refused: a sampler cannot be summed over all labels."""
        if self.sampler is None:
            raise self._has_no_labels()
        raise ProblemError(
            f"criterion `{self.name}` can draw labels but not sum over all of them, which Fisher kind "
            "`exact` needs; use `fisher[kind=mc]`"
        )

    def _products(self, logits: Tensor, targets: Tensor) -> Callable[[Tensor], Tensor]:
        """Map v to ∇²ξ_i v_i by reverse mode twice: more functions support it than forward over reverse."""
        pullback = vjp(lambda rows: self.gradients(rows, targets), logits)[1]
        return lambda vectors: pullback(vectors)[0]
