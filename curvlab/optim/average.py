"""Curvatures that outlive their step: kept for later steps, or averaged over them.

    C̄ ← ε C̄ + (1 - ε) C      of B^t (after PosEig), of E[hhᵀ] and of E[h]

A Gram factor's average is a Gram factor: the rows of both, scaled by √ε and √(1-ε). Once the rows are
as many as the columns the dense form is smaller, and is averaged instead. Where one is diagonal, so is the
average. A solver that reads the mean input factor only has E[h] and B of ḡ averaged, not E[hhᵀ] and the B
that goes with it: for it these are the latest batch's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import sqrt

import torch
from torch import Tensor

from curvlab.curvature import Curvature, Definiteness, LayerCurvature
from curvlab.curvature_layers import (
    KroneckerLayer,
    KroneckerPart,
    PlainLayer,
    SharedLayer,
    TiedLayer,
)
from curvlab.curvature_structures import EigenLayer, JointLayer
from curvlab.exceptions import PairError, ProblemError
from curvlab.linalg import DenseFactor, DiagonalFactor, Factor, GramFactor
from curvlab.linalg.factors import InputFactors, InputKind
from curvlab.providers.statistics import ROW_BYTES

__all__ = ["average", "kept"]


def kept(curvature: Curvature, given: Iterable[Tensor] = ()) -> Curvature:
    """`curvature` as a value of its own: nothing of it lies in the buffers of the `given` tensors.

    It no longer says that the parameters have changed since: to be used later is its purpose.
    """
    if curvature.matrix_free or curvature.live:
        raise PairError(
            f"`{curvature.provider}` is matrix-free: its blocks read the model as it is, so it can be "
            f"neither averaged (ema) nor kept for later steps (refresh_every). Use `fisher`, `gauss-newton`, "
            f"`pch-1` or `pch-2`, or ema=0 and refresh_every=1"
        )
    theirs = {tensor.untyped_storage()._cdata for tensor in given}

    def own(tensor: Tensor) -> Tensor:
        # Contiguous, so that a resumed run, which reads contiguous tensors, computes the same bits.
        shared = tensor.untyped_storage()._cdata in theirs
        return tensor.clone(memory_format=torch.contiguous_format) if shared else tensor.contiguous()

    layers = tuple(layer.map(own) for layer in curvature.layers)
    return replace(curvature, layers=layers, versions=None)


def average(old: Curvature, new: Curvature, decay: float, reads: InputKind = "full") -> Curvature:
    """ε `old` + (1 - ε) `new` with ε = `decay`, for solvers that read the `reads` input factor.

    >>> from curvlab.linalg import RankOneFactor
    >>> def curvature(b):
    ...     layer = LayerCurvature("0", None, "0.bias", DenseFactor(torch.tensor([[b]])))
    ...     return Curvature("pch-1", "mse", (layer,), Definiteness(True, "by PosEig"))
    >>> average(curvature(1.0), curvature(5.0), 0.75).blocks["0.bias"].to_dense().item()
    2.0
    """
    pairs = zip(old.layers, new.layers, strict=True)
    layers = tuple(_layer(before, after, decay, reads) for before, after in pairs)
    psd = old.psd and new.psd
    why = (new if new.psd != psd or old.psd == psd else old).definiteness.why
    return replace(new, layers=layers, definiteness=Definiteness(psd, why), versions=None)


def _layer(old: LayerCurvature, new: LayerCurvature, decay: float, reads: InputKind) -> LayerCurvature:
    match old, new:
        case KroneckerLayer(), KroneckerLayer():
            inputs = new.inputs
            if old.inputs is not None and new.inputs is not None:
                inputs = _inputs(old.inputs, new.inputs, decay, reads, new.name)
            return replace(new, output=_factor(old.output, new.output, decay, new.name), inputs=inputs)
        case SharedLayer(), SharedLayer():
            output = _factor(old.mean_output, new.mean_output, decay, new.name)
            return replace(
                new, parts=_parts(old.parts, new.parts, decay, reads, new.name), mean_output=output
            )
        case PlainLayer(), PlainLayer():
            return replace(new, factor=_factor(old.factor, new.factor, decay, new.name))
        case EigenLayer(), EigenLayer():
            raise PairError(
                f"layer `{new.name}`: structure=ekfac has other eigenvectors at every estimate, of which "
                f"there is no average. Use ema=0, or structure=kronecker"
            )
        case JointLayer(), JointLayer():
            return replace(new, factor=_factor(old.factor, new.factor, decay, new.name))
        case TiedLayer(), TiedLayer():
            # Its diagonal is that of the full input factors, whatever the solver reads.
            pairs = zip(old.summands, new.summands, strict=True)
            summands = [(b, _parts(a.parts, b.parts, decay, "full", new.name)) for a, b in pairs]
            return replace(new, summands=tuple(replace(one, parts=parts) for one, parts in summands))
    raise PairError(
        f"layer `{new.name}` was {old.kind} and is {new.kind}: there is no average of the two. Start again "
        f"with the new one, or use ema=0"
    )


def _parts(
    old: Sequence[KroneckerPart], new: Sequence[KroneckerPart], decay: float, reads: InputKind, layer: str
) -> tuple[KroneckerPart, ...]:
    return tuple(
        KroneckerPart(
            after.output if reads == "mean" else _factor(before.output, after.output, decay, layer),
            _inputs(before.inputs, after.inputs, decay, reads, layer),
        )
        for before, after in zip(old, new, strict=True)
    )


def _inputs(old: InputFactors, new: InputFactors, decay: float, reads: InputKind, layer: str) -> InputFactors:
    mean = torch.lerp(new.mean, old.mean, decay)
    full = new.full
    if reads == "full":
        full = _factor(old.full, full, decay, layer)
    elif isinstance(full, GramFactor):
        # Rows with another mean than their own are no longer those that a gradient comes from.
        full = GramFactor(full.rows, full.root)
    return InputFactors(full, mean)


def _factor(old: Factor, new: Factor, decay: float, layer: str) -> Factor:
    if isinstance(old, GramFactor) and isinstance(new, GramFactor):
        held = len(old.rows) + len(new.rows)
        if held < new.size:
            _check_bytes(held, new, layer)
            roots = (old.root * sqrt(decay), new.root * sqrt(1 - decay))
            return GramFactor(torch.cat([old.rows, new.rows]), torch.cat(roots))
    if isinstance(old, DiagonalFactor) or isinstance(new, DiagonalFactor):
        return DiagonalFactor(torch.lerp(new.diagonal(), old.diagonal(), decay))
    return DenseFactor(torch.lerp(new.to_dense(), old.to_dense(), decay))


def _check_bytes(held: int, factor: GramFactor, layer: str) -> None:
    needed = held * factor.size * factor.rows.element_size()
    if needed > ROW_BYTES and held > len(factor.rows):
        raise ProblemError(
            f"layer `{layer}`: the average of its input factor ({factor.size:,} inputs) holds {held:,} rows, "
            f"{needed:,} bytes, above the limit of {ROW_BYTES:,}. Use ema=0, or a solver that reads the mean "
            f"input factor only (`ea-cg`, `sm-kfi`)"
        )
