"""The rows of every layer kind, written from their definition: h_ip, and where g_ip is found.

A *use* is one call of a layer by one example alone. Its rows h are formed by explicit loops; its gradients g
are those of a zero that is added to what the call returned. Nothing here is shared with curvlab.
Modules whose weights torch uses inside (attention, recurrent cells, bags of embeddings) are first replaced
by ones of the same function and the same parameters that call their matrices one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(eq=False)
class Use:
    """Rows h (S, n) of one part of a call, and the zero `output` whose gradient `rows` makes (S, o)."""

    inputs: Tensor
    output: Tensor
    rows: Callable[[Tensor], Tensor]
    positions: tuple[int, ...]


@dataclass(eq=False)
class Summand:
    """The uses of a matrix in one orientation, by part; `index[g]` (o, n) places W_g in weight.flatten()."""

    kind: str
    index: list[Tensor]
    uses: list[list[Use]]


@dataclass(eq=False)
class Record:
    """What one example's pass saw: the summands of each matrix, by the parameter's identity."""

    summands: dict[int, dict[str, Summand]] = field(default_factory=dict)

    def add(self, weight: Tensor, kind: str, index: list[Tensor], part: int, use: Use) -> None:
        kinds = self.summands.setdefault(id(weight), {})
        summand = kinds.setdefault(kind, Summand(kind, index, [[] for _ in index]))
        summand.uses[part].append(use)


# how a parameter is seen as matrices


def matrices(weight: Tensor, groups: int = 1) -> list[Tensor]:
    """W_g (o, n), the rows of the parameter in order."""
    return list(torch.arange(weight.numel()).reshape(groups, weight.shape[0] // groups, -1))


def transposed(weight: Tensor) -> list[Tensor]:
    """W (o, n) of a parameter (n, o)."""
    return [torch.arange(weight.numel()).reshape(weight.shape).T]


def transposed_convolution(weight: Tensor, groups: int) -> list[Tensor]:
    """W_g[o, (c, κ)] = weight[c, o, κ], for the channels c of group g."""
    index = torch.arange(weight.numel()).reshape(weight.shape)
    return [part.transpose(0, 1).flatten(1) for part in index.chunk(groups)]


# patches


def padded(module: Any, x: Tensor) -> Tensor:
    dims = len(module.kernel_size)
    if module.padding == "same":
        sides = []
        for d, k in zip(module.dilation, module.kernel_size, strict=True):
            sides.append((d * (k - 1) // 2, d * (k - 1) - d * (k - 1) // 2))
    elif module.padding == "valid":
        sides = [(0, 0)] * dims
    else:
        sides = [(p, p) for p in module.padding]
    flat = [amount for side in reversed(sides) for amount in side]
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x, flat, mode=mode) if any(flat) else x


def patches(module: Any, x: Tensor, out: tuple[int, ...]) -> Tensor:
    """(positions, groups, n) of images (b, C, …) of one example: what reaches each output position."""
    rows = []
    for wide, place in itertools.product(padded(module, x.detach()), itertools.product(*map(range, out))):
        cut = wide
        for axis, p in enumerate(place):
            start, dilation = p * module.stride[axis], module.dilation[axis]
            stop = start + dilation * (module.kernel_size[axis] - 1) + 1
            cut = cut.narrow(axis + 1, start, stop - start)
            cut = cut.index_select(axis + 1, torch.arange(0, stop - start, dilation))
        rows.append(cut.reshape(module.groups, -1))
    return torch.stack(rows)


def transposed_patches(module: Any, x: Tensor, out: tuple[int, ...]) -> Tensor:
    """The same of a transposed convolution: tap κ at output p sees input (p + padding - κd) / stride."""
    kernel, rows = module.kernel_size, []
    for image, place in itertools.product(x.detach(), itertools.product(*map(range, out))):
        patch = image.new_zeros(image.shape[0], *kernel)
        for tap in itertools.product(*map(range, kernel)):
            source = [p + module.padding[a] - tap[a] * module.dilation[a] for a, p in enumerate(place)]
            whole = all(s % module.stride[a] == 0 for a, s in enumerate(source))
            at = [s // module.stride[a] for a, s in enumerate(source)]
            if whole and all(0 <= s < image.shape[1 + a] for a, s in enumerate(at)):
                patch[(slice(None), *tap)] = image[(slice(None), *at)]
        rows.append(patch.reshape(module.groups, -1))
    return torch.stack(rows)


# one entry for each layer kind: what a call adds to the record


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], name: str = "input", place: int = 0) -> Tensor:
    return args[place] if len(args) > place else kwargs[name]


def watch_linear(record: Record, module: Any, x: Tensor, zero: Tensor) -> None:
    h = x.detach().reshape(-1, x.shape[-1])
    index = matrices(module.weight)
    use = Use(h, zero, lambda g: g.reshape(-1, g.shape[-1]), tuple(x.shape[1:-1]))
    record.add(module.weight, "matrix", index, 0, use)


def watch_conv1d_of_transformers(record: Record, module: Any, x: Tensor, zero: Tensor) -> None:
    h = x.detach().reshape(-1, x.shape[-1])
    use = Use(h, zero, lambda g: g.reshape(-1, g.shape[-1]), tuple(x.shape[1:-1]))
    record.add(module.weight, "transposed", transposed(module.weight), 0, use)


def watch_convolution(record: Record, module: Any, x: Tensor, zero: Tensor) -> None:
    out, groups = tuple(zero.shape[2:]), module.groups
    if isinstance(module, TRANSPOSED):
        rows, index = transposed_patches(module, x, out), transposed_convolution(module.weight, groups)
    else:
        rows, index = patches(module, x, out), matrices(module.weight, groups)
    for g in range(groups):

        def of_group(gradient: Tensor, g: int = g) -> Tensor:
            return gradient.flatten(2).transpose(1, 2).flatten(0, 1).unflatten(1, (groups, -1))[:, g]

        record.add(module.weight, "matrix", index, g, Use(rows[:, g], zero, of_group, out))


def watch_embedding(record: Record, module: Any, x: Tensor, zero: Tensor) -> None:
    h = F.one_hot(x.flatten(), module.num_embeddings).to(zero.dtype)
    if module.padding_idx is not None:
        h = h * (x.flatten() != module.padding_idx).to(zero.dtype)[:, None]
    use = Use(h, zero, lambda g: g.reshape(-1, g.shape[-1]), tuple(x.shape[1:]))
    record.add(module.weight, "lookup", transposed(module.weight), 0, use)


def watch_bilinear(record: Record, module: Any, x: Tensor, y: Tensor, zero: Tensor) -> None:
    pairs = x.detach().unsqueeze(-1) * y.detach().unsqueeze(-2)
    h = pairs.reshape(-1, x.shape[-1] * y.shape[-1])
    use = Use(h, zero, lambda g: g.reshape(-1, g.shape[-1]), tuple(x.shape[1:-1]))
    record.add(module.weight, "matrix", matrices(module.weight), 0, use)


def is_conv1d_of_transformers(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


HOOKED = (nn.Linear, nn.Embedding, nn.Bilinear, *CONVOLUTIONS, *TRANSPOSED)


@contextmanager
def watching(model: nn.Module, functions: bool = False) -> Iterator[Record]:
    """Record every use of every layer in the passes made inside; hooks are gone afterwards.

    With `functions`, products with a matrix are seen where F.linear and F.embedding are called, whoever
    calls them, and only modules with torch's own forward are hooked.
    """
    record = Record()

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        zero = torch.zeros_like(output).requires_grad_()
        first = argument(args, kwargs, "input1" if isinstance(module, nn.Bilinear) else "input")
        if isinstance(module, nn.Bilinear):
            watch_bilinear(record, module, first, argument(args, kwargs, "input2", 1), zero)
        elif isinstance(module, nn.Linear):
            watch_linear(record, module, first, zero)
        elif isinstance(module, nn.Embedding):
            watch_embedding(record, module, first, zero)
        elif isinstance(module, CONVOLUTIONS + TRANSPOSED):
            watch_convolution(record, module, first, zero)
        else:
            watch_conv1d_of_transformers(record, module, argument(args, kwargs, "x"), zero)
        return output + zero

    handles = []
    for module in model.modules():
        if isinstance(module, Explicit):
            module.record = record
        elif _to_hook(module, functions):
            handles.append(module.register_forward_hook(hook, with_kwargs=True))
    try:
        with _Functions(record) if functions else nullcontext():
            yield record
    finally:
        for handle in handles:
            handle.remove()
        for module in model.modules():
            if isinstance(module, Explicit):
                module.record = None


def _to_hook(module: nn.Module, functions: bool) -> bool:
    own = dict(module.named_parameters(recurse=False)).get("weight")
    if not isinstance(own, nn.Parameter) or not (
        isinstance(module, HOOKED) or is_conv1d_of_transformers(module)
    ):
        return False
    if not functions:
        return True
    plain = type(module).forward in [kind.forward for kind in HOOKED] and "forward" not in vars(module)
    return plain and not isinstance(module, nn.Linear | nn.Embedding)


LINEAR = (F.linear,)
PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)


class _Functions(TorchFunctionMode):
    """Sees F.linear(x, W), F.embedding(x, W) and x @ W of a parameter W, or of its transpose."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        lookup, product = function is F.embedding, function in PRODUCTS
        if function not in LINEAR and not lookup and not (product and len(args) == 2):
            return out
        x, weight = argument(args, kwargs), argument(args, kwargs, "weight", 1)
        parameter = weight if isinstance(weight, nn.Parameter) else weight._base
        # A product without a graph adds nothing to the gradient.
        if not _whole(parameter, weight) or not weight.requires_grad or not torch.is_grad_enabled():
            return out
        zero = torch.zeros_like(out).requires_grad_()
        kept = F.one_hot(x.flatten(), len(weight)).to(out.dtype) if lookup else x.detach().clone()
        padding = args[2] if len(args) > 2 else kwargs.get("padding_idx")
        if lookup and padding is not None:
            kept = kept * (x.flatten() != padding).to(out.dtype)[:, None]
        h = kept.reshape(-1, kept.shape[-1])
        # F.linear takes W as (o, n), the others as (n, o).
        rows_are_outputs = (not lookup and not product) == (
            weight.shape == parameter.shape and weight.stride() == parameter.stride()
        )
        index = matrices(parameter) if rows_are_outputs else transposed(parameter)
        kind = "lookup" if lookup else "matrix" if rows_are_outputs else "turned"
        positions = tuple(x.shape[1:] if lookup else x.shape[1:-1])
        use = Use(h, zero, lambda g: g.reshape(-1, g.shape[-1]), positions)
        self.record.add(parameter, kind, index, 0, use)
        return out + zero


