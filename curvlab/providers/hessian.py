"""The exact Hessian: mean bias blocks as matrices, weight blocks as operators, cross-layer blocks on request.

    bias     E[H_i^t]                       made when it is looked at, where cross-layer blocks are kept
    weight   E[(h_i h_iᵀ) ⊗ H_i^t]          never its Kronecker approximation
    full     all blocks of the Hessian of the mean loss, in `@`, `to_dense` and `cg`

On a chain everything comes from the tensors of its recording (a single batch's is kept, a stream is recorded
anew for every product), example by example at the pre-activations:

    H_i^k = ∇²ξ(h^k),   H_i^{t-1} = diag(σ') Wᵀ H_i^t W diag(σ') + diag(σ'' ⊙ (Wᵀ g^t))

`layer_hessians` gives H_i^t as matrices, for a few examples at a time. `hessian_products` gives H_i^t u_i
without forming one, by differentiating the backward pass along u (the R-operator):

    forward    u^{s} = W^s (σ' ⊙ u^{s-1})
    backward   v^k = ∇²ξ u^k,  v^{s-1} = σ' ⊙ (Wᵀ v^s) + σ'' ⊙ (Wᵀ g^s) ⊙ u^{s-1}

Any other model's own forward is differentiated twice: see `curvlab.providers.operators`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import add
from typing import ClassVar, Literal

import torch
from torch import Tensor

from curvlab.curvature import Curvature, Definiteness
from curvlab.curvature_layers import LayerCurvature, layer_from_parts
from curvlab.exceptions import ProblemError, SpecError
from curvlab.linalg import Block, DenseFactor, OperatorBlock, eigvalsh, signed_difference
from curvlab.linalg.factors import frobenius_norm, row_square_norms, symmetric_product
from curvlab.linalg.flat import WholeProduct, unflatten_rows
from curvlab.measure import device
from curvlab.model.layers import Chain
from curvlab.model.recording import ChainRecording, Recording
from curvlab.problem import Problem
from curvlab.providers.base import Context, Provider, check_draws, example_layers
from curvlab.providers.chain_products import ChainProducts
from curvlab.providers.hessian_rows import HessianRows
from curvlab.providers.operators import ModelOperator, ProblemSnapshot, products_at_once
from curvlab.providers.statistics import Statistic, Values
from curvlab.specs import check_choices

__all__ = [
    "BiasHessians",
    "ChainHessian",
    "Hessian",
    "chunks",
    "hessian_products",
    "layer_hessians",
    "mean_hessians",
]

CHUNK_BYTES = 192 * 1024**2
LOOK_AT_UP_TO = 256
UNKNOWN = Definiteness(False, "a Hessian may have negative eigenvalues")


def chunks(recording: ChainRecording, lowest: int = 0) -> Iterator[slice]:
    """Slices of the examples, small enough that one matrix per example fits in `CHUNK_BYTES`."""
    widths = [layer.out_features for layer in recording.chain.layers[lowest:]]
    per_example = 3 * max(widths) ** 2 * recording.logits.element_size()
    size = max(1, CHUNK_BYTES // per_example)
    for start in range(0, recording.examples, size):
        yield slice(start, min(start + size, recording.examples))


def layer_hessians(recording: ChainRecording, rows: slice, lowest: int = 0) -> Iterator[tuple[int, Tensor]]:
    """(t, H_i^t for the examples in `rows`) from the output layer down to layer `lowest`."""
    layers = recording.chain.layers
    hessian = recording.criterion.hessians(recording.logits[rows], recording.targets[rows])
    yield len(layers) - 1, hessian
    for index in range(len(layers) - 1, lowest, -1):
        weight, slope = layers[index].weight, recording.activation_slopes[index - 1][rows]
        hessian = weight.T @ (hessian @ weight)
        hessian.mul_(slope[:, :, None]).mul_(slope[:, None, :])
        term = recording.second_order_terms[index - 1]
        if term is not None:
            hessian.diagonal(dim1=1, dim2=2).add_(term[rows])
        yield index - 1, hessian


def mean_hessians(recording: ChainRecording) -> list[Tensor]:
    """E[H_i^t] for the layers that have blocks, holding the matrices of one chunk of examples only.

    The lowest layer's matrices are never formed: with Y_i = W diag(σ'_i) its mean is the single product
    Σ_i Y_iᵀ (c_i H_i) Y_i plus the mean diagonal.
    """
    layers = recording.chain.layers
    lowest = min(index for index, layer in enumerate(layers) if layer.selected)
    stop = min(lowest + 1, len(layers) - 1)
    means: dict[int, Tensor] = {}
    for rows in chunks(recording, stop):
        weights = recording.row_weights[rows]
        for index, hessian in layer_hessians(recording, rows, stop):
            mean = torch.einsum("i,iab->ab", weights, hessian)
            means[index] = mean if index not in means else means[index].add_(mean)
        if lowest < stop:
            mean = _mean_below(recording, rows, lowest, hessian)
            means[lowest] = mean if lowest not in means else means[lowest].add_(mean)
    return [(means[i] + means[i].T) / 2 for i, layer in enumerate(layers) if layer.selected]


def _mean_below(recording: ChainRecording, rows: slice, lowest: int, hessian: Tensor) -> Tensor:
    weight = recording.chain.layers[lowest + 1].weight
    slope, weights = recording.activation_slopes[lowest][rows], recording.row_weights[rows]
    scaled = weight * slope[:, None, :]
    curved = (hessian @ weight).mul_((slope * weights[:, None])[:, None, :])
    mean = symmetric_product(scaled.flatten(0, 1).T, curved.flatten(0, 1).T)
    term = recording.second_order_terms[lowest]
    if term is not None:
        mean.diagonal().add_(weights @ term[rows])
    return mean


def hessian_products(recording: ChainRecording, index: int, vectors: Tensor) -> Tensor:
    """H_i^t u_i for layer t = `index`, with u_i the rows of `vectors` (examples × n_t)."""
    layers = recording.chain.layers
    along = [vectors]
    for s in range(index + 1, len(layers)):
        along.append((along[-1] * recording.activation_slopes[s - 1]) @ layers[s].weight.T)
    back = recording.criterion.hessian_products(recording.logits, recording.targets, along[-1])
    for s in range(len(layers) - 1, index, -1):
        back = (back @ layers[s].weight) * recording.activation_slopes[s - 1]
        term = recording.second_order_terms[s - 1]
        if term is not None:
            back = back + term * along[s - 1 - index]
    return back


@dataclass(frozen=True)
class BiasHessians(Statistic):
    """E[H_i^t] for each layer with blocks."""

    def of(self, recording: Recording) -> Values:
        assert isinstance(recording, ChainRecording)
        return tuple(mean_hessians(recording))


BIAS_HESSIANS = BiasHessians()


class ChainHessian:
    """Products with the exact Hessian of a chain."""

    def __init__(self, problem: Problem) -> None:
        chain = problem.require_chain("hessian of a chain")
        self.snapshot = ProblemSnapshot.of(problem)
        self.layers = problem.layers
        self.positions = [chain.layers.index(layer) for layer in self.layers]
        self._held: ChainProducts | None = None

    def batches(self) -> Iterator[tuple[ChainRecording, Tensor]]:
        """Each batch's recording, with its rows' weights in the mean over all."""
        for recording, weights in self.snapshot.batches():
            assert isinstance(recording, ChainRecording)
            yield recording, weights

    def weight_block(self, index: int) -> OperatorBlock:
        """E[(h_i h_iᵀ) ⊗ H_i^t] as an operator, with closed forms for its diagonal, trace and norm."""
        return _Weight(self, self.positions[index], self.layers[index].weight).block()

    def bias_block(self, index: int, bias: Tensor) -> Block:
        """E[H_i^t], a matrix that is made when it is first looked at."""
        return _MeanHessian(self, self.positions[index], bias.detach())

    def matrices(self, position: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(H_i^t, h_i, c_i) for a chunk of examples after the other."""
        for recording, weights in self.batches():
            for rows in chunks(recording, position):
                *_, (_, hessians) = layer_hessians(recording, rows, position)
                yield hessians, recording.inputs[position][rows], weights[rows]

    def pair_sum(self, position: int, centre: Tensor | None = None) -> Tensor:
        """‖E[(h_i h_iᵀ) ⊗ Δ_i]‖_F² with Δ_i = H_i^t - `centre`, from inner products over pairs of examples.

        = Σ_ij c_i c_j (h_i·h_j)² tr(Δ_i Δ_j); with centre B it is the squared error of the Kronecker block
        E[hhᵀ] ⊗ B, with nothing of the weight's size squared ever formed.
        """
        total = torch.zeros((), dtype=torch.float64)
        # A shuffled stream has another order in every pass, so only a kept batch has a lower triangle.
        symmetric = not self.snapshot.problem.streamed
        for a, (left, h_left, weights_left) in enumerate(self.matrices(position)):
            delta_left = left if centre is None else left - centre
            for b, (right, h_right, weights_right) in enumerate(self.matrices(position)):
                if symmetric and b > a:
                    break
                delta_right = right if centre is None else right - centre
                traces = delta_left.flatten(1) @ delta_right.flatten(1).T
                pairs = traces * (h_left @ h_right.T).square() * torch.outer(weights_left, weights_right)
                total += (2 if symmetric and b < a else 1) * pairs.sum().cpu().double()
        return total.to(h_left)

    def whole_product(self, at_once: int) -> WholeProduct:
        """The Hessian of the mean loss over all selected parameters, cross-layer blocks included.

        Of several vectors `at_once` go through a recording together.
        """

        def images(vectors: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
            count = len(next(iter(vectors.values())))
            parts = [slice(start, start + at_once) for start in range(0, count, at_once)]
            sums: list[dict[str, Tensor]] = []
            for products in self._products():
                if sums:
                    found = [products.of(named(vectors, part)) for part in parts]
                    sums = [add_in_place(*pair) for pair in zip(sums, found, strict=True)]
                else:
                    sums = [products.of(named(vectors, part), named(into, part)) for part in parts]
            return sums

        def named(vectors: Mapping[str, Tensor], part: slice) -> dict[str, Tensor]:
            return {name: x[part] for name, x in vectors.items()}

        def several(vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            sums = images(vectors, {})
            return {name: torch.cat([one[name] for one in sums]) for name in sums[0]}

        def side_by_side(rows: Tensor, shapes: Mapping[str, Sequence[int]]) -> Tensor:
            found = rows.new_empty(rows.shape)
            images(unflatten_rows(rows, shapes), unflatten_rows(found, shapes))
            return found

        return WholeProduct(several, side_by_side=side_by_side)

    def _products(self) -> Iterator[ChainProducts]:
        """Those of each recording; a single batch's are kept."""
        if self._held is not None:
            self.snapshot.check_unchanged()
            yield self._held
            return
        for recording, weights in self.batches():
            made = ChainProducts(recording, weights)
            if not self.snapshot.problem.streamed:
                self._held = made
            yield made


def add_in_place(total: dict[str, Tensor], more: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The named tensors with others of the same names added."""
    return {name: value.add_(more[name]) for name, value in total.items()}


@dataclass(frozen=True, eq=False)
class _Weight:
    """The weight block of the layer at `position` of the chain."""

    hessian: ChainHessian
    position: int
    like: Tensor

    def product(self, x: Tensor) -> Tensor:
        return reduce(add, self._products(x))  # not in place: under vmap x is a batch

    def _products(self, x: Tensor) -> Iterator[Tensor]:
        for recording, weights in self.hessian.batches():
            h = recording.inputs[self.position]
            curved = hessian_products(recording, self.position, h @ x.T)
            yield (curved * weights[:, None]).T @ h

    def diagonal(self) -> Tensor:
        result = torch.zeros_like(self.like)
        for hessians, h, weights in self.hessian.matrices(self.position):
            diagonals = hessians.diagonal(dim1=1, dim2=2)
            result.addmm_((diagonals * weights[:, None]).T, h.square())
        return result

    def trace(self) -> Tensor:
        result = self.like.new_zeros(())
        for hessians, h, weights in self.hessian.matrices(self.position):
            result += weights @ (hessians.diagonal(dim1=1, dim2=2).sum(1) * row_square_norms(h))
        return result

    def square_norm(self) -> Tensor:
        return self.hessian.pair_sum(self.position)

    def block(self) -> OperatorBlock:
        shape = (self.like.shape[0], self.like.shape[1])
        return OperatorBlock(shape, self.product, self.like, 0, self.diagonal, self.trace, self.square_norm)


@dataclass(frozen=True, eq=False)
class _MeanHessian(Block):
    """E[H_i^t] of the layer at `position` of the chain: a matrix that is made when it is first looked at."""

    kind: ClassVar[str] = "dense"
    hessian: ChainHessian = field(repr=False)
    position: int
    like: Tensor = field(repr=False)

    @cached_property
    def matrix(self) -> Tensor:
        """The mean over the examples."""
        total = self.like.new_zeros(self.numel, self.numel)
        for hessians, _, weights in self.hessian.matrices(self.position):
            total += torch.einsum("i,iab->ab", weights, hessians)
        return (total + total.T) / 2

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.like.shape)

    @property
    def example(self) -> Tensor:
        return self.like

    @property
    def form(self) -> str:
        return self.kind

    @property
    def nbytes(self) -> int:
        """Those of the matrix, made or not."""
        return self.numel**2 * self.like.element_size()

    def matmul(self, x: Tensor) -> Tensor:
        return self.matrix @ x

    def _dense(self) -> Tensor:
        return self.matrix.clone()

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal().clone()

    def trace(self) -> Tensor:
        return self.matrix.trace()

    def frobenius_norm(self) -> Tensor:
        return frobenius_norm(self.matrix)


@dataclass(frozen=True)
class Hessian(Provider):
    """The exact Hessian of the mean loss, block diagonal by parameter unless structure=full.

    Args:
        full: `full=true` is the old name of `structure=full`.
        structure: `block`, block diagonal by parameter; `full` keeps the cross-layer blocks in `@`,
            `to_dense` and `cg`.
        kind: `exact`, by products that read the model; `rows`, its blocks by parameter from signed rows that
            the curvature keeps (`curvlab.providers.hessian_rows`): unbiased, for `cg`.
        samples: for `rows`, how many draws of random signs go back, or `all` for every column by itself.
        seed: of what is drawn.

    >>> Hessian(structure="full").coupled
    True
    """

    needs_chain: ClassVar[bool] = False
    full: bool = False
    structure: Literal["block", "full"] = "block"
    kind: Literal["exact", "rows"] = "exact"
    samples: int | Literal["all"] = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_choices(self)
        if self.samples != "all" and self.samples < 1:
            raise SpecError(f"samples={self.samples}: expected `all` or a number of at least 1")
        if self.kind == "rows" and self.coupled:
            raise SpecError(
                "structure=full does not go with kind=rows: between layers the Hessian has bilinear terms, "
                "of which there are no rows. Use kind=exact, or structure=block"
            )

    def check(self, problem: Problem, name: str) -> None:
        super().check(problem, name)
        if self.kind != "rows":
            return
        if self.samples != "all":
            check_draws(self.samples, problem, name)
        if problem.reading.unknown:
            functions = ", ".join(f"`{function}`" for function in problem.reading.unknown)
            raise ProblemError(
                f"`{name}` needs the local Hessian of every non-linear function, and that of {functions} is "
                f"not known. Write that part of the forward with element-wise functions, products, softmax "
                f"and normalisations, or use `hessian`, or `pch[kind=rows]`, which leaves it out"
            )

    @property
    def products(self) -> HessianRows:
        """The statistic of the kind `rows`."""
        return HessianRows(samples=None if self.samples == "all" else self.samples, seed=self.seed)

    @property
    def coupled(self) -> bool:
        """Whether cross-layer blocks are kept."""
        return self.full or self.structure == "full"

    def statistics(self, problem: Problem) -> tuple[Statistic, ...]:
        if self.kind == "rows":
            return (self.products,)
        return () if problem.chain is None or self.coupled else (BIAS_HESSIANS,)

    def curvature(self, context: Context, name: str) -> Curvature:
        problem = context.problem
        if self.kind == "rows":
            return self._of_rows(context, name)
        operator: ChainHessian | ModelOperator
        at_once = products_at_once(problem)
        layers: tuple[LayerCurvature, ...]
        if problem.chain is None:
            operator = ModelOperator(problem, "hessian")
            layers, definiteness = operator.layers(), UNKNOWN
        else:
            operator, known = ChainHessian(problem), self._known_definiteness(problem, problem.chain)
            if self.coupled:
                layers, definiteness = _operator_layers(operator), known or UNKNOWN
            else:
                means = context.tensors(BIAS_HESSIANS)
                layers, definiteness = _chain_layers(operator, means), known or _looked_at(means)
        return Curvature(
            name,
            problem.criterion.name,
            layers,
            definiteness,
            exact=True,
            full_product=operator.whole_product(at_once) if self.coupled else None,
            versions=problem.versions,
            live=True,
            structure="full" if self.coupled else "block",
            products_at_once=at_once,
        )

    def _of_rows(self, context: Context, name: str) -> Curvature:
        factors, problem = context.factors(self.products), context.problem
        pairs = zip(factors[: len(factors) // 2], factors[len(factors) // 2 :], strict=True)
        blocks = [signed_difference(plus, minus) for plus, minus in pairs]
        notes = []
        if self.samples != "all":
            notes.append(
                f"of {self.samples} draw{'s' if self.samples > 1 else ''} of random signs per example"
            )
        reused = problem.reading.reused
        if reused:
            named = ", ".join(f"`{one}`" for one in reused)
            notes.append(f"without the bilinear terms between the uses of {named}, where one follows another")
        return Curvature(
            name,
            problem.criterion.name,
            example_layers(context, blocks, "block"),
            UNKNOWN,
            exact=self.samples == "all" and not reused,
            notes=tuple(notes),
            structure="block",
        )

    def _known_definiteness(self, problem: Problem, chain: Chain) -> Definiteness | None:
        """Without σ'', and with a convex criterion, each diagonal block is Gauss-Newton's."""
        straight = all(activation.piecewise_linear for activation in chain.activations)
        if problem.criterion.convex and straight and (not self.coupled or len(chain.layers) == 1):
            return Definiteness(True, "a convex criterion and piecewise linear activations")
        return None


def _operator_layers(operator: ChainHessian) -> tuple[LayerCurvature, ...]:
    layers = []
    for index, layer in enumerate(operator.layers):
        weight = None if layer.weight_name is None else operator.weight_block(index)
        given = None if layer.bias_name is None else layer.bias
        bias = None if given is None else operator.bias_block(index, given)
        names = (layer.name, layer.weight_name, layer.bias_name)
        layers.append(layer_from_parts(*names, None, weight_operator=weight, bias_operator=bias))
    return tuple(layers)


def _chain_layers(operator: ChainHessian, means: Sequence[Tensor]) -> tuple[LayerCurvature, ...]:
    layers = []
    for index, (layer, mean) in enumerate(zip(operator.layers, means, strict=True)):
        weight = None if layer.weight_name is None else operator.weight_block(index)
        names = (layer.name, layer.weight_name, layer.bias_name)
        layers.append(layer_from_parts(*names, DenseFactor(mean), weight_operator=weight))
    return tuple(layers)


def _looked_at(means: Sequence[Tensor]) -> Definiteness:
    """Not promised to be PSD; the smallest eigenvalue of the smaller bias blocks tells how far from it."""
    small = [mean for mean in means if len(mean) <= LOOK_AT_UP_TO and device.readable(mean)]
    if not small:
        return UNKNOWN
    smallest = float(torch.stack([eigvalsh(mean)[0] for mean in small]).amin())
    return Definiteness(False, f"a Hessian; smallest eigenvalue of the smaller bias blocks {smallest:.2g}")
