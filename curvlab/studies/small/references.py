"""The exact Hessian that errors are measured from, on any graph: blocks at layer outputs, and products.

A layer's bias shifts its outputs z at every position alike, so ∂²E[ξ]/∂b² is the exact Hessian's block at
the outputs, B of ḡ. Where a layer has no bias, one of zeros is added to the outputs of its module, in a copy
of the model: the block exists all the same, and is exact. It takes one Hessian product per output.

Weight blocks are too large to form. For a random v with independent signs

    E ‖(Ã - H_b) v‖² = ‖Ã - H_b‖_F²        E ‖H_b v‖² = ‖H_b‖_F²

so a few products estimate the signed error and the norm that it is relative to; the same v serve every
provider and both, which makes the ratio far less noisy than either.

What the products cost is counted, in operations, before they are made; each is charged at least what running
a model costs besides (`product_operations`), or small models would take for ever.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvlab.curvature import Curvature, LayerCurvature
from curvlab.curvature_layers import SharedLayer
from curvlab.exceptions import CurvlabError
from curvlab.linalg.execution import in_float64
from curvlab.measure.operations import counting
from curvlab.model.network import ModelCall
from curvlab.model.products import ModelProducts
from curvlab.problem import Problem

__all__ = [
    "PROBES",
    "Budget",
    "OutputBlocks",
    "probed_weight_errors",
    "product_operations",
    "provider_output_block",
]

ON_A_CHAIN, ON_A_GRAPH = 1e7, 1e10  # operations that a product takes as long as, however small the model is
PROBES = 6
DENSE_UP_TO = 4096


def product_operations(counted: int, problem: Problem) -> float:
    """What one Hessian product of so many counted operations is charged.

    >>> problem = Problem(nn.Linear(2, 2), "mse", torch.eye(2), torch.zeros(2, 2))
    >>> product_operations(16, problem)
    10000016.0
    """
    return counted + (ON_A_GRAPH if problem.chain is None else ON_A_CHAIN)


@dataclass
class Budget:
    """Operations that are left to spend.

    >>> budget = Budget(100.0)
    >>> budget.take(60), budget.take(60), budget.left
    (True, False, 40.0)
    """

    left: float

    def take(self, operations: float) -> bool:
        """Spend so many, if they are left."""
        if operations > self.left:
            return False
        self.left -= operations
        return True


class OutputBlocks:
    """The exact Hessian's block at the outputs of each layer, signed, where it is affordable.

    `left_out` names the layers without one, and why.
    """

    def __init__(self, problem: Problem, exact: Curvature, budget: Budget) -> None:
        self.problem, self.exact, self.budget = problem, exact, budget
        self.left_out: dict[str, str] = {}
        self._cost: float | None = None

    def block(self, layer: LayerCurvature) -> Tensor | None:
        """B of the layer, n × n, or None where it is left out."""
        name = layer.bias_name
        if name is not None:
            block = self.exact.blocks[name]
            product = lambda: block @ torch.zeros(block.shape).to(block.example)  # noqa: E731
            return block.to_dense() if self._is_affordable(layer, block.numel, product) else None
        size = _output_size(self.problem, layer.name)
        if size is None:
            self.left_out[layer.name] = "it has no bias and no module whose outputs could be shifted"
            return None
        with _shifted_outputs(self.problem, layer.name, size) as products:
            if not self._is_affordable(layer, size, lambda: products(torch.zeros(size))):
                return None
            columns = [products(unit) for unit in torch.eye(size)]
        dense = torch.stack(columns)
        return (dense + dense.T) / 2

    def _is_affordable(self, layer: LayerCurvature, size: int, product: Callable[[], object]) -> bool:
        if size > DENSE_UP_TO:
            self.left_out[layer.name] = f"its block has {size:,} rows, too many to form"
            return False
        if self._cost is None:
            with counting() as counted:
                product()
            self._cost = product_operations(counted.total, self.problem)
        if self.budget.take(size * self._cost):
            return True
        self.left_out[layer.name] = (
            f"its {size} Hessian products of {self._cost:.1e} operations each are beyond the limit"
        )
        return False


def provider_output_block(layer: LayerCurvature) -> Tensor | None:
    """The provider's own B at a layer's outputs; None where it has none apart from the weight."""
    if layer.output is not None:
        return layer.output.to_dense()
    if isinstance(layer, SharedLayer):
        return layer.mean_output.to_dense()
    name = layer.bias_name
    return None if name is None or name not in layer.blocks else layer.blocks[name].to_dense()


def _output_size(problem: Problem, name: str) -> int | None:
    """The number of outputs (channels) of a layer that is a module of its own; None for any other."""
    try:
        module = problem.model.get_submodule(name)
    except AttributeError:
        return None
    if isinstance(module, nn.Linear):
        return module.out_features
    return module.out_channels if isinstance(module, nn.modules.conv._ConvNd) else None


@contextmanager
def _shifted_outputs(problem: Problem, name: str, size: int) -> Iterator[Callable[[Tensor], Tensor]]:
    """Products with the Hessian of the mean loss over a shift of the outputs of one module, at shift zero."""
    model = copy.deepcopy(problem.model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    example = problem.network.example
    shift = torch.zeros(size, dtype=example.dtype, device=example.device, requires_grad=True)
    module = model.get_submodule(name)
    channels = 1 if isinstance(module, nn.modules.conv._ConvNd) else -1

    def add(module: nn.Module, inputs: object, outputs: Tensor) -> Tensor:
        shape = [1] * outputs.ndim
        shape[channels] = size
        return outputs + shift.reshape(shape)

    handle = module.register_forward_hook(add)
    call = ModelCall(model, problem.network.call.output)
    products = ModelProducts(call, problem.criterion, {"shift": shift}, torch_layout=problem.torch_layout)
    try:
        prepared = [products.prepare(batch.inputs, batch.targets) for batch in problem.batches()]
        total = sum(batch.total_weight for batch in prepared)

        def product(vector: Tensor) -> Tensor:
            sums = [batch.hessian({"shift": vector.to(shift)})["shift"] for batch in prepared]
            return torch.stack(sums).sum(0) / total

        yield product
    finally:
        handle.remove()


def probed_weight_errors(
    problem: Problem, exact: Curvature, curvatures: Sequence[Curvature], budget: Budget, seed: int = 0
) -> tuple[list[dict[str, float]], dict[str, float], int]:
    """Signed errors of the weight blocks by name, of each curvature, the norms of the exact ones, and probes.

    As many probes as the budget buys, at most `PROBES`; with none the mappings are empty. Of a block that a
    curvature cannot multiply with the name is missing.
    """
    names = [layer.weight_name for layer in exact.layers if layer.weight_name is not None]
    if not names:
        return [{} for _ in curvatures], {}, 0
    with counting() as counted:
        first = exact.blocks[names[0]]
        _ = first @ torch.zeros(first.shape).to(first.example)
    each = product_operations(counted.total, problem) * len(names)
    probes = 0
    while probes < PROBES and budget.take(each):
        probes += 1
    if not probes:
        return [{} for _ in curvatures], {}, 0
    draws = torch.Generator().manual_seed(seed)
    squares: list[dict[str, float]] = [{} for _ in range(len(curvatures) + 1)]
    for name in names:
        block = exact.blocks[name]
        for _ in range(probes):
            signs = torch.randint(0, 2, block.shape, generator=draws) * 2.0 - 1.0
            vector = signs.to(block.example)
            truth = block @ vector
            _add(squares[-1], name, truth)
            for held, curvature in zip(squares, curvatures, strict=False):
                image = _product(curvature, name, vector)
                if image is not None:
                    _add(held, name, image - truth)
    roots = [{name: (value / probes) ** 0.5 for name, value in held.items()} for held in squares]
    return roots[:-1], roots[-1], probes


def _add(held: dict[str, float], name: str, vector: Tensor) -> None:
    held[name] = held.get(name, 0.0) + float(in_float64(vector).square().sum())


def _product(curvature: Curvature, name: str, vector: Tensor) -> Tensor | None:
    blocks: Mapping[str, object] = curvature.blocks
    if name not in blocks:
        return None
    try:
        return curvature.blocks[name] @ vector
    except CurvlabError:
        return None
