"""Data sets: determinism, splits, standardisation, lazy images and errors that name the file."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits

from curvlab.data import Cifar10, Cifar10Enlarged, ImageFolder, dataset, datasets
from curvlab.data.base import stratified_split, stratified_subset
from curvlab.data.characters import generate
from curvlab.data.cifar10 import TEST_FILES, TRAIN_FILES, Release
from curvlab.data.download import cache_folder
from curvlab.exceptions import DataError, SpecError

RECORDS = 20
BEGINNING = "nulu reglasa vopa ciyli. rivabi yariziv wa visumin vopa ciyl"
REAL_CIFAR10 = cache_folder() / "cifar-10-batches-bin"


class TinyCifar10(Cifar10):
    release = Release("http://127.0.0.1:9/none.tar.gz", "0" * 64, RECORDS)


class TinyCifar10Enlarged(Cifar10Enlarged):
    release = TinyCifar10.release


@pytest.fixture
def cifar_folder(tmp_path: Path) -> Path:
    """Six files in CIFAR-10's layout; record i of a file has label i mod 10."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in (*TRAIN_FILES, *TEST_FILES):
        rows = rng.integers(0, 256, (RECORDS, 3073), dtype=np.uint8)
        rows[:, 0] = np.arange(RECORDS) % 10
        (folder / name).write_bytes(rows.tobytes())
    return folder


@pytest.fixture
def image_root(tmp_path: Path) -> Path:
    """Four classes of ten images of 12×8 pixels in one colour of their own."""
    root = tmp_path / "images"
    for label in range(4):
        (root / f"class{label}").mkdir(parents=True)
        for index in range(10):
            colour = (40 * label, 10 * index, 100)
            Image.new("RGB", (12, 8), colour).save(root / f"class{label}" / f"{index}.png")
    return root


# Batches


def _labels_by_batch(data, **options):
    return [targets.tolist() for _, targets in data.batches(100, **options)]


def test_batches_repeat_for_the_same_seed_and_epoch_and_differ_otherwise():
    data = dataset("digits").load()
    first = _labels_by_batch(data, seed=3, epoch=2)
    assert first == _labels_by_batch(data, seed=3, epoch=2)
    assert first != _labels_by_batch(data, seed=3, epoch=3)
    assert first != _labels_by_batch(data, seed=4, epoch=2)


def test_an_epoch_holds_every_training_example_once_with_its_own_target():
    data = dataset("digits").load()
    inputs, targets = data.train.all()
    expected = Counter((*row, label) for row, label in zip(inputs.tolist(), targets.tolist(), strict=True))
    seen = Counter(
        (*row, label)
        for x, y in data.batches(64, seed=1, epoch=5)
        for row, label in zip(x.tolist(), y.tolist(), strict=True)
    )
    assert seen == expected


def test_batches_can_be_iterated_again_and_resumed_at_any_batch():
    data = dataset("digits").load()
    whole = data.batches(100, seed=0, epoch=1)
    assert [len(x) for x, _ in whole] == [len(x) for x, _ in whole]
    for start in range(len(whole) + 1):
        rest = data.batches(100, seed=0, epoch=1, start=start)
        assert len(rest) == len(whole) - start
        for (x, y), (x_expected, y_expected) in zip(rest, list(whole)[start:], strict=True):
            assert torch.equal(x, x_expected)
            assert torch.equal(y, y_expected)


def test_drop_last_leaves_out_the_short_batch_only():
    data = dataset("digits[train=250]").load()
    assert [len(x) for x, _ in data.batches(100, drop_last=True)] == [100, 100]
    assert [len(x) for x, _ in data.batches(100)] == [100, 100, 50]
    assert [len(x) for x, _ in data.train.in_order(100)] == [100, 100, 50]


def test_bad_batch_arguments_are_refused():
    data = dataset("digits[train=250]").load()
    with pytest.raises(SpecError, match="batch size is 0"):
        data.batches(0)
    with pytest.raises(DataError, match="leaves no batch of 250"):
        data.batches(300, drop_last=True)
    with pytest.raises(DataError, match="start is batch 4; use 0 to 3"):
        data.batches(100, start=4)


