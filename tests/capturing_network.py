"""A residual network that shows the inputs of its non-linear nodes, and its dense curvature by torch.func.

J, J_n by jacrev of (logits, u_1, …), M_n by hessian of Σ_k ḡ_k f_n,k: nothing of curvlab is used.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev
from torch.nn import functional as F

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": lambda z, y: F.cross_entropy(z[None], y[None]),
    "robust": lambda z, y: 1 / (1 + torch.exp(5 * (z.softmax(-1)[y] - 0.2))),
}


class Capturing(nn.Module):
    """Convolution, tanh, a residual branch, LayerNorm and GELU; `seen` are the nodes' inputs, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mix = nn.Conv1d(2, 3, 2, padding=1), nn.Conv1d(3, 3, 1)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)
        self.hidden = nn.Linear(3, 4)
        self.seen: list[Tensor] = []

    def note(self, u: Tensor) -> Tensor:
        self.seen.append(u)
        return u

    def forward(self, x: Tensor) -> Tensor:
        self.seen.clear()
        h = torch.tanh(self.note(self.conv(x)))
        h = (h + self.mix(h)).mean(2)
        return self.head(F.gelu(self.note(self.norm(self.note(self.hidden(h))))))

    def node_functions(self) -> list[Callable[[Tensor], Tensor]]:
        weight, bias = self.norm.weight.detach(), self.norm.bias.detach()
        return [torch.tanh, lambda u: F.layer_norm(u, (4,), weight, bias), F.gelu]

    def to_rows(self, number: int, u: Tensor) -> Tensor:
        """A node's input of one example as (positions, units)."""
        return u[0].T if number == 0 else u


def make(examples: int, seed: int = 0) -> tuple[Capturing, Tensor, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Capturing().double()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p))
        return model, torch.randn(examples, 2, 3).double(), torch.randint(3, (examples,))


