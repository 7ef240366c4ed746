"""Rows, matrices and gradients per example of every use of a parameter, against autograd.

The reference for the rows is the Jacobian of torch's own function in its weight, ∂z_ip,o/∂W, whose entries
that belong to output o are h_ip.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from curvlab.exceptions import ProblemError
from curvlab.model.uses import (
    AddedUse,
    BilinearUse,
    ConvolutionUse,
    EmbeddingBagUse,
    EmbeddingUse,
    LinearUse,
    MultipliedUse,
    TransposedConvolutionUse,
    Use,
    WeightUse,
    base,
    scale_and_shift_uses,
)

B = 3  # examples


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape) + 17 * len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@dataclass(frozen=True)
class Case:
    """One call of a function with a weight.

    `rows` turns the function's output into (examples, S, outputs); `inputs_of` picks, from a tensor of the
    weight's shape, what belongs to one output: the entries of h in their order.
    """

    name: str
    shape: tuple[int, ...]
    function: Callable[[Tensor], Tensor]
    use: WeightUse
    rows: Callable[[Tensor], Tensor]
    inputs_of: Callable[[Tensor, int], Tensor]
    parts: int = 1
    positions_shape: tuple[int, ...] | None = ()

    @cached_property
    def weight(self) -> Tensor:
        return draw(*self.shape, seed=1)

    @cached_property
    def input_rows(self) -> Tensor:
        """h_ip, (examples, S, parts, n), read from the Jacobian."""
        jacobian = torch.autograd.functional.jacobian(lambda w: self.rows(self.function(w)), self.weight)
        outputs = jacobian.shape[2]
        firsts = range(0, outputs, outputs // self.parts)
        examples = [
            [self.inputs_of(jacobian[i, p, o], o) for o in firsts]
            for i in range(B)
            for p in range(jacobian.shape[1])
        ]
        rows = torch.stack([torch.stack(parts) for parts in examples])
        return rows.reshape(B, -1, *rows.shape[1:])


def linear_case(
    name: str, *dims: int, transposed: bool = False, parts: int = 1, folded: bool = False
) -> Case:
    x = draw(*dims, 4)
    outputs = 6

    def function(weight: Tensor) -> Tensor:
        return x @ weight if transposed else F.linear(x, weight)

    return Case(
        name,
        (4, outputs) if transposed else (outputs, 4),
        function,
        LinearUse(x, B, transposed=transposed, parts=parts),
        lambda out: out.reshape(B, -1, outputs),
        lambda weight, o: weight[:, o] if transposed else weight[o],
        parts,
        None if folded else dims[1:],
    )


def bilinear_case(name: str, *dims: int) -> Case:
    x, y = draw(*dims, 2), draw(*dims, 3, seed=1)
    return Case(
        name,
        (4, 2, 3),
        lambda weight: F.bilinear(x, y, weight),
        BilinearUse(x, B, second=y),
        lambda out: out.reshape(B, -1, 4),
        lambda weight, o: weight[o].flatten(),
        positions_shape=dims[1:] if dims[0] == B else None,
    )


def embedding_case(name: str, *dims: int, padding: int | None = None) -> Case:
    tokens = torch.randint(0, 4, dims, generator=torch.Generator().manual_seed(5))
    # torch's forward reads the padding row, but its gradient leaves it out: that is the h = 0 of the row.
    return Case(
        name,
        (4, 2),
        lambda weight: F.embedding(tokens, weight, padding_idx=padding),
        EmbeddingUse(tokens, B, vocabulary=4, dtype=torch.float64, padding=padding),
        lambda out: out.reshape(B, -1, 2),
        lambda weight, o: weight[:, o],
        positions_shape=dims[1:] if dims[0] == B else None,
    )


ByDimensions = dict[int, Callable[..., Tensor]]
CONVOLUTIONS: ByDimensions = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED: ByDimensions = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def channels_last(out: Tensor) -> Tensor:
    return out.flatten(2).transpose(1, 2).reshape(B, -1, out.shape[1])


def convolution_case(
    name: str,
    sizes: tuple[int, ...],
    kernel: tuple[int, ...],
    channels: int = 2,
    outputs: int = 2,
    groups: int = 1,
    folds: int = 1,
    transposed: bool = False,
    **options: Any,
) -> Case:
    x, options = draw(B * folds, channels, *sizes), {"groups": groups, **options}
    per_group, inputs = outputs // groups, channels // groups
    shape = (channels, per_group, *kernel) if transposed else (outputs, inputs, *kernel)
    function = (TRANSPOSED if transposed else CONVOLUTIONS)[len(sizes)]
    sample = function(x, torch.zeros(shape, dtype=x.dtype), **options)

    def inputs_of(weight: Tensor, o: int) -> Tensor:
        group, within = divmod(o, per_group)
        return (weight[group * inputs :][:inputs, within] if transposed else weight[o]).flatten()

    return Case(
        name,
        shape,
        lambda weight: function(x, weight, **options),
        (TransposedConvolutionUse if transposed else ConvolutionUse).from_call(x, B, shape, **options),
        channels_last,
        inputs_of,
        groups,
        tuple(sample.shape[2:]) if folds == 1 else None,
    )


transposed_case = partial(convolution_case, transposed=True)


CASES = [
    linear_case("linear", B),
    linear_case("linear, positions", B, 5),
    linear_case("linear, two position dimensions", B, 2, 3),
    linear_case("linear, folded", B * 4, folded=True),
    linear_case("linear, folded with positions", B * 2, 3, folded=True),
    linear_case("linear, transposed", B, 5, transposed=True),
    linear_case("linear, three parts", B, 5, parts=3),
    linear_case("linear, transposed, three parts", B, 5, transposed=True, parts=3),
    bilinear_case("bilinear", B),
    bilinear_case("bilinear, positions", B, 5),
    bilinear_case("bilinear, folded", B * 2, 3),
    embedding_case("embedding", B),
    embedding_case("embedding, positions", B, 6),
    embedding_case("embedding, folded", B * 2, 3),
    embedding_case("embedding, two position dimensions", B, 2, 3),
    convolution_case("conv1d", (7,), (3,)),
    convolution_case("conv1d, all options", (9,), (3,), 4, 6, groups=2, stride=2, padding=2, dilation=2),
    convolution_case("conv1d, short output", (4,), (3,)),
    convolution_case("conv1d, dilation shares rows", (12,), (3,), dilation=2, padding=1),
    convolution_case("conv2d", (5, 6), (3, 3)),
    convolution_case("conv2d, one tap", (3, 4), (1, 1)),
    convolution_case("conv2d, padding", (4, 5), (3, 3), padding=1),
    convolution_case("conv2d, much padding", (3, 3), (3, 3), padding=(3, 4)),
    convolution_case("conv2d, stride", (6, 7), (3, 2), stride=(2, 3)),
    convolution_case("conv2d, stride in the first dimension", (6, 7), (3, 3), stride=(2, 1), padding=1),
    convolution_case("conv2d, stride in the second dimension", (6, 7), (3, 3), stride=(1, 2), padding=1),
    convolution_case("conv2d, dilation", (7, 6), (3, 2), dilation=(2, 3), padding=2),
    convolution_case("conv2d, same", (4, 5), (3, 3), padding="same"),
    convolution_case("conv2d, same, asymmetric", (4, 5), (2, 4), padding="same"),
    convolution_case("conv2d, same, asymmetric, dilation", (5, 6), (4, 2), padding="same", dilation=(1, 3)),
    convolution_case("conv2d, valid", (4, 5), (2, 3), padding="valid"),
    convolution_case("conv2d, wide kernel", (3, 8), (1, 5), padding=(0, 2)),
    convolution_case("conv2d, tall kernel", (8, 3), (5, 1), padding=(2, 0)),
    convolution_case("conv2d, groups", (5, 4), (3, 3), 4, 6, groups=2, padding=1),
    convolution_case("conv2d, depthwise", (5, 4), (3, 3), 3, 6, groups=3, padding=1),
    convolution_case(
        "conv2d, all options", (7, 8), (3, 2), 4, 4, groups=2, stride=(1, 2), padding=(2, 1), dilation=(2, 1)
    ),
    convolution_case("conv2d, folded", (5, 4), (3, 3), 4, 4, groups=2, folds=2, padding=1),
    convolution_case("conv2d, folded, stride", (5, 4), (3, 3), folds=2, stride=2),
    convolution_case("conv3d", (4, 3, 3), (2, 2, 2), padding=1),
    convolution_case(
        "conv3d, all options",
        (5, 4, 4),
        (2, 3, 2),
        2,
        2,
        groups=2,
        stride=(2, 1, 1),
        padding=(1, 1, 0),
        dilation=(1, 1, 2),
    ),
    transposed_case("transposed 1d", (4,), (3,)),
    transposed_case(
        "transposed 1d, all options",
        (4,),
        (3,),
        4,
        6,
        groups=2,
        stride=2,
        padding=1,
        output_padding=1,
        dilation=2,
    ),
    transposed_case(
        "transposed 1d, output padding beyond the stride", (4,), (3,), stride=1, dilation=3, output_padding=2
    ),
    transposed_case("transposed 2d", (3, 4), (3, 2), 2, 3),
    transposed_case("transposed 2d, stride", (3, 2), (2, 3), stride=(2, 3)),
    transposed_case("transposed 2d, stride beyond the kernel", (3, 2), (2, 2), stride=3),
    transposed_case("transposed 2d, padding", (3, 4), (3, 3), padding=1),
    transposed_case("transposed 2d, padding beyond the kernel's reach", (6, 5), (2, 2), padding=2),
    transposed_case(
        "transposed 2d, padding beyond the reach, stride",
        (4, 5),
        (2, 3),
        stride=2,
        padding=(2, 3),
        output_padding=1,
    ),
    transposed_case(
        "transposed 2d, groups", (3, 3), (3, 2), 4, 6, groups=2, stride=2, padding=1, output_padding=1
    ),
    transposed_case("transposed 2d, depthwise", (3, 3), (2, 3), 3, 3, groups=3, stride=2),
    transposed_case("transposed 2d, folded", (3, 3), (3, 2), 4, 2, groups=2, folds=2, stride=2),
    transposed_case(
        "transposed 3d", (2, 3, 2), (2, 2, 3), stride=(1, 2, 1), padding=(0, 1, 1), dilation=(2, 1, 1)
    ),
]
PADDED = [
    embedding_case("embedding, padding", B, 6, padding=2),
    embedding_case("embedding, negative padding", B, 6, padding=-1),
]
ALL = CASES + PADDED
all_cases = pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)


def weights_of(use: WeightUse, kind: str) -> Tensor:
    if kind == "equal":
        return torch.full((B, use.positions), 1 / 7, dtype=torch.float64)
    if "per example" in kind:
        examples = torch.tensor([0.3, -0.8 if "signed" in kind else 0.8, 1.7], dtype=torch.float64)
        return examples[:, None].expand(B, use.positions)
    positions = draw(B, use.positions, seed=3)
    return positions if "signed" in kind else positions.abs()


all_weights = pytest.mark.parametrize(
    "kind", ["equal", "per example", "signed per example", "per position", "signed per position"]
)


@pytest.fixture(params=["whole", "in pieces"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in pieces":
        monkeypatch.setattr(base, "CHUNK_ENTRIES", 1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_matrix_times_an_input_row_is_the_functions_output(case: Case) -> None:
    matrix, rows = case.use.matrix(case.weight), case.use.input_rows()
    assert matrix.shape[0] == case.use.parts == case.parts
    assert rows.shape == (B, case.use.positions, case.parts, case.use.input_size)
    found = torch.einsum("gon,bsgn->bsgo", matrix, rows).flatten(2)
    close(found, case.rows(case.function(case.weight)))


@all_cases
def test_the_image_of_a_weight_is_its_matrix_times_every_row(case: Case, chunks: None) -> None:
    other = draw(*case.weight.shape, seed=5)
    expected = torch.einsum("gon,bsgn->bsgo", case.use.matrix(other), case.use.input_rows())
    close(case.use.image(other), expected)


@all_cases
def test_input_rows_are_the_jacobian_in_the_weight(case: Case) -> None:
    close(case.use.input_rows(), case.input_rows)
    close(case.use.input_rows(1, 2), case.input_rows[1:2])


@all_cases
def test_output_rows_are_the_gradient_at_every_example_and_position(case: Case) -> None:
    gradient = draw(*case.function(case.weight).shape, seed=2)
    close(case.use.output_rows(gradient).flatten(2), case.rows(gradient))


@all_cases
def test_output_rows_of_several_draws_are_those_of_each_draw(case: Case) -> None:
    gradients = draw(2, 3, *case.function(case.weight).shape, seed=2)
    expected = [[case.use.output_rows(gradient) for gradient in pair] for pair in gradients]
    close(case.use.output_rows(gradients), torch.stack([torch.stack(pair) for pair in expected]))


@all_cases
def test_dimensions_of_positions_are_those_of_the_output(case: Case) -> None:
    assert case.use.positions_shape == case.positions_shape


@all_cases
def test_gradient_is_autograds_in_the_weights_own_shape(case: Case, chunks: None) -> None:
    weight = case.weight.clone().requires_grad_()
    output = case.function(weight)
    gradient, factors = draw(*output.shape, seed=2), draw(B, seed=4)
    rows = case.use.output_rows(gradient)
    (expected,) = torch.autograd.grad(output, weight, gradient, retain_graph=True)
    close(case.use.gradient(rows, case.shape), expected)
    loss = (case.rows(output * gradient).sum((1, 2)) * factors).sum()
    (expected,) = torch.autograd.grad(loss, weight)
    close(case.use.gradient(rows, case.shape, factors), expected)


def single_gradients(function: Callable[[Tensor], Tensor], parameter: Tensor, gradients: Tensor) -> Tensor:
    """Autograd's gradient of one example after the other, draw by draw: (draws, examples, *shape)."""
    leaf = parameter.clone().requires_grad_()
    output = function(leaf)
    examples = []
    for gradient in gradients:
        for i in range(B):
            mask = torch.zeros(B, output.shape[0] // B, dtype=output.dtype)
            mask[i] = 1
            masked = gradient * mask.reshape(-1, *(1,) * (output.ndim - 1))
            examples.append(torch.autograd.grad(output, leaf, masked, retain_graph=True)[0])
    return torch.stack(examples).reshape(len(gradients), B, *parameter.shape)


def check_example_gradients(use: Use, function: Callable[[Tensor], Tensor], parameter: Tensor) -> None:
    gradients = draw(2, *function(parameter).shape, seed=2)
    shape = tuple(parameter.shape)
    expected = single_gradients(function, parameter, gradients)
    close(use.example_gradients(gradients, shape), expected)
    close(use.example_gradients(gradients[1], shape), expected[1])
    close(use.example_gradients(gradients[None], shape), expected[None])


@all_cases
def test_example_gradients_are_autograds_of_single_examples(case: Case, chunks: None) -> None:
    check_example_gradients(case.use, case.function, case.weight)


@all_cases
def test_a_matrix_goes_back_to_the_weights_shape(case: Case) -> None:
    assert torch.equal(case.use.from_matrix(case.use.matrix(case.weight), case.shape), case.weight)
    several = draw(2, 3, *case.shape)
    assert torch.equal(case.use.from_matrix(case.use.matrix(several), case.shape), several)
    assert torch.equal(case.use.matrix(several)[1, 2], case.use.matrix(several[1, 2]))


@all_weights
@all_cases
def test_mean_input_is_the_weighted_sum_of_the_rows(case: Case, kind: str, chunks: None) -> None:
    weights = weights_of(case.use, kind)
    close(case.use.mean_input(weights), torch.einsum("bs,bsgn->gn", weights, case.input_rows))


@all_weights
@all_cases
def test_second_moment_is_the_weighted_sum_of_outer_products(case: Case, kind: str, chunks: None) -> None:
    weights = weights_of(case.use, kind)
    expected = torch.einsum("bs,bsgn,bsgm->gnm", weights, case.input_rows, case.input_rows)
    close(case.use.input_second_moment(weights), expected)


@all_cases
def test_sampled_rows_are_the_rows_of_those_positions(case: Case) -> None:
    positions = case.use.positions
    index = torch.stack(
        [torch.randperm(positions, generator=torch.Generator().manual_seed(i)) for i in range(B)]
    )
    expected = torch.stack([case.input_rows[i, index[i]] for i in range(B)])
    close(case.use.sampled_rows(index), expected)
    close(case.use.sampled_rows(index[:, :2]), expected[:, :2])


@pytest.mark.parametrize("case", PADDED, ids=lambda case: case.name)
def test_padding_tokens_contribute_nothing(case: Case) -> None:
    use = case.use
    assert isinstance(use, EmbeddingUse)
    padding = use.padding % use.vocabulary if use.padding is not None else None
    is_padding = use.inputs == padding
    assert is_padding.any()
    assert not use.input_rows()[is_padding].any()
    ones = torch.ones(B, use.positions, dtype=torch.float64)
    counts = torch.bincount(use.inputs.flatten(), minlength=4).double()
    counts[padding] = 0
    close(use.frequencies(ones), counts)
    gradient = draw(B, use.positions, 2)
    assert not use.gradient(use.output_rows(gradient), case.shape)[padding].any()


@dataclass(frozen=True)
class Bag:
    name: str
    use: EmbeddingBagUse
    function: Callable[[Tensor], Tensor]
    tokens: list[list[int]]
    """By example, the tokens of its positions; -1 where a position holds none."""


def bag_case(
    name: str, bags: list[list[int]], padding: int | None = None, scaled: bool = False, **options: Any
) -> Bag:
    """Bags of tokens; of unequal lengths they go to torch as one vector with offsets."""
    lengths = [len(bag) for bag in bags]
    options["mode"] = mode = options.get("mode", "sum")
    settings: dict[str, Any] = {
        "vocabulary": 4,
        "dtype": torch.float64,
        "padding": padding,
        "mean": mode == "mean",
    }
    if len(set(lengths)) == 1:
        tokens = torch.tensor(bags)
        coefficients = draw(*tokens.shape) if scaled else None
        use = EmbeddingBagUse(tokens, B, coefficients=coefficients, **settings)
        offsets = None
    else:
        tokens = torch.tensor([token for bag in bags for token in bag])
        coefficients = draw(len(tokens)) if scaled else None
        offsets = torch.tensor([sum(lengths[:b]) for b in range(len(bags))])
        use = EmbeddingBagUse.from_offsets(tokens, offsets, B, coefficients=coefficients, **settings)

    def function(weight: Tensor) -> Tensor:
        return F.embedding_bag(
            tokens, weight, offsets, mode=mode, padding_idx=padding, per_sample_weights=coefficients
        )

    filled = [[-1 if t == padding else t for t in bag] + [-1] * (max(lengths) - len(bag)) for bag in bags]
    folds = len(bags) // B
    by_example = [[t for bag in filled[i * folds : (i + 1) * folds] for t in bag] for i in range(B)]
    return Bag(name, use, function, by_example)


EQUAL = [[0, 1, 1, 3], [2, 2, 0, 3], [1, 2, 3, 0]]
UNEQUAL = [[0, 1, 1], [3], [2, 0, 2, 3, 1]]
BAGS = [
    bag_case("sum", EQUAL),
    bag_case("mean", EQUAL, mode="mean"),
    bag_case("sum, padding", EQUAL, padding=2),
    bag_case("mean, padding", EQUAL, padding=2, mode="mean"),
    bag_case("mean, a bag of padding only", [[2, 2], [1, 2], [3, 0]], padding=2, mode="mean"),
    bag_case("sum, coefficients", EQUAL, scaled=True),
    bag_case("sum, coefficients, padding", EQUAL, padding=1, scaled=True),
    bag_case("offsets, sum", UNEQUAL),
    bag_case("offsets, mean", UNEQUAL, mode="mean"),
    bag_case("offsets, mean, padding", UNEQUAL, padding=1, mode="mean"),
    bag_case("offsets, sum, coefficients, padding", UNEQUAL, padding=2, scaled=True),
    bag_case("offsets, mean, an empty bag", [[0, 3], [], [1]], mode="mean"),
    bag_case("folded, mean", [*EQUAL, [3, 3, 1, 0], [0, 2, 2, 1], [1, 1, 1, 1]], mode="mean"),
    bag_case("folded, offsets, sum", [*UNEQUAL, [1, 1], [2], [3, 0]]),
]
all_bags = pytest.mark.parametrize("bag", BAGS, ids=lambda bag: bag.name)


def one_hot_rows(bag: Bag) -> Tensor:
    rows = torch.zeros(B, len(bag.tokens[0]), 1, 4, dtype=torch.float64)
    for i, tokens in enumerate(bag.tokens):
        for p, token in enumerate(tokens):
            if token >= 0:
                rows[i, p, 0, token] = 1
    return rows


@all_bags
def test_every_token_of_a_bag_is_a_position_with_a_one_hot_row(bag: Bag) -> None:
    rows = one_hot_rows(bag)
    close(bag.use.input_rows(), rows)
    weights = weights_of(bag.use, "per position")
    mean = torch.einsum("bs,bsgn->gn", weights, rows)
    close(bag.use.frequencies(weights), mean[0])
    close(bag.use.mean_input(weights), mean)
    close(bag.use.input_second_moment(weights), torch.einsum("bs,bsgn,bsgm->gnm", weights, rows, rows))
    index = torch.tensor([[1, 0], [0, 1], [1, 1]])
    close(bag.use.sampled_rows(index), torch.stack([rows[i, index[i]] for i in range(B)]))


@all_bags
def test_the_rows_of_a_bag_give_autograds_gradients(bag: Bag) -> None:
    weight = draw(4, 2)
    gradients = draw(2, *bag.function(weight).shape)
    expected = single_gradients(bag.function, weight, gradients)
    found = bag.use.output_rows(gradients)
    close(torch.einsum("dbsgo,bsgn->dbno", found, one_hot_rows(bag)), expected)
    close(bag.use.example_gradients(gradients, (4, 2)), expected)
    close(bag.use.gradient(found[0], (4, 2)), expected[0].sum(0))
    factors = draw(B)
    close(bag.use.gradient(found[0], (4, 2), factors), torch.tensordot(factors, expected[0], 1))


Norm = tuple[str, Callable[..., Tensor], tuple[int, ...], tuple[Any, ...], dict[str, Any], tuple[int, ...]]
NORMS: list[Norm] = [
    ("layer norm", F.layer_norm, (B, 4), ((4,),), {"eps": 1e-3}, (4,)),
    ("layer norm, positions", F.layer_norm, (B, 5, 4), ((4,),), {}, (4,)),
    ("layer norm, folded", F.layer_norm, (B * 2, 5, 4), ((4,),), {}, (4,)),
    ("layer norm, several dimensions", F.layer_norm, (B, 5, 2, 4), ((2, 4),), {}, (2, 4)),
    ("layer norm, a dimension of one", F.layer_norm, (B, 5, 1, 4), ((1, 4),), {}, (1, 4)),
    ("layer norm, all dimensions", F.layer_norm, (B, 5, 2), ((5, 2),), {}, (5, 2)),
    ("rms norm", F.rms_norm, (B, 5, 4), ((4,),), {"eps": 1e-3}, (4,)),
    ("rms norm, several dimensions", F.rms_norm, (B, 5, 2, 4), ((2, 4),), {}, (2, 4)),
    ("group norm", F.group_norm, (B, 4, 3, 2), (2,), {"eps": 1e-3}, (4,)),
    ("group norm, no positions", F.group_norm, (B, 4), (2,), {}, (4,)),
    ("group norm, folded", F.group_norm, (B * 2, 4, 3), (4,), {}, (4,)),
    ("instance norm 1d", F.instance_norm, (B, 4, 5), (), {}, (4,)),
    ("instance norm 2d", F.instance_norm, (B, 4, 3, 2), (), {"eps": 1e-3}, (4,)),
    ("batch norm 1d", F.batch_norm, (B, 4), (draw(4), draw(4, seed=1).abs()), {"training": False}, (4,)),
    ("batch norm 1d, positions", F.batch_norm, (B, 4, 5), (draw(4), draw(4, seed=1).abs()), {}, (4,)),
    ("batch norm 2d", F.batch_norm, (B, 4, 3, 2), (draw(4), draw(4, seed=1).abs()), {"eps": 0.1}, (4,)),
]


@pytest.mark.parametrize(
    ("name", "function", "inputs", "args", "options", "shape"), NORMS, ids=[n[0] for n in NORMS]
)
def test_example_gradients_of_scale_and_shift_are_autograds(
    name: str,
    function: Callable[..., Tensor],
    inputs: tuple[int, ...],
    args: tuple[Any, ...],
    options: dict[str, Any],
    shape: tuple[int, ...],
) -> None:
    x, weight, bias = draw(*inputs), draw(*shape), draw(*shape, seed=1)
    call = options | {"weight": weight} | ({} if function is F.rms_norm else {"bias": bias})
    scale, shift = scale_and_shift_uses(function, (x, *args), call, B)
    check_example_gradients(scale, lambda p: function(x, *args, **call | {"weight": p}), weight)
    if function is not F.rms_norm:
        check_example_gradients(shift, lambda p: function(x, *args, **call | {"bias": p}), bias)


def test_running_statistics_of_an_instance_norm_stay_as_they_are() -> None:
    x, weight = draw(B, 4, 5), draw(4)
    mean, variance = draw(4), draw(4, seed=1).abs()
    kept = mean.clone(), variance.clone()
    scale, _ = scale_and_shift_uses(F.instance_norm, (x, mean, variance, weight), {}, B)
    check_example_gradients(scale, lambda p: F.instance_norm(x, weight=p), weight)
    assert torch.equal(mean, kept[0])
    assert torch.equal(variance, kept[1])


def test_an_instance_norm_in_eval_mode_uses_its_running_statistics() -> None:
    x, weight = draw(B, 4, 5), draw(4)
    call = {"running_mean": draw(4), "running_var": draw(4, seed=1).abs(), "use_input_stats": False}
    scale, _ = scale_and_shift_uses(F.instance_norm, (x,), call | {"weight": weight}, B)
    check_example_gradients(scale, lambda p: F.instance_norm(x, weight=p, **call), weight)


def test_a_batch_norm_with_the_batchs_statistics_is_refused() -> None:
    call = {"running_mean": None, "running_var": None, "training": True}
    with pytest.raises(ProblemError, match="eval mode"):
        scale_and_shift_uses(F.batch_norm, (draw(B, 4),), call, B)


def test_a_function_that_is_no_normalisation_is_refused() -> None:
    with pytest.raises(ProblemError, match="`linear` is no normalisation"):
        scale_and_shift_uses(F.linear, (draw(B, 4), draw(4, 4)), {}, B)


SHAPES = [(5, 4), (1, 5, 4), (4,), (5, 1), (1, 1, 4), (1,), (), (1, 1, 1)]
broadcast_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


@broadcast_shapes
@pytest.mark.parametrize("folds", [1, 2])
def test_example_gradients_of_a_sum_or_product_are_autograds(shape: tuple[int, ...], folds: int) -> None:
    x, p = draw(B * folds, 5, 4), draw(*shape)
    check_example_gradients(AddedUse(x, B), lambda q: x + q, p)
    check_example_gradients(AddedUse(x, B, coefficient=-1.0), lambda q: x - q, p)
    check_example_gradients(AddedUse(x, B, coefficient=0.5), lambda q: torch.add(x, q, alpha=0.5), p)
    check_example_gradients(MultipliedUse(x, B), lambda q: x * q, p)


@broadcast_shapes
def test_example_gradients_of_an_expanded_parameter_are_autograds(shape: tuple[int, ...]) -> None:
    p = draw(*shape)
    output = p.expand(B, 5, 4)
    check_example_gradients(AddedUse(output, B), lambda q: q.expand(B, 5, 4), p)


def test_a_product_that_grows_by_broadcasting_has_its_input_expanded() -> None:
    x, p = draw(B, 1, 4), draw(5, 1)
    check_example_gradients(MultipliedUse(x.expand(B, 5, 4), B), lambda q: x * q, p)


@pytest.mark.parametrize("shape", [(B, 5, 4), (1, B, 5, 4)])
def test_a_parameter_with_entries_for_every_example_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ProblemError, match="examples share"):
        AddedUse(draw(B, 5, 4), B).example_gradients(draw(B, 5, 4), shape)


