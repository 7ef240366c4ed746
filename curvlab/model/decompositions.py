"""Attention and recurrent functions of torch, written out with `linear` and elementary functions.

Some functions of torch use several weights inside, where nobody who watches the calls can see them. Each
function here has the signature of one of those and computes the same from calls of
`torch.nn.functional.linear`, so that a `torch.overrides.TorchFunctionMode` sees every use of a weight.
With queries Q, keys K and values V of d features in each head, attention is

    softmax(Q Kᵀ / √d + M) V,       Q = x_q W_qᵀ + b_q,   K = x_k W_kᵀ + b_k,   V = x_v W_vᵀ + b_v

and a recurrent layer takes h_t = step(x_t W_ihᵀ + b_ih, h_{t-1} W_hhᵀ + b_hh). How often `linear` is called:

    multi_head_attention_forward       4: rows of q, k and v in this order, then the output projection
    lstm, gru, rnn_tanh, rnn_relu      for each layer and direction 1 with W_ih for all T time steps, then T
                                       with W_hh, each followed by one with W_hr where an LSTM has projections
    lstm_cell, gru_cell, rnn_…_cell    2: W_ih, then W_hh
    scaled_dot_product_attention       0

The input of every call has the batch dimension first, (batch, length, features) or (batch, features),
whichever layout the model uses. A part of a packed weight is a view of it: its `_base` is the parameter.
Every function used here has a double backward and a forward-mode rule, unlike torch's fused kernels.

>>> query, key, value = torch.randn(3, 2, 4, 5, dtype=torch.float64)
>>> written_out = DECOMPOSITIONS[F.scaled_dot_product_attention]
>>> torch.allclose(written_out(query, key, value), F.scaled_dot_product_attention(query, key, value))
True
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod, sqrt
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from ..exceptions import CurvlabError

__all__ = ["DECOMPOSITIONS", "NotDecomposedError"]


class NotDecomposedError(CurvlabError, NotImplementedError):
    """A call that is not written out here: whoever substitutes functions calls torch's own function instead.

    It is raised before the first call of `linear`, so that no use of a weight is seen twice. Calls that
    torch itself refuses come here too, because torch's message about them is the better one.
    """


# ------------------------------------------------------------------------------------------ attention


def _additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as a term of the scores: −∞ where a boolean mask is true; a mask of numbers is one already."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -inf)


def _softmax_or_zero(scores: Tensor) -> Tensor:
    """Softmax over the last dimension; zeros where a query may attend to nothing (plain softmax has NaN)."""
    nothing = (scores == -inf).all(-1, keepdim=True)
    return scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Q Kᵀ · scale + M."""
    scores = (query * scale) @ key.transpose(-2, -1)
    return scores if mask is None else scores + mask


