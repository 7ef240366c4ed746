"""Dense references for the solvers on hand-made layers: torch.linalg on what `layer_cases` writes out.

They form (1-α) B ⊗ A + αI, or the factored inverse part by part, and share no code with the solvers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvlab import Additive, Mixed
from tests.layer_cases import Written

ITERATIVE = "[max_iter=400,tol=1e-14]"
SOLVERS = ("exact", "kfi", "sm-kfi", f"cg{ITERATIVE}", f"ea-cg{ITERATIVE}")
EXPLICIT = "formulation=explicit"
DAMPINGS = (Mixed(0.1), Additive(0.3))
Damping = Mixed | Additive


def inverse(matrix: Tensor, shift: float) -> Tensor:
    return torch.linalg.inv(matrix + shift * torch.eye(len(matrix), dtype=matrix.dtype))


def factored_inverse(b: Tensor, a: Tensor, gradient: Tensor, tau: float) -> Tensor:
    pi = float(((a.trace() / len(a)) / (b.trace() / len(b))) ** 0.5)
    return -inverse(b, tau**0.5 / pi) @ gradient @ inverse(a, pi * tau**0.5)


def damped_solve(matrix: Tensor, gradient: Tensor, scale: float, shift: float) -> Tensor:
    system = scale * matrix + shift * torch.eye(len(matrix), dtype=matrix.dtype)
    return -torch.linalg.solve(system, gradient.flatten()).reshape(gradient.shape)


def weight_step(solver: str, written: Written, gradient: Tensor, damping: Damping, l2: float = 0.0) -> Tensor:
    """The step of the weight, part by part, with the factors that the solver's documentation names."""
    mean = solver.startswith(("sm-kfi", "ea-cg"))
    scale = 1 - damping.alpha if isinstance(damping, Mixed) else 1.0
    tau = damping.alpha if isinstance(damping, Mixed) else damping.tau
    steps = []
    for index, part in enumerate(written.parts(gradient)):
        a = torch.outer(written.means[index], written.means[index]) if mean else written.a[index]
        b = written.sub_block(index) if mean else written.b[index]
        if "kfi" in solver:
            steps.append(factored_inverse(b, a, part, tau + l2))
        else:
            steps.append(damped_solve(torch.kron(b.contiguous(), a), part, scale, tau + scale * l2))
    return written.whole(steps, tuple(gradient.shape))


def vector_step(solver: str, block: Tensor, gradient: Tensor, damping: Damping, l2: float = 0.0) -> Tensor:
    """The step of a bias, or of any parameter without Kronecker structure."""
    scale = 1 - damping.alpha if isinstance(damping, Mixed) else 1.0
    tau = damping.alpha if isinstance(damping, Mixed) else damping.tau
    if "kfi" in solver:
        return damped_solve(block, gradient, 1.0, tau + l2)
    return damped_solve(block, gradient, scale, tau + scale * l2)


def expected_steps(
    solver: str, written: Written, gradient: dict[str, Tensor], damping: Damping, l2: float = 0.0
) -> dict[str, Tensor]:
    steps = {}
    for name, block in written.blocks.items():
        if name == written.layer.weight_name:
            steps[name] = weight_step(solver, written, gradient[name], damping, l2)
        elif written.layer.kind == "tied" and not solver.startswith("cg"):
            steps[name] = vector_step(solver, block.diagonal().diag(), gradient[name], damping, l2)
        else:
            steps[name] = vector_step(solver, block, gradient[name], damping, l2)
    return steps


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).norm()) <= tolerance * float(expected.norm())