def test_loading_and_shuffling_leave_the_global_random_state_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for spec in ("digits[train=100]", "synthetic", "synthetic-regression"):
        list(dataset(spec).load(seed=1).batches(50, seed=2, epoch=3))
    assert torch.equal(torch.get_rng_state(), before)


# Splits and subsets


@given(st.lists(st.integers(2, 30), min_size=1, max_size=6), st.floats(0.01, 0.99), st.integers())
def test_a_split_partitions_the_examples_with_every_class_on_both_sides(sizes, fraction, seed):
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    train, test = stratified_split(labels, fraction, seed)
    assert sorted(train.tolist() + test.tolist()) == list(range(len(labels)))
    assert set(labels[train].tolist()) == set(labels[test].tolist()) == set(range(len(sizes)))
    again = stratified_split(labels, fraction, seed)
    assert torch.equal(train, again[0])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.data())
def test_a_subset_has_the_size_asked_for_and_each_class_within_one_of_its_share(sizes, data):
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    count = data.draw(st.integers(1, len(labels)))
    chosen = stratified_subset(labels, len(labels), count, seed=data.draw(st.integers()))
    assert len(set(chosen.tolist())) == len(chosen) == count
    for label, size in enumerate(sizes):
        assert abs(int((labels[chosen] == label).sum()) - count * size / len(labels)) < 1


def test_a_class_of_one_example_cannot_be_split():
    with pytest.raises(DataError, match="class 1 has 1 example"):
        stratified_split(torch.tensor([0, 0, 1]), 0.2, 0)


@pytest.mark.parametrize("count", [0, 101])
def test_a_subset_larger_than_the_data_or_empty_is_refused(count):
    with pytest.raises(DataError, match=f"subset of {count} examples.*use 1 to 100"):
        stratified_subset(None, 100, count, 0)


# Digits


def test_digits_are_standardised_by_their_training_pixels_alone():
    data = dataset("digits").load(seed=7)
    train, test = data.train.all()[0].double(), data.test.all()[0].double()
    deviation = train.std(0, correction=0)
    assert train.mean(0).abs().max() < 1e-6
    assert ((deviation - 1).abs() < 1e-6).logical_or(deviation == 0).all()
    assert (deviation == 0).any(), "the digits have constant pixels, which are divided by 1"
    assert torch.isfinite(test).all()
    assert test.mean(0).abs().max() > 1e-3, "the test part is not standardised by itself"


def test_digits_are_scikit_learns_up_to_an_affine_map_of_each_pixel():
    pixels, labels = load_digits(return_X_y=True)
    data = dataset("digits").load(seed=0)
    assert len(data.train) + len(data.test) == len(pixels) == 1797
    assert torch.equal(
        torch.cat([data.train.targets, data.test.targets]).bincount(), torch.from_numpy(labels).bincount()
    )
    assert abs(len(data.test) / 1797 - 0.2) < 0.01
    assert (data.features, data.outputs, data.classes, data.shape) == (64, 10, 10, (1, 8, 8))
    assert data.train.all()[0].dtype == torch.float32
    assert data.train.targets.dtype == torch.int64


def test_limits_in_the_spec_are_subsets_of_the_same_split():
    whole = dataset("digits").load(seed=2)
    small = dataset("digits[train=200,test=50]").load(seed=2)
    assert (len(small.train), len(small.test)) == (200, 50)
    rows = {tuple(row) for row in whole.train.all()[0].tolist()}
    assert all(tuple(row) in rows for row in small.train.all()[0].tolist())


def test_to_converts_inputs_and_real_targets_but_not_labels():
    data = dataset("digits[train=20]").load().to("cpu", torch.float64)
    inputs, targets = next(iter(data.batches(5)))
    assert (inputs.dtype, targets.dtype) == (torch.float64, torch.int64)
    regression = dataset("synthetic-regression[examples=20]").load().to("cpu", torch.float64)
    assert next(iter(regression.batches(5)))[1].dtype == torch.float64


