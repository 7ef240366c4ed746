"""Dense references for any small model, from the definitions of DESIGN section 2, "Rows and examples".

Every example goes through the model alone, and every loss term, column and output is a pass of its own:

    ξ_i = Σ_j c_ij ξ_ij / c_i          c_i = Σ_j c_ij          E[f] = Σ c_i f_i / Σ c_i
    expand   A = E[mean_p h_ip h_ipᵀ]     B = E[Σ_p g_ip g_ipᵀ]
    reduce   A = E[h̄_i h̄_iᵀ]              B = E[ḡ_i ḡ_iᵀ]
    bias, norm and plain parameters       E[∇_θ ∇_θᵀ], the sum of each column's own gradient

Blocks are dense matrices on `parameter.flatten()`. Nothing is shared with curvlab.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.any_rows import Record, Summand, Use, explicit, watching

Blocks = dict[str, Tensor]
Draw = Sequence[tuple[int, float]]


# loss terms


@dataclass(frozen=True, eq=False)
class Term:
    """One loss term: its weight c_ij, its outputs' place in logits.flatten(), ξ_ij and the model's labels."""

    weight: float
    index: Tensor
    loss: Callable[[Tensor], Tensor]
    score_columns: Callable[[Tensor], Tensor]
    loss_of_label: Callable[[Tensor, int], Tensor] | None = None


TermSplit = Callable[[Tensor, Tensor], list[Term]]


def cross_entropy_terms(
    weight: Sequence[float] | None = None,
    ignore_index: int = -100,
    classes_first: bool = False,
    smoothing: float = 0.0,
) -> TermSplit:
    """-log softmax(z)_y with c_ij = w_y, 0 where y is `ignore_index`; outputs last, or dimension 1."""

    def label_loss(z: Tensor, y: int) -> Tensor:
        log_p = z - z.logsumexp(0)
        return -(1 - smoothing) * log_p[y] - smoothing * log_p.mean()

    def score_columns(z: Tensor) -> Tensor:
        # Rows √p_y ∇ξ(y): their outer products sum to the expectation over the model's own labels.
        p = z.softmax(0)
        rows = []
        for y in range(len(z)):
            at = z.detach().requires_grad_()
            (g,) = torch.autograd.grad(label_loss(at, y), at)
            rows.append(p[y].sqrt() * g)
        return torch.stack(rows)

    def split(logits: Tensor, target: Tensor) -> list[Term]:
        places = torch.arange(logits.numel()).reshape(logits.shape)
        places = places.movedim(1, -1) if classes_first else places
        terms = []
        for index, y in zip(places.reshape(-1, places.shape[-1]), target.flatten().tolist(), strict=True):
            ignored = y == ignore_index
            c = 0.0 if ignored else 1.0 if weight is None else float(weight[y])
            label = 0 if ignored else y
            loss = lambda z, y=label: label_loss(z, y)  # noqa: E731
            terms.append(Term(c, index, loss, score_columns, label_loss))
        return terms

    return split


def squared_terms() -> TermSplit:
    """The mean over K outputs of the squared residual; labels from N(f, K/2 I), with score variance 2/K."""

    def split(logits: Tensor, target: Tensor) -> list[Term]:
        k = logits.shape[-1]
        places = torch.arange(logits.numel()).reshape(-1, k)
        return [
            Term(
                1.0,
                index,
                lambda z, y=y: ((z - y) ** 2).mean(),
                lambda z: torch.eye(len(z), dtype=z.dtype) * (2 / len(z)) ** 0.5,
            )
            for index, y in zip(places, target.reshape(-1, k), strict=True)
        ]

    return split


def bernoulli_terms() -> TermSplit:
    """BCE averaged over K outputs; Bernoulli labels: the score has variance p(1-p)/K²."""

    def split(logits: Tensor, target: Tensor) -> list[Term]:
        k = logits.shape[-1]
        places = torch.arange(logits.numel()).reshape(-1, k)
        return [
            Term(
                1.0,
                index,
                lambda z, y=y: (torch.log1p(torch.exp(-z.abs())) + z.clamp(min=0) - z * y).mean(),
                lambda z: torch.diag((z.sigmoid() * (1 - z.sigmoid())).sqrt() / len(z)),
            )
            for index, y in zip(places, target.reshape(-1, k), strict=True)
        ]

    return split


# calls


def call(model: nn.Module, inputs: Any) -> Any:
    """model(x), model(*x) or model(**x)."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def example(inputs: Any, i: int) -> Any:
    """Example i alone, as a batch of one."""
    if isinstance(inputs, dict):
        return {k: example(v, i) for k, v in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(example(v, i) for v in inputs)
    return inputs[i : i + 1] if isinstance(inputs, Tensor) and inputs.ndim else inputs


def pick_logits(result: Any, output: Any = None) -> Tensor:
    """What `output=` names; without it `.logits`, ["logits"], else the first tensor of a tuple."""
    if callable(output):
        return output(result)
    if isinstance(output, str):
        return result[output] if isinstance(result, dict) else getattr(result, output)
    if isinstance(output, int):
        return result[output]
    if isinstance(result, Tensor):
        return result
    if hasattr(result, "logits"):
        return result.logits
    if isinstance(result, dict):
        return result["logits"]
    return next(value for value in result if isinstance(value, Tensor))


# the reference


@dataclass(frozen=True, eq=False)
class Part:
    """One matrix W_g: A and B of the setting, E[h], and B of ḡ, with its place in the parameter."""

    index: Tensor
    a: Tensor
    b: Tensor
    mean: Tensor
    mean_b: Tensor


@dataclass(eq=False)
class AnyReference:
    """A model, the terms of its loss and a batch; `l2` is λ.

    With `functions` matrix products are seen where they are made, whichever module makes them; with `live` a
    use that the logits do not depend on is no position.
    """

    model: nn.Module
    terms: TermSplit
    inputs: Any
    targets: Tensor
    l2: float = 0.0
    output: Any = None
    copied: bool = True
    functions: bool = False
    live: bool = False

    def __post_init__(self) -> None:
        # Models with hooks that set plain tensors cannot be copied; who gives one of those gives it away.
        self.model = explicit(copy.deepcopy(self.model) if self.copied else self.model)

    @property
    def examples(self) -> int:
        return len(self.targets)

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def forward(self, i: int) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return pick_logits(call(self.model, example(self.inputs, i)), self.output)

    @cache  # noqa: B019 - as short-lived as the test
    def pieces(self, i: int) -> tuple[Tensor, list[Term]]:
        logits = self.forward(i).detach()
        return logits, self.terms(logits, self.targets[i : i + 1])

    @cached_property
    def weights(self) -> Tensor:
        """c_i = Σ_j c_ij."""
        sums = [sum(term.weight for term in self.pieces(i)[1]) for i in range(self.examples)]
        return torch.tensor(sums, dtype=torch.float64)

    @property
    def counted(self) -> list[tuple[int, float]]:
        """The examples with c_i > 0 and their share c_i / Σ c_i."""
        shares = (self.weights / self.weights.sum()).tolist()
        return [(i, share) for i, share in enumerate(shares) if share > 0]

    def term_shares(self, i: int) -> list[tuple[float, Term]]:
        """The terms of example i that count, with c_ij / c_i."""
        terms = self.pieces(i)[1]
        total = float(self.weights[i])
        return [(term.weight / total, term) for term in terms if term.weight > 0]

    def example_loss(self, i: int, logits: Tensor) -> Tensor:
        """ξ_i."""
        flat = logits.flatten()
        return torch.stack([c * term.loss(flat[term.index]) for c, term in self.term_shares(i)]).sum()

    def mean_loss(self) -> Tensor:
        """E[ξ] + λ/2 ‖θ‖²."""
        loss = torch.stack([share * self.example_loss(i, self.forward(i)) for i, share in self.counted]).sum()
        squares = torch.stack([(p**2).sum() for p in self.parameters.values()]).sum()
        return loss + self.l2 / 2 * squares

    # by autograd of the mean loss

    def gradient(self) -> Blocks:
        grads = torch.autograd.grad(self.mean_loss(), list(self.parameters.values()), allow_unused=True)
        named = zip(self.parameters.items(), grads, strict=True)
        return {name: torch.zeros_like(p) if g is None else g for (name, p), g in named}

    @cache  # noqa: B019
    def full_hessian(self) -> Tensor:
        parameters = list(self.parameters.values())
        return loss_hessian(self.mean_loss(), parameters)

    def hessian_blocks(self) -> Blocks:
        return self.diagonal_blocks(self.full_hessian())

    def diagonal_blocks(self, matrix: Tensor) -> Blocks:
        blocks, start = {}, 0
        for name, p in self.parameters.items():
            blocks[name] = matrix[start : start + p.numel(), start : start + p.numel()]
            start += p.numel()
        return blocks

    @cache  # noqa: B019
    def full_gauss_newton(self) -> Tensor:
        """E[Jᵀ ∇²ξ_i J] + λI, the Jacobian one output at a time."""
        size = sum(p.numel() for p in self.parameters.values())
        total = self.l2 * torch.eye(size, dtype=torch.float64)
        for i, share in self.counted:
            logits = self.forward(i)
            jacobian = torch.stack([self._flat_gradient(z) for z in logits.flatten()])
            at = logits.detach().requires_grad_()
            (first,) = torch.autograd.grad(self.example_loss(i, at), at, create_graph=True)
            curved = torch.stack([
                torch.autograd.grad(entry, at, retain_graph=True)[0].flatten() for entry in first.flatten()
            ])  # fmt: skip
            total += share * jacobian.T @ curved @ jacobian
        return total

    def gauss_newton_blocks(self) -> Blocks:
        return self.diagonal_blocks(self.full_gauss_newton())

    def _flat_gradient(self, scalar: Tensor) -> Tensor:
        parameters = list(self.parameters.values())
        grads = torch.autograd.grad(scalar, parameters, retain_graph=True, allow_unused=True)
        filled = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]
        return torch.cat([g.flatten() for g in filled])

    # columns: the cotangents that a provider sends back for one example

    def columns(self, kind: str, i: int, labels: Sequence[Draw] | None = None) -> list[Tensor]:
        """Cotangents at the logits of example i; `labels`[s]: (label, factor) of each term, draw s."""
        logits = self.pieces(i)[0]
        flat = logits.flatten()
        if kind == "empirical":
            at = logits.clone().requires_grad_()
            return [torch.autograd.grad(self.example_loss(i, at), at)[0]]
        columns = []
        if kind == "mc":
            assert labels is not None
            for draw in labels:
                column = torch.zeros_like(flat)
                for (c, term), (y, factor) in zip(self.term_shares(i), draw, strict=True):
                    column[term.index] = factor * c**0.5 * self._label_score(flat, term, y)
                columns.append(column.reshape(logits.shape))
            return columns
        for c, term in self.term_shares(i):
            rows = term.score_columns(flat[term.index]) if kind == "exact" else _root(term, flat[term.index])
            for row in rows:
                column = torch.zeros_like(flat)
                column[term.index] = c**0.5 * row
                columns.append(column.reshape(logits.shape))
        return columns

    def _label_score(self, flat: Tensor, term: Term, y: int) -> Tensor:
        assert term.loss_of_label is not None
        at = flat[term.index].clone().requires_grad_()
        return torch.autograd.grad(term.loss_of_label(at, y), at)[0]

    # blocks

    def plain_blocks(self, kind: str = "empirical", labels: Any = None) -> Blocks:
        """E[Σ_columns ∇_θ ∇_θᵀ] of every parameter, no Kronecker structure at all."""
        blocks = {n: torch.zeros(p.numel(), p.numel()).double() for n, p in self.parameters.items()}
        for i, share in self.counted:
            logits = self.forward(i)
            for column in self.columns(kind, i, None if labels is None else labels[i]):
                flat = self._flat_gradient((logits * column).sum())
                parts = flat.split([p.numel() for p in self.parameters.values()])
                for name, g in zip(blocks, parts, strict=True):
                    blocks[name] += share * torch.outer(g, g)
        return {name: block + self.shift(block) for name, block in blocks.items()}

    def shift(self, block: Tensor) -> Tensor:
        return self.l2 * torch.eye(len(block), dtype=block.dtype)

    def parts(self, kind: str, sharing: str, labels: Any = None) -> dict[str, list[Part]]:
        """The Kronecker products of each matrix, without λ; several that overlap where the matrix is tied."""
        sums: dict[tuple[str, str, int], list[Any]] = {}
        for i, share in self.counted:
            with watching(self.model, self.functions) as record:
                logits = self.forward(i)
            columns = self.columns(kind, i, None if labels is None else labels[i])
            for name, summand in self._summands(record):
                for g, index in enumerate(summand.index):
                    found = self._one_example(i, logits, columns, summand, g, sharing)
                    old = sums.setdefault((name, summand.kind, g), [index, 0, 0, 0, 0])
                    for slot, value in enumerate(found, start=1):
                        old[slot] = old[slot] + share * value
        result: dict[str, list[Part]] = {}
        for (name, _, _), values in sums.items():
            result.setdefault(name, []).append(Part(*values))
        return result

    def gradient_of_rows(self) -> Blocks:
        """E[Σ_p g_ip h_ipᵀ] placed in each matrix, flattened: its gradient, where every use was seen."""
        total: Blocks = {}
        for i, share in self.counted:
            with watching(self.model, self.functions) as record:
                logits = self.forward(i)
            (column,) = self.columns("empirical", i)
            for name, summand in self._summands(record):
                flat = total.setdefault(name, torch.zeros(self.parameters[name].numel()).double())
                for index, uses in zip(summand.index, summand.uses, strict=True):
                    for use in uses:
                        (g,) = torch.autograd.grad(
                            logits, use.output, column, retain_graph=True, allow_unused=True
                        )
                        if g is not None:
                            flat[index.flatten()] += share * (use.rows(g).T @ use.inputs).flatten()
        return total

    def _summands(self, record: Record) -> list[tuple[str, Summand]]:
        names = {id(p): name for name, p in self.parameters.items()}
        return [
            (names[key], summand)
            for key, kinds in record.summands.items()
            if key in names
            for summand in kinds.values()
        ]

    def _one_example(
        self, i: int, logits: Tensor, columns: list[Tensor], summand: Summand, part: int, sharing: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        uses = summand.uses[part]
        if self.live:
            uses = [use for use in uses if self._reaches(logits, use)] or uses
        expand = sharing == "expand" or summand.kind == "lookup"
        h = torch.cat([use.inputs for use in uses])
        w = torch.cat([self._position_weights(i, use.positions, len(use.inputs)) for use in uses])
        w = w / w.sum() if float(w.sum()) > 0 else w
        mean = w @ h
        a = h.T @ (w[:, None] * h) if expand else torch.outer(mean, mean)
        width = summand.index[part].shape[0]
        b, mean_b = (torch.zeros(width, width, dtype=torch.float64) for _ in range(2))
        for column in columns:
            zeros = [use.output for use in uses]
            got = torch.autograd.grad(logits, zeros, column, retain_graph=True, allow_unused=True)
            rows = torch.cat([
                use.rows(torch.zeros_like(use.output) if g is None else g)
                for use, g in zip(uses, got, strict=True)
            ])  # fmt: skip
            total = rows.sum(0)
            b += rows.T @ rows if expand else torch.outer(total, total)
            mean_b += torch.outer(total, total)
        return a, b, mean, mean_b

    def _reaches(self, logits: Tensor, use: Use) -> bool:
        """Whether the logits depend on what this use returned."""
        (g,) = torch.autograd.grad(logits.sum(), use.output, retain_graph=True, allow_unused=True)
        return g is not None

    def _position_weights(self, i: int, positions: tuple[int, ...], rows: int) -> Tensor:
        """c_ij where the layer's positions are the loss's, by shape; plain otherwise. Mean 1 in both."""
        logits, terms = self.pieces(i)
        if len(terms) == rows and positions and positions == self._term_shape(logits, terms):
            c = torch.tensor([term.weight for term in terms], dtype=torch.float64)
            return c * rows / c.sum()
        return torch.ones(rows, dtype=torch.float64)

    def _term_shape(self, logits: Tensor, terms: list[Term]) -> tuple[int, ...]:
        last = terms[0].index.diff()
        return tuple(logits.shape[1:-1] if not len(last) or int(last[0]) == 1 else logits.shape[2:])

    def blocks(self, kind: str, sharing: str = "expand", labels: Any = None) -> Blocks:
        """The blocks of `fisher[kind=…]`, or with kind "rows" of `gauss-newton[kind=rows]`."""
        blocks = self.plain_blocks(kind, labels)
        for name, parts in self.parts(kind, sharing, labels).items():
            total = torch.zeros_like(blocks[name])
            for part in parts:
                flat = part.index.flatten()
                total[flat[:, None], flat] += torch.kron(part.b.contiguous(), part.a.contiguous())
            blocks[name] = total + self.shift(total)
        return blocks

    # solvers

    def direction(self, solver: str, kind: str, sharing: str, alpha: float) -> Blocks:
        """The documented system of `solver` with Mixed(α), every block by torch.linalg.solve."""
        gradient = self.gradient()
        parts = self.parts(kind, sharing)
        plain = self.blocks(kind, sharing)
        result = {}
        for name, g in gradient.items():
            if name not in parts:
                data = plain[name] - self.shift(plain[name])
                result[name] = self._plain_solve(solver, data, g, alpha)
            elif len(parts[name]) > 1 and _overlapping(parts[name]):
                data = plain[name] - self.shift(plain[name])
                data = data if solver == "cg" else data.diagonal().diag()
                result[name] = self._plain_solve(solver, data, g, alpha)
            else:
                result[name] = self._kronecker_solve(solver, parts[name], g, alpha)
        return result

    def _plain_solve(self, solver: str, block: Tensor, g: Tensor, alpha: float) -> Tensor:
        eye = torch.eye(len(block), dtype=block.dtype)
        if solver in ("kfi", "sm-kfi"):
            matrix = block + (alpha + self.l2) * eye
        else:
            matrix = (1 - alpha) * block + (alpha + (1 - alpha) * self.l2) * eye
        return torch.linalg.solve(matrix, -g.flatten()).reshape(g.shape)

    def _kronecker_solve(self, solver: str, parts: list[Part], g: Tensor, alpha: float) -> Tensor:
        out = torch.zeros(g.numel(), dtype=g.dtype)
        for part in parts:
            mean = solver in ("sm-kfi", "ea-cg")
            a, b = (torch.outer(part.mean, part.mean), part.mean_b) if mean else (part.a, part.b)
            eye_a, eye_b = (torch.eye(len(m), dtype=m.dtype) for m in (a, b))
            if solver in ("kfi", "sm-kfi"):
                root, pi = (alpha + self.l2) ** 0.5, _pi(a, b)
                matrix = torch.kron(b + root / pi * eye_b, a + root * pi * eye_a)
            else:
                shift = alpha + (1 - alpha) * self.l2
                matrix = (1 - alpha) * torch.kron(b.contiguous(), a.contiguous())
                matrix = matrix + shift * torch.kron(eye_b, eye_a)
            flat = part.index.flatten()
            out[flat] = torch.linalg.solve(matrix, -g.flatten()[flat])
        return out.reshape(g.shape)

    def draws(self, i: int) -> list[list[Draw]]:
        """All that one draw of labels can be for example i: terms in one pass, with signs, or apart."""
        shares = self.term_shares(i)
        labels = list(itertools.product(*(range(len(term.index)) for _, term in shares)))
        signs = [(1, *rest) for rest in itertools.product((1, -1), repeat=len(shares) - 1)]
        together = [[tuple(zip(y, sign, strict=True))] for sign in signs for y in labels]
        apart = [
            [tuple((y, float(k == j)) for k, y in enumerate(label)) for j in range(len(label))]
            for label in labels
        ]
        return [*together, *apart]

    def drawn(self, i: int, block: Callable[[str], Tensor]) -> list[Draw]:
        """The draw of example i whose plain and bias blocks are `block(name)`; empty if none is."""
        logits = self.forward(i)
        jacobian = torch.stack([self._flat_gradient(z) for z in logits.flatten()])
        sizes = [p.numel() for p in self.parameters.values()]
        plain = [name for name in self.parameters if name not in self.parts("empirical", "expand")]
        found = {name: block(name) - self.shift(block(name)) for name in plain}
        for draws in self.draws(i):
            columns = torch.stack([column.flatten() for column in self.columns("mc", i, draws)])
            parts = dict(zip(self.parameters, (columns @ jacobian).split(sizes, 1), strict=True))
            if all(torch.allclose(parts[n].T @ parts[n], found[n], 1e-9, 1e-14) for n in plain):
                return draws
        return []


def loss_hessian(loss: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """∇²loss on the concatenated parameters, one row at a time."""
    grads = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    filled = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]
    rows = []
    for entry in torch.cat([g.flatten() for g in filled]):
        if not entry.requires_grad:
            rows.append(torch.zeros(sum(p.numel() for p in parameters), dtype=loss.dtype))
            continue
        second = torch.autograd.grad(entry, parameters, retain_graph=True, allow_unused=True)
        flat = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, second, strict=True)]
        rows.append(torch.cat([g.flatten() for g in flat]))
    return torch.stack(rows).detach()


def _root(term: Term, z: Tensor) -> Tensor:
    """Rows L with Σ L Lᵀ = ∇²ξ_ij, by eigh; the loss must be convex."""
    at = z.clone().requires_grad_()
    (first,) = torch.autograd.grad(term.loss(at), at, create_graph=True)
    curved = torch.stack([torch.autograd.grad(entry, at, retain_graph=True)[0] for entry in first])
    values, vectors = torch.linalg.eigh(curved)
    return (vectors * values.clamp(min=0).sqrt()).T


def _overlapping(parts: list[Part]) -> bool:
    places = torch.cat([part.index.flatten() for part in parts])
    return len(places.unique()) < len(places)


def _pi(a: Tensor, b: Tensor) -> float:
    """√((tr A / n) / (tr B / o)), clamped; 1e6 for tr B = 0, 1e-6 for tr A = 0, 1 for both."""
    ta, tb = float(a.trace()) / len(a), float(b.trace()) / len(b)
    if ta <= 0 and tb <= 0:
        return 1.0
    if tb <= 0:
        return 1e6
    return min(max((ta / tb) ** 0.5, 1e-6), 1e6)
