"""Every package is imported before pytest collects doctests.

pytest imports a module by its path. Where that is the first import of its package, the package imports the
module too, and there would be two of it: `curvlab.providers.base` with a registry that nobody fills, or a
class that is not the class of its instances.
"""

from __future__ import annotations

import importlib
import pkgutil

import curvlab

for found in pkgutil.walk_packages(curvlab.__path__, "curvlab."):
    if found.ispkg:
        importlib.import_module(found.name)