def _whole(parameter: Any, weight: Tensor) -> bool:
    """Whether the weight is the parameter, a matrix, or a view of all of it as it is or transposed."""
    if not isinstance(parameter, nn.Parameter) or parameter.ndim != 2 or weight.ndim != 2:
        return False
    same = weight.shape == parameter.shape and weight.stride() == parameter.stride()
    turned = weight.shape == parameter.shape[::-1] and weight.stride() == parameter.stride()[::-1]
    return weight.data_ptr() == parameter.data_ptr() and (same or turned)


# modules that torch computes whole, written so that every matrix product shows


class Explicit(nn.Module):
    """A twin of a torch module, with its parameters, whose products with matrices the record sees."""

    record: Record | None = None

    def product(
        self, weight: Tensor, bias: Tensor | None, x: Tensor, part: int = 0, parts: int = 1
    ) -> Tensor:
        """W_part x + b_part for the part of the rows of `weight`."""
        index = matrices(weight, parts)
        # The record is made here, once, and not by those who look at functions.
        with torch._C.DisableTorchFunction():
            out = F.linear(x, weight.chunk(parts)[part], None if bias is None else bias.chunk(parts)[part])
        if self.record is None:
            return out
        zero = torch.zeros_like(out).requires_grad_()
        h = x.detach().reshape(-1, x.shape[-1])
        use = Use(h, zero, lambda g: g.reshape(-1, g.shape[-1]), tuple(x.shape[1:-1]))
        self.record.add(weight, "matrix", index, part, use)
        return out + zero


