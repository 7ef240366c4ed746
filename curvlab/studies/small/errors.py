"""The paper's yardstick: how far each provider's bias blocks are from those of the absolute Hessian.

    bias     ‖B̃^t - |B^t|‖_F          B^t = E[H_i^t], |·| its absolute eigenvalues
    weight   ‖Ã^t - E[hhᵀ ⊗ H_i^t]‖_F   signed: |·| would need the eigenvectors of a huge matrix
    Total    the root of the sum of squares over the layers

The paper averages these over the parameters visited in training; here they are at one point.

The error of a weight block is found with neither matrix formed. Entry
(μ, ν) of the H_i meets the inputs only through the m × m kernel κ_ij = c_i c_j (h_i·h_j)²:

    ‖E[(h_i h_iᵀ) ⊗ Δ_i]‖_F² = Σ_μν δ_μνᵀ κ δ_μν      with δ_μν = ([Δ_1]_μν, …, [Δ_m]_μν)

Let H̄ be the mean of the H_i under the row sums of κ. Then for every block E[hhᵀ] ⊗ B

    ‖E[hhᵀ] ⊗ B - E[hhᵀ ⊗ H_i]‖² = ‖E[hhᵀ]‖² ‖B - H̄‖² + ‖E[hhᵀ ⊗ (H_i - H̄)]‖²

because the two terms are orthogonal. Nothing cancels, one pass over the H_i serves every provider, and the
last term is the floor: the error that is left with the best B there is, H̄ itself.

The H_i are read a few columns at a time, for all examples, as Hessian-vector products with unit vectors:
memory grows with the number of examples only by what those columns take.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from curvlab.curvature import Curvature, LayerCurvature
from curvlab.defaults import PROVIDERS
from curvlab.linalg import poseig
from curvlab.linalg.execution import full_precision
from curvlab.model.layers import Chain
from curvlab.model.recording import ChainRecording
from curvlab.problem import Problem
from curvlab.providers import GaussNewton, Hessian, Provider, estimate
from curvlab.providers.hessian import hessian_products
from curvlab.providers.registry import providers as registry
from curvlab.studies.small.references import (
    Budget,
    OutputBlocks,
    probed_weight_errors,
    provider_output_block,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "TOTAL",
    "WeightYardstick",
    "errors",
    "gauss_newton_error",
    "weight_yardstick",
]

TOTAL = "Total"


@full_precision
def errors(
    problem: Problem,
    providers: str | Provider | Sequence[str | Provider] = PROVIDERS,
    *,
    weights: bool = False,
    operations: float = math.inf,
) -> pd.DataFrame:
    """The error of each provider's bias blocks at each layer, and in total, against the absolute Hessian.

    Args:
        problem: a batch, or a stream of batches: one pass serves all providers.
        providers: names or instances.
        weights: also measure the weight blocks. On a chain and one batch they are exact, and cost about one
            Hessian-vector product per output unit, once for all providers; of a stream, of any other graph,
            and where that costs more than `operations`, they are estimated by a few random products.
        operations: what the references may cost, in multiplications and additions; what is beyond is NaN, and
            `attrs["left_out"]` has the reason.

    Returns:
        One row for each provider and layer, then one whose layer is `"Total"`:

        - `layer` (1 is next to the input), `layer_name`, `provider`;
        - `error` = ‖B̃ - |B|‖_F and `relative` = `error` / ‖|B|‖_F. A layer without bias has B all the same,
          at its outputs; NaN where none can be had, or where it costs too much;
        - with `weights`: `weight_error` = ‖Ã - E[hhᵀ⊗H_i]‖_F, signed, `weight_relative`, and
          `weight_floor`, the smallest error that any block E[hhᵀ] ⊗ B can have at this layer (exact ones
          only). NaN where a layer's weight is frozen, and where a block of another package is not
          E[hhᵀ] ⊗ B: nothing short of forming it would tell.

        `attrs` holds the criterion, what each provider says of its definiteness and in its notes, and the
        shares of the trainable parameters that `error` (`bias_share`) and `weight_error` (`weight_share`)
        speak for; `weight_probes` is 0 where weight errors are exact.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Sigmoid(), torch.nn.Linear(3, 2))
    >>> problem = Problem(model, "cross-entropy", torch.eye(4), torch.tensor([0, 1, 0, 1]))
    >>> frame = errors(problem, ["gauss-newton", "pch-1"])
    >>> frame["layer"].tolist(), float(frame["error"].iloc[1].round(6))
    ([1, 2, 'Total', 1, 2, 'Total'], 0.0)
    """
    import pandas as pd

    specs = [providers] if isinstance(providers, str | Provider) else list(providers)
    numbers, budget = _numbers(problem), Budget(operations)
    *curvatures, exact = estimate([*specs, "hessian"], problem)
    truths, notes = _truths(problem, exact, budget)
    measured = [
        [
            _bias_error(curvature, layer, truth, _is_hessian(spec, curvature))
            for layer, truth in zip(exact.layers, truths, strict=True)
        ]
        for spec, curvature in zip(specs, curvatures, strict=True)
    ]
    probes = 0
    if weights:
        of_weights, probes, said = _all_weight_errors(problem, specs, curvatures, exact, numbers, budget)
        notes += said
        measured = [
            [a | b for a, b in zip(one, other, strict=True)]
            for one, other in zip(measured, of_weights, strict=True)
        ]
    pairs = zip(curvatures, measured, strict=True)
    names = [layer.name for layer in exact.layers]
    rows = [row for curvature, values in pairs for row in _rows(curvature.provider, names, numbers, values)]
    frame = pd.DataFrame(rows)
    frame.attrs = _attributes(problem, curvatures) | _shares(problem, exact, truths, measured)
    frame.attrs |= {"weight_probes": probes, "left_out": notes}
    return frame


Measured = dict[str, float]  # errors and norms of one layer, or of all, by the name of their column


def _numbers(problem: Problem) -> list[int]:
    """The place of each layer that has blocks, counted from 1 at the input."""
    layers = problem.layers if problem.chain is None else problem.chain.layers
    return [index for index, layer in enumerate(layers, start=1) if layer.selected]


def _truths(
    problem: Problem, exact: Curvature, budget: Budget
) -> tuple[list[tuple[Tensor, Tensor] | None], list[str]]:
    """The exact block at the outputs of each layer, signed and absolute, and notes on those left out."""
    if problem.chain is not None:
        found: list[Tensor | None] = [provider_output_block(layer) for layer in exact.layers]
        return [_signed_and_absolute(block) for block in found], []
    # Half is for the weights: blocks at the outputs of few layers are of less use than some of all weights.
    blocks = OutputBlocks(problem, exact, Budget(budget.left / 2))
    found = [blocks.block(layer) for layer in exact.layers]
    budget.left = budget.left / 2 + blocks.budget.left
    return [_signed_and_absolute(block) for block in found], _left_out_words(blocks.left_out)


def _left_out_words(left_out: Mapping[str, str]) -> list[str]:
    """One sentence for each reason, however many layers share it."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        by_reason.setdefault(re.sub(r"\d[\d,.]* ?", "", reason), []).append(name)
    words = []
    for names in by_reason.values():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        words.append(f"no error at the outputs of `{names[0]}`{others}: {left_out[names[0]]}")
    return words