def positive(matrix: Tensor, gamma: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(torch.where(values < 0, gamma * values, values)) @ vectors.T


class Dense:
    """Jacobians of all parameters and local Hessians, example by example."""

    def __init__(self, model: Capturing, x: Tensor, y: Tensor, loss: str) -> None:
        self.model, self.x, self.y, self.loss = model, x, y, LOSSES[loss]
        self.parameters = {name: p.detach() for name, p in model.named_parameters()}
        self.names = list(self.parameters)
        self._local: dict[int, list[Tensor]] = {}

    def outputs(self, parameters: dict[str, Tensor], i: int) -> tuple[Tensor, ...]:
        z = functional_call(self.model, parameters, (self.x[i : i + 1],))
        return (z[0], *self.model.seen)

    def jacobians(self, i: int) -> list[Tensor]:
        """J and every J_n, (outputs, parameters)."""
        found = jacrev(lambda p: self.outputs(p, i))(self.parameters)
        sizes = [o.numel() for o in self.outputs(self.parameters, i)]
        return [
            torch.cat([one[name].reshape(size, -1) for name in self.names], 1)
            for one, size in zip(found, sizes, strict=True)
        ]

    def output_hessian(self, i: int) -> Tensor:
        z = self.outputs(self.parameters, i)[0].detach()
        return hessian(lambda z: self.loss(z, self.y[i]))(z)

    def local_hessians(self, i: int) -> list[Tensor]:
        """M_{i,n} over the entries of u_n, flattened."""
        if i not in self._local:
            self._local[i] = self._local_hessians(i)
        return self._local[i]

    def _local_hessians(self, i: int) -> list[Tensor]:
        seen = [u.detach() for u in self.outputs(self.parameters, i)[1:]]
        found = []
        for number, (function, u) in enumerate(zip(self.model.node_functions(), seen, strict=True)):
            along = self._gradient_at(number, i)
            found.append(
                hessian(lambda v, f=function, a=along: (f(v) * a).sum())(u).reshape(u.numel(), u.numel())
            )
        return found

    def _gradient_at(self, number: int, i: int) -> Tensor:
        """∂ξ_i/∂f_n: the derivative by something that is added to the node's output."""
        functions = self.model.node_functions()

        def shifted(delta: Tensor) -> Tensor:
            m, x = self.model, self.x[i : i + 1]
            outputs = [delta if n == number else 0 for n in range(3)]
            h = functions[0](m.conv(x)) + outputs[0]
            h = (h + m.mix(h)).mean(2)
            n = functions[1](m.hidden(h)) + outputs[1]
            return self.loss(m.head(functions[2](n) + outputs[2])[0], self.y[i])

        u = self.outputs(self.parameters, i)[1 + number].detach()
        return grad(shifted)(torch.zeros_like(functions[number](u)))

    def mean_terms(self) -> list[Tensor]:
        """M̄_n over examples and positions, (units, units)."""
        total: list[Tensor] = []
        for number in range(3):
            blocks = []
            for i in range(len(self.x)):
                u = self.outputs(self.parameters, i)[1 + number].detach()
                places = self.model.to_rows(number, torch.arange(u.numel()).reshape(u.shape))
                local = self.local_hessians(i)[number]
                blocks += [local[row[:, None], row] for row in places]
            total.append(torch.stack(blocks).mean(0))
        return total

    def at_positions(self, number: int, matrix: Tensor) -> Tensor:
        """A units × units matrix at every position of a node's input."""
        u = self.outputs(self.parameters, 0)[1 + number].detach()
        places = self.model.to_rows(number, torch.arange(u.numel()).reshape(u.shape))
        whole = torch.zeros(u.numel(), u.numel()).double()
        for row in places:
            whole[row[:, None], row] += matrix
        return whole

    def positive_hessian(self, gamma: float, output_gamma: float) -> Tensor:
        """E[Jᵀ PosEig(∇²ξ_i) J + Σ_n J_nᵀ PosEig(M̄_n) J_n]."""
        terms = [self.at_positions(n, positive(m, gamma)) for n, m in enumerate(self.mean_terms())]
        return self._sum(lambda i: [positive(self.output_hessian(i), output_gamma), *terms])

    def own_terms_hessian(self) -> Tensor:
        """E[Jᵀ ∇²ξ_i J + Σ_n J_nᵀ M_{i,n} J_n]: every block by parameter is the Hessian's."""
        return self._sum(lambda i: [self.output_hessian(i), *self.local_hessians(i)])

    def mean_terms_hessian(self) -> Tensor:
        """E[Jᵀ ∇²ξ_i J + Σ_n J_nᵀ M̄_n J_n]."""
        terms = [self.at_positions(n, m) for n, m in enumerate(self.mean_terms())]
        return self._sum(lambda i: [self.output_hessian(i), *terms])

    def gradients(self) -> Tensor:
        """∇ξ_i, (examples, parameters)."""
        rows = []
        for i in range(len(self.x)):
            found = grad(lambda p, i=i: self.loss(self.outputs(p, i)[0], self.y[i]))(self.parameters)
            rows.append(torch.cat([found[name].flatten() for name in self.names]))
        return torch.stack(rows)

    def _sum(self, curvatures: Callable[[int], list[Tensor]]) -> Tensor:
        total = 0
        for i in range(len(self.x)):
            pairs = zip(self.jacobians(i), curvatures(i), strict=True)
            total = total + sum(j.T @ m @ j for j, m in pairs) / len(self.x)
        assert isinstance(total, Tensor)
        return total.detach()

    def mask(self, groups: list[tuple[str, ...]]) -> Tensor:
        """1 where two entries belong to parameters of one group."""
        number = {name: index for index, group in enumerate(groups) for name in group}
        each = [torch.full((self.parameters[n].numel(),), float(number[n])).double() for n in self.names]
        joined = torch.cat(each)
        return (joined[:, None] == joined).double()
