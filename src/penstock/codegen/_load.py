"""Compiled C++ in this process: loaded by ctypes, with the types of its functions declared."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.codegen._build import build_library, rebuild_library
from penstock.errors import BuildError

_logger = logging.getLogger(__name__)

Functions = Mapping[str, tuple[Any, Sequence[Any]]]
"""By name of a function the ctypes type of its result (None: void) and those of its arguments."""


def load_library(
    name: str,
    source: str | Path | Sequence[Path],
    *,
    flags: Sequence[str] = (),
    include_torch: bool = False,
    include_python: bool = False,
    functions: Functions | None = None,
) -> ctypes.CDLL:
    """Compile C++ source (or find it in the cache) and load it into this process.

    Example:
        >>> load_library("answer", 'extern "C" int answer() { return 42; }').answer()
        42

    Args:
        name: As for `build_library`.
        source: As for `build_library`.
        flags: As for `build_library`.
        include_torch: As for `build_library`.
        include_python: As for `build_library`; the functions are then called with the GIL held,
            and may return with a Python exception set.
        functions: By name of a function its result's type and its arguments' types, as ctypes has
            them; others keep what ctypes assumes.

    Returns:
        The loaded library. It stays loaded until the process ends.

    Raises:
        BuildError: As for `build_library`; or the library cannot be loaded even when built anew.
        ValueError: `name` is not an identifier.
    """
    headers = {"include_torch": include_torch, "include_python": include_python}
    path = build_library(name, source, flags=flags, **headers)
    loader = ctypes.PyDLL if include_python else ctypes.CDLL
    try:
        library = loader(str(path))
    except OSError as error:
        # A machine that lost power may keep a damaged file; a fresh one costs a second.
        _logger.info("building %s again because it does not load: %s", path.name, error)
        path = rebuild_library(name, source, flags=flags, **headers)
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
    flags: Sequence[str] = (),
    include_torch: bool = False,
    include_python: bool = False,
    functions: Functions | None = None,
    work: str,
    otherwise: str,
) -> ctypes.CDLL | None:
    """Load a library as `load_library` does, for work that can also be done without it.

    Which way the work is done is logged, so whoever calls this keeps the answer.

    Example:
        >>> load_optional_library(
        ...     "answer",
        ...     'extern "C" int answer() { return 42; }',
        ...     work="questions are answered",
        ...     otherwise="by Python",
        ... ).answer()
        42

    Args:
        name: As for `build_library`.
        source: As for `build_library`.
        flags: As for `build_library`.
        include_torch: As for `build_library`.
        include_python: As for `load_library`.
        functions: As for `load_library`.
        work: What the library does, as a clause for the log.
        otherwise: How it is done without the library, as the end of that clause.

    Returns:
        The loaded library; None where it cannot be built or loaded.

    Raises:
        ValueError: `name` is not an identifier.
    """
    try:
        library = load_library(
            name,
            source,
            flags=flags,
            include_torch=include_torch,
            include_python=include_python,
            functions=functions,
        )
    except BuildError as error:
        _logger.info("%s %s: %s", work, otherwise, error)
        return None
    _logger.info("%s by C++", work)
    return library
