"""The small algebra: symmetric factors, parameters as matrices, blocks, steps, PosEig, CG.

Nothing here knows of networks; nothing here imports the rest of curvlab.
"""

from __future__ import annotations

from curvlab.linalg.blocks import (
    Block,
    FactorBlock,
    KroneckerBlock,
    OperatorBlock,
    ScaledBlock,
    ShiftedBlock,
    SumBlock,
    ViewedBlock,
)
from curvlab.linalg.eigenblocks import EigenBlock, EigenPart
from curvlab.linalg.example_factors import (
    ExampleFactor,
    FormedRows,
    ParameterRows,
    poseig_difference,
    signed_difference,
)
from curvlab.linalg.execution import eigh, eigvalsh
from curvlab.linalg.factors import (
    DenseFactor,
    DiagonalFactor,
    Factor,
    GramFactor,
    RankOneFactor,
    congruence,
    gram,
    poseig,
    poseig_diagonal,
)
from curvlab.linalg.steps import Combination, Matrix, RowProduct, Step, TensorStep, ViewStep
from curvlab.linalg.views import MatrixView

__all__ = [
    "Block",
    "Combination",
    "DenseFactor",
    "DiagonalFactor",
    "EigenBlock",
    "EigenPart",
    "ExampleFactor",
    "Factor",
    "FactorBlock",
    "FormedRows",
    "GramFactor",
    "KroneckerBlock",
    "Matrix",
    "MatrixView",
    "OperatorBlock",
    "ParameterRows",
    "RankOneFactor",
    "RowProduct",
    "ScaledBlock",
    "ShiftedBlock",
    "Step",
    "SumBlock",
    "TensorStep",
    "ViewStep",
    "ViewedBlock",
    "congruence",
    "eigh",
    "eigvalsh",
    "gram",
    "poseig",
    "poseig_diagonal",
    "poseig_difference",
    "signed_difference",
]
