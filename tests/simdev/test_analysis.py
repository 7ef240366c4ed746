"""Spectra, densities, estimates, samples and trackers on the simulated device: the CPU's numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import curvlab
from curvlab import Additive
from curvlab.cli import main
from curvlab.linalg import execution
from tests.simdev.cases import problem, seeded
from tests.simdev.device import Sim

pytestmark = pytest.mark.device

DAMPING = Additive(0.1)
PROVIDERS = ("fisher", "pch[kind=rows]", "gauss-newton[kind=exact]", "hessian[full=true]")
Numbers = dict[str, Tensor] | Tensor | list[float] | float

MEASURES: dict[str, Callable[[curvlab.Curvature, curvlab.Gradient], Numbers]] = {
    "largest": lambda c, g: curvlab.spectrum(c, 4).eigenvalues,
    "by size": lambda c, g: curvlab.spectrum(c, 3, which="magnitude").residuals,
    "density": lambda c, g: torch.as_tensor(curvlab.density(c, probes=2, steps=12, width=0.01).density),
    "trace": lambda c, g: float(c.trace()),
    "estimated trace": lambda c, g: value_of(c.trace(probes=4)),
    "estimated norm": lambda c, g: value_of(c.frobenius_norm(probes=4)),
    "product": lambda c, g: c @ g,
    "diagonal": lambda c, g: dict(c.diagonal()),
}
DAMPED: dict[str, Callable[[curvlab.Curvature, curvlab.Gradient], Numbers]] = {
    "logdet": lambda c, g: value_of(c.logdet(damping=DAMPING)),
    "inverse": lambda c, g: c.inverse(damping=DAMPING) @ g,
    "root": lambda c, g: c.power(-0.5, damping=DAMPING) @ g,
    "sample": lambda c, g: c.sample(2, damping=DAMPING),
}


def value_of(found: object) -> float:
    """The value of an `Estimate`, or the number itself."""
    return float(getattr(found, "value", found))


def on_host(found: Numbers) -> list[Tensor]:
    if isinstance(found, dict):
        return [torch.as_tensor(value).detach().cpu().double() for value in found.values()]
    return [torch.as_tensor(found).detach().cpu().double()]


@pytest.mark.slow
@pytest.mark.parametrize("provider", PROVIDERS)
def test_measures_equal_the_cpu_s(sim: Sim, provider: str) -> None:
    """On device 1, while device 0 is the current one and gets nothing. Rounding alone may differ.

    Most of a whole Hessian's eigenvalues lie at zero, where the places of Lanczos' nodes are rounding.
    """
    made = seeded("chain")
    ours, theirs = problem(made, "sim:1"), problem(made, "cpu")
    with sim.counted(0) as elsewhere:
        pairs = [(curvlab.estimate(provider, own), own.gradient()) for own in (ours, theirs)]
        measures = MEASURES if "hessian" in provider else MEASURES | DAMPED
        for name, measure in measures.items():
            found, expected = (on_host(measure(*pair)) for pair in pairs)
            for mine, other in zip(found, expected, strict=True):
                rounding = 0.02 if name == "density" else 1e-4
                assert float((mine - other).abs().max()) <= rounding * float(other.abs().max()) + 1e-6, name
    assert elsewhere.counts.allocations == 0


@pytest.mark.slow
@pytest.mark.parametrize("lacking", ["float64", "eigendecompositions"])
@pytest.mark.parametrize("provider", ["fisher", "fisher[structure=full]", "hessian[full=true]"])
def test_measures_need_neither_float64_nor_eigendecompositions(sim: Sim, provider: str, lacking: str) -> None:
    """On such a device they are made on the host, or done without."""
    made = seeded("chain")
    own, other = problem(made, "sim"), problem(made, "cpu")
    execution._has_eigh.cache_clear()
    try:
        with sim.without_float64() if lacking == "float64" else sim.without(["_linalg_eigh"]):
            curvature, gradient = curvlab.estimate(provider, own), own.gradient()
            found = {name: on_host(measure(curvature, gradient)) for name, measure in MEASURES.items()}
            largest = float(gradient.norm())
    finally:
        execution._has_eigh.cache_clear()
    theirs, expected = curvlab.estimate(provider, other), other.gradient()
    assert largest == pytest.approx(float(expected.norm()), rel=1e-5)
    for name in ("largest", "trace", "estimated trace", "product"):
        for mine, right in zip(found[name], on_host(MEASURES[name](theirs, expected)), strict=True):
            assert float((mine - right).abs().max()) <= 1e-4 * float(right.abs().max()) + 1e-6, name


@pytest.mark.slow
def test_curvatures_of_the_device_are_compared_there(sim: Sim) -> None:
    made = seeded("chain")
    found = []
    for device in ("sim", "cpu"):
        own = problem(made, device)
        a, b = curvlab.estimate("fisher", own), curvlab.estimate("gauss-newton", own)
        found.append(curvlab.similarity(a, b, k=3))
    for ours, theirs in zip(*((one.distance, one.cosine) for one in found), strict=True):
        assert value_of(ours) == pytest.approx(value_of(theirs), rel=1e-4)


@pytest.mark.slow
def test_a_tracker_measures_on_the_device(sim: Sim) -> None:
    frames = []
    for device in ("sim", "cpu"):
        tracker = curvlab.Tracker(
            problem(seeded("chain"), device),
            every=1,
            measures=["top-eigenvalue", "trace", "density", "errors"],
            providers=["fisher"],
        )
        tracker(0)
        frame = tracker.frame()
        frames.append(frame[frame["of"] != "negative mass"])  # whose sign is rounding, near zero
    assert list(frames[0]["measure"]) == list(frames[1]["measure"])
    np.testing.assert_allclose(frames[0]["value"], frames[1]["value"], rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_the_command_runs_on_the_device(sim: Sim) -> None:
    arguments = "spectrum --arch 64-8-10 --data digits[train=60] --batch 60 --provider hessian -k 2"
    shown = [CliRunner().invoke(main, [*arguments.split(), "--device", device]) for device in ("sim", "cpu")]
    for one in shown:
        assert one.exit_code == 0, one.output
    assert shown[0].output.splitlines()[:3] == shown[1].output.splitlines()[:3]
