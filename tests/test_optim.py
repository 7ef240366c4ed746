"""SecondOrder as a torch optimizer: the step, its options, groups, schedulers and state."""

from __future__ import annotations

import copy
import dataclasses
from itertools import pairwise

import pytest
import torch
from torch import nn

import curvlab
from curvlab.exceptions import PairError, ProblemError, SolveError, SpecError
from curvlab.measure.memory import track
from curvlab.optim import LevenbergMarquardt, SecondOrder


def network(*widths: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    modules: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        modules += [nn.Linear(fan_in, fan_out, dtype=torch.float64), nn.Sigmoid()]
    return nn.Sequential(*modules[:-1])


def batch(seed: int, examples: int = 12, features: int = 5, classes: int = 3):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(examples, features, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(classes, (examples,), generator=generator)


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def direction(model, inputs, targets, provider="pch-1", solver="ea-cg", alpha=0.01):
    problem = curvlab.Problem(model, "cross-entropy", inputs, targets)
    solution = curvlab.solve(solver, curvlab.estimate(provider, problem), problem.gradient(), alpha=alpha)
    return dict(solution.direction)


def assert_moved(model, before, steps, **tolerance):
    tolerance = tolerance or {"rtol": 1e-12, "atol": 1e-14}
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] + steps[name], **tolerance)


@pytest.mark.parametrize(
    ("provider", "solver"),
    [
        ("pch-1", "ea-cg"),
        ("fisher", "kfi"),
        ("gauss-newton", "sm-kfi"),
        ("hessian", "cg"),
        ("pch-2", "exact"),
    ],
)
def test_a_step_adds_lr_times_the_direction(provider, solver):
    model, (x, y) = network(5, 4, 3), batch(0)
    before, d = parameters(model), direction(model, x, y, provider, solver)
    SecondOrder(model, "cross-entropy", provider, solver, lr=0.3).step(x, y)
    assert_moved(model, before, {name: 0.3 * step for name, step in d.items()})


class SharedWeights(nn.Module):
    """Positions, a grouped convolution and an embedding; with `tied` also a matrix that is both ends."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 4)
        self.mix = nn.Conv1d(4, 4, 3, padding=1, groups=2)
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(self.tokens(x).mT)).mT)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("solver", ["ea-cg", "sm-kfi"])
@pytest.mark.parametrize("provider", ["fisher[kind=mc]", "gauss-newton[kind=rows]", "fisher[positions=2]"])
def test_a_step_with_the_mean_input_factor_is_that_of_the_provider_as_it_was_given(provider, solver, tied):
    torch.manual_seed(0)
    model = SharedWeights(tied).double()
    x, y = torch.randint(5, (6, 3)), torch.randint(5, (6, 3))
    problem = curvlab.Problem(model, "cross-entropy", x, y)
    expected = curvlab.solve(solver, curvlab.estimate(provider, problem), problem.gradient(), alpha=0.05)
    found = []
    optimizer = SecondOrder(model, "cross-entropy", provider, solver, alpha=0.05)
    optimizer.on_solution = found.append
    optimizer.step(x, y)
    for name, direction in expected.direction.items():
        torch.testing.assert_close(found[0].direction[name], direction, rtol=1e-10, atol=1e-14)


def test_a_step_returns_the_loss_before_it_and_leaves_grad_alone():
    model, (x, y) = network(5, 4, 3), batch(0)
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    expected = nn.functional.cross_entropy(model(x), y)
    loss = SecondOrder(model, nn.CrossEntropyLoss()).step(x, y)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-14, atol=0)
    assert not loss.requires_grad
    assert all(bool((p.grad == 7).all()) for p in model.parameters())


def test_a_closure_that_returns_the_batch_is_the_same_step():
    x, y = batch(0)
    one, two = network(5, 4, 3), network(5, 4, 3)
    SecondOrder(one, "cross-entropy").step(x, y)
    SecondOrder(two, "cross-entropy").step(lambda: (x, y))
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize("given", [lambda: torch.tensor(1.0, requires_grad=True), lambda: None, lambda: 0.5])
def test_a_scalar_loss_is_refused(given):
    optimizer = SecondOrder(network(5, 4, 3), "cross-entropy")
    with pytest.raises(ProblemError, match="a scalar loss alone carries no curvature"):
        optimizer.step(given)
    with pytest.raises(ProblemError, match="a scalar loss alone carries no curvature"):
        optimizer.step(batch(0)[0])


def test_groups_have_learning_rates_of_their_own():
    model, (x, y) = network(5, 4, 3), batch(0)
    before, d = parameters(model), direction(model, x, y)
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": [model[2].weight]}]
    SecondOrder(model, "cross-entropy", lr=0.2, params=groups).step(x, y)
    rates = {"0.weight": 0.5, "0.bias": 0.5, "2.weight": 0.2, "2.bias": 0.0}
    assert_moved(model, before, {name: rates[name] * step for name, step in d.items()})


class Scaled(nn.Module):
    """A parameter beside those of a Linear layer, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(3)), nn.Linear(5, 3)
        self.offset = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x):
        return self.linear(x) * self.scale + self.offset


