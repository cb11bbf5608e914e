"""Generated Python modules: written to the cache, so that tools that ask for source find it."""

from __future__ import annotations

import os
import sys
import tempfile
import types
from pathlib import Path

from penstock.codegen._build import LIBRARIES
from penstock.codegen._cache import CACHE_DIR_VARIABLE, digest, private_directory
from penstock.errors import BuildError

_loaded: dict[Path, types.ModuleType] = {}


def load_module(name: str, source: str) -> types.ModuleType:
    r"""Write Python source to the cache and execute it, once per process.

    Example:
        >>> load_module("answer", "def answer():\n    return 42\n").answer()
        42

    Args:
        name: Starts the file's name; an identifier.
        source: The module's text. What is executed is this text, never what a file holds.

    Returns:
        The module; the same one for the same name and text.

    Raises:
        BuildError: The cache directory is not safe or cannot be written.
        ValueError: `name` is not an identifier.
    """
    if not name.isidentifier():
        raise ValueError(f"name is {name!r}, but must be an identifier")
    path = private_directory(LIBRARIES) / f"{name}-{digest(source)}.py"
    if path not in _loaded:
        try:
            _write(path, source)
        except OSError as error:
            raise BuildError(
                f"{path} cannot be written: {error}; make room there, or set "
                f"{CACHE_DIR_VARIABLE} to another directory"
            ) from error
        module = types.ModuleType(path.stem)
        module.__file__ = str(path)
        sys.modules[module.__name__] = module  # where `inspect` looks for a function's module
        exec(compile(source, str(path), "exec"), module.__dict__)
        _loaded[path] = module
    return _loaded[path]


def _write(path: Path, source: str) -> None:
    """Put `source` at `path` by one atomic rename; several processes may do so at once."""
    if path.exists() and path.read_text(encoding="utf-8") == source:
        return
    descriptor, unfinished = tempfile.mkstemp(prefix="module-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(source)
        os.replace(unfinished, path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise
