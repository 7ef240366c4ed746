"""The layers of a curvature: one class for each form that the blocks of a layer have.

    KroneckerLayer   weight E[hhᵀ] ⊗ B, bias B                  Linear with one row per example
    SharedLayer      weight A_g ⊗ B_g per part g, bias B of ḡ   several positions, or several matrices
    PlainLayer       one factor on parameter.flatten()          scale and shift of a norm, and any other
    TiedLayer        a sum of Kronecker products                a matrix that is a lookup and a head
    OperatorLayer    products only                              hessian, gauss-newton[kind=exact]

`curvlab.curvature_structures` has those of structures that are no Kronecker product.

Blocks act on tensors of a parameter's own shape. What a solver is given are a layer's *units*: Kronecker
layers with at most one weight matrix and one bias vector each. Those with a weight are the matrices of the
weight's view, in their order; a unit's bias is a whole parameter, flattened.
"""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from curvlab.curvature_io import factor_from, input_factors_from, tensors_under
from curvlab.exceptions import MatrixFreeError, PairError
from curvlab.linalg import (
    Block,
    DiagonalFactor,
    Factor,
    FactorBlock,
    KroneckerBlock,
    MatrixView,
    SumBlock,
    ViewedBlock,
)
from curvlab.linalg.factors import InputFactors, InputKind
from curvlab.linalg.stacks import diagonal_blocks

__all__ = [
    "KroneckerLayer",
    "KroneckerPart",
    "LayerCurvature",
    "OperatorLayer",
    "PlainLayer",
    "SharedLayer",
    "Summand",
    "TiedLayer",
    "layer_from_parts",
    "under_prefix",
]

TensorMap = Callable[[Tensor], Tensor]


class _LayerType(ABCMeta):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """`LayerCurvature(…)`, once the class of all layers, makes one of the kind that its arguments are."""
        return (
            layer_from_parts(*args, **kwargs) if cls is LayerCurvature else super().__call__(*args, **kwargs)
        )


