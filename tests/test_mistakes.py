"""Mistaken arguments end in a CurvlabError that says what was given, before any work is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import curvlab
from curvlab.exceptions import CurvlabError, ProblemError, SpecError
from curvlab.measure import device as devices
from curvlab.solvers import CG, KFI
from curvlab.studies.dask_executor import Dask
from curvlab.studies.setup import Setup


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 4, generator=generator, dtype=torch.float64), torch.arange(6) % 3


def problem(**options: Any) -> curvlab.Problem:
    return curvlab.Problem(model(), "cross-entropy", *batch(), **options)


@pytest.fixture(scope="module")
def curvature() -> curvlab.Curvature:
    return curvlab.estimate("fisher", problem())


NO_NUMBERS: tuple[Any, ...] = ("x", [1], 1j, torch.ones(2), object(), float("nan"))
SETTINGS: dict[str, Callable[[Any], object]] = {
    "alpha of solve": lambda value: curvlab.solve(
        "kfi", curvlab.estimate("fisher", problem()), problem().gradient(), alpha=value
    ),
    "alpha": lambda value: curvlab.Mixed(value),
    "tau": lambda value: curvlab.Additive(value),
    "l2": lambda value: problem(l2=value),
    "tol": lambda value: CG(tol=value),
    "pi": lambda value: KFI(pi=value),
    "gamma": lambda value: curvlab.providers.PCH(gamma=value),
}


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_no_number_is_refused_as_such(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match="=") as caught:
        SETTINGS[name](value)
    assert isinstance(caught.value, CurvlabError)


@pytest.mark.parametrize("value", ["x", 2.5, None, 10**26, True])
def test_whole_numbers_are_whole_and_of_64_bits(value: Any) -> None:
    for make in (lambda: CG(max_iter=value), lambda: curvlab.providers.Fisher(seed=value)):
        with pytest.raises(SpecError, match="expected a whole number of at most 64 bits"):
            make()


Use = Callable[[curvlab.Curvature, dict[str, Tensor]], object]
OPERANDS: dict[str, tuple[Use, str]] = {
    "missing": (lambda c, g: c @ {"0.weight": g["0.weight"]}, "no entry for"),
    "shape": (lambda c, g: c @ {name: torch.zeros(2, 2) for name in g}, r"has shape \(2, 2\)"),
    "dtype": (lambda c, g: c @ {name: value.float() for name, value in g.items()}, "is torch.float32"),
    "no tensor": (lambda c, g: c @ dict.fromkeys(g, 3), "is a int"),  # type: ignore[arg-type]
    "flat": (lambda c, g: c.flat_product(torch.zeros(3)), "a vector of 43 entries"),
    "flat list": (lambda c, g: c.flat_product([1.0]), "takes a tensor"),  # type: ignore[arg-type]
    "dense": (lambda c, g: c.to_dense(max_bytes=1), "would take 14,792 bytes"),
    "load nothing": (lambda c, g: c.load("nowhere/at-all"), "is not there"),
    "load folder": (lambda c, g: c.load(Path(__file__).parent), "cannot be read"),
    "load None": (lambda c, g: c.load(None), "expected the name of a file"),  # type: ignore[arg-type]
    "save None": (lambda c, g: c.save(None), "expected the name of a file"),  # type: ignore[arg-type]
    "layers": (lambda c, g: problem(layers=3), "expected a list of names"),
}


@pytest.mark.parametrize("case", OPERANDS)
def test_operands_and_files_that_do_not_fit_are_refused(case: str, curvature: curvlab.Curvature) -> None:
    use, expected = OPERANDS[case]
    with pytest.raises(CurvlabError, match=expected):
        use(curvature, dict(problem().gradient()))


def test_old_handlers_of_builtin_errors_still_work(curvature: curvlab.Curvature) -> None:
    with pytest.raises(FileNotFoundError):
        curvature.load("nowhere/at-all")
    with pytest.raises(MemoryError):
        curvature.to_dense(max_bytes=1)
    with pytest.raises(ValueError, match="no entry"):
        _ = curvature @ {}


@pytest.mark.parametrize("provider", ["fisher", "hessian"])
def test_scipy_operators_take_complex_vectors(provider: str) -> None:
    operator = curvlab.estimate(provider, problem()).to_scipy()
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(2, operator.shape[0]))
    expected = operator @ left + 1j * (operator @ right)
    np.testing.assert_allclose(operator @ (left + 1j * right), expected, rtol=1e-12)


def test_layers_without_entries_are_refused() -> None:
    empty = nn.Sequential(nn.Linear(4, 0), nn.Tanh(), nn.Linear(0, 3)).double()
    with pytest.raises(ProblemError, match=r"`0\.weight` of shape \(0, 4\).*has no entries"):
        curvlab.Problem(empty, "cross-entropy", *batch())


@pytest.mark.parametrize("provider", ["fisher", "hessian", "gauss-newton[kind=rows]"])
def test_embeddings_with_sparse_gradients_are_as_those_with_dense_ones(provider: str) -> None:
    tokens, labels = torch.tensor([0, 3, 3, 6, 1, 2]), batch()[1]
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        made = nn.Sequential(nn.Embedding(7, 4, sparse=sparse), nn.Linear(4, 3)).double()
        given = curvlab.Problem(made, "cross-entropy", tokens, labels)
        found.append(curvlab.estimate(provider, given) @ given.gradient())
    for name, dense in found[0].items():
        torch.testing.assert_close(found[1][name], dense, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "provider",
    ["fisher[kind=mc,samples={}]", "gauss-newton[kind=rows,samples={}]", "pch[kind=rows,samples={}]"],
)
def test_draws_that_take_days_are_refused_with_the_time(provider: str) -> None:
    with pytest.raises(SpecError, match=r"samples=100,000,000,000 .* at least 1\d\d\.\d days"):
        curvlab.estimate(provider.format(10**11), problem())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("64-99999999-10", "7,499,999,935 parameters: with one gradient they take 59,999,999,480 bytes"),
        ("64" + "-8" * 3000 + "-10", r"3,001 layers: .* about 15 s"),
    ],
)
def test_networks_that_cannot_be_studied_are_refused_before_they_are_made(
    arch: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "memory_bytes", lambda device: 1 << 30)
    with pytest.raises(SpecError, match=expected):
        Setup(arch=arch, data="digits", device="cpu").build_model()


def test_seeds_beyond_64_bits_are_refused() -> None:
    with pytest.raises(SpecError, match=r"seed=1.*at most 64 bits"):
        Setup(data="digits", seed=10**26).resolve()


@pytest.mark.parametrize("address", ["nonsense", "tcp://host", "host:", "tcp://host:port", "a b:80"])
def test_addresses_that_are_none_are_refused_without_waiting(address: str) -> None:
    with pytest.raises(SpecError, match="is not the address of a scheduler"):
        Dask(address=address)


@pytest.mark.parametrize(
    "address", ["tcp://host:8786", "10.0.0.1:8786", "tls://[::1]:8786", "inproc://1/2/3"]
)
def test_addresses_of_schedulers_are_taken(address: str) -> None:
    assert Dask(address=address).address == address