def test_parameters_without_curvature_are_refused():
    model = Scaled()
    with pytest.raises(ProblemError, match=r"offset.*only trainable parameters of the model"):
        SecondOrder(model, "cross-entropy", params=[model.offset])
    with pytest.raises(ProblemError, match=r"\(7,\)"):
        SecondOrder(model, "cross-entropy", params=[nn.Parameter(torch.zeros(7))])
    optimizer = SecondOrder(model, "cross-entropy", "fisher", "kfi", params=model.linear.parameters())
    with pytest.raises(ProblemError, match="offset"):
        optimizer.add_param_group({"params": [model.offset]})
    assert len(optimizer.param_groups) == 1


def test_a_parameter_of_no_layer_steps_with_its_own_block():
    model, (x, y) = Scaled().double(), batch(0)
    x = x.double()
    before = model.scale.detach().clone()

    def losses(scale, weight, bias, one, label):
        made = {"scale": scale, "linear.weight": weight, "linear.bias": bias}
        return nn.functional.cross_entropy(torch.func.functional_call(model, made, one[None]), label[None])

    gradient = torch.func.vmap(torch.func.grad(losses), (None, None, None, 0, 0))
    rows = gradient(*(p.detach() for p in (model.scale, model.linear.weight, model.linear.bias)), x, y)
    fisher = rows.T @ rows / len(x)
    solver = "cg[max_iter=50,tol=1e-14]"
    optimizer = SecondOrder(model, "cross-entropy", "fisher", solver, lr=0.3, alpha=0.05)
    optimizer.step(x, y)
    damped = 0.95 * fisher + 0.05 * torch.eye(3, dtype=torch.float64)
    expected = before - 0.3 * torch.linalg.solve(damped, rows.mean(0))
    torch.testing.assert_close(model.scale.detach(), expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(model.offset, torch.zeros(3).double())


def test_schedulers_set_the_learning_rate():
    model, (x, y) = network(5, 4, 3), batch(0)
    optimizer = SecondOrder(model, "cross-entropy", lr=0.4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.step(x, y)
    scheduler.step()
    before, d = parameters(model), direction(model, x, y)
    optimizer.step(x, y)
    assert_moved(model, before, {name: 0.2 * step for name, step in d.items()})


def test_weight_decay_is_decoupled():
    model, (x, y) = network(5, 4, 3), batch(0)
    before, d = parameters(model), direction(model, x, y)
    SecondOrder(model, "cross-entropy", lr=0.2, weight_decay=0.1).step(x, y)
    assert_moved(model, before, {n: 0.2 * step - 0.02 * before[n] for n, step in d.items()})


def test_max_grad_norm_scales_the_step_as_if_the_gradient_were_clipped():
    model, (x, y) = network(5, 4, 3), batch(0)
    loss = nn.functional.cross_entropy(model(x), y)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    before, d = parameters(model), direction(model, x, y)
    SecondOrder(model, "cross-entropy", lr=1.0, max_grad_norm=float(norm) / 4).step(x, y)
    assert_moved(model, before, {name: step / 4 for name, step in d.items()})
    before, d = parameters(model), direction(model, x, y)
    SecondOrder(model, "cross-entropy", lr=1.0, max_grad_norm=1e3).step(x, y)
    assert_moved(model, before, d)


def test_momentum_sums_the_directions():
    model, batches = network(5, 4, 3), [batch(seed) for seed in range(3)]
    optimizer = SecondOrder(model, "cross-entropy", lr=0.3, momentum=0.9)
    velocity = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for x, y in batches:
        before, d = parameters(model), direction(model, x, y)
        velocity = {name: 0.9 * v + d[name] for name, v in velocity.items()}
        optimizer.step(x, y)
        assert_moved(model, before, {name: 0.3 * v for name, v in velocity.items()})


def test_the_plain_step_allocates_nothing_of_a_weights_size():
    model = nn.Sequential(nn.Linear(4000, 30), nn.Sigmoid(), nn.Linear(30, 3))
    x, y = torch.randn(8, 4000), torch.randint(3, (8,))
    optimizer = SecondOrder(model, "cross-entropy")
    optimizer.step(x, y)
    with track(record=True) as tracker:
        optimizer.step(x, y)
    # The copy of the batch's first example and rows apart, all is of 30 × 8 or 30 × 30.
    assert tracker.largest(1)[0].elements <= 8 * 4000
    assert tracker.peak_bytes < 4000 * 30 * 4 / 2


def test_a_step_that_would_write_nan_is_refused_and_changes_nothing():
    model, (x, y) = network(5, 4, 3), batch(0)
    optimizer = SecondOrder(model, "cross-entropy", lr=0.1, momentum=0.5, ema=0.9)
    optimizer.step(x, y)
    before, state = parameters(model), copy.deepcopy(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 1e308
    optimizer.alpha = 1e-12
    with pytest.raises(SolveError, match=r"layer `\d`: the step would write NaN or infinity"):
        optimizer.step(x * 1e4, y)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    after = optimizer.state_dict()
    assert after["second_order"]["steps"] == state["second_order"]["steps"] == 1
    for index, entry in state["state"].items():
        assert torch.equal(entry["momentum_buffer"], after["state"][index]["momentum_buffer"])


def test_a_large_but_finite_step_is_taken():
    model = nn.Sequential(nn.Linear(2, 2)).double()
    x, y = torch.eye(2, dtype=torch.float64), torch.tensor([0, 1])
    SecondOrder(model, "cross-entropy", lr=1e300).step(x, y)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_refresh_keeps_the_curvature_between_estimates():
    model, batches = network(5, 4, 3), [batch(seed) for seed in range(4)]
    optimizer = SecondOrder(model, "cross-entropy", "pch-1", "kfi", lr=0.3, refresh_every=3)
    for index, (x, y) in enumerate(batches):
        problem = curvlab.Problem(model, "cross-entropy", x, y)
        if index % 3 == 0:
            dense = {n: b.to_dense() for n, b in curvlab.estimate("pch-1", problem).blocks.items()}
            layers = curvlab.estimate("pch-1", problem).to(torch.float64)
        before = parameters(model)
        expected = dict(
            curvlab.solve("kfi", _unstamped(layers), dict(problem.gradient()), alpha=0.01).direction
        )
        given = x.clone()
        optimizer.step(given, y)
        given.zero_()  # a user's own buffer, reused: the kept rows must not lie in it
        assert_moved(model, before, {n: 0.3 * d for n, d in expected.items()}, rtol=1e-8, atol=1e-12)
        assert dense


def _unstamped(curvature):
    return dataclasses.replace(curvature, versions=None)


@pytest.mark.parametrize(("provider", "solver"), [("fisher", "kfi"), ("pch-1", "ea-cg"), ("pch-1", "cg")])
@pytest.mark.parametrize("examples", [3, 12])
def test_ema_averages_the_factors_as_a_naive_mean_does(provider, solver, examples):
    model, batches = network(9, 7, 3), [batch(seed, examples, 9) for seed in range(4)]
    optimizer = SecondOrder(model, "cross-entropy", provider, solver, lr=0.3, ema=0.6)
    naive = None
    for count, (x, y) in enumerate(batches, start=1):
        fresh = curvlab.estimate(provider, curvlab.Problem(model, "cross-entropy", x, y))
        now = [
            (layer.output.to_dense(), layer.inputs.full.to_dense(), layer.inputs.mean)
            for layer in fresh.layers
        ]
        now = [tuple(t.clone() for t in layer) for layer in now]
        weight = min(1 - 1 / count, 0.6)
        naive = now if naive is None else [
            tuple(weight * a + (1 - weight) * b for a, b in zip(old, new, strict=True))
            for old, new in zip(naive, now, strict=True)
        ]  # fmt: skip
        buffer = x.clone()
        optimizer.step(buffer, y)
        buffer.zero_()
    for layer, (output, full, mean) in zip(optimizer._kept.layers, naive, strict=True):
        torch.testing.assert_close(layer.output.to_dense(), output, rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(layer.inputs.mean, mean, rtol=1e-10, atol=1e-13)
        if solver != "ea-cg":
            torch.testing.assert_close(layer.inputs.full.to_dense(), full, rtol=1e-10, atol=1e-13)


def test_ema_steps_with_the_averaged_mean_factor():
    """EA-CG run to its limit on the average, against a dense solve."""
    model, batches = network(5, 4, 3), [batch(seed) for seed in range(2)]
    optimizer = SecondOrder(
        model, "cross-entropy", "pch-1", "ea-cg[max_iter=200]", lr=1.0, alpha=0.3, ema=0.5
    )
    optimizer.step(*batches[0])
    before = parameters(model)
    problem = curvlab.Problem(model, "cross-entropy", *batches[1])
    gradient = {name: g.clone() for name, g in problem.gradient().items()}
    optimizer.step(*batches[1])
    for layer in optimizer._kept.layers:
        a = torch.outer(layer.inputs.mean, layer.inputs.mean)
        matrix = 0.7 * torch.kron(layer.output.to_dense().contiguous(), a)
        matrix.diagonal().add_(0.3)
        step = torch.linalg.solve(matrix, -gradient[layer.weight_name].flatten())
        moved = dict(model.named_parameters())[layer.weight_name].detach() - before[layer.weight_name]
        torch.testing.assert_close(moved.flatten(), step, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("option", [{"ema": 0.9}, {"refresh_every": 2}])
def test_matrix_free_curvatures_are_not_kept(option):
    optimizer = SecondOrder(network(5, 4, 3), "cross-entropy", "hessian", "cg", **option)
    with pytest.raises(PairError, match="matrix-free"):
        optimizer.step(*batch(0))


def test_kept_curvatures_do_not_warn(recwarn):
    optimizer = SecondOrder(network(5, 4, 3), "cross-entropy", refresh_every=4, ema=0.5)
    for seed in range(6):
        optimizer.step(*batch(seed))
    assert not [w for w in recwarn if issubclass(w.category, curvlab.StaleWarning)]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_levenberg_marquardt_follows_the_ratio_of_actual_to_predicted_reduction(momentum):
    rule = LevenbergMarquardt(every=1)
    model, alpha = network(5, 4, 3), 0.05
    optimizer = SecondOrder(
        model, "cross-entropy", "gauss-newton", "kfi", lr=0.7, alpha=alpha, momentum=momentum, adapt=rule
    )
    seen = set()
    for seed in range(12):
        x, y = batch(seed % 2)
        problem = curvlab.Problem(model, "cross-entropy", x, y)
        dense = curvlab.estimate("gauss-newton", problem).to_dense()
        gradient = torch.cat([g.flatten() for g in problem.gradient().values()])
        before, loss = parameters(model), nn.functional.cross_entropy(model(x), y)
        optimizer.step(x, y)
        delta = torch.cat([(p.detach() - before[n]).flatten() for n, p in model.named_parameters()])
        predicted = -(gradient @ delta + 0.5 * delta @ dense @ delta)
        ratio = float((loss - nn.functional.cross_entropy(model(x), y)).detach() / predicted)
        if predicted > 0:
            alpha *= 2 / 3 if ratio > 0.75 else 3 / 2 if ratio < 0.25 else 1
        else:
            alpha *= 3 / 2
        alpha = min(max(alpha, rule.min_alpha), rule.max_alpha)
        seen.add(round(alpha, 12))
        assert optimizer.alpha == pytest.approx(alpha, rel=1e-12)
    assert len(seen) > 1


def test_levenberg_marquardt_keeps_its_bounds():
    rule = LevenbergMarquardt(min_alpha=0.01, max_alpha=0.5)
    assert rule.adapted(0.011, 1.0, 1.0) == 0.01
    assert rule.adapted(0.4, float("-inf"), 1.0) == 0.5
    assert rule.adapted(0.1, 0.5, 1.0) == 0.1
    assert rule.adapted(0.1, 1.0, -1.0) == pytest.approx(0.15)


@pytest.mark.parametrize(
    "wrong",
    [{"lr": -0.1}, {"lr": float("nan")}, {"alpha": 0}, {"alpha": 2}, {"momentum": 1.0}, {"ema": 1.0},
     {"refresh_every": 0}, {"max_grad_norm": 0}, {"weight_decay": -1}],
)  # fmt: skip
def test_options_out_of_range_are_refused(wrong):
    with pytest.raises(SpecError, match=next(iter(wrong))):
        SecondOrder(network(5, 4, 3), "cross-entropy", **wrong)


# SPRING


@pytest.mark.parametrize("solver", ["exact", "cg[max_iter=400,tol=1e-13]"])
@pytest.mark.parametrize("provider", ["fisher[structure=layer]", "fisher[structure=full]", "pch-1"])
def test_spring_is_its_formula(provider: str, solver: str) -> None:
    """d = μ d₋ - (sC + τI)⁻¹ (g + μ s C d₋), with dense matrices."""
    model, inputs, targets = _spring_problem()
    optimizer = SecondOrder(model, "cross-entropy", provider, solver, lr=0.3, alpha=0.2, spring=0.9)
    last = torch.zeros(sum(p.numel() for p in model.parameters())).double()
    for _ in range(3):
        problem = curvlab.Problem(model, "cross-entropy", inputs, targets)
        dense = curvlab.estimate(provider, problem).to_dense()
        gradient = torch.cat([value.flatten() for value in problem.gradient().values()])
        damped = 0.8 * dense + 0.2 * torch.eye(len(dense)).double()
        last = 0.9 * last - torch.linalg.solve(damped, gradient + 0.9 * 0.8 * dense @ last)
        expected = torch.cat([p.detach().flatten() for p in model.parameters()]) + 0.3 * last
        optimizer.step(inputs, targets)
        found = torch.cat([p.detach().flatten() for p in model.parameters()])
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def _spring_problem() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    return model, torch.randn(5, 4).double(), torch.randint(3, (5,))


def test_spring_of_zero_is_the_plain_step_and_its_first_step_too() -> None:
    model, inputs, targets = _spring_problem()
    others = [copy.deepcopy(model) for _ in range(2)]
    for one, spring in zip((model, *others), (0.0, 0.0, 0.9), strict=True):
        SecondOrder(one, "cross-entropy", "fisher[structure=layer]", "exact", spring=spring).step(
            inputs, targets
        )
    plain = [p.detach() for p in model.parameters()]
    for other in others:
        for p, expected in zip(other.parameters(), plain, strict=True):
            torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=1e-14)


def test_spring_continues_from_a_state_and_refuses_momentum() -> None:
    model, inputs, targets = _spring_problem()
    settings = {"provider": "fisher[structure=layer]", "solver": "exact", "spring": 0.9}
    first = SecondOrder(model, "cross-entropy", **settings)
    first.step(inputs, targets)
    twin = copy.deepcopy(model)
    second = SecondOrder(twin, "cross-entropy", **settings)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    first.step(inputs, targets)
    second.step(inputs, targets)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)
    with pytest.raises(SpecError, match=r"spring=0\.9 with momentum=0\.5.*Use one of them"):
        SecondOrder(model, "cross-entropy", momentum=0.5, spring=0.9)
    with pytest.raises(SpecError, match="spring"):
        SecondOrder(model, "cross-entropy", spring=1.0)
