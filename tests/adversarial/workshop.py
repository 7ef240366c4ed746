"""The folder that mistaken commands run in: models, batches and losses that misbehave, and broken files.

Everything a command of the table names is here by a short name, so that the table reads as a shell history.
"""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from curvlab.studies.compare.run import compare
from curvlab.studies.setup import Setup
from tests.cases import ONE_SCENE

__all__ = ["TINY", "make_workshop"]

TINY = Setup(arch="5-4-3", data="synthetic[features=5,classes=3,examples=30]", batch=10, device="cpu")

OWN = """
import torch
from torch import nn

def net(): return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
def rows(): return torch.linspace(-1, 1, 24).reshape(6, 4), torch.tensor([0, 1, 0, 1, 0, 1])

# models
number = 7
def raises(): raise RuntimeError("no weights today")
def needs_argument(width): return nn.Linear(width, 2)
def a_list(): return [1, 2]
def no_parameters(): return nn.Flatten()
def empty_layer(): return nn.Sequential(nn.Linear(4, 0), nn.Linear(0, 2))
class Stumbles(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, x): raise KeyError("token_type_ids")
class WrongShape(nn.Linear):
    def __init__(self): super().__init__(5, 2)
class ThreeOutputs(nn.Linear):
    def __init__(self): super().__init__(4, 2)
    def forward(self, x): return {"scores": super().forward(x)}
class NotFinite(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
        self.weight.data.fill_(float("nan"))
class Noisy(nn.Linear):
    def __init__(self): super().__init__(4, 2)
    def forward(self, x): return super().forward(x) + torch.randn(2)
class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, x): return self.forward(x)
class Leaves(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, x): raise SystemExit(0)
def exits(): raise SystemExit(0)

# batches
def no_batches(): return []
def text(): return "rows of data"
def bad_labels(): return rows()[0], torch.tensor([0, 1, 0, 1, 0, 9])
def negative_labels(): return rows()[0], torch.tensor([0, 1, 0, 1, 0, -3])
def float_labels(): return rows()[0], rows()[1].float()
def too_few_labels(): return rows()[0], torch.tensor([0, 1])
def not_finite_rows(): return rows()[0] / 0, rows()[1]
def one_pass(): return iter([rows()])
def stumbling():
    class Batches:
        def __iter__(self):
            yield rows()
            raise OSError("the disk is gone")
    return Batches()
def zero_rows(): return torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)

# criteria
def loss_raises(z, y): raise ZeroDivisionError("loss")
def loss_int(z, y): return 3
def loss_nan(z, y): return (z * float("nan")).sum()
def loss_vector(z, y): return z
def loss_text(z, y): return "small"
"""

CONFIGS = {
    "not.toml": "alpha = [[[",
    "binary.toml": b"\xff\xfe\x00\x01",
    "empty_list.toml": "providers = []\n",
    "number_list.toml": "providers = [1, 2]\n",
    "table.toml": "[alpha]\nvalue = 1\n",
    "wrong_type.toml": 'alpha = "much"\n',
    "bool.toml": "batch = true\n",
    "typo.toml": 'provider = ["fisher"]\n',
    "dated.toml": "alpha = 2026-01-01\n",
    "twice.toml": "alpha = 0.1\nalpha = 0.2\n",
    "infinite.toml": "alpha = inf\n",
    "float_batch.toml": "batch = 10.5\n",
    "nul.toml": 'data = "digits\\u0000"\n',
    "grid_key.toml": "rates = [0.1]\n",
    "grid_empty.toml": "lr = []\n",
    "grid_number.toml": "lr = 0.1\n",
    "grid_text.toml": 'data = "digits"\nlr = ["fast"]\nbatch = [10]\npairs = ["sgd"]\n',
    "grid_pair.toml": 'data = "digits"\nlr = [0.1]\nbatch = [10]\npairs = ["fihser + kfi"]\n',
    "grid_epochs.toml": 'data = "digits"\nepochs = "ten"\npairs = ["sgd"]\n',
    "grid_batch.toml": 'data = "digits"\nbatch = ["all"]\npairs = ["sgd"]\n',
    "grid_pairs.toml": 'data = "digits"\npairs = [3]\nlr = [0.1]\nbatch = [10]\n',
    "grid_seed.toml": 'data = "digits"\nseed = "lucky"\npairs = ["sgd"]\n',
}


class Payload:
    """Whoever unpickles it makes a folder that the tests would find."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("unpickled",)


def make_states(folder: Path) -> None:
    """State dicts that are not that of `own:net`, and what only looks like one."""
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    own = {name: value.detach() for name, value in net.state_dict().items()}
    states: dict[str, object] = {
        "whole": net,
        "list": [1, 2],
        "texts": dict.fromkeys(own, "x"),
        "part": {"0.weight": own["0.weight"]},
        "shape": own | {"0.weight": own["0.weight"].T.contiguous()},
        "complex": {name: value.to(torch.complex64) for name, value in own.items()},
        "integers": {name: value.to(torch.int64) for name, value in own.items()},
        "sparse": {name: value.to_sparse() for name, value in own.items()},
        "meta": {name: value.to("meta") for name, value in own.items()},
        "infinite": {name: value / 0 for name, value in own.items()},
    }
    for name, state in states.items():
        torch.save(state, folder / f"{name}.pt")
    (folder / "pickled.pt").write_bytes(pickle.dumps(Payload()))
    (folder / "nothing.pt").write_bytes(b"")
    os.mkfifo(folder / "pipe.pt")


def make_workshop(folder: Path) -> None:
    """Fill the folder; one comparison is made, so that there is a finished run to be mistaken about."""
    (folder / "own.py").write_text(OWN)
    (folder / "broken_syntax.py").write_text("def build(:\n")
    (folder / "broken_import.py").write_text("import a_package_that_is_not_there\n")
    (folder / "exits.py").write_text("raise SystemExit(3)\n")
    for name, content in CONFIGS.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    make_states(folder)
    (folder / "file").write_text("in the way")
    (folder / "empty").mkdir()
    (folder / "images" / "one").mkdir(parents=True)
    (folder / "splits" / "train").mkdir(parents=True)
    (folder / "splits" / "val").mkdir()
    (folder / "cifar").mkdir()
    (folder / "cifar" / "data_batch_1.bin").write_bytes(b"\x00" * 3073)
    (folder / "foreign").mkdir()
    (folder / "foreign" / "results.jsonl").write_text('{"name": "somebody else"}\n')
    (folder / "trained").mkdir()
    (folder / "trained" / "results.jsonl").write_text(json.dumps({"key": "k", "kind": "epoch"}) + "\n")
    compare(TINY, ["fisher"], ["kfi"], **ONE_SCENE, repetitions=1, output=folder / "finished")