def _signed_and_absolute(block: Tensor | None) -> tuple[Tensor, Tensor] | None:
    if block is None:
        return None
    signed = block.detach().to("cpu", torch.float64)
    return signed, _absolute(signed)


def _absolute(block: Tensor) -> Tensor:
    """|B|, in float64 and on the host: the differences to come may be small."""
    return poseig(block.to("cpu", torch.float64), gamma=-1.0)


def _layer_of(curvature: Curvature, layer: LayerCurvature) -> LayerCurvature | None:
    """A curvature's own layer with the same parameters; other structures join layers, or part them."""
    wanted = (layer.name, layer.weight_name, layer.bias_name)
    same = (own for own in curvature.layers if (own.name, own.weight_name, own.bias_name) == wanted)
    return next(same, None)


def _output_block(curvature: Curvature, layer: LayerCurvature) -> Tensor | None:
    """A curvature's block at the outputs of the exact Hessian's `layer`, where it has one."""
    counterpart = _layer_of(curvature, layer)
    found = None if counterpart is None else provider_output_block(counterpart)
    bias = layer.bias_name
    if found is None and bias is not None and bias in curvature.blocks:
        return curvature.blocks[bias].to_dense()
    return found


def _is_hessian(spec: str | Provider, curvature: Curvature) -> bool:
    """Whether it is what is measured against; a Fisher may be exact too, and is another matrix."""
    return curvature.exact and isinstance(registry.make(spec), Hessian)


def _bias_error(
    curvature: Curvature, layer: LayerCurvature, truth: tuple[Tensor, Tensor] | None, hessian: bool
) -> Measured:
    if truth is None:
        return {"error": math.nan, "norm": math.nan}
    signed, absolute = truth
    # The exact Hessian's blocks are at hand, also where a layer has no bias.
    own = signed if hessian else _output_block(curvature, layer)
    if own is None:
        return {"error": math.nan, "norm": math.nan}
    return {"error": _norm(own.to(absolute) - absolute), "norm": _norm(absolute)}


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix))


