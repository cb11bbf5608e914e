"""Compiled C++ in this process: loaded by ctypes, with the types of its functions declared."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from penstock.codegen._build import BuildOptions, build_library
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
    functions: Functions | None = None,
    **options: Unpack[BuildOptions],
) -> ctypes.CDLL | None:
    """Load a library as `load_library` does, for work that can also be done without it.

    The way in which the work is done is logged at each call, so the caller keeps the result.

    Example:
        >>> load_optional_library(
        ...     "answer",
        ...     'extern "C" int answer() { return 42; }',
        ...     work="questions are answered",
        ...     otherwise="by Python",
        ... ).answer()
        42

    Args:
        name: Starts the file's name; letters, digits and underscores.
        source: The source text, or the path of its file, or those of several files in their order.
        work: The library's work, as a clause for the log.
        otherwise: How it is done without the library, as the end of that clause.
        functions: As for `load_library`: the types of results and arguments by name.
        **options: Those of `build_library`.

    Returns:
        The loaded library; None where it cannot be built or loaded.

    Raises:
        ValueError: `name` is not an identifier.
    """
    try:
        library = load_library(name, source, functions=functions, **options)
    except BuildError as error:
        _logger.info("%s %s: %s", work, otherwise, error)
        return None
    _logger.info("%s by C++", work)
    return library
