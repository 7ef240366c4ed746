"""The small algebra: symmetric factors, Kronecker and matrix-free blocks, PosEig, CG.

Nothing here knows of networks; nothing here imports the rest of curvlab.
"""

from __future__ import annotations

from curvlab.linalg.blocks import Block, FactorBlock, KroneckerBlock, OperatorBlock
from curvlab.linalg.factors import (
    DenseFactor,
    Factor,
    GramFactor,
    RankOneFactor,
    congruence,
    gram,
    poseig,
    poseig_diagonal,
)
from curvlab.linalg.steps import Combination, Matrix, RowProduct, Step, TensorStep

__all__ = [
    "Block",
    "Combination",
    "DenseFactor",
    "Factor",
    "FactorBlock",
    "GramFactor",
    "KroneckerBlock",
    "Matrix",
    "OperatorBlock",
    "RankOneFactor",
    "RowProduct",
    "Step",
    "TensorStep",
    "congruence",
    "gram",
    "poseig",
    "poseig_diagonal",
]
