"""Build a shared library from C++ source, once per machine, and load it.

The steps are always the same: is it in the cache; take the lock; is it there now; build it in a
temporary directory; move it into place with one atomic rename; load it. So a reader never sees half
a library, and processes that start together build it once.

Whoever can write to the cache can run code as the user who loads from it. The cache must therefore
belong to the user and be writable by nobody else; anything else is refused, never repaired.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import shlex
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import filelock

from penstock.codegen._compiler import (
    COMMON_FLAGS,
    compiler_identity,
    machine_identity,
    require_compiler,
    torch_flags,
)
from penstock.errors import BuildError

_logger = logging.getLogger(__name__)

CACHE_DIR_VARIABLE = "PENSTOCK_CACHE_DIR"
_LIBRARIES = "libraries"
_BUILD_TIMEOUT_SECONDS = 600
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def build_library(
    name: str,
    source: str | Path,
    *,
    flags: Sequence[str] = (),
    include_torch: bool = False,
) -> Path:
    """Compile C++ source to a shared library, or find it in the cache from an earlier time.

    Example:
        >>> build_library("answer", 'extern "C" int answer() { return 42; }')  # doctest: +SKIP
        PosixPath('/home/me/.cache/penstock/libraries/answer-1c0f....so')

    Args:
        name: Starts the file's name; letters, digits and underscores.
        source: The source text (`str`), or the path of a file that holds it (`Path`). It must be
            complete: files that it includes by a relative path are not part of the cache's key.
        flags: Further arguments of the compiler, after the source file, so `-l` flags work.
        include_torch: Whether to make torch's headers available and to link against libc10.

    Returns:
        The path of the shared library. Its name holds the hash of the source, the flags and all
        else that it depends on.

    Raises:
        BuildError: There is no compiler, the compiler rejects the source (the message shows the
            command and its output), or the cache directory is not safe.
        ValueError: `name` is not an identifier.
    """
    return _build(name, source, flags=flags, include_torch=include_torch, replace=False)


def load_library(
    name: str,
    source: str | Path,
    *,
    flags: Sequence[str] = (),
    include_torch: bool = False,
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

    Returns:
        The loaded library. It stays loaded until the process ends.

    Raises:
        BuildError: As for `build_library`; or the library cannot be loaded even when built anew.
        ValueError: `name` is not an identifier.
    """
    path = build_library(name, source, flags=flags, include_torch=include_torch)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        # A machine that lost power may keep a damaged file; a fresh one costs a second.
        _logger.info("building %s again because it does not load: %s", path.name, error)
    path = _build(name, source, flags=flags, include_torch=include_torch, replace=True)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"the library {path} was built but does not load: {error}") from error


def _build(
    name: str, source: str | Path, *, flags: Sequence[str], include_torch: bool, replace: bool
) -> Path:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"name is {name!r}, but must consist of letters, digits and underscores and not start "
            "with a digit"
        )
    text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
    compiler = require_compiler()
    all_flags, identity = list(flags), [compiler_identity(compiler), machine_identity(flags)]
    if include_torch:
        extra_flags, torch_identity = torch_flags()
        all_flags += extra_flags
        identity.append(torch_identity)
    key = _digest(text, *COMMON_FLAGS, *flags, *identity)
    directory = _library_directory()
    path = directory / f"{name}-{key}.so"
    if path.exists() and not replace:
        return path
    lock = filelock.FileLock(path.with_suffix(".lock"), timeout=_BUILD_TIMEOUT_SECONDS)
    try:
        with lock:
            if replace or not path.exists():
                _compile(compiler, text, all_flags, path)
    except filelock.Timeout as error:
        raise BuildError(
            f"another process has held {lock.lock_file} for {_BUILD_TIMEOUT_SECONDS} s while "
            "building the same library; end that process"
        ) from error
    except OSError as error:
        raise BuildError(
            f"{path} cannot be written: {error}; make room there, or set {CACHE_DIR_VARIABLE} to "
            "another directory"
        ) from error
    return path


def _compile(compiler: Sequence[str], text: str, flags: Sequence[str], path: Path) -> None:
    """Compile `text` and move the result, and the source for whoever debugs it, to `path`."""
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
        os.replace(source_path, path.with_suffix(".cpp"))
        os.replace(built_path, path)


def cache_root() -> Path:
    """Return where this user's caches of Penstock lie; nothing is created or checked."""
    chosen = os.environ.get(CACHE_DIR_VARIABLE)
    if not chosen:
        import platformdirs

        chosen = platformdirs.user_cache_dir("penstock", appauthor=False)
    # Links are resolved first, so that what is checked is what is used.
    return Path(os.path.realpath(Path(chosen).expanduser()))


def _library_directory() -> Path:
    """Return the directory of the libraries; create it, or refuse it if others can write to it."""
    directory = cache_root() / _LIBRARIES
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        for checked in (directory.parent, directory):
            _check_safe(checked)
    except OSError as error:
        raise BuildError(
            f"the cache directory {directory} cannot be used: {error}; set {CACHE_DIR_VARIABLE} to "
            "a directory that you can write to"
        ) from error
    return directory


def _check_safe(directory: Path) -> None:
    """Raise `BuildError` unless `directory` is a directory that only this user can write to."""
    status = os.lstat(directory)  # of a link itself: one could be swapped after the check
    if not stat.S_ISDIR(status.st_mode):
        problem = "it is not a directory"
    elif status.st_uid != os.geteuid():
        problem = f"it belongs to user {status.st_uid}, not to you ({os.geteuid()})"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"others can write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    else:
        return
    raise BuildError(
        f"the cache directory {directory} is not safe to load code from: {problem}; delete it or "
        f"`chmod 700` it, or set {CACHE_DIR_VARIABLE} to a directory of your own"
    )


def _digest(*parts: str) -> str:
    """Hash texts so that moving a byte from one to the next changes the result."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode("utf-8")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()[:32]
