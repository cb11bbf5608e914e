"""Code in this process: C++ loaded by ctypes, and generated Python modules.

The functions of C++ get their types declared. Python is written to the cache, so that tools that
ask for source find it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from penstock.codegen._build import LIBRARIES, BuildOptions, build_library
from penstock.codegen._cache import cannot_write, digest, private_directory
from penstock.errors import BuildError

_logger = logging.getLogger(__name__)

Functions = Mapping[str, tuple[Any, Sequence[Any]]]
"""By name of a function the ctypes type of its result (None: void) and those of its arguments."""


def load_library(
    name: str,
    source: str | Path | Sequence[Path],
    *,
    functions: Functions | None = None,
    **options: Unpack[BuildOptions],
) -> ctypes.CDLL:
    """Compile C++ source (or find it in the cache) and load it into this process.

    Example:
        >>> load_library("answer", 'extern "C" int answer() { return 42; }').answer()
        42

    Args:
        name: Starts the file's name; letters, digits and underscores.
        source: The source text, or the path of its file, or those of several files in their order.
        functions: By name of a function its result's type and its arguments' types, as ctypes has
            them; others keep what ctypes assumes.
        **options: Those of `build_library`. With `include_python` the functions are called with
            the GIL held, and may return with a Python exception set.

    Returns:
        The loaded library. It stays loaded until the process ends.

    Raises:
        BuildError: The library cannot be built, or not be loaded even when built anew.
        ValueError: `name` is not an identifier.
    """
    path = build_library(name, source, **options)
    loader = ctypes.PyDLL if options.get("include_python") else ctypes.CDLL
    try:
        library = loader(str(path))
    except OSError as error:
        # A machine that lost power may keep a damaged file; a fresh one costs a second.
        _logger.info("building %s again because it does not load: %s", path.name, error)
        path = build_library(name, source, **options, replace=True)
        try:
            library = loader(str(path))
        except OSError as error:
            raise BuildError(f"the library {path} was built but does not load: {error}") from error
    for function, (result, arguments) in (functions or {}).items():
        declared = getattr(library, function)
        declared.restype, declared.argtypes = result, arguments
    return library


def load_optional_library(
    name: str,
    source: str | Path | Sequence[Path],
    *,
    work: str,
    otherwise: str,
    level: int = logging.INFO,
    functions: Functions | None = None,
    **options: Unpack[BuildOptions],
) -> ctypes.CDLL | None:
    """Load a library as `load_library` does, for work that can also be done without it.

    The way in which the work is done is logged at each call, so the caller keeps the result. Where
    it cannot be built or loaded, that is None.

    Example:
        >>> load_optional_library(
        ...     "answer",
        ...     'extern "C" int answer() { return 42; }',
        ...     work="questions are answered",
        ...     otherwise="by Python",
        ... ).answer()
        42

    Args:
        name: This, `source`, `functions` and `**options` are those of `load_library`.
        source: The source text or its files.
        work: The library's work, as a clause for the log.
        otherwise: How it is done without the library, as the end of that clause.
        level: Of the log where it is done without.
        functions: The types of results and arguments by name.
        **options: Those of `build_library`.
    """
    try:
        library = load_library(name, source, functions=functions, **options)
    except BuildError as error:
        _logger.log(level, "%s %s: %s", work, otherwise, error)
        return None
    _logger.info("%s by C++", work)
    return library


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
            if not path.exists() or path.read_text(encoding="utf-8") != source:
                # By one atomic rename: several processes may do so at once.
                with tempfile.TemporaryDirectory(prefix="module-", dir=path.parent) as temporary:
                    unfinished = Path(temporary, path.name)
                    unfinished.write_text(source, encoding="utf-8")
                    os.replace(unfinished, path)
        except OSError as error:
            raise cannot_write(path, error) from error
        module = types.ModuleType(path.stem)
        module.__file__ = str(path)
        sys.modules[module.__name__] = module  # where `inspect` looks for a function's module
        exec(compile(source, str(path), "exec"), module.__dict__)
        _loaded[path] = module
    return _loaded[path]
