"""Any provider with any solver as a torch optimizer."""

from __future__ import annotations

from curvlab.optim.levenberg_marquardt import LevenbergMarquardt
from curvlab.optim.second_order import SecondOrder

__all__ = ["LevenbergMarquardt", "SecondOrder"]
