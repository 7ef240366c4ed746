"""Studies: each a function from a problem or a plan to a DataFrame."""

from __future__ import annotations

from curvlab.studies.bounds import bounds
from curvlab.studies.errors import errors

__all__ = ["bounds", "errors"]