class LayerCurvature(metaclass=_LayerType):
    """The blocks of one layer, in one of several forms.

    Called by itself it takes the parts of a Linear layer (see `layer_from_parts`):

    >>> import torch
    >>> from curvlab.linalg import DenseFactor
    >>> layer = LayerCurvature("0", None, "0.bias", DenseFactor(torch.eye(2)))
    >>> type(layer).__name__, isinstance(layer, LayerCurvature)
    ('KroneckerLayer', True)
    """

    kind: ClassVar[str]
    name: str
    weight_name: str | None = None
    bias_name: str | None = None
    output: Factor | None = None
    inputs: InputFactors | None = None
    view: MatrixView | None = None

    @property
    @abstractmethod
    def blocks(self) -> dict[str, Block]:
        """The blocks by parameter name, each on tensors of the parameter's own shape."""

    @abstractmethod
    def map(self, function: TensorMap) -> Self:
        """The same layer with `function` applied to each tensor of its factors."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that define the layer, by path: `output/matrix`, `part0/input/rows`."""

    @abstractmethod
    def header(self) -> dict[str, Any]:
        """All else that defines the layer, as JSON can hold it."""

    @abstractmethod
    def _units(self, kind: InputKind) -> tuple[KroneckerLayer, ...]:
        """What `units` keeps."""

    def _stacked_units(self, kind: InputKind) -> tuple[KroneckerLayer, ...] | None:
        """The same with the matrices of a weight as one stack; None where they are none."""
        return None

    def units(self, kind: InputKind, *, stacked: bool = False) -> tuple[KroneckerLayer, ...]:
        """The Kronecker layers that a solver with the `kind` of input factor is given; kept once made.

        `stacked`: many small matrices of one weight are one unit, whose factors are stacks.
        """
        key = (kind, stacked)
        if key not in self._kept_units:
            together = self._stacked_units(kind) if stacked else None
            self._kept_units[key] = self._units(kind) if together is None else together
        return self._kept_units[key]

    @cached_property
    def _kept_units(self) -> dict[tuple[str, bool], tuple[KroneckerLayer, ...]]:
        return {}

    @property
    def input_size(self) -> int:
        """n, the inputs of the weight's matrix (the patch size of a convolution); 0 where it has none."""
        return 0

    @property
    def kronecker(self) -> bool:
        """Whether the weight block is a Kronecker product."""
        return False

    @property
    def matrix_free(self) -> bool:
        """Whether the blocks are products that read the model."""
        return False

    @property
    def weight_operator(self) -> Block | None:
        """The weight's block where it is matrix-free."""
        return None

    @property
    def bias_operator(self) -> Block | None:
        """The bias's block where it is matrix-free."""
        return None

    def formed(self) -> LayerCurvature:
        """The same layer made of tensors that a file can hold."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold: the fields, and nothing that was made from them."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class KroneckerLayer(LayerCurvature):
    """A Linear layer with one row per example: bias block B, weight block E[hhᵀ] ⊗ B; also a solver's unit.

    >>> import torch
    >>> from curvlab.linalg import DenseFactor
    >>> inputs = InputFactors(DenseFactor(torch.eye(3)), torch.zeros(3))
    >>> layer = KroneckerLayer("0", "0.weight", "0.bias", DenseFactor(torch.eye(2)), inputs)
    >>> {name: block.shape for name, block in layer.blocks.items()}
    {'0.weight': (2, 3), '0.bias': (2,)}
    """

    kind: ClassVar[str] = "kronecker"
    name: str
    weight_name: str | None = field()
    bias_name: str | None = field()
    output: Factor = field()
    inputs: InputFactors | None = None

    @cached_property
    def blocks(self) -> dict[str, Block]:
        blocks: dict[str, Block] = {}
        if self.weight_name is not None:
            if self.inputs is None:
                raise PairError(f"layer `{self.name}` has no input factors: its weight has no block")
            blocks[self.weight_name] = KroneckerBlock(self.output, self.inputs)
        if self.bias_name is not None:
            blocks[self.bias_name] = FactorBlock(self.output)
        return blocks

    def map(self, function: TensorMap) -> Self:
        inputs = None if self.inputs is None else self.inputs.map(function)
        return replace(self, output=self.output.map(function), inputs=inputs)

    def tensors(self) -> dict[str, Tensor]:
        inputs = {} if self.inputs is None else under_prefix("input", self.inputs.tensors())
        return under_prefix("output", self.output.tensors()) | inputs

    def header(self) -> dict[str, Any]:
        row = {"kind": self.kind, "name": self.name, "weight": self.weight_name, "bias": self.bias_name}
        inputs = {} if self.inputs is None else {"input": self.inputs.full.kind}
        return row | {"output": self.output.kind} | inputs

    @staticmethod
    def unpack(row: dict[str, Any], tensors: Mapping[str, Tensor]) -> KroneckerLayer:
        """The layer that `header` and `tensors` took apart."""
        inputs = _unpack_inputs(row, tensors) if "input" in row else None
        return KroneckerLayer(row["name"], row["weight"], row["bias"], _unpack_output(row, tensors), inputs)

    def _units(self, kind: InputKind) -> tuple[KroneckerLayer, ...]:
        return (self,)

    def units(self, kind: InputKind, *, stacked: bool = False) -> tuple[KroneckerLayer, ...]:
        """Itself."""
        return (self,)

    @property
    def complete(self) -> bool:
        """Whether a weight has the input factors that its block takes."""
        return self.inputs is not None or self.weight_name is None

    @property
    def input_size(self) -> int:
        return 0 if self.inputs is None else self.inputs.size

    @property
    def kronecker(self) -> bool:
        return self.inputs is not None


@dataclass(frozen=True, eq=False)
class KroneckerPart:
    """A ⊗ B of one matrix of a weight: the output factor B and the input factors."""

    output: Factor
    inputs: InputFactors

    def map(self, function: TensorMap) -> KroneckerPart:
        """The same with `function` applied to each tensor."""
        return KroneckerPart(self.output.map(function), self.inputs.map(function))

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that define the part."""
        return under_prefix("output", self.output.tensors()) | under_prefix("input", self.inputs.tensors())

    def header(self) -> dict[str, str]:
        """The kinds of the factors."""
        return {"output": self.output.kind, "input": self.inputs.full.kind}