def _causal_mask(query: Tensor, key: Tensor) -> Tensor:
    """True where a key comes after the query, so that the query may not attend to it."""
    shape = (query.shape[-2], key.shape[-2])
    return torch.ones(shape, dtype=torch.bool, device=query.device).triu(1)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(Q Kᵀ · scale + M) V for tensors (…, length, features); scale is 1/√d unless it is given.

    A boolean `attn_mask` is true where a query may attend to a key, the opposite of the masks of
    `multi_head_attention_forward`.
    """
    if query.is_nested or (is_causal and attn_mask is not None):
        raise NotDecomposedError(
            "`scaled_dot_product_attention` is written out for dense tensors and for `attn_mask` or "
            "`is_causal`, not both; this call has nested tensors or both."
        )
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    mask = _causal_mask(query, key) if is_causal else attn_mask
    if mask is not None:
        excluded = mask if is_causal or mask.dtype != torch.bool else ~mask
        mask = _additive_mask(excluded, query.dtype)
    scores = _scores(query, key, mask, 1 / sqrt(query.shape[-1]) if scale is None else scale)
    weights = scores.softmax(-1) if attn_mask is None else _softmax_or_zero(scores)
    if dropout_p > 0.0:
        weights = F.dropout(weights, dropout_p)
    output = weights @ value
    # Fused kernels store the output as the query is stored, and a model may rely on it: after them
    # `.transpose(1, 2).view(…)` joins heads that were split by `.view(…).transpose(1, 2)`.
    fused = (
        query.dim() == 4
        and dropout_p == 0.0
        and query.shape[-1] == value.shape[-1]
        and not (attn_mask is not None and attn_mask.requires_grad)
    )
    if fused and query.stride(1) < query.stride(2):
        output = output.transpose(1, 2).contiguous().transpose(1, 2)
    return output


def _attention_shapes_fit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    separate: bool,
    static: Sequence[Tensor],
) -> bool:
    """Whether shapes and types are those that `multi_head_attention_forward` of torch accepts.

    Without this check a mask of a wrong shape might be broadcast here while torch refuses it.
    """
    if any(tensor.is_nested for tensor in (query, key, value)):
        return False
    if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
        return False
    target, *batch, features = query.shape
    source = key.shape[0]
    heads = num_heads * prod(batch)
    masks = [mask for mask in (key_padding_mask, attn_mask) if mask is not None]
    return (
        features % num_heads == 0
        and list(key.shape[1:-1]) == batch
        and (key.shape[:-1] == value.shape[:-1] if separate else key.shape == value.shape)
        and all(mask.dtype == torch.bool or mask.is_floating_point() for mask in masks)
        and (key_padding_mask is None or key_padding_mask.shape == (*batch, source))
        and (attn_mask is None or attn_mask.shape in ((target, source), (heads, target, source)))
        and all(rows.shape[::2] == (heads, features // num_heads) for rows in static)
    )


def _rows_of_projections(packed: Tensor | None, features: int) -> list[Tensor | None]:
    """The rows of a packed weight or bias that belong to the query, the key and the value, as views."""
    if packed is None:
        return [None, None, None]
    return [packed.narrow(0, part * features, features) for part in range(3)]


def _append_key(keys: Tensor, extra: Tensor) -> Tensor:
    """Keys or values (…, source, features) with one more, the same for every example."""
    return torch.cat([keys, extra.expand(*keys.shape[:-2], 1, keys.shape[-1])], dim=-2)


def _merge_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, num_heads: int, extra: int, dtype: torch.dtype
) -> Tensor | None:
    """The sum of both masks, for scores (batch, heads, target, source + extra); extra keys are not masked."""
    mask: Tensor | None = None
    if attn_mask is not None:
        mask = F.pad(_additive_mask(attn_mask, dtype), (0, extra))
        mask = mask.unflatten(0, (-1, num_heads)) if mask.dim() == 3 else mask
    if key_padding_mask is not None:
        padding = F.pad(_additive_mask(key_padding_mask, dtype), (0, extra))
        padding = padding.view(-1, 1, 1, padding.shape[-1])
        mask = padding if mask is None else mask + padding
    return mask


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention of several heads, for a query (target, batch, features), keys and values (source, batch, …).

    The three input projections are three calls of `linear` also where query, key and value are one tensor.
    `static_k` and `static_v` take the place of projected keys and values, which are computed nevertheless,
    as in torch.
    """
    features = query.shape[-1]
    # torch takes `is_causal` as the mask only in this case, and otherwise as a mere hint about `attn_mask`
    causal = is_causal and key_padding_mask is None and not need_weights
    given_mask = None if causal else attn_mask
    separate = [q_proj_weight, k_proj_weight, v_proj_weight]
    given = separate if use_separate_proj_weight else _rows_of_projections(in_proj_weight, features)
    weights = [weight for weight in given if weight is not None]
    static = [rows for rows in (static_k, static_v) if rows is not None]
    if (
        features != embed_dim_to_check
        or len(weights) != 3
        or (is_causal and attn_mask is None)
        or (bias_k is None) != (bias_v is None)
        or (bias_k is not None and static)
        or not _attention_shapes_fit(
            query, key, value, num_heads, key_padding_mask, given_mask, use_separate_proj_weight, static
        )
    ):
        raise NotDecomposedError(
            "`multi_head_attention_forward` was given arguments that do not fit together."
        )

    batched = query.dim() == 3
    inputs = [tensor.transpose(0, 1) if batched else tensor.unsqueeze(0) for tensor in (query, key, value)]
    biases = _rows_of_projections(in_proj_bias, features)
    projected = [F.linear(*arguments) for arguments in zip(inputs, weights, biases, strict=True)]
    q, k, v = (rows.unflatten(-1, (num_heads, -1)).transpose(1, 2) for rows in projected)
    if static_k is not None:
        k = static_k.unflatten(0, (-1, num_heads))
    if static_v is not None:
        v = static_v.unflatten(0, (-1, num_heads))

    source = k.shape[-2]
    if bias_k is not None and bias_v is not None:
        k = _append_key(k, bias_k.view(num_heads, 1, -1))
        v = _append_key(v, bias_v.view(num_heads, 1, -1))
    if add_zero_attn:
        k = _append_key(k, k.new_zeros(1))
        v = _append_key(v, v.new_zeros(1))

    if causal:
        mask: Tensor | None = _additive_mask(_causal_mask(q, k), q.dtype)
    else:
        mask = _merge_masks(given_mask, key_padding_mask, num_heads, k.shape[-2] - source, q.dtype)
    scores = _scores(q, k, mask, 1 / sqrt(q.shape[-1]))
    # torch gives NaN where a query may attend to nothing and weights are wanted, and zeros otherwise
    attention = scores.softmax(-1) if need_weights or mask is None else _softmax_or_zero(scores)
    if training and dropout_p > 0.0:
        attention = F.dropout(attention, dropout_p)
    output = F.linear((attention @ v).transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias)
    output = output.transpose(0, 1).contiguous() if batched else output.squeeze(0)
    if not need_weights:
        return output, None
    if average_attn_weights:
        attention = attention.mean(1)
    return output, attention if batched else attention.squeeze(0)


