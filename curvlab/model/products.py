"""Exact products with the Hessian and the Gauss-Newton matrix of any model, for any of its parameters.

With z the logits, J = ∂z/∂θ, terms ξ_ij with weights c_ij and r = ∂/∂z Σ c_ij ξ_ij,

    gradient         g = Jᵀ r                               one backward pass that keeps its own graph
    Hessian          H v = ∂(g·v)/∂θ                        one backward pass through both graphs
    Gauss-Newton     G v = Jᵀ ∇²ξ J v,  J v = ∂(g·v)/∂r     two backward passes, each through one graph

g is linear in r, so the derivative of g·v at r is J v: no forward mode is needed, for which many functions
have no rule. ∇²ξ is the criterion's own, in closed form. All are *sums*, Σ c_ij …; a mean over several
batches divides by the sum of their `total_weight`. With l2 = λ each has Σ c_ij · λ v added, and the mean λ v.

Only `torch.autograd.grad` at the live parameters is used: `.grad` is never written, and hooks of the
parameters do not run. Functions without second derivative are replaced while the model runs
(`curvlab.model.double_backward`); where one remains the error names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeAlias

import torch
from torch import Tensor

from curvlab.criteria import Criterion
from curvlab.criteria.base import LossTerms
from curvlab.exceptions import ArgumentError, ProblemError, StaleError
from curvlab.model.double_backward import (
    TwiceDifferentiable,
    backward_pass,
    graph_entries,
    no_second_derivative,
    refuse_broken_graphs,
)
from curvlab.model.network import Inputs, ModelCall, eager_without_autocast

__all__ = ["BatchProducts", "ModelProducts", "differentiating_twice"]

# Vectors of one batched backward pass, when a dense block is formed; fewer where the graph is large: batches
# are 10 × faster on small networks and up to 2 × slower on a residual one of 128 images.
VECTORS_AT_ONCE = 16
ENTRIES_AT_ONCE = 2**23
_Product: TypeAlias = Callable[[Mapping[str, Tensor], int | None], list[Tensor]]


class ModelProducts:
    """Products with the exact Hessian and Gauss-Newton matrix, over `parameters`: names to live parameters.

    `torch_layout`: the criterion was given as a torch loss, as `LossTerms.of` takes it.

    >>> from curvlab.criteria import MSE
    >>> layer = torch.nn.Linear(1, 1)
    >>> products = ModelProducts(ModelCall(layer), MSE(), dict(layer.named_parameters()))
    >>> inputs, targets = torch.tensor([[3.0], [1.0]]), torch.zeros(2, 1)
    >>> products.hessian(inputs, targets, {"weight": torch.ones(1, 1)})
    {'weight': tensor([[20.]])}
    """

    def __init__(
        self,
        call: ModelCall,
        criterion: Criterion,
        parameters: Mapping[str, Tensor],
        l2: float = 0.0,
        *,
        torch_layout: bool = False,
    ) -> None:
        for name, parameter in parameters.items():
            _check_differentiable(name, parameter)
        self.call, self.criterion, self.parameters = call, criterion, dict(parameters)
        self.l2, self.torch_layout = l2, torch_layout

    def prepare(self, inputs: Inputs, targets: Tensor, names: Iterable[str] | None = None) -> BatchProducts:
        """Run the model and its backward pass on a batch, and keep both graphs for any number of products.

        `names` limits the parameters, by default all. Held until the result is dropped: the activations, as
        in training, and what the backward pass made of them. On a residual network of 128 images that is
        1.9 × the peak memory of a gradient, and a product takes 2.3 × its time, 3.7 × with nothing kept.
        """
        return self._differentiated_once(inputs, targets, names, keep=True)

    def hessian(self, inputs: Inputs, targets: Tensor, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Σ c_ij ∇²ξ_ij v over the parameters named in `vectors`, their cross blocks included."""
        return self._differentiated_once(inputs, targets, vectors, keep=False).hessian(vectors)

    def gauss_newton(
        self, inputs: Inputs, targets: Tensor, vectors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Σ c_ij Jᵀ ∇²ξ_ij J v over the parameters named in `vectors`, their cross blocks included."""
        return self._differentiated_once(inputs, targets, vectors, keep=False).gauss_newton(vectors)

    def _differentiated_once(
        self, inputs: Inputs, targets: Tensor, names: Iterable[str] | None, keep: bool
    ) -> BatchProducts:
        """Both graphs of a batch, to be kept or freed with the first product."""
        chosen = list(self.parameters) if names is None else list(names)
        _check_names(chosen, self.parameters)
        parameters = {name: self.parameters[name] for name in chosen}
        with differentiating_twice(inputs, parameters), torch.enable_grad():
            logits = self.call(inputs)
            if not logits.requires_grad:
                raise ProblemError(
                    "the logits depend on no trainable parameter: the forward runs under torch.no_grad(), "
                    "detaches them, or all parameters that it uses are frozen"
                )
            terms = LossTerms.of(self.criterion, logits, targets, torch_layout=self.torch_layout)
            refuse_broken_graphs(logits)
            cotangent = _OutputGradient.apply(logits, terms)
            gradients = backward_pass([logits], list(parameters.values()), [cotangent], create_graph=True)
            named = dict(zip(parameters, gradients, strict=True))
            shift = self.l2 * terms.total_weight
            return BatchProducts(parameters, terms, logits, cotangent, named, shift, keep)


class BatchProducts:
    """Products with the matrices of one batch, whose graphs are held: see `ModelProducts.prepare`.

    >>> from curvlab.criteria import MSE
    >>> layer = torch.nn.Linear(1, 1)
    >>> products = ModelProducts(ModelCall(layer), MSE(), dict(layer.named_parameters()), l2=0.5)
    >>> batch = products.prepare(torch.tensor([[3.0], [1.0]]), torch.zeros(2, 1))
    >>> batch.hessian({"bias": torch.ones(1)}), batch.hessian_block("weight"), batch.total_weight
    ({'bias': tensor([5.])}, tensor([[21.]]), tensor(2.))
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        terms: LossTerms,
        logits: Tensor,
        cotangent: Tensor,
        gradients: Mapping[str, Tensor | None],
        shift: Tensor,
        keep: bool,
    ) -> None:
        self._parameters, self._terms, self._shift, self._keep = parameters, terms, shift, keep
        self._logits, self._cotangent, self._gradients = logits, cotangent, gradients
        self._versions = {name: parameter._version for name, parameter in parameters.items()}

    @property
    def total_weight(self) -> Tensor:
        """Σ c_ij: what the batch weighs in a mean over several."""
        return self._terms.total_weight

    def hessian(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Σ c_ij ∇²ξ_ij v over the parameters named in `vectors`, their cross blocks included."""
        checked = self._check_vectors(vectors)
        with self._differentiating():
            return self._add_names(checked, self._hessian(checked))

    def gauss_newton(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Σ c_ij Jᵀ ∇²ξ_ij J v over the parameters named in `vectors`, their cross blocks included."""
        checked = self._check_vectors(vectors)
        with self._differentiating():
            return self._add_names(checked, self._gauss_newton(checked))

    def second_moment(
        self, vectors: Mapping[str, Tensor], outer: Callable[[LossTerms, Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """Σ Jᵀ U J v for matrices U at the logits: `outer(terms, y)` is U y, y in the logits' shape."""
        checked = self._check_vectors(vectors)
        with self._differentiating():
            (along,) = self._differentiated_along(checked, [self._cotangent], None)
            inputs = [self._parameters[name] for name in checked]
            values = self._pulled_back([self._logits], inputs, [outer(self._terms, along)], None)
            return self._add_names(checked, values)

    def hessian_block(self, name: str) -> Tensor:
        """The n × n block of one parameter of n entries, from n products."""
        return self._block(name, self._hessian)

    def gauss_newton_block(self, name: str) -> Tensor:
        """The n × n block of one parameter of n entries, from n products."""
        return self._block(name, self._gauss_newton)

    def _hessian(self, vectors: Mapping[str, Tensor], count: int | None = None) -> list[Tensor]:
        """The values for `vectors`, or for `count` of them, stacked."""
        inputs = [self._parameters[name] for name in vectors]
        return self._differentiated_along(vectors, inputs, count)

    def _gauss_newton(self, vectors: Mapping[str, Tensor], count: int | None = None) -> list[Tensor]:
        (along,) = self._differentiated_along(vectors, [self._cotangent], count)
        curved = _output_hessian_product(self._terms, along)
        inputs = [self._parameters[name] for name in vectors]
        return self._pulled_back([self._logits], inputs, [curved], count)

    def _differentiated_along(
        self, vectors: Mapping[str, Tensor], inputs: Sequence[Tensor], count: int | None
    ) -> list[Tensor]:
        """∂(g·v)/∂inputs; a gradient without graph is constant and adds nothing."""
        pairs = [(self._gradients[name], vector) for name, vector in vectors.items()]
        live = [(gradient, v) for gradient, v in pairs if gradient is not None and gradient.requires_grad]
        return self._pulled_back([gradient for gradient, _ in live], inputs, [v for _, v in live], count)

    def _pulled_back(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        cotangents: Sequence[Tensor],
        count: int | None,
    ) -> list[Tensor]:
        """Jᵀ v at the inputs for one cotangent v of each output, or for `count` of them, stacked."""
        stacked = () if count is None else (count,)
        if not outputs:
            return [x.new_zeros(*stacked, *x.shape) for x in inputs]
        if count is None:
            values = backward_pass(outputs, inputs, cotangents, retain_graph=self._keep)
        else:
            values = torch.autograd.grad(
                outputs, inputs, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
        pairs = zip(inputs, values, strict=True)
        return [x.new_zeros(*stacked, *x.shape) if value is None else value for x, value in pairs]

    def _block(self, name: str, product: _Product) -> Tensor:
        self._check_current()
        _check_names([name], self._parameters)
        parameter = self._parameters[name]
        identity = torch.eye(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
        at_once = min(VECTORS_AT_ONCE, max(1, ENTRIES_AT_ONCE // graph_entries(self._logits)))
        units = identity.reshape(-1, *parameter.shape).split(at_once)
        with self._differentiating():
            rows = torch.cat([_stacked_products(product, name, part) for part in units]).flatten(1)
            block = (rows + rows.T) / 2
            block.diagonal().add_(self._shift)
            return block

    def _check_vectors(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self._check_current()
        _check_names(list(vectors), self._parameters)
        checked = {}
        for name in vectors:
            vector, parameter = vectors[name], self._parameters[name]
            if vector.shape != parameter.shape:
                raise ArgumentError(
                    f"the vector of `{name}` has shape {tuple(vector.shape)}; expected the parameter's, "
                    f"{tuple(parameter.shape)}"
                )
            checked[name] = vector.detach().to(parameter.dtype)
        return checked

    def _check_current(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter._version != self._versions[name]:
                raise StaleError(
                    f"`{name}` has changed since this batch was prepared, whose graphs are those of the old "
                    f"value. Prepare the batch again"
                )

    def _differentiating(self) -> AbstractContextManager[None]:
        return differentiating_twice(self._terms.logits, self._parameters)

    def _add_names(self, vectors: Mapping[str, Tensor], values: Sequence[Tensor]) -> dict[str, Tensor]:
        """The values under their names, with λ Σ c_ij v added."""
        named = zip(vectors.items(), values, strict=True)
        return {name: torch.add(value.detach(), self._shift * vector) for (name, vector), value in named}


class _OutputGradient(torch.autograd.Function):
    """r = ∂/∂z Σ c_ij ξ_ij, with the derivative v ↦ c_ij ∇²ξ_ij v: both as the criterion gives them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, terms: LossTerms) -> Tensor:
        ctx.terms = terms
        return terms.as_logits(terms.criterion.gradients(terms.logits, terms.targets), terms.weights)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        return _output_hessian_product(ctx.terms, cotangents[0]), None


def _output_hessian_product(terms: LossTerms, vectors: Tensor) -> Tensor:
    """c_ij ∇²ξ_ij v for vectors in the shape of the model's logits, with any dimensions before."""
    draws = vectors.ndim - len(terms.shape) - 1
    last = vectors.movedim(draws + 1, -1) if terms.classes_first else vectors
    rows = last.reshape(*vectors.shape[:draws], len(terms.logits), terms.outputs)
    curved = terms.criterion.hessian_products(terms.logits, terms.targets, rows)
    return terms.as_logits(curved, terms.weights)


def _stacked_products(product: _Product, name: str, vectors: Tensor) -> Tensor:
    """One product for each of the vectors, in one batched backward pass where torch can batch all of it."""
    if len(vectors) > 1:
        with suppress(RuntimeError):
            return product({name: vectors}, len(vectors))[0]
    return torch.stack([product({name: vector}, None)[0] for vector in vectors])


@contextmanager
def differentiating_twice(inputs: Inputs, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Where forward and backward passes run: errors about second derivatives say what to do.

    The backward passes need it as the forward does: checkpointing calls the model again there, and autocast
    would round their products.
    """
    hooks = _take_hooks(parameters)
    try:
        with eager_without_autocast(inputs), TwiceDifferentiable():
            yield
    except RuntimeError as error:
        missing = NOT_IMPLEMENTED.search(str(error))
        if missing is None:
            raise
        raise no_second_derivative(f"`{missing[1]}` of torch") from error
    finally:
        for held, functions in hooks:
            held.update(functions)


def _take_hooks(parameters: Mapping[str, Tensor]) -> list[tuple[dict[int, Any], dict[int, Any]]]:
    """Empty the parameters' own hooks: what they make of a gradient is not the loss's."""
    held = [hooks for p in parameters.values() if (hooks := p._backward_hooks)]
    taken = [(hooks, dict(hooks)) for hooks in held]
    for hooks in held:
        hooks.clear()
    return taken


NOT_IMPLEMENTED = re.compile(r"derivative for '?(?:aten::)?(\w+)'? is not implemented")


def _check_differentiable(name: str, parameter: Tensor) -> None:
    if parameter.is_inference():
        raise ProblemError(
            f"`{name}` was made in inference mode, and cannot be differentiated. Make the model outside "
            f"torch.inference_mode(), or load its state into one that was"
        )
    if not parameter.requires_grad or not parameter.is_leaf:
        state = "is frozen (requires_grad=False)" if parameter.is_leaf else "is no leaf of the graph"
        raise ProblemError(f"`{name}` {state}; expected trainable parameters of the model. Leave it out")


def _check_names(names: Sequence[str], known: Mapping[str, Tensor]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        given = f"`{unknown[0]}`" if unknown else "no parameter"
        raise ArgumentError(f"products were asked for {given}; expected names among {list(known)}")
