"""The paper's yardstick: how far each provider's bias blocks are from those of the absolute Hessian.

    bias     ‖B̃^t - |B^t|‖_F          B^t = E[H_i^t], |·| its absolute eigenvalues
    weight   ‖Ã^t - E[hhᵀ ⊗ H_i^t]‖_F   signed: |·| would need the eigenvectors of a huge matrix
    Total    the root of the sum of squares over the layers

The paper averages these over the parameters visited in training; here they are at one point.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from curvlab.curvature import Curvature, LayerCurvature
from curvlab.exceptions import ProblemError
from curvlab.linalg import poseig
from curvlab.model.recording import ChainRecording
from curvlab.problem import Problem
from curvlab.providers import GaussNewton, Provider, estimate
from curvlab.providers.registry import providers as registry
from curvlab.studies.weight_errors import WeightYardstick, gauss_newton_error, weight_yardstick

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["DEFAULT_PROVIDERS", "TOTAL", "errors"]

DEFAULT_PROVIDERS = ("fisher", "gauss-newton", "pch-1", "pch-2")
TOTAL = "Total"


def errors(
    problem: Problem,
    providers: str | Provider | Sequence[str | Provider] = DEFAULT_PROVIDERS,
    *,
    weights: bool = False,
) -> pd.DataFrame:
    """The error of each provider's bias blocks at each layer, and in total, against the absolute Hessian.

    Args:
        problem: a batch, or a stream of batches (without `weights`): one pass serves all providers.
        providers: names or instances.
        weights: also measure the weight blocks; costs about one Hessian-vector product an output unit,
            once for all providers, and needs a chain and a single batch.

    Returns:
        One row for each provider and layer, then one whose layer is `"Total"`:

        - `layer` (1 is next to the input), `layer_name`, `provider`;
        - `error` = ‖B̃ - |B|‖_F and `relative` = `error` / ‖|B|‖_F;
        - with `weights`: `weight_error` = ‖Ã - E[hhᵀ⊗H_i]‖_F, signed, `weight_relative`, and
          `weight_floor`, the smallest error that any block E[hhᵀ] ⊗ B can have at this layer.
          NaN where a layer's weight is frozen, and where a block of another package is not E[hhᵀ] ⊗ B:
          nothing short of forming it would tell.

        `attrs` holds the criterion, and what each provider says of its definiteness and in its notes.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Sigmoid(), torch.nn.Linear(3, 2))
    >>> problem = Problem(model, "cross-entropy", torch.eye(4), torch.tensor([0, 1, 0, 1]))
    >>> frame = errors(problem, ["gauss-newton", "pch-1"])
    >>> frame["layer"].tolist(), float(frame["error"].iloc[1].round(6))
    ([1, 2, 'Total', 1, 2, 'Total'], 0.0)
    """
    import pandas as pd

    specs = [providers] if isinstance(providers, str | Provider) else list(providers)
    numbers = _numbers(problem)
    sticks = _yardsticks(problem, numbers) if weights else []
    *curvatures, exact = estimate([*specs, "hessian"], problem)
    truths = [_absolute(_bias_block(layer)) for layer in exact.layers]
    rows: list[dict[str, object]] = []
    for spec, curvature in zip(specs, curvatures, strict=True):
        pairs = zip(curvature.layers, truths, strict=True)
        measured = [_bias_error(layer, truth) for layer, truth in pairs]
        if weights:
            of_weights = _weight_errors(problem, spec, curvature, numbers, sticks)
            measured = [a | b for a, b in zip(measured, of_weights, strict=True)]
        rows += _rows(curvature, numbers, measured)
    frame = pd.DataFrame(rows)
    frame.attrs = _attributes(problem, curvatures)
    return frame


Measured = dict[str, float]  # errors and norms of one layer, or of all, by the name of their column


def _numbers(problem: Problem) -> list[int]:
    """The place of each layer that has blocks, counted from 1 at the input."""
    network = problem.network
    layers = network.layers if network.chain is None else network.chain.layers
    return [index for index, layer in enumerate(layers, start=1) if layer.selected]


def _bias_block(layer: LayerCurvature) -> Tensor:
    if layer.output is not None:
        return layer.output.to_dense()
    if layer.bias_operator is None:
        raise ProblemError(
            f"layer `{layer.name}` has no bias and the model is no chain, so its mean Hessian at the "
            "pre-activations, the yardstick of its errors, is not available. Leave it out with layers=[…]"
        )
    return layer.bias_operator.to_dense()


def _absolute(block: Tensor) -> Tensor:
    """|B|, in float64 and on the host: the differences to come may be small."""
    return poseig(block.to("cpu", torch.float64), gamma=-1.0)


def _bias_error(layer: LayerCurvature, truth: Tensor) -> Measured:
    difference = _bias_block(layer).to(truth) - truth
    return {"error": _norm(difference), "norm": _norm(truth)}


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix))


def _yardsticks(problem: Problem, numbers: list[int]) -> list[WeightYardstick]:
    problem.network.require_chain("errors(weights=True)")
    if problem.streamed:
        raise ProblemError(
            "errors(weights=True) compares examples pair by pair and was given a stream; expected a "
            "single batch. Use problem.with_data(inputs, targets) with one of them, or leave `weights` out"
        )
    return [weight_yardstick(_recording(problem), number - 1) for number in numbers]


def _recording(problem: Problem) -> ChainRecording:
    recording = problem.recording()
    assert isinstance(recording, ChainRecording)
    return recording


def _weight_errors(
    problem: Problem,
    spec: str | Provider,
    curvature: Curvature,
    numbers: list[int],
    sticks: list[WeightYardstick],
) -> list[Measured]:
    provider, recording = registry.make(spec), _recording(problem)
    exact_gauss_newton = isinstance(provider, GaussNewton) and provider.kind == "exact"

    def error(layer: LayerCurvature, position: int, stick: WeightYardstick) -> float:
        if curvature.exact:
            return 0.0
        if exact_gauss_newton:
            return gauss_newton_error(recording, position)
        if layer.output is not None and _has_inputs_of(layer, recording):
            return stick.error(layer.output.to_dense())
        return math.nan

    measured = []
    for layer, number, stick in zip(curvature.layers, numbers, sticks, strict=True):
        values = (error(layer, number - 1, stick), stick.norm, stick.floor)
        if layer.weight_name is None:
            values = (math.nan,) * 3
        measured.append(dict(zip(("weight_error", "weight_norm", "weight_floor"), values, strict=True)))
    return measured


def _has_inputs_of(layer: LayerCurvature, recording: ChainRecording) -> bool:
    """Whether the weight block is E[hhᵀ] ⊗ B with the inputs of this very recording."""
    if layer.inputs is None or layer.weight_operator is not None:
        return False
    recorded = next(record for record in recording.layers if record.layer.name == layer.name)
    return layer.inputs.full.shares_rows_with(recorded.inputs)


def _rows(curvature: Curvature, numbers: list[int], measured: list[Measured]) -> list[dict[str, object]]:
    rows = [
        {"layer": number, "layer_name": layer.name, "provider": curvature.provider, **_columns(values)}
        for number, layer, values in zip(numbers, curvature.layers, measured, strict=True)
    ]
    total = {key: _root_of_squares([values[key] for values in measured]) for key in measured[0]}
    return [*rows, {"layer": TOTAL, "layer_name": TOTAL, "provider": curvature.provider, **_columns(total)}]


def _columns(values: Measured) -> Measured:
    """The errors, each with its ratio to the norm of what it is an error of."""
    columns = {"error": values["error"], "relative": _ratio(values["error"], values["norm"])}
    if "weight_error" in values:
        columns["weight_error"] = values["weight_error"]
        columns["weight_relative"] = _ratio(values["weight_error"], values["weight_norm"])
        columns["weight_floor"] = values["weight_floor"]
    return columns


def _ratio(error: float, norm: float) -> float:
    if norm == 0:
        return 0.0 if error == 0 else math.inf
    return error / norm


def _root_of_squares(values: list[float]) -> float:
    """Over the layers that have a value; NaN where none has."""
    known = [value for value in values if not math.isnan(value)]
    return math.hypot(*known) if known else math.nan


def _attributes(problem: Problem, curvatures: list[Curvature]) -> dict[Hashable | None, object]:
    return {
        "criterion": problem.criterion.name,
        "definiteness": {curvature.provider: str(curvature.definiteness) for curvature in curvatures},
        "notes": {curvature.provider: list(curvature.notes) for curvature in curvatures if curvature.notes},
    }