# ----------------------------------------------------------------------------------- recurrent layers


class _CellWeights(NamedTuple):
    """Weights of one layer in one direction; W_hr projects the hidden state of an LSTM."""

    input_hidden: Tensor
    hidden_hidden: Tensor
    input_bias: Tensor | None
    hidden_bias: Tensor | None
    projection: Tensor | None = None


# From x_t W_ihᵀ + b_ih and the states of the previous time step (h first) to the states of this one.
_Step: TypeAlias = Callable[[Tensor, tuple[Tensor, ...], _CellWeights], tuple[Tensor, ...]]


def _lstm_step(inputs: Tensor, state: tuple[Tensor, ...], weights: _CellWeights) -> tuple[Tensor, ...]:
    """c_t = σ(f) c_{t-1} + σ(i) tanh(g), h_t = W_hr (σ(o) tanh(c_t)), for the parts (i, f, g, o)."""
    hidden, memory = state
    gates = inputs + F.linear(hidden, weights.hidden_hidden, weights.hidden_bias)
    take, keep, candidate, show = gates.chunk(4, -1)
    memory = keep.sigmoid() * memory + take.sigmoid() * candidate.tanh()
    hidden = show.sigmoid() * memory.tanh()
    if weights.projection is not None:
        hidden = F.linear(hidden, weights.projection)
    return hidden, memory


def _gru_step(inputs: Tensor, state: tuple[Tensor, ...], weights: _CellWeights) -> tuple[Tensor, ...]:
    """n = tanh(x_n + σ(r) h_n), h_t = (1 − σ(z)) n + σ(z) h_{t-1}, for the parts (r, z, n)."""
    (hidden,) = state
    recurrent = F.linear(hidden, weights.hidden_hidden, weights.hidden_bias)
    input_reset, input_update, input_candidate = inputs.chunk(3, -1)
    hidden_reset, hidden_update, hidden_candidate = recurrent.chunk(3, -1)
    reset = (input_reset + hidden_reset).sigmoid()
    update = (input_update + hidden_update).sigmoid()
    candidate = (input_candidate + reset * hidden_candidate).tanh()
    return (candidate + update * (hidden - candidate),)


def _tanh_step(inputs: Tensor, state: tuple[Tensor, ...], weights: _CellWeights) -> tuple[Tensor, ...]:
    """h_t = tanh(x + h)."""
    return ((inputs + F.linear(state[0], weights.hidden_hidden, weights.hidden_bias)).tanh(),)


def _relu_step(inputs: Tensor, state: tuple[Tensor, ...], weights: _CellWeights) -> tuple[Tensor, ...]:
    """h_t = max(0, x + h)."""
    return ((inputs + F.linear(state[0], weights.hidden_hidden, weights.hidden_bias)).relu(),)