@dataclass(frozen=True, eq=False)
class Summand:
    """A view of a weight with the Kronecker product of each of its matrices."""

    view: MatrixView
    parts: tuple[KroneckerPart, ...]

    def __post_init__(self) -> None:
        given = [(part.output.size, part.inputs.size) for part in self.parts]
        count, outputs, inputs = self.view.matrix_shape
        if given != [(outputs, inputs)] * count:
            raise ValueError(
                f"a view of shape {self.view.shape} has {count} matrices of {outputs} × {inputs}; got "
                f"factors of {', '.join(f'{o} × {n}' for o, n in given) or 'no part'}"
            )

    @property
    def block(self) -> ViewedBlock:
        """X_g ↦ B_g X_g A_g."""
        products = tuple(KroneckerBlock(part.output, part.inputs) for part in self.parts)
        return ViewedBlock(self.view, products)

    def map(self, function: TensorMap) -> Summand:
        """The same with `function` applied to each tensor."""
        return Summand(self.view, tuple(part.map(function) for part in self.parts))

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of all parts."""
        parts = enumerate(self.parts)
        return {key: t for i, part in parts for key, t in under_prefix(f"part{i}", part.tensors()).items()}

    def header(self) -> dict[str, Any]:
        """The view, and the kinds of the factors."""
        return {"view": self.view.pack(), "parts": [part.header() for part in self.parts]}

    @staticmethod
    def unpack(row: dict[str, Any], tensors: Mapping[str, Tensor]) -> Summand:
        """What `header` and `tensors` took apart."""
        parts = []
        for index, one in enumerate(row["parts"]):
            own = tensors_under(tensors, f"part{index}")
            parts.append(KroneckerPart(_unpack_output(one, own), _unpack_inputs(one, own)))
        return Summand(MatrixView.unpack(row["view"]), tuple(parts))


@dataclass(frozen=True, eq=False)
class SharedLayer(LayerCurvature):
    """A weight that is used at several positions of an example, or that falls into several matrices.

    `view` and `parts` are those of the weight: part g has the input factors A_g and E[h]_g and the output
    factor B_g (of `expand` or of `reduce`). `mean_output` is B of ḡ, the rows summed over positions, over all
    G · o outputs: the bias block and, in its diagonal blocks, what goes with the mean input factor.
    A weight without a block has `weight_name` None, no view and no parts.

    >>> import torch
    >>> from curvlab.linalg import DenseFactor
    >>> inputs = InputFactors(DenseFactor(torch.eye(12)), torch.ones(12))
    >>> part = KroneckerPart(DenseFactor(torch.eye(2)), inputs)
    >>> view, mean = MatrixView((2, 3, 2, 2)), DenseFactor(torch.eye(2))
    >>> layer = SharedLayer("conv", "conv.weight", "conv.bias", view, (part,), mean)
    >>> [(unit.weight_name, unit.bias_name) for unit in layer.units("full")]
    [('conv.weight', None), (None, 'conv.bias')]
    >>> [(unit.weight_name, unit.bias_name) for unit in layer.units("mean")]
    [('conv.weight', 'conv.bias')]
    """

    kind: ClassVar[str] = "shared"
    name: str
    weight_name: str | None = field()
    bias_name: str | None = field()
    view: MatrixView | None = field()
    parts: tuple[KroneckerPart, ...]
    mean_output: Factor

    def __post_init__(self) -> None:
        if (self.weight_name is None) != (self.view is None) or (self.view is None and self.parts):
            raise ValueError(
                f"layer `{self.name}`: a weight has a name, a view and parts; without it give None, None, ()"
            )
        if self._summand is None:
            return
        count, outputs, _ = self._summand.view.matrix_shape
        if self.mean_output.size != count * outputs:
            raise ValueError(
                f"layer `{self.name}`: its mean output factor is over all outputs of all parts, "
                f"{count} × {outputs}; got one of {self.mean_output.size}"
            )

    @cached_property
    def _summand(self) -> Summand | None:
        return None if self.view is None else Summand(self.view, self.parts)

    @cached_property
    def blocks(self) -> dict[str, Block]:
        blocks: dict[str, Block] = {}
        if self.weight_name is not None and self._summand is not None:
            blocks[self.weight_name] = self._summand.block
        if self.bias_name is not None:
            blocks[self.bias_name] = FactorBlock(self.mean_output)
        return blocks

    def map(self, function: TensorMap) -> Self:
        parts = tuple(part.map(function) for part in self.parts)
        return replace(self, parts=parts, mean_output=self.mean_output.map(function))

    def tensors(self) -> dict[str, Tensor]:
        parts = {} if self._summand is None else self._summand.tensors()
        return parts | under_prefix("mean-output", self.mean_output.tensors())

    def header(self) -> dict[str, Any]:
        row = {"kind": self.kind, "name": self.name, "weight": self.weight_name, "bias": self.bias_name}
        return (
            row | {"mean_output": self.mean_output.kind} | (self._summand.header() if self._summand else {})
        )

    @staticmethod
    def unpack(row: dict[str, Any], tensors: Mapping[str, Tensor]) -> SharedLayer:
        """The layer that `header` and `tensors` took apart."""
        mean = factor_from(row["mean_output"], tensors_under(tensors, "mean-output"))
        summand = Summand.unpack(row, tensors) if "view" in row else None
        view, parts = (None, ()) if summand is None else (summand.view, summand.parts)
        return SharedLayer(row["name"], row["weight"], row["bias"], view, parts, mean)

    def _units(self, kind: InputKind) -> tuple[KroneckerLayer, ...]:
        alone = self.bias_name is not None
        units: list[KroneckerLayer] = []
        for index, part in enumerate(self.parts):
            output, bias = part.output, None
            if kind == "mean":
                output = self._mean_output_of(index)
                # One system matrix for both, as in a Linear layer.
                bias = self.bias_name if len(self.parts) == 1 else None
                alone = alone and bias is None
            name = self.name if len(self.parts) == 1 else f"{self.name}[{index}]"
            units.append(KroneckerLayer(name, self.weight_name, bias, output, part.inputs))
        if alone:
            units.append(KroneckerLayer(self.name, None, self.bias_name, self.mean_output))
        return tuple(units)

    def _stacked_units(self, kind: InputKind) -> tuple[KroneckerLayer, ...] | None:
        block = None if self.weight_name is None else self.blocks[self.weight_name]
        if not isinstance(block, ViewedBlock) or not block.stackable:
            return None
        means = torch.stack([part.inputs.mean for part in self.parts])
        # Who reads E[h] alone forms no E[hhᵀ].
        inputs = InputFactors(lambda: block.stack.input, means)
        output = block.stack.output if kind == "full" else diagonal_blocks(self.mean_output, len(self.parts))
        units = [KroneckerLayer(self.name, self.weight_name, None, output, inputs)]
        if self.bias_name is not None:
            units.append(KroneckerLayer(self.name, None, self.bias_name, self.mean_output))
        return tuple(units)

    def _mean_output_of(self, index: int) -> Factor:
        """The diagonal block of `mean_output` that belongs to a part."""
        if len(self.parts) == 1:
            return self.mean_output
        size = self.parts[index].output.size
        return self.mean_output.diagonal_block(index * size, (index + 1) * size)

    @property
    def input_size(self) -> int:
        return 0 if self.view is None else self.view.matrix_shape[2]

    @property
    def kronecker(self) -> bool:
        return self.view is not None


@dataclass(frozen=True, eq=False)
class PlainLayer(LayerCurvature):
    """A parameter without Kronecker structure, under its own name: `factor` acts on parameter.flatten().

    >>> import torch
    >>> layer = PlainLayer("norm.weight", (4,), DiagonalFactor(torch.ones(4)))
    >>> layer.blocks["norm.weight"].shape, [unit.bias_name for unit in layer.units("mean")]
    ((4,), ['norm.weight'])
    """

    kind: ClassVar[str] = "plain"
    name: str
    shape: tuple[int, ...]
    factor: Factor

    @property
    def parameter_name(self) -> str:
        """The layer's name."""
        return self.name

    @cached_property
    def blocks(self) -> dict[str, Block]:
        return {self.name: FactorBlock(self.factor, self.shape)}

    def map(self, function: TensorMap) -> Self:
        return replace(self, factor=self.factor.map(function))

    def formed(self) -> PlainLayer:
        return replace(self, factor=self.factor.formed())

    def tensors(self) -> dict[str, Tensor]:
        return under_prefix("factor", self.factor.tensors())

    def header(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name, "shape": list(self.shape), "factor": self.factor.kind}

    @staticmethod
    def unpack(row: dict[str, Any], tensors: Mapping[str, Tensor]) -> PlainLayer:
        """The layer that `header` and `tensors` took apart."""
        factor = factor_from(row["factor"], tensors_under(tensors, "factor"))
        return PlainLayer(row["name"], tuple(row["shape"]), factor)

    def _units(self, kind: InputKind) -> tuple[KroneckerLayer, ...]:
        return (KroneckerLayer(self.name, None, self.name, self.factor),)


