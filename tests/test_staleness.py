"""Objects whose model or data have changed say so, or follow: problems, curvatures, optimizers, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvlab
from curvlab.curvature import StaleWarning
from curvlab.exceptions import StaleError
from curvlab.optim import SecondOrder


class Network(nn.Module):
    """Layers, a buffer and a mode that its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)
        self.activation = nn.LeakyReLU(0.1)
        self.register_buffer("centre", torch.zeros(4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(self.a(x - self.centre))
        return self.b(2 * hidden if self.training else hidden)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(7, 4, generator=generator, dtype=torch.float64), torch.arange(7) % 3


def freeze(model: Network, x: Tensor, y: Tensor) -> None:
    model.a.weight.requires_grad_(False)


def replace_module(model: Network, x: Tensor, y: Tensor) -> None:
    model.activation = nn.Tanh()  # type: ignore[assignment]


def flip_mode(model: Network, x: Tensor, y: Tensor) -> None:
    model.eval()


def change_slope(model: Network, x: Tensor, y: Tensor) -> None:
    model.activation.negative_slope = 0.5


def add_hook(model: Network, x: Tensor, y: Tensor) -> None:
    model.a.register_forward_hook(lambda module, inputs, output: 2 * output)


def change_buffer(model: Network, x: Tensor, y: Tensor) -> None:
    model.centre.add_(1)


def write_data(model: Network, x: Tensor, y: Tensor) -> None:
    model.b.weight.data.mul_(2)


def write_buffer_data(model: Network, x: Tensor, y: Tensor) -> None:
    model.centre.data.add_(1)


def write_inputs_in_numpy(model: Network, x: Tensor, y: Tensor) -> None:
    x.numpy()[:] *= 2


def write_targets_in_numpy(model: Network, x: Tensor, y: Tensor) -> None:
    y.numpy()[:] = 0


Change = Callable[[Network, Tensor, Tensor], None]
CHANGES: tuple[Change, ...] = (
    freeze,
    replace_module,
    flip_mode,
    change_slope,
    add_hook,
    change_buffer,
    write_data,
    write_buffer_data,
    write_inputs_in_numpy,
    write_targets_in_numpy,
)
REFUSED = (freeze, replace_module)


def flat(gradient: Any) -> Tensor:
    return torch.cat([gradient[name].flatten() for name in gradient])


@pytest.mark.parametrize("change", CHANGES)
def test_a_kept_problem_follows_a_change_or_refuses_it(change: Change) -> None:
    model, (x, y) = Network(), batch()
    kept = curvlab.Problem(model, "cross-entropy", x, y)
    before = flat(kept.gradient())
    change(model, x, y)
    if change in REFUSED:
        with pytest.raises(StaleError, match="Make a new Problem"):
            kept.gradient()
        return
    after = flat(curvlab.Problem(model, "cross-entropy", x, y).gradient())
    assert not torch.allclose(after, before)
    torch.testing.assert_close(flat(kept.gradient()), after, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("provider", ["fisher", "hessian", "gauss-newton[kind=exact]"])
def test_a_kept_curvature_says_that_its_model_or_data_changed(change: Change, provider: str) -> None:
    model, (x, y) = Network(), batch()
    curvature = curvlab.estimate(provider, curvlab.Problem(model, "cross-entropy", x, y))
    curvature.to_dense()
    change(model, x, y)
    # Factors are those of the old model, which may be what is wanted; what reads the batch is of neither.
    if provider == "fisher" and change is not write_inputs_in_numpy:
        with pytest.warns(StaleWarning, match=r"changed since `fisher` was estimated"):
            curvature.to_dense()
    else:
        with pytest.raises(StaleError, match="changed since"):
            curvature.to_dense()


@pytest.mark.parametrize("refresh_every", [1, 5])
@pytest.mark.parametrize("change", CHANGES)
def test_an_optimizer_follows_a_change_or_refuses_it(change: Change, refresh_every: int) -> None:
    model, (x, y) = Network(), batch()
    optimizer = SecondOrder(model, "cross-entropy", "fisher", "kfi", refresh_every=refresh_every)
    optimizer.step(x, y)
    change(model, x, y)
    weights = [p.detach().clone() for p in model.parameters()]
    if change in REFUSED:
        with pytest.raises(StaleError, match="a new SecondOrder"):
            optimizer.step(x, y)
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), weights, strict=True))
        return
    expected = nn.functional.cross_entropy(model(x), y).detach()
    torch.testing.assert_close(optimizer.step(x, y), expected, rtol=1e-12, atol=1e-14)


def test_a_curvature_does_not_keep_its_model_alive_to_watch_it() -> None:
    model, (x, y) = Network(), batch()
    curvature = curvlab.estimate("fisher", curvlab.Problem(model, "cross-entropy", x, y))
    expected = curvature.to_dense()
    del model
    torch.testing.assert_close(curvature.to_dense(), expected)


@pytest.mark.slow
def test_threads_that_share_a_model_do_not_disturb_each_other() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = batch()
    parts = {rows: (x[:rows], y[:rows]) for rows in (4, 5, 6)}
    expected = {
        rows: flat(curvlab.Problem(model, "cross-entropy", *part).gradient()) for rows, part in parts.items()
    }
    outputs = model(x).detach()
    failures: list[str] = []

    def analyse(rows: int) -> None:
        try:
            for _ in range(15):
                problem = curvlab.Problem(model, "cross-entropy", *parts[rows])
                torch.testing.assert_close(flat(problem.gradient()), expected[rows])
                _ = curvlab.estimate("hessian", problem) @ problem.gradient()
        except Exception as error:
            failures.append(repr(error))

    def call() -> None:
        try:
            for _ in range(200):
                torch.testing.assert_close(model(x).detach(), outputs)
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=analyse, args=(rows,)) for rows in parts]
    threads.append(threading.Thread(target=call))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