def test_reconstruction_makes_the_inputs_the_targets():
    data = dataset("digits[train=20]").load().reconstruction()
    inputs, targets = next(iter(data.batches(5)))
    assert torch.equal(inputs, targets)
    assert (data.outputs, data.classes) == (64, None)
    assert len(data.subset(train=7).train) == 7


# Synthetic


def test_synthetic_data_have_the_shape_asked_for_and_repeat_by_seed():
    data = dataset("synthetic[features=7,classes=3,examples=100]").load(seed=1)
    assert (len(data.train), len(data.test), data.features, data.outputs) == (80, 20, 7, 3)
    assert data.train.targets.unique().tolist() == [0, 1, 2]
    again = dataset("synthetic[features=7,classes=3,examples=100]").load(seed=1)
    other = dataset("synthetic[features=7,classes=3,examples=100]").load(seed=2)
    assert torch.equal(data.train.all()[0], again.train.all()[0])
    assert not torch.equal(data.train.all()[0], other.train.all()[0])


def test_synthetic_regression_adds_noise_of_the_deviation_asked_for():
    clean = dataset("synthetic-regression[features=5,outputs=2,examples=20000,noise=0]").load()
    noisy = dataset("synthetic-regression[features=5,outputs=2,examples=20000,noise=0.5]").load()
    assert torch.equal(clean.train.all()[0], noisy.train.all()[0])
    difference = (noisy.train.targets - clean.train.targets).double()
    assert difference.std(0).tolist() == pytest.approx([0.5, 0.5], abs=0.02)
    assert clean.train.targets.double().std(0).tolist() == pytest.approx([1, 1], abs=0.05)


@pytest.mark.parametrize(
    "spec",
    [
        "synthetic[features=0]",
        "synthetic[classes=1]",
        "synthetic[examples=1]",
        "synthetic[noise=-1]",
        "synthetic[noise=nan]",
        "synthetic-regression[outputs=0]",
        "digits[train=0]",
        "image-folder[classes=1]",
        "image-folder[test_fraction=1]",
        "image-folder[size=0]",
        "cifar10-224[size=0]",
        "cifar10-224[interpolation=bicubic]",
        "synthetic-images[image=3-8]",
        "synthetic-images[image=3-8-0]",
        "synthetic-images[classes=1]",
        "characters[length=0]",
        "characters[examples=1]",
        "digit",
    ],
)
def test_impossible_settings_are_refused_when_the_spec_is_read(spec):
    with pytest.raises(SpecError):
        dataset(spec)


def test_every_name_has_a_canonical_text_that_reads_back():
    for name in datasets.names():
        assert dataset(datasets.canonical(name)) == dataset(name)


# CIFAR-10


@pytest.mark.parametrize("parent", [False, True])
@pytest.mark.parametrize("by_environment", [False, True])
def test_cifar10_is_found_in_a_folder_or_its_parent(cifar_folder, monkeypatch, parent, by_environment):
    folder = cifar_folder.parent if parent else cifar_folder
    monkeypatch.delenv("CURVLAB_DATA", raising=False)
    if by_environment:
        monkeypatch.setenv("CURVLAB_DATA", str(folder))
    data = TinyCifar10().load(data_dir=None if by_environment else folder)
    assert (len(data.train), len(data.test)) == (5 * RECORDS, RECORDS)
    assert (data.shape, data.classes, data.class_names[3]) == ((3, 32, 32), 10, "cat")