def test_a_convolution_without_a_batch_dimension_is_refused() -> None:
    with pytest.raises(ProblemError, match="2 more dimensions"):
        ConvolutionUse.from_call(draw(2, 5, 5), 1, (3, 2, 3, 3))


def test_padding_by_name_is_refused_for_a_transposed_convolution() -> None:
    with pytest.raises(ProblemError, match="numbers as padding"):
        TransposedConvolutionUse.from_call(draw(B, 2, 5), B, (2, 3, 3), padding="same")


class LargestTensor(TorchDispatchMode):
    """Remembers the most entries of any tensor that is made, those of `known` ones aside."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in self.known:
            self.entries = max(self.entries, out.untyped_storage().nbytes() // out.element_size())
        return out


@pytest.mark.parametrize("kind", ["per example", "per position"])
def test_the_second_moment_unfolds_no_more_than_one_piece_at_a_time(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = ConvolutionUse.from_call(draw(12, 2, 16, 16), 12, (3, 2, 3, 3), padding=1)
    weights = torch.arange(12.0 * 256, dtype=torch.float64).reshape(12, 256)
    if kind == "per example":
        weights = weights[:, :1].expand(12, 256)
    unfolded, limit = 12 * 256 * 18, 256 * 18 * 2
    monkeypatch.setattr(base, "CHUNK_ENTRIES", limit)
    with LargestTensor(use.inputs, weights) as largest:
        use.input_second_moment(weights)
    assert largest.entries <= limit < unfolded
    monkeypatch.setattr(base, "CHUNK_ENTRIES", unfolded)
    with LargestTensor(use.inputs, weights) as largest:
        use.input_second_moment(weights)
    assert largest.entries > limit


@pytest.mark.parametrize("transposed", [False, True])
def test_mean_input_and_sampled_rows_unfold_nothing(transposed: bool) -> None:
    kind = TransposedConvolutionUse if transposed else ConvolutionUse
    use = kind.from_call(draw(12, 2, 16, 16), 12, (2, 2, 3, 3), padding=1)
    weights = torch.full((12, use.positions), 0.5, dtype=torch.float64)
    index = torch.arange(24).reshape(12, 2)
    with LargestTensor(use.inputs, weights) as largest:
        use.mean_input(weights)
        use.sampled_rows(index)
    assert largest.entries <= use.inputs.numel()