@dataclass(frozen=True, eq=False)
class TiedLayer(LayerCurvature):
    """A parameter whose block is a sum of Kronecker products: an embedding that is the head as well.

    `cg` takes its products; every other solver its diagonal, as that of a parameter without structure.
    """

    kind: ClassVar[str] = "tied"
    name: str
    shape: tuple[int, ...]
    summands: tuple[Summand, ...]

    @property
    def parameter_name(self) -> str:
        """The layer's name."""
        return self.name

    @cached_property
    def blocks(self) -> dict[str, Block]:
        return {self.name: SumBlock(tuple(summand.block for summand in self.summands))}

    def map(self, function: TensorMap) -> Self:
        return replace(self, summands=tuple(summand.map(function) for summand in self.summands))

    def tensors(self) -> dict[str, Tensor]:
        summands = enumerate(self.summands)
        return {
            key: t for i, one in summands for key, t in under_prefix(f"summand{i}", one.tensors()).items()
        }

    def header(self) -> dict[str, Any]:
        summands = [summand.header() for summand in self.summands]
        return {"kind": self.kind, "name": self.name, "shape": list(self.shape), "summands": summands}

    @staticmethod
    def unpack(row: dict[str, Any], tensors: Mapping[str, Tensor]) -> TiedLayer:
        """The layer that `header` and `tensors` took apart."""
        summands = tuple(
            Summand.unpack(one, tensors_under(tensors, f"summand{index}"))
            for index, one in enumerate(row["summands"])
        )
        return TiedLayer(row["name"], tuple(row["shape"]), summands)

    def _units(self, kind: InputKind) -> tuple[KroneckerLayer, ...]:
        diagonal = DiagonalFactor(self.blocks[self.name].diagonal().flatten())
        return (KroneckerLayer(self.name, None, self.name, diagonal),)