def test_cifar10_pixels_are_standardised_by_channel_in_the_files_order(cifar_folder):
    data = TinyCifar10().load(data_dir=cifar_folder)
    raw = np.concatenate(
        [np.fromfile(cifar_folder / name, np.uint8).reshape(-1, 3073) for name in TRAIN_FILES]
    )
    planes = raw[:, 1:].reshape(-1, 3, 1024).astype(np.float64)
    mean, deviation = planes.mean((0, 2), keepdims=True), planes.std((0, 2), keepdims=True)
    inputs, targets = data.train.to("cpu", torch.float64).all()
    np.testing.assert_allclose(inputs.numpy(), ((planes - mean) / deviation).reshape(-1, 3072), atol=1e-12)
    assert targets.tolist() == raw[:, 0].tolist()


@pytest.mark.parametrize("interpolation", ["bilinear", "nearest"])
@pytest.mark.parametrize("size", [224, 48, 20])
def test_enlarged_cifar10_is_what_torch_interpolates(cifar_folder, interpolation, size):
    small = TinyCifar10(train=10).load(data_dir=cifar_folder).to("cpu", torch.float64)
    large = TinyCifar10Enlarged(train=10, size=size, interpolation=interpolation).load(data_dir=cifar_folder)
    large = large.to("cpu", torch.float64)
    images = small.train.all()[0].reshape(-1, 3, 32, 32)
    expected = torch.nn.functional.interpolate(images, size=(size, size), mode=interpolation)
    torch.testing.assert_close(large.train.all()[0], expected.flatten(1), rtol=0, atol=1e-12)
    assert large.features == 3 * size * size


def test_enlarged_cifar10_keeps_the_small_pixels_only(cifar_folder):
    data = TinyCifar10Enlarged().load(data_dir=cifar_folder)
    assert data.train.inputs.pixels.shape == (5 * RECORDS, 3, 32, 32)
    assert data.train.inputs.pixels.dtype == torch.uint8


def test_a_truncated_file_is_named_with_both_sizes(cifar_folder):
    path = cifar_folder / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=re.escape(f"{path}: 61,459 bytes, expected 61,460")):
        TinyCifar10().load(data_dir=cifar_folder)


def test_the_official_files_are_expected_at_their_official_size(cifar_folder):
    with pytest.raises(DataError, match="expected 30,730,000"):
        Cifar10().load(data_dir=cifar_folder)


def test_a_label_beyond_nine_is_named_with_its_record(cifar_folder):
    path = cifar_folder / "test_batch.bin"
    content = bytearray(path.read_bytes())
    content[4 * 3073] = 10
    path.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(f"{path}: corrupt, record 4 has label 10")):
        TinyCifar10().load(data_dir=cifar_folder)


def test_a_missing_file_is_named(cifar_folder):
    (cifar_folder / "data_batch_5.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_5\.bin: the file is missing"):
        TinyCifar10().load(data_dir=cifar_folder)


def test_a_folder_without_cifar10_or_no_folder_at_all_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no data_batch_\*\.bin there"):
        TinyCifar10().load(data_dir=tmp_path)
    with pytest.raises(DataError, match="absent: no such folder; --data-dir"):
        TinyCifar10().load(data_dir=tmp_path / "absent")


@pytest.mark.skipif(not REAL_CIFAR10.is_dir(), reason="CIFAR-10 has not been downloaded to the cache")
def test_the_real_cifar10_has_its_published_counts_and_moments(monkeypatch):
    monkeypatch.delenv("CURVLAB_DATA", raising=False)
    data = dataset("cifar10").load()
    assert data.train.targets.bincount().tolist() == [5000] * 10
    assert data.test.targets.bincount().tolist() == [1000] * 10
    moments = data.train.inputs.standardisation
    assert (moments.mean.flatten() / 255).tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=5e-5)
    assert (moments.deviation.flatten() / 255).tolist() == pytest.approx([0.2470, 0.2435, 0.2616], abs=5e-5)


# Image folder


