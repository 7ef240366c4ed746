"""PCH, the positive-curvature Hessian: the exact recursion's mean, made positive semi-definite.

    B^k = PosEig_{γ_out}(E[∇²ξ(h^k)])
    B^{t-1} = (Wᵀ B^t W) ⊙ E[σ'σ'ᵀ] + diag(PosEig_γ(E[σ'' ⊙ (Wᵀ g^t)]))

γ = -1 takes absolute values (PCH-1), γ = 0 clips (PCH-2). The output layer has a γ of its own, -1 in
both: the paper's tables show no error there for either. Where every activation is piecewise linear
and the criterion convex, PCH is Gauss-Newton.
"""

from __future__ import annotations

from dataclasses import dataclass

from curvlab.curvature import Curvature, Definiteness
from curvlab.exceptions import SpecError
from curvlab.linalg import poseig, poseig_diagonal
from curvlab.problem import Problem
from curvlab.providers.base import INPUTS, Context, Provider, kronecker_layers
from curvlab.providers.recursion import OUTPUT_HESSIAN, SLOPES, recurse
from curvlab.providers.statistics import Bends, Statistic

__all__ = ["PCH"]

BENDS = Bends()


@dataclass(frozen=True)
class PCH(Provider):
    """The Hessian's recursion with negative curvature multiplied by gamma ≤ 0.

    >>> PCH(gamma=0.0)
    PCH(gamma=0.0, output_gamma=-1.0)
    """

    gamma: float = -1.0
    output_gamma: float = -1.0

    def __post_init__(self) -> None:
        for field in ("gamma", "output_gamma"):
            if not getattr(self, field) <= 0:
                raise SpecError(
                    f"{field}={getattr(self, field)} must be at most 0: it multiplies negative eigenvalues "
                    f"(-1 takes absolute values, 0 clips)"
                )

    def statistics(self, problem: Problem) -> tuple[Statistic, ...]:
        return (INPUTS, OUTPUT_HESSIAN, SLOPES, BENDS)

    def curvature(self, context: Context, name: str) -> Curvature:
        chain = context.network.require_chain(name)
        criterion = context.problem.criterion
        (output,) = context.tensors(OUTPUT_HESSIAN)
        # Where the criterion is convex the mean is PSD already: PosEig would only add rounding.
        top = output if criterion.convex else poseig(output, self.output_gamma)
        bends = [poseig_diagonal(bend, self.gamma) for bend in context.tensors(BENDS)]
        outputs = recurse(chain, top, context.tensors(SLOPES), bends)
        same = bool(criterion.convex) and all(a.piecewise_linear for a in chain.activations)
        return Curvature(
            name,
            criterion.name,
            kronecker_layers(context, outputs),
            Definiteness(True, "by PosEig"),
            notes=("equals Gauss-Newton here: every activation is piecewise linear",) if same else (),
        )
