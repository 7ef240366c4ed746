"""A setup gives the network the data as it takes them, and the network the sizes of the data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from curvlab.data import Cifar10, Examples, TokenInputs, datasets
from curvlab.data.cifar10 import TEST_FILES, TRAIN_FILES, Release
from curvlab.exceptions import DataError, SpecError
from curvlab.studies.setup import Setup
from curvlab.studies.small.fake_problem import _sizes
from curvlab.studies.train.evaluate import evaluate
from curvlab.studies.train.optimizers import GradientSteps
from curvlab.studies.train.plan import TrainPlan
from curvlab.studies.train.run import train

RECORDS = 20
IMAGE_NETWORKS = ["lenet", "cnn", "resnet8", "resnet18", "vit-tiny", "mlp-mixer"]


@pytest.fixture
def tiny_cifar10(tmp_path, monkeypatch):
    """CIFAR-10 under its own name, from files of 20 records; gives the folder."""
    rng = np.random.default_rng(0)
    for name in (*TRAIN_FILES, *TEST_FILES):
        rows = rng.integers(0, 256, (RECORDS, 3073), dtype=np.uint8)
        rows[:, 0] = np.arange(RECORDS) % 10
        (tmp_path / name).write_bytes(rows.tobytes())
    monkeypatch.setattr(Cifar10, "release", Release("http://127.0.0.1:9/none.tar.gz", "0" * 64, RECORDS))
    return tmp_path


@pytest.mark.parametrize("arch", IMAGE_NETWORKS)
@pytest.mark.parametrize("data", ["cifar10", "digits"])
def test_an_image_network_is_built_for_the_images_it_gets(arch, data, tiny_cifar10):
    setup = Setup(arch=arch, data=data, data_dir=str(tiny_cifar10), batch=8).resolve()
    shape = (3, 32, 32) if data == "cifar10" else (1, 8, 8)
    assert f"image={'-'.join(map(str, shape))}" in setup.arch
    inputs, targets = setup.build_batches()
    assert (inputs.shape, targets.shape) == ((8, *shape), (8,))
    assert setup.build_model().eval()(inputs).shape == (8, 10)


def test_a_fully_connected_network_gets_the_same_values_as_rows(tiny_cifar10):
    rows, labels = Setup(
        arch="3072-8-10", data="cifar10", data_dir=str(tiny_cifar10), batch=9
    ).build_batches()
    images, same = Setup(arch="cnn", data="cifar10", data_dir=str(tiny_cifar10), batch=9).build_batches()
    assert rows.shape == (9, 3072)
    assert torch.equal(images.flatten(1), rows)
    assert torch.equal(labels, same)


def test_the_setup_of_characters_is_the_character_model_by_itself():
    setup = Setup(data="characters[length=12,examples=40]", batch=5, dtype="float64").resolve()
    assert setup.arch.startswith("gpt-nano[")
    inputs, targets = setup.build_batches()
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (5, 12)
    model = setup.build_model()
    logits = model(inputs)
    assert (logits.shape, logits.dtype) == ((5, 12, 28), torch.float64)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(np.log(28), rel=0.3)


def test_what_was_set_stays_set_and_a_resolved_setup_resolves_to_itself():
    setup = Setup(arch="resnet8[outputs=12,norm=group]", activation="relu", data="digits").resolve()
    assert all(part in setup.arch for part in ("outputs=12", "norm=group", "activation=relu", "image=1-8-8"))
    assert setup.resolve() == setup
    assert setup.build_model().head.out_features == 12


def test_a_network_is_resolved_without_the_files_of_its_data(tmp_path):
    setup = Setup(arch="resnet8", data="cifar10", data_dir=str(tmp_path / "absent"), batch=4).resolve()
    assert "image=3-32-32" in setup.arch
    assert setup.build_model().conv1.in_channels == 3
    assert _sizes(setup) == ("images", (3, 32, 32), 10)


def test_a_network_and_data_of_another_kind_are_refused_with_what_would_do():
    with pytest.raises(SpecError, match=r"ResNet takes images.*`64`\. Use a data set of images \(digits"):
        Setup(arch="resnet8", data="synthetic").resolve()
    with pytest.raises(DataError, match="`characters` has sequences of tokens"):
        Setup(arch="64-10", data="characters[examples=10]").build_batches()
    with pytest.raises(DataError, match="`synthetic` has rows of features"):
        Setup(arch="gpt-nano", data="synthetic").build_batches()
    with pytest.raises(SpecError, match="image=3-32-32 and the data have 1-8-8; leave image out"):
        Setup(arch="cnn[image=3-32-32]", data="digits").resolve()


def test_a_users_own_model_says_what_it_takes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_networks.py").write_text(
        "from torch import nn\n"
        "def rows():\n    return nn.Linear(64, 10)\n"
        "def images():\n    return nn.Sequential(nn.Conv2d(1, 2, 8), nn.Flatten(), nn.Linear(2, 10))\n"
        "images.input_kind = 'images'\n"
    )
    for name, shape in (("rows", (6, 64)), ("images", (6, 1, 8, 8))):
        setup = Setup(model=f"own_networks:{name}", data="digits", batch=6)
        inputs, _ = setup.build_batches()
        assert inputs.shape == shape
        assert setup.build_model()(inputs).shape == (6, 10)


def test_every_data_set_names_an_architecture_that_takes_it():
    from curvlab.architectures import architecture

    for name in ("digits", "synthetic", "synthetic-images", "synthetic-regression", "characters"):
        source = datasets.make(name)
        source.load().given_as(architecture(source.architecture).input_kind)


@pytest.mark.parametrize(
    "setup",
    [
        Setup(arch="resnet8", data="digits[train=200,test=50]", batch=50),
        Setup(data="characters[length=16,examples=100]", batch=20),
    ],
)
def test_a_network_of_images_or_tokens_trains(setup):
    frame = train(TrainPlan(setup, "sgd[lr=0.1]", epochs=3))
    assert set(frame["status"]) == {"ok"}
    first, *_, last = frame["train_loss"]
    assert last < 0.95 * first
    assert frame["test_accuracy"].iloc[-1] > 0.15


def test_the_loss_and_the_step_of_tokens_are_those_of_torch():
    setup = Setup(data="characters[length=7,examples=30]", dtype="float64", batch=24)
    inputs, targets = setup.build_batches()
    ours, theirs = setup.build_model(), setup.build_model()
    expected = nn.functional.cross_entropy(theirs(inputs).flatten(0, 1), targets.flatten())
    examples = Examples(TokenInputs(inputs), targets)
    score = evaluate(ours, setup.build_criterion(), examples)
    assert score.loss == pytest.approx(expected.item(), abs=1e-12)
    right = (theirs(inputs).argmax(-1) == targets).double().mean().item()
    assert score.accuracy == pytest.approx(right, abs=1e-12)
    expected.backward()
    torch.optim.SGD(theirs.parameters(), lr=0.5).step()
    steps = GradientSteps(torch.optim.SGD(ours.parameters(), lr=0.5), ours, setup.build_criterion())
    assert steps.step(inputs, targets).item() == pytest.approx(expected.item(), abs=1e-12)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