@dataclass(frozen=True, eq=False)
class OperatorLayer(LayerCurvature):
    """Matrix-free blocks by parameter name; `cg` only.

    Of a Linear layer `weight_name` and `bias_name` say which parameter is what, and `output` is the mean
    block at its output, where the provider has one (with or without a bias that it is the block of).
    """

    kind: ClassVar[str] = "operator"
    name: str
    operators: Mapping[str, Block]
    output: Factor | None = None
    weight_name: str | None = None
    bias_name: str | None = None

    @property
    def blocks(self) -> dict[str, Block]:
        return dict(self.operators)

    @property
    def matrix_free(self) -> bool:
        return True

    @property
    def weight_operator(self) -> Block | None:
        return None if self.weight_name is None else self.operators.get(self.weight_name)

    @property
    def bias_operator(self) -> Block | None:
        found = None if self.bias_name is None else self.operators.get(self.bias_name)
        return None if isinstance(found, FactorBlock) else found

    def map_blocks(self, function: Callable[[Block], Block]) -> OperatorLayer:
        """The same layer with `function` applied to each matrix-free block."""
        blocks = self.operators.items()
        return replace(
            self, operators={n: b if isinstance(b, FactorBlock) else function(b) for n, b in blocks}
        )

    def map(self, function: TensorMap) -> Self:
        raise MatrixFreeError(
            f"layer `{self.name}` is matrix-free: its blocks read the model and the batch, which stay as "
            f"they are. Convert the model and the batch, and estimate again"
        )

    def tensors(self) -> dict[str, Tensor]:
        """Those of `output`: what the operators read is the model's."""
        return {} if self.output is None else under_prefix("output", self.output.tensors())

    def header(self) -> dict[str, Any]:
        raise MatrixFreeError(f"layer `{self.name}` is matrix-free: there is no matrix to save")

    def _units(self, kind: InputKind) -> tuple[KroneckerLayer, ...]:
        raise PairError(
            f"layer `{self.name}` has no Kronecker factors to solve by: use `cg`, which needs products only"
        )


def layer_from_parts(
    name: str,
    weight_name: str | None,
    bias_name: str | None,
    output: Factor | None,
    inputs: InputFactors | None = None,
    weight_operator: Block | None = None,
    bias_operator: Block | None = None,
) -> LayerCurvature:
    """The layer of a Linear module: Kronecker where it has factors only, else matrix-free.

    `output` is B^t, where the provider has one; `inputs` the layer's input factors, where the weight block is
    a Kronecker product; `weight_operator` and `bias_operator` the blocks that are matrix-free.
    """
    if weight_operator is None and bias_operator is None and output is not None:
        return KroneckerLayer(name, weight_name, bias_name, output, inputs)
    blocks: dict[str, Block] = {}
    if weight_name is not None:
        if weight_operator is not None:
            blocks[weight_name] = weight_operator
        elif output is not None and inputs is not None:
            blocks[weight_name] = KroneckerBlock(output, inputs)
        else:
            raise ValueError(f"layer `{name}`: its weight has neither an operator nor both factors")
    if bias_name is not None:
        if bias_operator is not None:
            blocks[bias_name] = bias_operator
        elif output is not None:
            blocks[bias_name] = FactorBlock(output)
        else:
            raise ValueError(f"layer `{name}`: its bias has neither an operator nor an output factor")
    return OperatorLayer(name, blocks, output, weight_name, bias_name)


def under_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under paths that begin with `prefix`."""
    return {f"{prefix}/{key}": tensor for key, tensor in tensors.items()}


def _unpack_output(row: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Factor:
    return factor_from(row["output"], tensors_under(tensors, "output"))


def _unpack_inputs(row: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> InputFactors:
    return input_factors_from(row["input"], tensors_under(tensors, "input"))