def test_an_image_folder_is_split_by_class_and_drawn_by_seed(image_root):
    data = ImageFolder(classes=3, size=6, test_fraction=0.3).load(seed=0, data_dir=image_root)
    assert (len(data.train), len(data.test), data.classes, data.shape) == (21, 9, 3, (3, 6, 6))
    drawn = {ImageFolder(classes=3, size=6).load(seed=s, data_dir=image_root).class_names for s in range(8)}
    assert len(drawn) > 1
    again = ImageFolder(classes=3, size=6, test_fraction=0.3).load(seed=0, data_dir=image_root)
    assert again.class_names == data.class_names
    assert torch.equal(again.test.all()[0], data.test.all()[0])


def test_an_image_keeps_its_colours_and_its_class(image_root):
    data = ImageFolder(size=5).load(seed=0, data_dir=image_root).to("cpu", torch.float64)
    inputs, targets = data.train.all()
    moments = data.train.inputs.standardisation
    colours = inputs.reshape(-1, 3, 25) * moments.deviation.reshape(3, 1) + moments.mean.reshape(3, 1)
    assert (colours - colours[..., :1]).abs().max() < 1e-9
    assert torch.allclose(colours[:, 0, 0], 40 * targets.double())
    assert torch.allclose(colours[:, 2, 0], torch.full((len(targets),), 100.0, dtype=torch.float64))
    assert inputs.reshape(-1, 3, 25).mean((0, 2)).abs().max() < 1e-9


def test_a_broken_image_is_named_when_it_is_needed(image_root):
    data = ImageFolder(size=6).load(data_dir=image_root)
    path = data.train.inputs.paths[4]
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataError, match=re.escape(f"{path}: not a readable image")):
        data.train.all()


def test_folders_that_cannot_be_classes_are_refused(image_root, tmp_path):
    with pytest.raises(DataError, match="4 class folders, 10 are needed"):
        dataset("imagenet10").load(data_dir=image_root)
    (tmp_path / "splits" / "train").mkdir(parents=True)
    (tmp_path / "splits" / "val").mkdir()
    with pytest.raises(DataError, match="look like splits"):
        ImageFolder().load(data_dir=tmp_path / "splits")
    (image_root / "empty").mkdir()
    with pytest.raises(DataError, match="empty: 0 images"):
        ImageFolder().load(data_dir=image_root)


def test_an_image_folder_must_be_named(monkeypatch):
    monkeypatch.delenv("CURVLAB_DATA", raising=False)
    with pytest.raises(DataError, match="no folder was named"):
        ImageFolder().load()


# Shapes of inputs


def test_images_keep_their_shape_where_a_network_takes_images(cifar_folder):
    data = TinyCifar10().load(data_dir=cifar_folder)
    rows, labels = next(iter(data.batches(30, seed=1, epoch=2)))
    images, same = next(iter(data.given_as("images").batches(30, seed=1, epoch=2)))
    assert (data.kind, rows.shape, images.shape) == ("images", (30, 3072), (30, 3, 32, 32))
    assert torch.equal(images.flatten(1), rows)
    assert torch.equal(labels, same)
    raw = np.fromfile(cifar_folder / TRAIN_FILES[0], np.uint8).reshape(-1, 3073)
    moments = data.train.inputs.standardisation
    green = (raw[3, 1 + 1024 + 5 * 32 + 7] - moments.mean[1, 0, 0]) / moments.deviation[1, 0, 0]
    first = data.given_as("images").train.to("cpu", torch.float64).batch(torch.tensor([3]))[0]
    assert first[0, 1, 5, 7].item() == pytest.approx(green.item(), abs=1e-12)


@pytest.mark.parametrize("spec", ["digits", "synthetic-images[image=2-5-4,examples=50]"])
def test_the_shape_survives_subsets_devices_and_the_way_back(spec):
    data = dataset(spec).load(seed=1)
    images = data.given_as("images").subset(train=20, seed=3).to("cpu", torch.float64)
    inputs = images.train.all()[0]
    assert inputs.shape == (20, *data.shape)
    assert inputs.dtype == torch.float64
    assert next(iter(images.test.in_order(4)))[0].shape == (4, *data.shape)
    again = images.given_as("rows").train.all()[0]
    assert torch.equal(again, data.subset(train=20, seed=3).to("cpu", torch.float64).train.all()[0])


