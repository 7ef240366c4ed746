"""Decompositions: attention and recurrent functions written out equal torch's own, and show uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.overrides import TorchFunctionMode

from curvlab.model.decompositions import DECOMPOSITIONS, NotDecomposedError

TOLERANCE = 1e-12
FEATURES, HEADS, BATCH, TARGET, SOURCE = 6, 2, 3, 4, 5
WIDTH, HIDDEN, TIME = 4, 3, 5
Names: TypeAlias = tuple[str | None, str | None]  # of the weight and the bias of a call of `linear`


class LinearCall(NamedTuple):
    inputs: Tensor
    weight: Tensor
    bias: Tensor | None = None


class Substitution(TorchFunctionMode):
    """Puts the table's functions in the place of torch's and keeps the calls of `linear` that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_calls: list[LinearCall] = []
        self.substituted: list[Callable[..., Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            self.linear_calls.append(LinearCall(*args, **kwargs))
        if func not in DECOMPOSITIONS:
            return func(*args, **kwargs)
        with self:
            result = DECOMPOSITIONS[func](*args, **kwargs)
        self.substituted.append(func)
        return result


@pytest.fixture(autouse=True)
def _float64() -> Any:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(previous)


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [] if value is None else [tensor for part in value for tensor in tensors_of(part)]


def results(call: Callable[[], Any], leaves: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of the call and gradients at the leaves of a fixed random combination of them."""
    outputs = tensors_of(call())
    generator = torch.Generator().manual_seed(1)
    combined = sum(
        (torch.randn(output.shape, generator=generator) * output.nan_to_num()).sum() for output in outputs
    )
    gradients = torch.autograd.grad(combined, leaves, allow_unused=True)
    return outputs, [
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves, gradients, strict=True)
    ]


def check_substitution(call: Callable[[], Any], leaves: list[Tensor], function: Any) -> list[LinearCall]:
    """Compare torch's own results with those of the substitutes; return the calls of `linear` seen."""
    torch.manual_seed(2)  # the same numbers for dropout in both
    outputs, gradients = results(call, leaves)
    torch.manual_seed(2)
    with (mode := Substitution()):
        written_outputs, written_gradients = results(call, leaves)
    assert mode.substituted == [function]
    assert [output.stride() for output in written_outputs] == [output.stride() for output in outputs]
    for given, expected in zip(written_outputs + written_gradients, outputs + gradients, strict=True):
        torch.testing.assert_close(given, expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    return mode.linear_calls


def name_of(tensor: Tensor | None, module: nn.Module) -> str | None:
    """`name` of a parameter of the module, `name[first:last]` for rows of one."""
    if tensor is None:
        return None
    for name, parameter in module.named_parameters():
        if tensor is parameter:
            return name
        if tensor._base is parameter:
            assert tensor.stride() == parameter.stride()
            first, remainder = divmod(tensor.storage_offset(), parameter.stride(0))
            assert remainder == 0
            return f"{name}[{first}:{first + tensor.shape[0]}]"
    raise AssertionError("the weight of a call of `linear` is no parameter and no view of one")


def names_of(calls: list[LinearCall], module: nn.Module) -> list[Names]:
    return [(name_of(call.weight, module), name_of(call.bias, module)) for call in calls]


def randomise(module: nn.Module) -> list[Tensor]:
    """Give every parameter (torch sets biases to zero) random numbers; return the parameters."""
    parameters = list(module.parameters())
    with torch.no_grad():
        for parameter in parameters:
            parameter.normal_(std=0.5)
    return parameters


# ---------------------------------------------------------------------------------- attention layers


def padding_mask(batched: bool = True) -> Tensor:
    mask = torch.zeros(BATCH, SOURCE, dtype=torch.bool)
    mask[0, 3:] = True
    mask[2, 0] = True
    return mask if batched else mask[0]


def open_mask(*shape: int) -> Tensor:
    """A random boolean mask that leaves every query key 1, which `padding_mask` leaves too."""
    mask = torch.rand(shape) < 0.5
    mask[..., 1] = False
    return mask


def float_mask(mask: Tensor) -> Tensor:
    return torch.randn(mask.shape).masked_fill(mask, -torch.inf)


def later(rows: int, columns: int) -> Tensor:
    return torch.ones(rows, columns, dtype=torch.bool).triu(1)


def all_keys_of_query_1(rows: int, columns: int) -> Tensor:
    return (torch.arange(rows) == 1)[:, None].expand(rows, columns)


ATTENTION: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "plain": ({}, dict),
    "no weights": ({}, lambda: {"need_weights": False}),
    "weights of each head": ({}, lambda: {"average_attn_weights": False}),
    "batch first": ({"batch_first": True}, dict),
    "batch first, no weights": ({"batch_first": True}, lambda: {"need_weights": False}),
    "no bias": ({"bias": False}, dict),
    "bias_kv": ({"add_bias_kv": True}, dict),
    "zero attention": ({"add_zero_attn": True}, lambda: {"need_weights": False}),
    "separate weights": ({"kdim": 5, "vdim": 7}, dict),
    "separate weights, no bias": ({"kdim": 5, "vdim": 7, "bias": False}, lambda: {"need_weights": False}),
    "bool mask": ({}, lambda: {"attn_mask": open_mask(TARGET, SOURCE)}),
    "bool mask, no weights": ({}, lambda: {"attn_mask": open_mask(TARGET, SOURCE), "need_weights": False}),
    "float mask": ({}, lambda: {"attn_mask": float_mask(open_mask(TARGET, SOURCE))}),
    "bool 3-D mask": ({}, lambda: {"attn_mask": open_mask(BATCH * HEADS, TARGET, SOURCE)}),
    "float 3-D mask, no weights": (
        {},
        lambda: {"attn_mask": float_mask(open_mask(BATCH * HEADS, TARGET, SOURCE)), "need_weights": False},
    ),
    "padding": ({}, lambda: {"key_padding_mask": padding_mask()}),
    "float padding, no weights": (
        {},
        lambda: {"key_padding_mask": float_mask(padding_mask()), "need_weights": False},
    ),
    "padding and 3-D mask": (
        {},
        lambda: {
            "key_padding_mask": padding_mask(),
            "attn_mask": open_mask(BATCH * HEADS, TARGET, SOURCE),
        },
    ),
    "every option": (
        {"add_bias_kv": True, "add_zero_attn": True, "kdim": 5, "vdim": 7, "batch_first": True},
        lambda: {
            "key_padding_mask": padding_mask(),
            "attn_mask": open_mask(TARGET, SOURCE),
            "average_attn_weights": False,
        },
    ),
    "every option, no weights": (
        {"add_bias_kv": True, "add_zero_attn": True},
        lambda: {
            "key_padding_mask": float_mask(padding_mask()),
            "attn_mask": float_mask(open_mask(BATCH * HEADS, TARGET, SOURCE)),
            "need_weights": False,
        },
    ),
    "causal": ({}, lambda: {"attn_mask": later(TARGET, SOURCE), "is_causal": True}),
    "causal, no weights": (
        {},
        lambda: {"attn_mask": later(TARGET, SOURCE), "is_causal": True, "need_weights": False},
    ),
    # torch ignores the mask where it takes the hint: another mask shows that the hint is taken
    "causal by hint alone": (
        {"add_bias_kv": True},
        lambda: {"attn_mask": torch.zeros(TARGET, SOURCE), "is_causal": True, "need_weights": False},
    ),
    "causal with padding": (
        {},
        lambda: {
            "attn_mask": open_mask(TARGET, SOURCE),
            "is_causal": True,
            "need_weights": False,
            "key_padding_mask": padding_mask(),
        },
    ),
    "nothing to attend to": ({}, lambda: {"attn_mask": all_keys_of_query_1(TARGET, SOURCE)}),
    "nothing to attend to, no weights": (
        {},
        lambda: {"attn_mask": all_keys_of_query_1(TARGET, SOURCE), "need_weights": False},
    ),
}


def expected_attention_calls(options: dict[str, Any]) -> list[Names]:
    thirds = [f"[{part * FEATURES}:{(part + 1) * FEATURES}]" for part in range(3)]
    bias = options.get("bias", True)
    weights = [f"in_proj_weight{rows}" for rows in thirds]
    if "kdim" in options:
        weights = ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
    calls: list[Names] = [
        (weight, f"in_proj_bias{rows}" if bias else None)
        for weight, rows in zip(weights, thirds, strict=True)
    ]
    return [*calls, ("out_proj.weight", "out_proj.bias" if bias else None)]


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_written_out_equals_torch_and_shows_four_uses(case: str) -> None:
    options, arguments_of = ATTENTION[case]
    module = nn.MultiheadAttention(FEATURES, HEADS, **options)
    leaves = randomise(module)
    widths = (FEATURES, options.get("kdim", FEATURES), options.get("vdim", FEATURES))
    inputs = [
        torch.randn(*((BATCH, length) if module.batch_first else (length, BATCH)), width, requires_grad=True)
        for length, width in zip((TARGET, SOURCE, SOURCE), widths, strict=True)
    ]
    arguments = arguments_of()
    calls = check_substitution(
        lambda: module(*inputs, **arguments), [*leaves, *inputs], F.multi_head_attention_forward
    )
    assert names_of(calls, module) == expected_attention_calls(options)
    lengths = (TARGET, SOURCE, SOURCE, TARGET)
    assert [call.inputs.shape[:2] for call in calls] == [(BATCH, length) for length in lengths]
    for call, given in zip(calls, inputs, strict=False):
        assert torch.equal(call.inputs, given if module.batch_first else given.transpose(0, 1))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("mask", [None, "2-D", "3-D"])
def test_attention_without_a_batch_dimension_equals_torch(need_weights: bool, mask: str | None) -> None:
    module = nn.MultiheadAttention(FEATURES, HEADS)
    leaves = randomise(module)
    query, key = torch.randn(TARGET, FEATURES), torch.randn(SOURCE, FEATURES)
    arguments: dict[str, Any] = {"need_weights": need_weights}
    if mask is not None:
        arguments["key_padding_mask"] = padding_mask(batched=False)
        arguments["attn_mask"] = open_mask(*((TARGET, SOURCE) if mask == "2-D" else (HEADS, TARGET, SOURCE)))
    call = lambda: module(query, key, key, **arguments)  # noqa: E731
    calls = check_substitution(call, leaves, F.multi_head_attention_forward)
    assert names_of(calls, module) == expected_attention_calls({})
    assert [call.inputs.shape[0] for call in calls] == [1, 1, 1, 1]


@pytest.mark.parametrize("batch_first", [False, True])
def test_self_attention_of_one_tensor_is_three_uses_of_the_packed_weight(batch_first: bool) -> None:
    module = nn.MultiheadAttention(FEATURES, HEADS, batch_first=batch_first)
    leaves = randomise(module)
    inputs = torch.randn(3, 3, FEATURES, requires_grad=True)
    call = lambda: module(inputs, inputs, inputs)  # noqa: E731
    calls = check_substitution(call, [*leaves, inputs], F.multi_head_attention_forward)
    assert names_of(calls, module) == expected_attention_calls({})


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_drops_the_same_weights_as_torch_in_training(need_weights: bool) -> None:
    module = nn.MultiheadAttention(FEATURES, HEADS, dropout=0.4)
    leaves = randomise(module)
    query = torch.randn(TARGET, BATCH, FEATURES)
    call = lambda: module(query, query, query, need_weights=need_weights)  # noqa: E731
    check_substitution(call, leaves, F.multi_head_attention_forward)
    trained = call()[0]
    module.eval()
    assert not torch.allclose(trained, call()[0])
    check_substitution(call, leaves, F.multi_head_attention_forward)


def attention_arguments() -> dict[str, Any]:
    rows = torch.randn(TARGET, BATCH, FEATURES)
    return {
        "query": rows,
        "key": rows,
        "value": rows,
        "embed_dim_to_check": FEATURES,
        "num_heads": HEADS,
        "in_proj_weight": torch.randn(3 * FEATURES, FEATURES),
        "in_proj_bias": None,
        "bias_k": None,
        "bias_v": None,
        "add_zero_attn": False,
        "dropout_p": 0.0,
        "out_proj_weight": torch.randn(FEATURES, FEATURES),
        "out_proj_bias": None,
    }


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("given", [("static_k",), ("static_v",), ("static_k", "static_v")])
def test_static_keys_and_values_replace_the_projected_ones(
    given: tuple[str, ...], need_weights: bool
) -> None:
    module = nn.MultiheadAttention(FEATURES, HEADS)
    leaves = randomise(module)
    key = torch.randn(SOURCE, BATCH, FEATURES)
    static = {
        name: torch.randn(BATCH * HEADS, SOURCE, FEATURES // HEADS, requires_grad=True) for name in given
    }

    weights = {
        "in_proj_weight": module.in_proj_weight,
        "in_proj_bias": module.in_proj_bias,
        "out_proj_weight": module.out_proj.weight,
        "out_proj_bias": module.out_proj.bias,
    }
    arguments = {**attention_arguments(), **weights, **static, "key": key, "value": key}
    call = lambda: F.multi_head_attention_forward(**arguments, need_weights=need_weights)  # noqa: E731
    calls = check_substitution(call, [*leaves, *static.values()], F.multi_head_attention_forward)
    assert names_of(calls, module) == expected_attention_calls({})


@pytest.mark.parametrize(
    "wrong",
    [
        {"attn_mask": torch.zeros(1, TARGET)},
        {"attn_mask": torch.zeros(1, TARGET, TARGET)},
        {"attn_mask": torch.zeros(TARGET, TARGET, dtype=torch.int64)},
        {"key_padding_mask": torch.zeros(1, TARGET, dtype=torch.bool)},
        {"is_causal": True},
        {"embed_dim_to_check": FEATURES + 2},
        {"num_heads": 4},
        {"in_proj_weight": None},
        {"use_separate_proj_weight": True},
        {"bias_k": torch.zeros(1, 1, FEATURES)},
        {"key": torch.zeros(TARGET, 1, FEATURES)},
        dict.fromkeys(("key", "value"), torch.zeros(TARGET, 1, FEATURES)),
        {"query": torch.zeros(TARGET, FEATURES)},
        {"query": torch.zeros(1, TARGET, BATCH, FEATURES)},
        {"static_k": torch.zeros(BATCH, TARGET, FEATURES)},
        dict.fromkeys(("bias_k", "bias_v"), torch.zeros(1, 1, FEATURES))
        | {"static_v": torch.zeros(BATCH * HEADS, TARGET, FEATURES // HEADS)},
    ],
    ids=lambda wrong: " and ".join(wrong),
)
def test_attention_that_torch_refuses_is_handed_back_before_any_use(wrong: dict[str, Any]) -> None:
    arguments = {**attention_arguments(), **wrong}
    with pytest.raises((RuntimeError, AssertionError)):
        F.multi_head_attention_forward(**arguments)
    mode = Substitution()
    with mode, pytest.raises(NotDecomposedError):
        F.multi_head_attention_forward(**arguments)
    assert mode.linear_calls == []


# --------------------------------------------------------------------------- attention of tensors alone

DOT_PRODUCT: dict[str, tuple[Callable[[], dict[str, Any]], tuple[int, ...], tuple[int, ...]]] = {
    "plain": (dict, (2, 3, 4, 5), (2, 3, 6, 5)),
    "three dimensions": (dict, (2, 4, 5), (2, 6, 5)),
    "causal": (lambda: {"is_causal": True}, (2, 3, 4, 5), (2, 3, 4, 5)),
    "causal, more keys": (lambda: {"is_causal": True}, (2, 3, 4, 5), (2, 3, 6, 5)),
    "causal, fewer keys": (lambda: {"is_causal": True}, (2, 3, 6, 5), (2, 3, 4, 5)),
    "bool mask": (lambda: {"attn_mask": ~open_mask(4, 6)}, (2, 3, 4, 5), (2, 3, 6, 5)),
    "nothing to attend to": (lambda: {"attn_mask": ~all_keys_of_query_1(4, 6)}, (2, 3, 4, 5), (2, 3, 6, 5)),
    "mask of each example": (lambda: {"attn_mask": ~open_mask(2, 1, 4, 6)}, (2, 3, 4, 5), (2, 3, 6, 5)),
    "float mask": (lambda: {"attn_mask": float_mask(open_mask(4, 6))}, (2, 3, 4, 5), (2, 3, 6, 5)),
    "trained mask": (lambda: {"attn_mask": torch.randn(4, 6).requires_grad_()}, (2, 3, 4, 5), (2, 3, 6, 5)),
    "scale": (lambda: {"scale": 0.3}, (2, 3, 4, 5), (2, 3, 6, 5)),
    "grouped queries": (lambda: {"enable_gqa": True, "is_causal": True}, (2, 6, 4, 5), (2, 2, 6, 5)),
    "dropout": (lambda: {"dropout_p": 0.4}, (2, 3, 4, 5), (2, 3, 6, 5)),
}


@pytest.mark.parametrize("heads_stored_last", [False, True])
@pytest.mark.parametrize("case", DOT_PRODUCT)
def test_dot_product_attention_written_out_equals_torch(case: str, heads_stored_last: bool) -> None:
    arguments_of, query_shape, key_shape = DOT_PRODUCT[case]
    arguments = arguments_of()

    def rows(shape: tuple[int, ...]) -> Tensor:
        stored = torch.randn(shape)
        if heads_stored_last:
            stored = stored.transpose(-3, -2).contiguous().transpose(-3, -2)
        return stored.requires_grad_()

    query, key, value = rows(query_shape), rows(key_shape), rows(key_shape)
    masks = [mask for mask in arguments.values() if isinstance(mask, Tensor) and mask.requires_grad]
    calls = check_substitution(
        lambda: F.scaled_dot_product_attention(query, key, value, **arguments),
        [query, key, value, *masks],
        F.scaled_dot_product_attention,
    )
    assert calls == []


def test_values_of_another_width_than_the_queries_equal_torch() -> None:
    query = torch.randn(2, 4, 3, 5).transpose(1, 2).requires_grad_()
    value = torch.randn(2, 3, 4, 6, requires_grad=True)
    call = lambda: F.scaled_dot_product_attention(query, query, value)  # noqa: E731
    check_substitution(call, [query, value], F.scaled_dot_product_attention)


def test_dot_product_attention_with_a_mask_and_is_causal_is_handed_back() -> None:
    rows = torch.randn(2, 3, 4, 5)
    with Substitution(), pytest.raises(NotDecomposedError, match="not both"):
        F.scaled_dot_product_attention(rows, rows, rows, attn_mask=torch.zeros(4, 4), is_causal=True)


# -------------------------------------------------------------------------------------- transformers


def renamed(calls: list[Names], prefix: str) -> list[Names]:
    return [(f"{prefix}.{weight}", f"{prefix}.{bias}") for weight, bias in calls]


FEED_FORWARD = [("linear1.weight", "linear1.bias"), ("linear2.weight", "linear2.bias")]


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_encoder_layer_in_eval_mode_shows_all_its_uses(norm_first: bool, masked: bool) -> None:
    module = nn.TransformerEncoderLayer(FEATURES, HEADS, 8, batch_first=True, norm_first=norm_first).eval()
    leaves = randomise(module)
    inputs = torch.randn(BATCH, SOURCE, FEATURES, requires_grad=True)
    arguments = {"src_mask": later(SOURCE, SOURCE), "is_causal": True} if masked else {}
    call = lambda: module(inputs, **arguments)  # noqa: E731
    calls = check_substitution(call, [*leaves, inputs], F.multi_head_attention_forward)
    assert names_of(calls, module) == renamed(expected_attention_calls({}), "self_attn") + FEED_FORWARD


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_encoder_without_gradients_is_seen_although_torch_would_take_its_fused_path() -> None:
    layer = nn.TransformerEncoderLayer(FEATURES, HEADS, 8, batch_first=True)
    module = nn.TransformerEncoder(layer, 2).eval()
    randomise(module)
    inputs = torch.randn(BATCH, SOURCE, FEATURES)
    padding = later(BATCH, SOURCE)
    mode = Substitution()
    with torch.no_grad():
        expected = module(inputs, src_key_padding_mask=padding)
        with mode:
            given = module(inputs, src_key_padding_mask=padding)
    # torch's fused path cuts the padding off, so its answer is shorter and has zeros there
    given = given[:, : expected.shape[1]].masked_fill(padding[:, : expected.shape[1], None], 0.0)
    torch.testing.assert_close(given, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert mode.substituted == [F.multi_head_attention_forward] * 2
    each = renamed(expected_attention_calls({}), "self_attn") + FEED_FORWARD
    assert names_of(mode.linear_calls, module) == renamed(each, "layers.0") + renamed(each, "layers.1")


def test_decoder_layer_shows_self_attention_and_attention_to_the_memory() -> None:
    module = nn.TransformerDecoderLayer(FEATURES, HEADS, 8, dropout=0.0)
    leaves = randomise(module)
    target = torch.randn(TARGET, BATCH, FEATURES, requires_grad=True)
    memory = torch.randn(SOURCE, BATCH, FEATURES, requires_grad=True)
    arguments = {"tgt_mask": later(TARGET, TARGET), "memory_key_padding_mask": padding_mask()}
    expected = results(lambda: module(target, memory, **arguments), [*leaves, target, memory])
    with (mode := Substitution()):
        given = results(lambda: module(target, memory, **arguments), [*leaves, target, memory])
    assert mode.substituted == [F.multi_head_attention_forward] * 2
    torch.testing.assert_close(given, expected, rtol=TOLERANCE, atol=TOLERANCE)
    attention = expected_attention_calls({})
    assert names_of(mode.linear_calls, module) == (
        renamed(attention, "self_attn") + renamed(attention, "multihead_attn") + FEED_FORWARD
    )


# ---------------------------------------------------------------------------------- recurrent layers

RECURRENT: dict[str, tuple[type[nn.RNNBase], dict[str, Any], Any]] = {
    "lstm": (nn.LSTM, {}, torch.lstm),
    "gru": (nn.GRU, {}, torch.gru),
    "tanh": (nn.RNN, {}, torch.rnn_tanh),
    "relu": (nn.RNN, {"nonlinearity": "relu"}, torch.rnn_relu),
}
RECURRENT_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "two layers": {"num_layers": 2},
    "bidirectional": {"bidirectional": True},
    "every option": {
        "num_layers": 3,
        "bidirectional": True,
        "batch_first": True,
        "bias": False,
        "dropout": 0.5,
    },
    "every option with bias": {"num_layers": 2, "bidirectional": True, "dropout": 0.5},
}
PROJECTED = {
    f"lstm, projected, {name}": (nn.LSTM, {**options, "proj_size": 2}, torch.lstm)
    for name, options in RECURRENT_OPTIONS.items()
}
RECURRENT_CASES = {
    f"{kind}, {name}": (module, {**fixed, **options}, function)
    for kind, (module, fixed, function) in RECURRENT.items()
    for name, options in RECURRENT_OPTIONS.items()
} | PROJECTED


def expected_recurrent_calls(options: dict[str, Any]) -> list[Names]:
    calls: list[Names] = []
    for layer in range(options.get("num_layers", 1)):
        for suffix in ["", "_reverse"] if options.get("bidirectional") else [""]:
            end = f"_l{layer}{suffix}"
            bias = options.get("bias", True)
            step = [(f"weight_hh{end}", f"bias_hh{end}" if bias else None)]
            if "proj_size" in options:
                step.append((f"weight_hr{end}", None))
            calls += [(f"weight_ih{end}", f"bias_ih{end}" if bias else None), *step * TIME]
    return calls


def state_of(module: nn.RNNBase, batch: int) -> Any:
    cells = module.num_layers * (2 if module.bidirectional else 1)
    hidden = torch.randn(cells, batch, module.proj_size or HIDDEN, requires_grad=True)
    memory = torch.randn(cells, batch, HIDDEN, requires_grad=True)
    return (hidden, memory) if isinstance(module, nn.LSTM) else hidden


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("case", RECURRENT_CASES)
def test_recurrent_layers_written_out_equal_torch_and_show_each_step(case: str, with_state: bool) -> None:
    kind, options, function = RECURRENT_CASES[case]
    module = kind(WIDTH, HIDDEN, **options).eval()
    leaves = randomise(module)
    state = state_of(module, BATCH) if with_state else None
    shape = (BATCH, TIME) if module.batch_first else (TIME, BATCH)
    inputs = torch.randn(*shape, WIDTH, requires_grad=True)
    calls = check_substitution(lambda: module(inputs, state), [*leaves, inputs, *tensors_of(state)], function)
    assert names_of(calls, module) == expected_recurrent_calls(options)
    assert {call.inputs.shape[0] for call in calls} == {BATCH}
    assert torch.equal(calls[0].inputs, inputs if module.batch_first else inputs.transpose(0, 1))


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_drop_the_same_outputs_as_torch_in_training(kind: str) -> None:
    module_kind, fixed, function = RECURRENT[kind]
    module = module_kind(WIDTH, HIDDEN, num_layers=2, bidirectional=True, dropout=0.4, **fixed)
    leaves = randomise(module)
    inputs = torch.randn(TIME, BATCH, WIDTH)
    check_substitution(lambda: module(inputs), leaves, function)
    trained = module(inputs)[0]
    assert not torch.allclose(trained, module.eval()(inputs)[0])


def test_recurrent_layers_without_a_batch_dimension_equal_torch() -> None:
    module = nn.LSTM(WIDTH, HIDDEN, batch_first=True)
    inputs = torch.randn(TIME, WIDTH, requires_grad=True)
    check_substitution(lambda: module(inputs), [*randomise(module), inputs], torch.lstm)


@pytest.mark.parametrize("kind", RECURRENT)
def test_packed_sequences_are_handed_back_before_any_use(kind: str) -> None:
    module_kind, fixed, _ = RECURRENT[kind]
    module = module_kind(WIDTH, HIDDEN, **fixed)
    packed = pack_padded_sequence(torch.randn(TIME, BATCH, WIDTH), torch.tensor([5, 4, 2]))
    mode = Substitution()
    with mode, pytest.raises(NotDecomposedError, match="packed"):
        module(packed)
    assert mode.linear_calls == []


def test_packed_sequences_given_by_keyword_are_handed_back() -> None:
    module = nn.GRU(WIDTH, HIDDEN)
    arguments = {
        "data": torch.randn(5, WIDTH),
        "batch_sizes": torch.tensor([3, 2]),
        "hx": torch.zeros(1, 3, HIDDEN),
        "params": module._flat_weights,
        "has_biases": True,
        "num_layers": 1,
        "dropout": 0.0,
        "train": False,
        "bidirectional": False,
    }
    torch.gru(**arguments)
    with Substitution(), pytest.raises(NotDecomposedError, match="packed"):
        torch.gru(**arguments)


@pytest.mark.parametrize(
    ("inputs", "state", "weights"),
    [
        (torch.zeros(TIME, BATCH, WIDTH), torch.zeros(2, BATCH, HIDDEN), 4),
        (torch.zeros(0, BATCH, WIDTH), torch.zeros(1, BATCH, HIDDEN), 4),
        (torch.zeros(BATCH, WIDTH), torch.zeros(1, BATCH, HIDDEN), 4),
        (torch.zeros(TIME, BATCH, WIDTH), torch.zeros(1, BATCH, HIDDEN), 3),
    ],
    ids=["states of two layers", "no time step", "two dimensions", "a weight is missing"],
)
def test_recurrent_calls_that_do_not_fit_are_handed_back(inputs: Tensor, state: Tensor, weights: int) -> None:
    module = nn.GRU(WIDTH, HIDDEN, dtype=torch.float64)
    inputs, state = inputs.double(), state.double()
    mode = Substitution()
    with mode, pytest.raises(NotDecomposedError):
        torch.gru(inputs, state, module._flat_weights[:weights], True, 1, 0.0, False, False, False)
    assert mode.linear_calls == []


CELLS: dict[str, tuple[type[nn.RNNCellBase], dict[str, Any], Any]] = {
    "lstm": (nn.LSTMCell, {}, torch.lstm_cell),
    "gru": (nn.GRUCell, {}, torch.gru_cell),
    "tanh": (nn.RNNCell, {}, torch.rnn_tanh_cell),
    "relu": (nn.RNNCell, {"nonlinearity": "relu"}, torch.rnn_relu_cell),
}


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", CELLS)
def test_recurrent_cells_written_out_equal_torch_and_show_two_uses(
    kind: str, bias: bool, batched: bool
) -> None:
    module_kind, fixed, function = CELLS[kind]
    module = module_kind(WIDTH, HIDDEN, bias=bias, **fixed)
    leaves = randomise(module)
    batch = (BATCH,) if batched else ()
    inputs = torch.randn(*batch, WIDTH, requires_grad=True)
    hidden = torch.randn(*batch, HIDDEN, requires_grad=True)
    memory = torch.randn(*batch, HIDDEN, requires_grad=True)
    state = (hidden, memory) if kind == "lstm" else hidden
    calls = check_substitution(lambda: module(inputs, state), [*leaves, inputs, *tensors_of(state)], function)
    biases = ("bias_ih", "bias_hh") if bias else (None, None)
    assert names_of(calls, module) == [("weight_ih", biases[0]), ("weight_hh", biases[1])]


# -------------------------------------------------------------------------------- second derivatives


def masked_attention() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    rows = torch.randn(TARGET, BATCH, FEATURES)
    keys = torch.randn(SOURCE, BATCH, FEATURES)
    module = nn.MultiheadAttention(FEATURES, HEADS, add_bias_kv=True)
    arguments = {"key_padding_mask": padding_mask(), "attn_mask": open_mask(TARGET, SOURCE)}
    return module, (rows, keys, keys), {**arguments, "need_weights": False}


def attention_to_nothing() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    _, rows, _ = masked_attention()
    arguments = {"attn_mask": all_keys_of_query_1(TARGET, SOURCE), "need_weights": False}
    return nn.MultiheadAttention(FEATURES, HEADS), rows, arguments


SECOND: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]] = {
    "masked attention": masked_attention,
    "attention to nothing": attention_to_nothing,
    "lstm": lambda: (nn.LSTM(WIDTH, HIDDEN, proj_size=2), (torch.randn(TIME, BATCH, WIDTH),), {}),
    "gru": lambda: (nn.GRU(WIDTH, HIDDEN, bidirectional=True), (torch.randn(TIME, BATCH, WIDTH),), {}),
    "tanh": lambda: (nn.RNN(WIDTH, HIDDEN), (torch.randn(TIME, BATCH, WIDTH),), {}),
    "relu": lambda: (nn.RNN(WIDTH, HIDDEN, nonlinearity="relu"), (torch.randn(TIME, BATCH, WIDTH),), {}),
    "lstm cell": lambda: (nn.LSTMCell(WIDTH, HIDDEN), (torch.randn(BATCH, WIDTH),), {}),
    "gru cell": lambda: (nn.GRUCell(WIDTH, HIDDEN), (torch.randn(BATCH, WIDTH),), {}),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("case", SECOND)
def test_hessian_products_by_two_backward_passes_and_by_forward_mode_agree(case: str) -> None:
    module, arguments, keywords = SECOND[case]()
    randomise(module)
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    direction = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}

    def loss(values: dict[str, Tensor]) -> Tensor:
        with Substitution():
            outputs = torch.func.functional_call(module, values, arguments, keywords)
        return sum(output.square().sum() for output in tensors_of(outputs))  # type: ignore[return-value]

    gradient = torch.func.grad(loss)
    _, forward = torch.func.jvp(gradient, (parameters,), (direction,))
    _, pull_back = torch.func.vjp(gradient, parameters)
    (backward,) = pull_back(direction)
    step = 1e-5
    ahead = gradient({name: value + step * direction[name] for name, value in parameters.items()})
    behind = gradient({name: value - step * direction[name] for name, value in parameters.items()})
    for name in parameters:
        difference = (ahead[name] - behind[name]) / (2 * step)
        torch.testing.assert_close(forward[name], backward[name], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(forward[name], difference, rtol=1e-5, atol=1e-5)
        assert forward[name].isfinite().all()
