"""Lets these tools use single files of the package without importing the engine (and what it needs) in every worker."""

from __future__ import annotations

import sys
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent


def light_package() -> None:
    """Registers `ds4` and `ds4.gguf` as bare packages, unless the real ones are loaded already."""
    for name, folder in (("ds4", "src/ds4"), ("ds4.gguf", "src/ds4/gguf")):
        if name not in sys.modules:
            package = types.ModuleType(name)
            package.__path__ = [str(HERE.parents[1] / folder)]
            sys.modules[name] = package
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