def _all_weight_errors(
    problem: Problem,
    specs: Sequence[str | Provider],
    curvatures: Sequence[Curvature],
    exact: Curvature,
    numbers: list[int],
    budget: Budget,
) -> tuple[list[list[Measured]], int, list[str]]:
    """The errors of weight blocks of each provider and layer, how many probes they are from, and notes."""
    chain = None if problem.streamed else problem.chain
    if chain is not None and budget.take(_yardstick_cost(chain, problem.examples(), numbers)):
        sticks = [weight_yardstick(_recording(problem), number - 1) for number in numbers]
        pairs = zip(specs, curvatures, strict=True)
        layers = exact.layers
        return [_weight_errors(problem, spec, one, layers, numbers, sticks) for spec, one in pairs], 0, []
    probed, norms, probes = probed_weight_errors(problem, exact, curvatures, budget)
    notes = [] if probes else ["no error of weight blocks: a random product with each is beyond the limit"]
    return [[_read_probes(layer, one, norms) for layer in exact.layers] for one in probed], probes, notes


def _read_probes(layer: LayerCurvature, found: Mapping[str, float], norms: Mapping[str, float]) -> Measured:
    name = layer.weight_name or ""
    error = found.get(name, math.nan)
    norm = math.nan if math.isnan(error) else norms.get(name, math.nan)
    return {"weight_error": error, "weight_norm": norm, "weight_floor": math.nan}


def _yardstick_cost(chain: Chain, examples: int, numbers: list[int]) -> float:
    """Operations of the exact yardsticks: a product through the layers above for each output unit."""
    layers, total = chain.layers, 0.0
    for number in numbers:
        above = sum(layer.in_features * layer.out_features for layer in layers[number:])
        units = layers[number - 1].out_features
        total += units * (8.0 * examples * above + 2.0 * examples**2 * units)
    return total


def _recording(problem: Problem) -> ChainRecording:
    recording = problem.recording()
    assert isinstance(recording, ChainRecording)
    return recording


def _weight_errors(
    problem: Problem,
    spec: str | Provider,
    curvature: Curvature,
    layers: Sequence[LayerCurvature],
    numbers: list[int],
    sticks: list[WeightYardstick],
) -> list[Measured]:
    provider, recording = registry.make(spec), _recording(problem)
    is_hessian = _is_hessian(spec, curvature)
    exact_gauss_newton = isinstance(provider, GaussNewton) and provider.kind == "exact"

    def error(layer: LayerCurvature, position: int, stick: WeightYardstick) -> float:
        if is_hessian:
            return 0.0
        if exact_gauss_newton:
            return gauss_newton_error(recording, position)
        own = _layer_of(curvature, layer)
        if own is not None and own.output is not None and _has_inputs_of(own, recording):
            return stick.error(own.output.to_dense())
        return math.nan

    measured = []
    for layer, number, stick in zip(layers, numbers, sticks, strict=True):
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


def _rows(
    provider: str, names: list[str], numbers: list[int], measured: list[Measured]
) -> list[dict[str, object]]:
    rows = [
        {"layer": number, "layer_name": name, "provider": provider, **_columns(values)}
        for number, name, values in zip(numbers, names, measured, strict=True)
    ]
    total = {key: _root_of_squares([values[key] for values in measured]) for key in measured[0]}
    return [*rows, {"layer": TOTAL, "layer_name": TOTAL, "provider": provider, **_columns(total)}]


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


def _shares(
    problem: Problem,
    exact: Curvature,
    truths: Sequence[object],
    measured: Sequence[Sequence[Measured]],
) -> dict[Hashable | None, object]:
    """The shares of the trainable parameters that errors at layer outputs and of weights speak for."""
    trainable = sum(p.numel() for p in problem.model.parameters() if p.requires_grad)
    blocks, bias, weight = exact.blocks, 0, 0
    for index, layer in enumerate(exact.layers):
        if layer.bias_name is not None and truths[index] is not None:
            bias += blocks[layer.bias_name].numel
        known = any(not math.isnan(one[index].get("weight_error", math.nan)) for one in measured)
        if layer.weight_name is not None and known:
            weight += blocks[layer.weight_name].numel
    return {"bias_share": bias / trainable, "weight_share": weight / trainable}


def _attributes(problem: Problem, curvatures: list[Curvature]) -> dict[Hashable | None, object]:
    return {
        "criterion": problem.criterion.name,
        "definiteness": {curvature.provider: str(curvature.definiteness) for curvature in curvatures},
        "notes": {curvature.provider: list(curvature.notes) for curvature in curvatures if curvature.notes},
    }


