"""Naive references: every curvature written out as DESIGN's formulas say, in plain loops over examples.

Nothing here uses curvlab: layers are (W, b) pairs, activations and losses are torch's own functions, and
derivatives come from torch.func. Blocks are dense matrices on `parameter.flatten()`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev

Loss = Callable[[Tensor, Tensor], Tensor]
Blocks = dict[str, Tensor]


@dataclass(eq=False)
class Reference:
    """A chain model with a loss of one example and the examples' weights c_i in the mean."""

    model: nn.Sequential
    loss: Loss
    inputs: Tensor
    targets: Tensor
    weights: Tensor

    @property
    def share(self) -> Tensor:
        return self.weights / self.weights.sum()

    @property
    def linears(self) -> list[tuple[str, nn.Linear]]:
        return [(name, m) for name, m in self.model.named_modules() if isinstance(m, nn.Linear)]

    @property
    def activations(self) -> list[nn.Module]:
        return [m for m in self.model if not isinstance(m, nn.Linear)]

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def mean_loss(self, parameters: dict[str, Tensor]) -> Tensor:
        logits = functional_call(self.model, parameters, (self.inputs,))
        losses = [self.loss(logits[i], self.targets[i]) for i in range(len(self.inputs))]
        return sum(c * loss for c, loss in zip(self.share, losses, strict=True))

    # exact quantities, by torch.func over the parameters

    def gradient(self) -> Blocks:
        return grad(self.mean_loss)(self.parameters)

    @cache  # noqa: B019
    def _nested_hessian(self) -> dict[str, dict[str, Tensor]]:
        return hessian(self.mean_loss)(self.parameters)

    def full_hessian(self) -> Tensor:
        nested = self._nested_hessian()
        sizes = {name: p.numel() for name, p in self.parameters.items()}
        rows = [torch.cat([nested[a][b].reshape(sizes[a], sizes[b]) for b in sizes], dim=1) for a in sizes]
        return torch.cat(rows)

    def hessian_blocks(self) -> Blocks:
        nested = self._nested_hessian()
        return {name: nested[name][name].reshape(p.numel(), p.numel()) for name, p in self.parameters.items()}

    def gauss_newton_blocks(self) -> Blocks:
        """E[Jᵀ ∇²ξ J] with J the Jacobian of the logits in the parameter."""
        blocks = {name: torch.zeros(p.numel(), p.numel()).double() for name, p in self.parameters.items()}
        for i, c in enumerate(self.share):
            x = self.inputs[i : i + 1]
            jacobians = jacrev(lambda p, x=x: functional_call(self.model, p, (x,))[0])(self.parameters)
            curved = hessian(self.loss)(self.logits(i), self.targets[i])
            for name, jacobian in jacobians.items():
                flat = jacobian.reshape(len(curved), -1)
                blocks[name] += c * flat.T @ curved @ flat
        return blocks

    # the forward and backward pass of one example, layer by layer

    def logits(self, i: int) -> Tensor:
        return self.forward(i)[1][-1]

    @cache  # noqa: B019 - as short-lived as the test
    def forward(self, i: int) -> tuple[list[Tensor], list[Tensor]]:
        """h^0 .. h^{k-1} and z^1 .. z^k."""
        hidden, outputs = [self.inputs[i]], []
        for t, (_, layer) in enumerate(self.linears):
            z = layer.weight.detach() @ hidden[-1]
            if layer.bias is not None:
                z = z + layer.bias.detach()
            outputs.append(z)
            if t < len(self.activations):
                hidden.append(self.activations[t](z.clone()))
        return hidden, outputs

    @cache  # noqa: B019
    def slopes(self, i: int) -> list[tuple[Tensor, Tensor]]:
        """σ' and σ'' of each hidden layer, entry by entry."""
        result = []
        for activation, z in zip(self.activations, self.forward(i)[1], strict=False):
            first = grad(lambda entries, f=activation: f(entries.clone()).sum())
            result.append((first(z), grad(lambda entries, first=first: first(entries).sum())(z)))
        return result

    def backward(self, i: int, gradient: Tensor) -> list[Tensor]:
        """g^1 .. g^k from g^k."""
        gradients = [gradient]
        for t in range(len(self.linears) - 1, 0, -1):
            weight = self.linears[t][1].weight.detach()
            gradients.append(self.slopes(i)[t - 1][0] * (weight.T @ gradients[-1]))
        return gradients[::-1]

    def label_gradients(self, i: int, target: Tensor) -> list[Tensor]:
        return self.backward(i, grad(self.loss)(self.logits(i), target))

    @cache  # noqa: B019
    def gradients(self, i: int) -> list[Tensor]:
        return self.label_gradients(i, self.targets[i])

    # expectations

    def mean(self, function: Callable[[int], Tensor]) -> Tensor:
        return sum(c * function(i) for i, c in enumerate(self.share))

    @cache  # noqa: B019
    def input_factors(self) -> list[Tensor]:
        return [
            self.mean(lambda i, t=t: torch.outer(self.forward(i)[0][t], self.forward(i)[0][t]))
            for t in range(len(self.linears))
        ]

    def fisher(self) -> list[Tensor]:
        return self._second_moments(lambda i: [(1.0, self.gradients(i))])

    def fisher_of_labels(self, draws: list[Tensor]) -> list[Tensor]:
        """With the labels `draws`[s][i] in place of the targets."""
        return self._second_moments(
            lambda i: [(1 / len(draws), self.label_gradients(i, labels[i])) for labels in draws]
        )

    def fisher_over_classes(self) -> list[Tensor]:
        """With the expectation over all classes, as softmax predicts them."""

        def terms(i: int) -> list[tuple[Tensor, list[Tensor]]]:
            probabilities = self.logits(i).softmax(0)
            return [(p, self.label_gradients(i, torch.tensor(y))) for y, p in enumerate(probabilities)]

        return self._second_moments(terms)

    def _second_moments(
        self, terms: Callable[[int], list[tuple[float | Tensor, list[Tensor]]]]
    ) -> list[Tensor]:
        per_example = [terms(i) for i in range(len(self.inputs))]
        return [
            self.mean(lambda i, t=t: sum(p * torch.outer(g[t], g[t]) for p, g in per_example[i]))
            for t in range(len(self.linears))
        ]

    @cache  # noqa: B019
    def output_hessian(self) -> Tensor:
        return self.mean(lambda i: hessian(self.loss)(self.logits(i), self.targets[i]))

    def gauss_newton(self) -> list[Tensor]:
        return self._recursion(self.output_hessian(), lambda bend: torch.zeros_like(bend))

    def pch(self, gamma: float, output_gamma: float = -1.0) -> list[Tensor]:
        values, vectors = torch.linalg.eigh(self.output_hessian())
        top = vectors @ torch.diag(_positive(values, output_gamma)) @ vectors.T
        return self._recursion(top, lambda bend: _positive(bend, gamma))

    def signed_pch(self, gamma: float, output_gamma: float = -1.0) -> list[Tensor]:
        """The recursion of E[∇²ξ] and of the second-order terms as they are, then PosEig of each block."""
        signed = self._recursion(self.output_hessian(), lambda bend: bend)
        gammas = [gamma] * (len(signed) - 1) + [output_gamma]
        pairs = [(*torch.linalg.eigh(block), one) for block, one in zip(signed, gammas, strict=True)]
        return [vectors @ torch.diag(_positive(values, one)) @ vectors.T for values, vectors, one in pairs]

    def _recursion(self, top: Tensor, diagonal: Callable[[Tensor], Tensor]) -> list[Tensor]:
        blocks = [top]
        for t in range(len(self.linears) - 1, 0, -1):
            weight = self.linears[t][1].weight.detach()
            products = self.mean(
                lambda i, t=t: torch.outer(self.slopes(i)[t - 1][0], self.slopes(i)[t - 1][0])
            )
            bend = self.mean(lambda i, t=t, weight=weight: self._bend(i, t, weight))
            blocks.append((weight.T @ blocks[-1] @ weight) * products + torch.diag(diagonal(bend)))
        return blocks[::-1]

    def _bend(self, i: int, t: int, weight: Tensor) -> Tensor:
        return self.slopes(i)[t - 1][1] * (weight.T @ self.gradients(i)[t])

    def kronecker_blocks(self, outputs: list[Tensor]) -> Blocks:
        """Bias blocks B and weight blocks B ⊗ E[hhᵀ], as torch flattens a weight."""
        blocks = {}
        for (name, layer), output, inputs in zip(self.linears, outputs, self.input_factors(), strict=True):
            blocks[f"{name}.weight"] = torch.kron(output.contiguous(), inputs.contiguous())
            if layer.bias is not None:
                blocks[f"{name}.bias"] = output
        return blocks


def _positive(values: Tensor, gamma: float) -> Tensor:
    return torch.stack([v if v >= 0 else gamma * v for v in values])
