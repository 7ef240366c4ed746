"""What the solver tests share: solvers, routes, problems, and references written out densely.

The references use none of curvlab's solvers or factors: H comes from forward hooks, G from autograd,
and every system is a torch.kron matrix given to torch.linalg.solve.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

import curvlab
from curvlab import Additive, Mixed

SOLVERS = ("kfi", "sm-kfi", "cg", "ea-cg", "exact")
DIRECT = ("kfi", "sm-kfi", "exact")
WITH_EXPLICIT = ("kfi", "sm-kfi", "cg", "ea-cg")
MEAN = ("sm-kfi", "ea-cg")
ROUTES = ("auto", "sample", "row", "dense")
KRONECKER = ("fisher", "fisher[kind=mc]", "fisher[kind=exact]", "gauss-newton", "pch-1", "pch-2")
MATRIX_FREE = ("hessian", "hessian[full=true]", "gauss-newton[kind=exact]")
PROVIDERS = KRONECKER + MATRIX_FREE

Maker = Callable[[torch.dtype], curvlab.Problem]


def network(widths: tuple[int, ...], dtype: torch.dtype = torch.float64, bias: bool = True) -> nn.Sequential:
    modules: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        modules += [nn.Linear(fan_in, fan_out, bias=bias, dtype=dtype), nn.Sigmoid()]
    return nn.Sequential(*modules[:-1])


def problem(
    widths: tuple[int, ...] = (12, 5, 3),
    examples: int = 4,
    dtype: torch.dtype = torch.float64,
    criterion: object = "cross-entropy",
    bias: bool = True,
    layers: list[str] | None = None,
    inputs: Tensor | None = None,
    gain: float = 1.0,
    seed: int = 0,
) -> curvlab.Problem:
    torch.manual_seed(seed)
    model = network(widths, dtype, bias)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(gain)
    x = torch.randn(examples, widths[0], dtype=dtype) + 0.3 if inputs is None else inputs.to(dtype)
    y = torch.randint(widths[-1], (len(x),))
    if criterion in ("mse", "tukey"):
        y = torch.randn(len(x), widths[-1], dtype=dtype)
    return curvlab.Problem(model, criterion, x, y, layers=layers)


WIDE = {"widths": (30, 12, 9, 3), "examples": 5}
NARROW = {"widths": (6, 5, 4, 3), "examples": 20}


@dataclass(frozen=True)
class Dense:
    """One layer written out: E[hhᵀ], E[h], B, G and g."""

    a: Tensor
    mean: Tensor
    b: Tensor
    weight: Tensor
    bias: Tensor | None

    def input_factor(self, solver: str) -> Tensor:
        return torch.outer(self.mean, self.mean) if solver.startswith(MEAN) else self.a


def written_out(
    p: curvlab.Problem, curvature: curvlab.Curvature, data: curvlab.Problem | None = None
) -> list[Dense]:
    """Every layer of the curvature of `p`, with the gradient of `data` (by default: of `p`)."""
    inputs = recorded_inputs(p)
    gradients = autograd_gradient(p if data is None else data)
    c = row_weights(p)
    layers = []
    for layer in curvature.layers:
        assert layer.output is not None
        h = inputs[layer.name]
        weight = gradients[f"{layer.name}.weight"]
        bias = gradients.get(f"{layer.name}.bias")
        layers.append(Dense(h.T @ (c[:, None] * h), c @ h, layer.output.to_dense(), weight, bias))
    return layers


def _batch(p: curvlab.Problem) -> tuple[Tensor, Tensor]:
    batch = next(iter(p.batches()))
    return batch.inputs, batch.targets


def row_weights(p: curvlab.Problem) -> Tensor:
    x, y = _batch(p)
    weight = getattr(p.criterion, "weight", None)
    c = torch.ones(len(x), dtype=x.dtype) if weight is None else torch.as_tensor(weight, dtype=x.dtype)[y]
    return c / c.sum()


def recorded_inputs(p: curvlab.Problem) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    handles = [
        m.register_forward_pre_hook(lambda _, args, name=name: seen.__setitem__(name, args[0].detach()))
        for name, m in p.model.named_modules()
        if isinstance(m, nn.Linear)
    ]
    p.model(_batch(p)[0])
    for handle in handles:
        handle.remove()
    return seen


def autograd_gradient(p: curvlab.Problem) -> dict[str, Tensor]:
    x, y = _batch(p)
    losses = p.criterion.losses(p.model(x), y)
    named = dict(p.model.named_parameters())
    grads = torch.autograd.grad(row_weights(p) @ losses, list(named.values()))
    return dict(zip(named, grads, strict=True))


def pi_of(a: Tensor, b: Tensor) -> float:
    sizes = float(a.trace() / len(a)), float(b.trace() / len(b))
    if sizes[1] == 0:
        return 1.0 if sizes[0] == 0 else 1e6
    return min(max((sizes[0] / sizes[1]) ** 0.5, 1e-6), 1e6)


def dense_solve(
    solver: str, d: Dense, damping: Mixed | Additive, pi: float | None = None
) -> tuple[Tensor, Tensor | None]:
    """The documented system of `solver`, by torch.kron and torch.linalg.solve."""
    a, b = d.input_factor(solver), d.b
    eye_a, eye_b = (torch.eye(len(m), dtype=m.dtype) for m in (a, b))
    if "kfi" in solver:
        root = damping.shift**0.5
        pi = pi_of(a, b) if pi is None else pi
        matrix = torch.kron(b + root / pi * eye_b, a + root * pi * eye_a)
        bias_matrix = b + damping.shift * eye_b
    else:
        matrix = damping.scale * torch.kron(b, a) + damping.shift * torch.kron(eye_b, eye_a)
        bias_matrix = damping.scale * b + damping.shift * eye_b
    weight = torch.linalg.solve(matrix, -d.weight.flatten()).reshape(d.weight.shape)
    return weight, None if d.bias is None else torch.linalg.solve(bias_matrix, -d.bias)


def converged(solver: str, **fields: object) -> str:
    """The solver's text with `fields`, and CG run to its limit."""
    if "cg" in solver:
        fields = {"max_iter": 500, "tol": 1e-14} | fields
    return f"{solver}[{','.join(f'{k}={v}' for k, v in fields.items())}]" if fields else solver


def assert_close(got: Tensor, expected: Tensor, tolerance: float) -> None:
    """‖got - expected‖ ≤ tolerance ‖expected‖."""
    assert got.shape == expected.shape
    error = float((got - expected).norm())
    size = float(expected.norm())
    assert error <= tolerance * max(size, 1e-30), f"{error:.3g} of {size:.3g}"