def _cell(step: _Step) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """The function of one time step, with the signature of `torch.lstm_cell` and its like."""

    def cell(
        input: Tensor,
        hx: Tensor | Sequence[Tensor],
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        new = step(F.linear(input, w_ih, b_ih), state, _CellWeights(w_ih, w_hh, b_ih, b_hh))
        return new[0] if isinstance(hx, Tensor) else new

    return cell


def _weights_of_cells(
    params: Sequence[Tensor], biases: bool, cells: int, projected: bool
) -> list[_CellWeights]:
    """Weights of each layer and direction from torch's flat list: W_ih, W_hh, then b_ih, b_hh, then W_hr."""
    each = 2 + 2 * biases + projected
    if len(params) != each * cells:
        raise NotDecomposedError(
            f"A recurrent function needs {each * cells} weights; {len(params)} were given."
        )
    split = []
    for first in range(0, len(params), each):
        w_ih, w_hh, *rest = params[first : first + each]
        b_ih, b_hh = rest[:2] if biases else (None, None)
        split.append(_CellWeights(w_ih, w_hh, b_ih, b_hh, rest[-1] if projected else None))
    return split


def _layers(step: _Step) -> Callable[..., tuple[Tensor, ...]]:
    """The function of a whole sequence, with the signature of `torch.lstm` and its like.

    Packed sequences are not written out: their rows are sorted by time, so they are not examples in order.
    """

    def layers(
        input: Tensor,
        hx: Tensor | Sequence[Tensor],
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        initial = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        directions = 2 if bidirectional else 1
        # as torch does: the hidden state of an LSTM is smaller than its memory only where it is projected
        projected = len(initial) == 2 and initial[0].shape[-1] != initial[1].shape[-1]
        cells = _weights_of_cells(params, has_biases, num_layers * directions, projected)
        sequence = input if batch_first else input.transpose(0, 1)  # (batch, time, features)
        state_shape = (len(cells), sequence.shape[0])
        if input.dim() != 3 or sequence.shape[1] == 0 or any(s.shape[:2] != state_shape for s in initial):
            raise NotDecomposedError("A recurrent function was given an input and states that do not fit.")
        final: list[tuple[Tensor, ...]] = []
        for layer in range(num_layers):
            outputs = []
            for direction in range(directions):
                weights = cells[len(final)]
                state = tuple(states[len(final)] for states in initial)
                steps = F.linear(sequence, weights.input_hidden, weights.input_bias).unbind(1)
                hidden = []
                for inputs in reversed(steps) if direction else steps:
                    state = step(inputs, state, weights)
                    hidden.append(state[0])
                outputs.append(torch.stack(hidden[::-1] if direction else hidden))
                final.append(state)
            output = torch.cat(outputs, -1)  # (time, batch, features), the order in which torch stores it
            if train and dropout > 0.0 and layer < num_layers - 1:
                output = F.dropout(output, dropout)
            sequence = output.transpose(0, 1)
        states = tuple(torch.stack(state) for state in zip(*final, strict=True))
        return (sequence if batch_first else sequence.transpose(0, 1), *states)

    def layers_of_padded(*arguments: Any, **keywords: Any) -> tuple[Tensor, ...]:
        second = arguments[1] if len(arguments) > 1 else keywords.get("hx")
        if "batch_sizes" in keywords or (isinstance(second, Tensor) and second.dtype == torch.int64):
            raise NotDecomposedError(
                "Recurrent functions are written out for padded batches (batch, time, features), not for a "
                "packed sequence. Give the layer a padded tensor, without `pack_padded_sequence`."
            )
        return layers(*arguments, **keywords)

    return layers_of_padded


# From a function of torch to the one that computes the same. A mode is off while it handles a call, so it is
# entered again around the substitute: `with mode: return DECOMPOSITIONS[function](*arguments, **keywords)`.
DECOMPOSITIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.multi_head_attention_forward: multi_head_attention_forward,
    F.scaled_dot_product_attention: scaled_dot_product_attention,
    torch.lstm: _layers(_lstm_step),
    torch.gru: _layers(_gru_step),
    torch.rnn_tanh: _layers(_tanh_step),
    torch.rnn_relu: _layers(_relu_step),
    torch.lstm_cell: _cell(_lstm_step),
    torch.gru_cell: _cell(_gru_step),
    torch.rnn_tanh_cell: _cell(_tanh_step),
    torch.rnn_relu_cell: _cell(_relu_step),
}