class ExplicitAttention(Explicit):
    """nn.MultiheadAttention with the three in-projections one by one."""

    def __init__(self, twin: nn.MultiheadAttention) -> None:
        super().__init__()
        for name, parameter in twin.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self.out_proj = twin.out_proj
        self.num_heads, self.batch_first = twin.num_heads, twin.batch_first
        self._qkv_same_embed_dim = twin._qkv_same_embed_dim
        self.in_proj_bias = twin.in_proj_bias

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        given = [t if self.batch_first else t.transpose(0, 1) for t in (query, key, value)]
        q, k, v = (self._project(p, x) for p, x in enumerate(given))
        (b, t, d), s = q.shape, k.shape[1]
        q, k, v = (x.reshape(b, -1, self.num_heads, d // self.num_heads).transpose(1, 2) for x in (q, k, v))
        scores = q @ k.transpose(-1, -2) / (d // self.num_heads) ** 0.5
        for mask in (attn_mask, None if key_padding_mask is None else key_padding_mask[:, None, None, :]):
            if mask is not None:
                scores = (
                    scores.masked_fill(mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
                )
        weights = scores.softmax(-1)
        out = self.out_proj((weights @ v).transpose(1, 2).reshape(b, t, d))
        assert weights.shape[-1] == s
        return (out if self.batch_first else out.transpose(0, 1)), weights.mean(1) if need_weights else None

    def _project(self, part: int, x: Tensor) -> Tensor:
        if self._qkv_same_embed_dim:
            return self.product(self.in_proj_weight, self.in_proj_bias, x, part, 3)
        weight = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)[part]
        z = self.product(weight, None, x)
        return z if self.in_proj_bias is None else z + self.in_proj_bias.chunk(3)[part]


class ExplicitBag(Explicit):
    """nn.EmbeddingBag on (batch, tokens), `sum` or `mean`: each token looks up its own row."""

    def __init__(self, twin: nn.EmbeddingBag) -> None:
        super().__init__()
        self.weight, self.mode = twin.weight, twin.mode

    def forward(
        self, input: Tensor, offsets: None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        rows = self.weight[input]
        if self.record is not None:
            zero = torch.zeros_like(rows).requires_grad_()
            h = F.one_hot(input.flatten(), len(self.weight)).to(rows.dtype)
            use = Use(h, zero, lambda g: g.reshape(-1, g.shape[-1]), tuple(input.shape[1:]))
            self.record.add(self.weight, "lookup", transposed(self.weight), 0, use)
            rows = rows + zero
        if per_sample_weights is not None:
            rows = rows * per_sample_weights.unsqueeze(-1)
        return rows.sum(1) if self.mode == "sum" else rows.mean(1)


class ExplicitCell(Explicit):
    """nn.RNNCell, nn.GRUCell and nn.LSTMCell with their two products shown."""

    def __init__(self, twin: nn.RNNCellBase) -> None:
        super().__init__()
        for name, parameter in twin.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self.bias_ih, self.bias_hh = twin.bias_ih, twin.bias_hh
        self.kind, self.hidden_size = type(twin).__name__, twin.hidden_size
        self.relu = getattr(twin, "nonlinearity", "tanh") == "relu"

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        zero = input.new_zeros(len(input), self.hidden_size)
        state, cell = hx if isinstance(hx, tuple) else (hx, zero)
        state, cell = (zero if state is None else state), (zero if cell is None else cell)
        x = self.product(self.weight_ih, self.bias_ih, input)
        h = self.product(self.weight_hh, self.bias_hh, state)
        state, cell = gated(self.kind.removesuffix("Cell"), x, h, state, cell, self.relu)
        return (state, cell) if self.kind == "LSTMCell" else state


def gated(kind: str, x: Tensor, h: Tensor, state: Tensor, cell: Tensor, relu: bool) -> tuple[Tensor, Tensor]:
    """The next state (and cell) of a recurrent layer, from its two products."""
    if kind == "RNN":
        return ((x + h).relu() if relu else (x + h).tanh()), cell
    if kind == "GRU":
        (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), h.chunk(3, -1)
        update = (xz + hz).sigmoid()
        return (1 - update) * (xn + (xr + hr).sigmoid() * hn).tanh() + update * state, cell
    i, f, g, o = (x + h).chunk(4, -1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


class ExplicitRecurrent(Explicit):
    """nn.RNN, nn.GRU and nn.LSTM, batch first and in one direction, step by step."""

    def __init__(self, twin: nn.RNNBase) -> None:
        super().__init__()
        for name, parameter in twin.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        assert twin.batch_first
        self.kind, self.num_layers, self.hidden_size = (
            twin.mode.split("_")[0],
            twin.num_layers,
            twin.hidden_size,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        for layer in range(self.num_layers):
            state = cell = x.new_zeros(len(x), self.hidden_size)
            outputs = []
            for t in range(x.shape[1]):
                given, before = (
                    self.product(
                        getattr(self, f"weight_{w}_l{layer}"), getattr(self, f"bias_{w}_l{layer}"), v
                    )
                    for w, v in (("ih", x[:, t]), ("hh", state))
                )
                state, cell = gated(self.kind, given, before, state, cell, relu=False)
                outputs.append(state)
            x = torch.stack(outputs, 1)
        return x, None


class ExplicitWeightNorm(nn.Module):
    """The parametrisation g v / ‖v‖ in plain operations: torch's own has a wrong second derivative."""

    def __init__(self, twin: Any) -> None:
        super().__init__()
        self.dim = twin.dim

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        others = [d for d in range(v.ndim) if d != self.dim]
        return v * (g / (v * v).sum(others, keepdim=True).sqrt())


TWINS: dict[type[nn.Module], type[Any]] = {
    nn.MultiheadAttention: ExplicitAttention,
    nn.EmbeddingBag: ExplicitBag,
    nn.RNNCell: ExplicitCell,
    nn.GRUCell: ExplicitCell,
    nn.LSTMCell: ExplicitCell,
    nn.RNN: ExplicitRecurrent,
    nn.GRU: ExplicitRecurrent,
    nn.LSTM: ExplicitRecurrent,
    parametrizations._WeightNorm: ExplicitWeightNorm,
}


def explicit(model: nn.Module) -> nn.Module:
    """The model with its children of the kinds above replaced, in place; parameter names stay."""
    if type(model) in TWINS:
        return TWINS[type(model)](model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in TWINS:
                twin = TWINS[type(child)](child)
                twin.train(child.training)
                setattr(parent, name, twin)
    return model