def test_an_image_folder_keeps_its_shape_too(image_root):
    data = ImageFolder(size=6).load(data_dir=image_root)
    assert data.given_as("images").train.all()[0].shape == (32, 3, 6, 6)


def test_synthetic_images_are_synthetic_rows_in_another_shape():
    rows = dataset("synthetic[features=40,classes=3,examples=50]").load(seed=2)
    images = dataset("synthetic-images[image=2-5-4,classes=3,examples=50]").load(seed=2)
    assert torch.equal(images.train.all()[0], rows.train.all()[0])
    assert torch.equal(images.test.targets, rows.test.targets)


@pytest.mark.parametrize(
    ("spec", "kind", "message"),
    [
        ("synthetic", "images", r"takes images.*`synthetic` has rows of features, of shape \(64,\)"),
        ("synthetic", "tokens", "takes sequences of tokens.*use the data set characters"),
        ("digits", "tokens", "takes sequences of tokens, and the data set `digits` has images"),
        ("characters[examples=10]", "rows", r"takes rows of features.*or a network for tokens \(gpt-nano\)"),
        ("characters[examples=10]", "images", "`characters` has sequences of tokens"),
        ("digits", "pictures", "wanted as `pictures`; use one of rows, images, tokens"),
    ],
)
def test_data_of_another_kind_than_the_network_takes_are_refused(spec, kind, message):
    with pytest.raises(DataError, match=message):
        dataset(spec).load().given_as(kind)


@pytest.mark.parametrize(
    "spec",
    [
        "digits",
        "synthetic[features=7,classes=3]",
        "synthetic-regression[features=7,outputs=2]",
        "synthetic-images[image=1-4-6,classes=3]",
        "characters[length=9,examples=20]",
    ],
)
def test_the_sizes_that_settings_tell_are_those_of_the_loaded_data(spec):
    data = dataset(spec).load()
    assert dataset(spec).sizes() == (data.shape, data.outputs)


def test_sizes_of_images_are_known_before_they_are_there(cifar_folder):
    for source in (TinyCifar10(), TinyCifar10Enlarged(size=40)):
        data = source.load(data_dir=cifar_folder)
        assert source.sizes() == (data.shape, data.outputs)
    assert dataset("imagenet10[size=64]").sizes() == ((3, 64, 64), 10)
    assert dataset("image-folder").sizes() is None


# Characters


def test_characters_repeat_by_seed_and_targets_are_the_next_characters():
    data = dataset("characters[length=10,examples=50]").load(seed=4)
    inputs, targets = data.train.all()
    assert (inputs.shape, targets.shape, len(data.test), data.kind) == ((40, 10), (40, 10), 10, "tokens")
    assert inputs.dtype == targets.dtype == torch.int64
    text = torch.cat([inputs.flatten(), data.test.all()[0].flatten()])
    assert torch.equal(torch.cat([targets.flatten(), data.test.all()[1].flatten()])[:-1], text[1:])
    assert torch.equal(dataset("characters[length=10,examples=50]").load(seed=4).train.all()[0], inputs)
    assert not torch.equal(dataset("characters[length=10,examples=50]").load(seed=5).train.all()[0], inputs)


def test_the_generated_text_is_one_language_fixed_for_good():
    text = generate(20_000, seed=0)
    assert text.startswith(BEGINNING)
    words = Counter(text.replace(".", "").split()[:-1])
    assert 50 < len(words) <= 200
    assert {len(sentence.split()) for sentence in text.split(". ")[:-1]} == set(range(3, 11))


def test_tokens_stay_integers_and_subsets_need_no_classes():
    data = dataset("characters[length=6,examples=40,train=7]").load().to("cpu", torch.float64)
    inputs, targets = next(iter(data.batches(5)))
    assert inputs.dtype == targets.dtype == torch.int64
    assert len(data.train) == 7
