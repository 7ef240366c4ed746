"""The version of the package: a module of its own, so that results and pages can name it without a cycle."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
