"""Packages that Penstock works without: whether they are installed, and what to install.

Each is imported where it is used, by `import_package`, so that an error names the command.
"""

from __future__ import annotations

import functools
import importlib
from importlib.util import find_spec
from types import ModuleType

_REQUIREMENTS = {
    "highspy": ("HiGHS", "highspy"),
    "matplotlib": ("matplotlib", "'penstock[viz]'"),
    "peft": ("PEFT", "peft"),
    "torch_geometric": ("PyTorch Geometric", "'penstock[pyg]'"),
    "transformers": ("Transformers", "'penstock[demo]'"),
}
"""By the name of the module: that of the package, and what `pip install` takes."""


@functools.cache
def is_installed(name: str) -> bool:
    """Return whether a package is installed, without importing it."""
    return find_spec(name) is not None


def import_package(name: str, purpose: str) -> ModuleType:
    """Import a package; where it is missing, the error names what needs it and the remedy.

    Example:
        >>> import_package("matplotlib", "drawing a timeline").__name__
        'matplotlib'

    Args:
        name: A module of `_REQUIREMENTS`.
        purpose: The beginning of the error's sentence.

    Raises:
        ModuleNotFoundError: It is not installed. Where something that it needs is missing, the
            error is its own.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        title, requirement = _REQUIREMENTS[name]
        raise ModuleNotFoundError(
            f"{purpose} needs {title}: pip install {requirement}", name=name
        ) from error
