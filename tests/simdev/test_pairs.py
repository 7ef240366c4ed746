"""Every provider with every solver, and the optimizer, on the simulated device: equal to the CPU to the bit,
or to 1e-5 of the largest entry with `cg`, whose sums are taken another way there.

The device computes with the CPU's kernels, so where a result differs a tensor took another way on it, or was
made on the host.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import curvlab
from curvlab.exceptions import CurvlabError, ProblemError, SpecError
from curvlab.measure import device as devices
from curvlab.optim import SecondOrder
from tests.simdev.cases import EVERY_PROVIDER, NETWORKS, problem, seeded
from tests.simdev.device import Sim
from tests.solver_cases import SOLVERS

pytestmark = pytest.mark.device


def outcome(provider: str, solver: str, own: curvlab.Problem) -> dict[str, Tensor] | str:
    """The direction, or the sentence with which the pair is refused."""
    try:
        curvature = curvlab.estimate(provider, own)
        return dict(curvlab.solve(solver, curvature, own.gradient(), alpha=0.1).direction)
    except CurvlabError as error:
        return str(error)


def check_equal(
    ours: dict[str, Tensor] | str, theirs: dict[str, Tensor] | str, device: str, tolerance: float
) -> None:
    if isinstance(theirs, str) or isinstance(ours, str):
        assert ours == theirs
        return
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert str(value.device) == device
        error = float((value.cpu() - theirs[name]).abs().max())
        assert error <= tolerance * float(theirs[name].abs().max()), name


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("provider", [*EVERY_PROVIDER, "fisher[sharing=reduce]"])
def test_directions_equal_the_cpu_s_and_stay_on_their_device(sim: Sim, provider: str, network: str) -> None:
    """On device 1 while device 0 is the current one, which then gets nothing."""
    made = seeded(network)
    ours, theirs = problem(made, "sim:1"), problem(made, "cpu")
    with sim.counted(0) as elsewhere:
        for solver in SOLVERS:
            tolerance = 1e-5 if solver == "cg" else 0.0
            mine, expected = (outcome(provider, solver, own) for own in (ours, theirs))
            check_equal(mine, expected, "sim:1", tolerance)
    assert elsewhere.counts.allocations == elsewhere.counts.launches == 0


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum, decay and clipping": {"momentum": 0.9, "weight_decay": 0.01, "max_grad_norm": 0.5},
    "a moving average": {"ema": 0.5, "refresh_every": 2},
    "an adapted damping": {"adapt": True},
}


def steps(made: Any, device: str, pair: tuple[str, str], options: dict[str, Any]) -> list[Tensor]:
    model = copy.deepcopy(made[0]).to(device)
    optimizer = SecondOrder(model, "cross-entropy", *pair, lr=0.1, alpha=0.1, **options)
    losses = [optimizer.step(made[1].to(device), made[2].to(device)) for _ in range(3)]
    return [loss.detach().cpu() for loss in losses] + [p.detach().cpu() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("pair", [("pch-1", "ea-cg"), ("fisher", "kfi")])
@pytest.mark.parametrize("options", OPTIONS)
def test_steps_of_the_optimizer_equal_the_cpu_s(sim: Sim, options: str, pair: tuple[str, str]) -> None:
    made = seeded("chain")
    with sim.counted(0) as elsewhere:
        ours = steps(made, "sim:1", pair, OPTIONS[options])
    assert elsewhere.counts.allocations == 0
    for mine, theirs in zip(ours, steps(made, "cpu", pair, OPTIONS[options]), strict=True):
        assert torch.equal(mine, theirs)


class Noisy(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + 0.1 * torch.randn_like(x))


@pytest.mark.parametrize("device", ["cpu", "sim:0", "sim:1"])
def test_a_forward_that_draws_on_its_device_is_refused(sim: Sim, device: str) -> None:
    x, y = torch.randn(6, 4).to(device), torch.tensor([0, 1, 2] * 2).to(device)
    before = [torch.get_rng_state(), *(torch.sim.get_rng_state(d) for d in range(2))]
    noisy = Noisy(torch.nn.Linear(4, 3)).to(device)
    host = torch.get_rng_state()
    with pytest.raises(ProblemError, match="draws random numbers"):
        curvlab.estimate("fisher", curvlab.Problem(noisy, "cross-entropy", x, y))
    after = [torch.get_rng_state(), *(torch.sim.get_rng_state(d) for d in range(2))]
    assert all(map(torch.equal, [host, *before[1:]], after))


def test_a_device_that_is_not_there_is_refused(sim: Sim) -> None:
    assert devices.resolve("sim:1") == torch.device("sim:1")
    with pytest.raises(SpecError, match="`sim` has 2"):
        devices.resolve("sim:2")
