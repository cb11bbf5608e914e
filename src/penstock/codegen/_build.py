"""Shared libraries from C++ source, each built once per machine.

The steps are always the same: is it in the cache; take the lock; is it there now; build it in a
temporary directory; move it into place with one atomic rename. So a reader never sees half
a library, and processes that start together build it once. A checksum lies beside each library: one
that was damaged or exchanged since is built anew.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import filelock

from penstock.codegen._cache import (
    CACHE_DIR_VARIABLE,
    cannot_write,
    digest,
    private_directory,
)
from penstock.codegen._compiler import (
    COMMON_FLAGS,
    compiler_identity,
    machine_identity,
    python_flags,
    require_compiler,
    torch_flags,
)
from penstock.errors import BuildError

_logger = logging.getLogger(__name__)

LIBRARIES = "libraries"
_BUILD_TIMEOUT_SECONDS = 600
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def why_nothing_can_be_built() -> str | None:
    """Return why no library can be built or found here, or None where that can be done.

    Ask it before work is given to C++ that can be done without it: a machine without a compiler and
    one without a usable cache directory are alike. The reason has its remedy, as in `BuildError`.

    Example:
        >>> why_nothing_can_be_built() is None
        True
    """
    try:
        compiler_identity(require_compiler())
        directory = private_directory(LIBRARIES)
    except BuildError as error:
        return str(error)
    if os.access(directory, os.W_OK | os.X_OK):
        return None
    return (
        f"the cache directory {directory} cannot be written; set {CACHE_DIR_VARIABLE} to a "
        "directory that you can write to"
    )


class BuildOptions(TypedDict, total=False):
    """Options of `build_library` that loading takes, too."""

    flags: Sequence[str]
    include_torch: bool
    include_python: bool


def build_library(
    name: str,
    source: str | Path | Sequence[Path],
    *,
    flags: Sequence[str] = (),
    include_torch: bool = False,
    include_python: bool = False,
    replace: bool = False,
) -> Path:
    """Compile C++ source to a shared library, or find it in the cache from an earlier time.

    Example:
        >>> build_library("answer", 'extern "C" int answer() { return 42; }')  # doctest: +SKIP
        PosixPath('/home/me/.cache/penstock/libraries/answer-1c0f....so')

    Args:
        name: Starts the file's name; letters, digits and underscores.
        source: The source text (`str`), or the path of the file that holds it (`Path`), or of the
            files that do, which are compiled as one text in their order. It must be complete:
            files that it includes by a relative path are not part of the cache's key.
        flags: Further arguments of the compiler, after the source file, so `-l` flags work.
        include_torch: Whether to make torch's headers available and to link against its libraries.
        include_python: Whether to make the headers of this Python available.
        replace: Whether to compile the source even if the cache has a library of it.

    Returns:
        The path of the shared library. Its name holds the hash of the source, the flags and all
        else that it depends on.

    Raises:
        BuildError: There is no compiler, the compiler rejects the source (the message shows the
            command and its output), or the cache directory is not safe.
        ValueError: `name` is not an identifier.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"name is {name!r}, but must consist of letters, digits and underscores and not start "
            "with a digit"
        )
    text = _text(source)
    compiler = require_compiler()
    all_flags, identity = list(flags), [compiler_identity(compiler), machine_identity(flags)]
    for find in [torch_flags] * include_torch + [python_flags] * include_python:
        extra_flags, headers_identity = find()
        all_flags += extra_flags
        identity.append(headers_identity)
    key = digest(text, *COMMON_FLAGS, *flags, *identity)
    path = private_directory(LIBRARIES) / f"{name}-{key}.so"
    if not replace and _is_whole(path):
        return path
    lock = filelock.FileLock(path.with_suffix(".lock"), timeout=_BUILD_TIMEOUT_SECONDS)
    try:
        with lock:
            if replace or not _is_whole(path):
                _compile(compiler, text, all_flags, path)
    except filelock.Timeout as error:
        raise BuildError(
            f"another process has held {lock.lock_file} for {_BUILD_TIMEOUT_SECONDS} s while "
            "building the same library; end that process"
        ) from error
    except OSError as error:
        raise cannot_write(path, error) from error
    return path


def _text(source: str | Path | Sequence[Path]) -> str:
    if isinstance(source, str):
        return source
    paths = [source] if isinstance(source, Path) else source
    return "".join(path.read_text(encoding="utf-8") for path in paths)


def _compile(compiler: Sequence[str], text: str, flags: Sequence[str], path: Path) -> None:
    """Compile `text` and move the result, and the source for debuggers, to `path`."""
    with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as temporary:
        source_path, built_path = Path(temporary, f"{path.stem}.cpp"), Path(temporary, path.name)
        source_path.write_text(text, encoding="utf-8")
        command = [*compiler, *COMMON_FLAGS, str(source_path), "-o", str(built_path), *flags]
        try:
            finished = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=_BUILD_TIMEOUT_SECONDS,
                env={**os.environ, "LC_ALL": "C"},
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise BuildError(
                f"the compiler did not run: {error}\n$ {shlex.join(command)}"
            ) from error
        if finished.returncode != 0 or not built_path.exists():
            raise BuildError(
                f"the compiler failed on {path.stem} with exit status {finished.returncode}\n"
                f"$ {shlex.join(command)}\n{finished.stdout}"
            )
        _logger.info("built %s with %s", path, shlex.join(compiler))
        checksum_path = Path(temporary, f"{path.stem}.sha256")
        checksum_path.write_text(_checksum(built_path), encoding="ascii")
        os.replace(source_path, path.with_suffix(".cpp"))
        os.replace(checksum_path, path.with_suffix(".sha256"))
        os.replace(built_path, path)


def _is_whole(path: Path) -> bool:
    """Return whether a library is there, byte for byte as it was built.

    The dynamic linker maps a file that was cut short, and the process dies where it reads beyond
    the end; so what was not built here, or lost its end with the power, must not reach it.
    """
    try:
        expected = path.with_suffix(".sha256").read_text(encoding="ascii", errors="replace")
        return expected == _checksum(path)
    except OSError:
        return False


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
