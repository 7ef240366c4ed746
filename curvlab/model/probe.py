"""The probe: a recording is compared with the model's own forward and with autograd before it is trusted.

A model may not be what it seems: a forward that looks at the batch's size, mixes its examples, depends on how
often it was called, hides a use of a weight, or has hooks that change gradients. On the first batch of every
structure (modules, modes, hooks, parameters, and the functions that the forward calls) these are compared:

    logits      of the whole batch, watched and not; of a few examples alone
    gradient    of up to `EXAMPLES` examples, assembled from the recording, with autograd's
    examples    Σ_k a_k ∇ξ_{i_k} of a few examples, assembled from rows of the batch, with theirs when alone
    places      the logits of a few examples that stand one place further on

A difference beyond rounding is an error that names the first parameter where it shows. A later batch that
goes the same way through the same structure is read off the forward as it runs: its logits and its loss are
the model's own. A forward that was nothing but a chain is compared with that one call by call, and read anew
where it differs (`curvlab.model.chain`). Of any other forward one example, another one each time, is run
alone, unless it is a chain, each of whose calls works on every row by itself. All is compared again, in every
batch, where calls move or join rows by what the data are, and where hooks see the gradients.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from math import isfinite

import torch
from torch import Tensor

from curvlab.criteria import Criterion
from curvlab.criteria.base import AllWeightsZeroError
from curvlab.exceptions import ProblemError
from curvlab.linalg.execution import askable, require
from curvlab.model.forward import Forward
from curvlab.model.network import Inputs, Network, slice_examples, take_examples
from curvlab.model.recording import (
    ChainRecording,
    GraphRecording,
    KnownForward,
    Recording,
    record,
    record_known,
)

__all__ = ["record_and_probe"]

EXAMPLES = 64
# Weights of the examples that are run alone: told apart by size and sign.
COEFFICIENTS = (1.0, -0.7, 0.45)
MOVED = 8  # examples that are run in other places
# Relative differences that rounding explains, also in deep networks in float32.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-7}
NEGLIGIBLE = 1e-2  # of the tolerance, relative to the whole gradient: parameters whose gradient is rounding


def record_and_probe(
    network: Network, criterion: Criterion, inputs: Inputs, targets: Tensor, *, torch_layout: bool = False
) -> Recording:
    """The recording of a batch, compared with the model itself where its structure is new."""
    known = next(iter(network.known_forward), None)  # another thread may clear it
    if isinstance(known, KnownForward):
        followed = record_known(network, criterion, inputs, targets, known, torch_layout=torch_layout)
        if followed is not None:
            return followed
        network.known_forward.clear()
    recording, forward = record(network, criterion, inputs, targets, torch_layout=torch_layout)
    if not askable(forward.logits):
        return recording
    structure = network.structure_key()
    key: Hashable = (structure, forward.way, type(recording))
    if key not in network.probed or forward.rows_may_meet or network.has_backward_hooks():
        network.probed[key] = _probe(network, criterion, inputs, targets, torch_layout, recording, forward)
    elif isinstance(recording, GraphRecording) and recording.examples > 1:
        _Probe(network, criterion, inputs, targets, torch_layout).compare_one_alone(recording)
    if network.probed[key]:
        recording, _ = record(
            network, criterion, inputs, targets, torch_layout=torch_layout, sequences_first=True
        )
    elif isinstance(recording, ChainRecording) and forward.calls and not network.has_backward_hooks():
        network.known_forward[:] = [KnownForward(structure, forward.calls, recording.chain)]
    return recording


def _probe(
    network: Network,
    criterion: Criterion,
    inputs: Inputs,
    targets: Tensor,
    torch_layout: bool,
    recording: Recording,
    forward: Forward,
) -> bool:
    """Compare; where either of the first two dimensions may be the examples', True if it is the second."""
    probe = _Probe(network, criterion, inputs, targets, torch_layout)
    try:
        probe.compare(recording, forward)
        return False
    except RowsError:
        other = replace(probe, sequences_first=True)
        again, watched = record(
            network, criterion, inputs, targets, torch_layout=torch_layout, sequences_first=True
        )
        if not any(seen.batch_dim for uses in watched.watched.direct.values() for seen in uses):
            raise
        other.compare(again, watched)
        return True