COLUMN_BYTES = 16 * 1024**2
GRAM_COLUMNS = 8192


@dataclass(frozen=True, eq=False)
class WeightYardstick:
    """What the error of any block E[hhᵀ] ⊗ B of one layer is read off.

    `best` is H̄, `input_norm` is ‖E[hhᵀ]‖_F and `floor` the error of E[hhᵀ] ⊗ H̄, all in float64.
    """

    best: Tensor
    input_norm: float
    floor: float

    def error(self, block: Tensor) -> float:
        """‖E[hhᵀ] ⊗ B - E[hhᵀ ⊗ H_i]‖_F for B = `block`."""
        return self._distance(block.to(self.best) - self.best)

    @property
    def norm(self) -> float:
        """‖E[hhᵀ ⊗ H_i]‖_F, the error of B = 0."""
        return self._distance(self.best)

    def _distance(self, difference: Tensor) -> float:
        within = self.input_norm * float(torch.linalg.matrix_norm(difference))
        return float((within**2 + self.floor**2) ** 0.5)


def weight_yardstick(recording: ChainRecording, position: int) -> WeightYardstick:
    """The yardstick of the layer at `position` in the chain."""
    kernel = _kernel(recording, position)
    total = kernel.sum()
    # Where every input is zero so is the weight block, and any mean will do.
    weights = kernel.sum(1) / total if total > 0 else recording.row_weights.to(kernel)
    rows, square = [], 0.0
    for slab in _hessian_columns(
        recording, position, lambda units: hessian_products(recording, position, units)
    ):
        columns = slab.to(kernel)
        mean = torch.einsum("i,sin->sn", weights, columns)
        rows.append(mean)
        square += _square_norm(kernel, columns - mean[:, None, :])
    best = torch.cat(rows)
    return WeightYardstick((best + best.T) / 2, float(total.sqrt()), max(square, 0.0) ** 0.5)


def gauss_newton_error(recording: ChainRecording, position: int) -> float:
    """‖E[hhᵀ ⊗ (C_i - H_i)]‖_F with C_i = J_iᵀ∇²ξ_iJ_i: the error of the exact Gauss-Newton weight block."""
    kernel = _kernel(recording, position)

    def difference(units: Tensor) -> Tensor:
        exact = hessian_products(recording, position, units)
        return _gauss_newton_products(recording, position, units) - exact

    slabs = _hessian_columns(recording, position, difference)
    return max(sum(_square_norm(kernel, slab.to(kernel)) for slab in slabs), 0.0) ** 0.5


def _gauss_newton_products(recording: ChainRecording, position: int, vectors: Tensor) -> Tensor:
    """C_i u_i: the Hessian's product without its σ'' terms."""
    layers, slopes = recording.chain.layers, recording.activation_slopes
    for s in range(position + 1, len(layers)):
        vectors = (vectors * slopes[s - 1]) @ layers[s].weight.T
    vectors = recording.criterion.hessian_products(recording.logits, recording.targets, vectors)
    for s in range(len(layers) - 1, position, -1):
        vectors = (vectors @ layers[s].weight) * slopes[s - 1]
    return vectors


def _kernel(recording: ChainRecording, position: int) -> Tensor:
    """κ_ij = c_i c_j (h_i·h_j)², in float64 whatever the inputs are in.

    Inputs that nearly all point the same way make κ nearly of rank one; deviations from a mean see only
    the rest, of which float32 would leave nothing.
    """
    rows = recording.inputs[position]
    gram = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for chunk in rows.split(GRAM_COLUMNS, dim=1):
        wide = chunk.to(gram)
        gram.addmm_(wide, wide.T)
    share = recording.row_weights.to(gram)
    return gram.square() * torch.outer(share, share)


def _hessian_columns(
    recording: ChainRecording, position: int, product: Callable[[Tensor], Tensor]
) -> Iterator[Tensor]:
    """`product` of the unit vectors, a slab (columns, examples, n_t) after the other."""
    size, examples = recording.chain.layers[position].out_features, recording.examples
    step = max(1, COLUMN_BYTES // (examples * size * recording.logits.element_size()))
    for start in range(0, size, step):
        stop = min(start + step, size)
        units = recording.logits.new_zeros(stop - start, examples, size)
        units.diagonal(start, 0, 2).fill_(1)
        yield product(units)


def _square_norm(kernel: Tensor, columns: Tensor) -> float:
    """Σ δᵀ κ δ over the entries of a slab (columns, examples, n_t)."""
    return float((torch.einsum("ij,sjn->sin", kernel, columns) * columns).sum())
