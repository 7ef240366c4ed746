"""How a parameter is used: one class per kind of torch function that has a parameter.

| class | functions | what it knows |
| --- | --- | --- |
| `LinearUse` | `F.linear`, `x @ weight`, an attention's packed in-projection | rows and matrix |
| `BilinearUse` | `F.bilinear` | rows and matrix |
| `ConvolutionUse`, `TransposedConvolutionUse` | `F.conv1d` … `F.conv_transpose3d` | rows and matrix |
| `EmbeddingUse`, `EmbeddingBagUse` | `F.embedding`, `F.embedding_bag` | rows, matrix, frequencies |
| `ScaleUse`, `ShiftUse` | weight and bias of a normalisation | gradients per example |
| `AddedUse`, `MultipliedUse` | `x + p`, `p.expand(…)`, `x * p` | gradients per example |

Another package adds a class of its own, derived from `Use` or `WeightUse`, by binding its function to it: see
`curvlab.model.bindings`.
"""

from curvlab.model.uses.base import (
    AddedUse,
    BilinearUse,
    BroadcastUse,
    LinearUse,
    MultipliedUse,
    ScaleShiftUse,
    ScaleUse,
    ShiftUse,
    Use,
    WeightUse,
    scale_and_shift_uses,
)
from curvlab.model.uses.convolution import ConvolutionUse, TransposedConvolutionUse
from curvlab.model.uses.embedding import EmbeddingBagUse, EmbeddingUse

__all__ = [
    "AddedUse",
    "BilinearUse",
    "BroadcastUse",
    "ConvolutionUse",
    "EmbeddingBagUse",
    "EmbeddingUse",
    "LinearUse",
    "MultipliedUse",
    "ScaleShiftUse",
    "ScaleUse",
    "ShiftUse",
    "TransposedConvolutionUse",
    "Use",
    "WeightUse",
    "scale_and_shift_uses",
]