class RowsError(ProblemError):
    """What is read off the rows of a batch is not what the examples have."""


@dataclass(frozen=True, eq=False)
class _Probe:
    network: Network
    criterion: Criterion
    inputs: Inputs
    targets: Tensor
    torch_layout: bool
    sequences_first: bool = False

    def compare(self, recording: Recording, forward: Forward) -> None:
        """Raise `ProblemError` where the recording is not what the model computes."""
        # Watched logits are detached from their graph here; only values are compared.
        whole = self._own_logits(self.inputs)
        self._compare_logits(forward.logits.detach(), whole.detach(), "the whole batch, called twice", _TWICE)
        part, own = recording, None if recording.examples > EXAMPLES else whole
        del whole  # its graph is that of the whole batch
        if recording.examples > EXAMPLES:
            try:
                part, _ = record(
                    self.network,
                    self.criterion,
                    slice_examples(self.inputs, 0, EXAMPLES),
                    self.targets[:EXAMPLES],
                    torch_layout=self.torch_layout,
                    sequences_first=self.sequences_first,
                )
            except AllWeightsZeroError:
                return
            except ProblemError:
                part = recording  # a model that takes one batch size only
            else:
                values = forward.logits[:EXAMPLES].detach()
                first = part.terms.as_logits(part.terms.logits, torch.ones_like(part.terms.within))
                self._compare_logits(values, first, f"the first {EXAMPLES} examples alone", _DEPEND)
        self._compare_gradient(part, self._own_logits(part.inputs_given) if own is None else own)
        del own
        self._compare_alone(part)
        self._compare_moved(part)

    def _own_logits(self, inputs: Inputs) -> Tensor:
        """The logits of the model's own forward, unwatched, with their graph."""
        with torch.inference_mode(False), torch.enable_grad():
            return self.network.call(inputs)

    def _compare_logits(self, ours: Tensor, own: Tensor, what: str, why: str) -> None:
        if ours.shape != own.shape or not _close(ours, own, float(own.abs().max())):
            raise self._differing(what, why)

    def _differing(self, what: str, why: str) -> ProblemError:
        return ProblemError(
            f"the logits of {type(self.network.model).__name__} differ for {what}: {why}. Curvature is "
            f"that of one function of one example"
        )

    def _compare_gradient(self, recording: Recording, logits: Tensor) -> None:
        terms = recording.terms
        weights = terms.within * terms.share[:, None]
        cotangent = terms.as_logits(terms.criterion.gradients(terms.logits, terms.targets), weights)
        own = self._autograd(logits, cotangent)
        ours = recording.weighted_gradients(recording.row_weights)
        self._compare(ours, own, "differs from autograd's")

    def _autograd(self, logits: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
        parameters = self.network.parameters
        with torch.inference_mode(False), torch.enable_grad():
            found = torch.autograd.grad(logits, list(parameters.values()), cotangent, allow_unused=True)
        return {
            name: torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g
            for (name, p), g in zip(parameters.items(), found, strict=True)
        }

    def _compare(self, ours: Mapping[str, Tensor], own: Mapping[str, Tensor], how: str) -> None:
        scale = float(torch.stack([g.norm() for g in own.values()]).norm())
        if not isfinite(scale):
            bad = next(name for name, g in own.items() if not bool(torch.isfinite(g).all()))
            raise ProblemError(
                f"the gradient of `{bad}` is not finite: the loss or the forward of "
                f"{type(self.network.model).__name__} overflows or is not differentiable at these parameters"
            )
        for name, theirs in own.items():
            if not _close(ours[name], theirs, NEGLIGIBLE * scale, norm=True):
                raise RowsError(
                    f"the gradient of `{name}` that is read off the calls of the forward {how} (relative "
                    f"difference {_difference(ours[name], theirs):.2g}): the forward of "
                    f"{type(self.network.model).__name__} computes something else than its calls show, such "
                    f"as a hook that changes values or gradients, or rows that are not the batch's examples "
                    f"in order. Curvature of it would be wrong"
                )

    def _compare_alone(self, recording: Recording) -> None:
        """A few examples by themselves against their rows in the batch."""
        counted = torch.nonzero(recording.weights > 0)[:, 0].tolist()
        chosen = sorted({counted[0], counted[len(counted) // 2], counted[-1]})
        terms = recording.terms
        cotangents = terms.gradient_cotangent()
        batch_logits = terms.as_logits(terms.logits, torch.ones_like(terms.within))
        weights = torch.zeros_like(recording.row_weights)
        own: dict[str, Tensor] = {}
        for index, coefficient in zip(chosen, COEFFICIENTS, strict=False):
            logits, row = self._alone(recording, index)
            self._compare_logits(
                batch_logits[index],
                logits[row].detach(),
                f"example {index} in the batch and without the others",
                _DEPEND,
            )
            cotangent = torch.zeros_like(logits)
            cotangent[row] = cotangents[index]
            for name, gradient in self._autograd(logits, cotangent).items():
                own[name] = coefficient * gradient + own.get(name, 0)
            weights[index] = coefficient
        self._compare(
            recording.weighted_gradients(weights), own, "of single examples differs from theirs alone"
        )

    def _compare_moved(self, recording: Recording) -> None:
        """A few examples, each one place further on than in the batch: what stands there must not matter."""
        counted = torch.nonzero(recording.weights > 0)[:MOVED, 0].cpu()
        if len(counted) < 2:
            return
        order = counted.roll(1)
        try:
            logits = self._own_logits(take_examples(recording.inputs_given, order))
        except Exception:  # the model takes no batch of another size: `_compare_alone` has said what can be
            return
        terms = recording.terms
        batch = terms.as_logits(terms.logits, torch.ones_like(terms.within))
        self._compare_logits(
            batch[order.to(batch.device)], logits.detach(), "examples in other places", _PLACE
        )

    def compare_one_alone(self, recording: Recording) -> None:
        """The logits of one example by itself against those in the batch."""
        terms = recording.terms
        index = 1 + next(self.network.later_batches) % (recording.examples - 1)
        logits, row = self._alone(recording, index)
        ours, own = terms.as_logits(terms.logits, torch.ones_like(terms.within))[index], logits[row].detach()
        what = f"example {index} in the batch and without the others"
        if ours.shape != own.shape:
            raise self._differing(what, _DEPEND)

        def judge(found: list[float]) -> None:
            difference, largest = found
            if not difference <= TOLERANCE.get(own.dtype, 1e-3) * largest:
                raise self._differing(what, _DEPEND)

        require([(ours - own).abs().max(), own.abs().max()], judge)

    def _alone(self, recording: Recording, index: int) -> tuple[Tensor, int]:
        """The logits without the other examples: alone, or repeated where the model takes no batch of one."""
        try:
            return self._own_logits(slice_examples(recording.inputs_given, index, index + 1)), 0
        except Exception:
            repeated = torch.full((recording.examples,), index)
            return self._own_logits(take_examples(recording.inputs_given, repeated)), index


_TWICE = (
    "its forward depends on how often it was called or on who watches it (a counter, a cache, random "
    "numbers, tracing)"
)
_PLACE = "what it does to an example depends on where it stands in the batch, or on the others"
_DEPEND = (
    "examples depend on each other or on the size of the batch (batch statistics, sorting, a branch on its "
    "size)"
)


def _difference(ours: Tensor, own: Tensor) -> float:
    return float((ours - own).norm() / own.norm().clamp(min=torch.finfo(own.dtype).tiny))


def _close(ours: Tensor, own: Tensor, scale: float, *, norm: bool = False) -> bool:
    """Whether two tensors agree up to rounding, relative to their own size and to `scale`."""
    tolerance = TOLERANCE.get(own.dtype, 1e-3)
    if norm:
        return float((ours - own).norm()) <= tolerance * (float(own.norm()) + scale)
    return float((ours - own).abs().max()) <= tolerance * scale
