"""The C++ compiler, and everything that a compiled library depends on.

Two libraries may share a cache entry only if they would be the same: same compiler, same C library,
same PyTorch, and the same processor where the flags say "native". Home directories are shared
between machines, so each of these is looked up, never assumed.
"""

from __future__ import annotations

import functools
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import BuildError

# torch's own extensions are built as C++20, and its headers accept that since before 2.11.
COMMON_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared")
_CANDIDATES = ("c++", "g++", "clang++")
_VERSION_TIMEOUT_SECONDS = 60


def find_compiler() -> str | None:
    """Return the C++ compiler's command, or None where there is no compiler.

    Where the environment variable CXX is set, it alone counts; it may contain arguments
    ("ccache g++"). Otherwise the first of `c++`, `g++` and `clang++` on the PATH is taken.

    Example:
        >>> find_compiler()  # doctest: +SKIP
        '/usr/bin/c++'

    Returns:
        A command line that a shell would accept, or None.
    """
    words = _find_words()
    return None if words is None else shlex.join(words)


def require_compiler() -> list[str]:
    """Return the compiler's command as a list of words, or raise `BuildError` with the remedy."""
    words = _find_words()
    if words is not None:
        return words
    if chosen := os.environ.get("CXX", "").strip():
        raise BuildError(
            f"the C++ compiler named by the environment variable CXX, {chosen!r}, was not found; "
            "set CXX to a compiler that exists, or unset it to use c++, g++ or clang++"
        )
    raise BuildError(
        f"no C++ compiler was found on the PATH (looked for {', '.join(_CANDIDATES)}); install "
        "one, for example with `apt install g++` or `conda install gxx`, or set CXX to its path"
    )


def compiler_identity(compiler: Sequence[str]) -> str:
    """Return the version text of a compiler; it is asked once per process and executable file."""
    executable = shutil.which(compiler[0]) or compiler[0]
    try:
        changed_ns = os.stat(executable).st_mtime_ns
    except OSError as error:
        raise BuildError(f"the C++ compiler {executable!r} cannot be used: {error}") from error
    return _version_text(tuple(compiler), changed_ns)


@functools.cache
def _version_text(compiler: tuple[str, ...], changed_ns: int) -> str:
    del changed_ns  # part of the cache's key only: the compiler may be upgraded meanwhile
    try:
        finished = subprocess.run(
            [*compiler, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_TIMEOUT_SECONDS,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"`{shlex.join(compiler)} --version` did not run: {error}") from error
    if finished.returncode != 0:
        raise BuildError(
            f"`{shlex.join(compiler)} --version` failed with exit status {finished.returncode}:\n"
            f"{finished.stdout}{finished.stderr}"
        )
    return f"{shlex.join(compiler)}\n{finished.stdout}"


def machine_identity(flags: Sequence[str]) -> str:
    """Return what a library depends on outside its source: architecture, C library, processor."""
    identity = f"{platform.system()} {platform.machine()} {' '.join(platform.libc_ver())}"
    if any(flag.endswith("=native") for flag in flags):
        identity += "\n" + _processor_features()
    return identity


@functools.cache
def _processor_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except FileNotFoundError:  # not Linux
        return platform.processor()
    wanted = ("vendor_id", "cpu family", "model", "flags", "CPU part", "Features")
    chosen = {line.partition(":")[0].strip(): line for line in lines if line.startswith(wanted)}
    return "\n".join(chosen[name] for name in sorted(chosen))


def torch_flags() -> tuple[list[str], str]:
    """Return the flags that make torch's headers and libraries usable, and what identifies them.

    A library is linked without a run path: the process that loads it has imported torch before,
    so the dynamic linker finds torch's already there.
    """
    import torch

    home = Path(torch.__file__).parent
    if not (home / "include" / "c10").is_dir():
        raise BuildError(
            f"torch {torch.__version__} in {home} comes without its C++ headers (no include/c10); "
            "install the torch wheel from PyPI or from the PyTorch index"
        )
    abi = int(torch.compiled_with_cxx11_abi())
    flags = [f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-isystem", str(home / "include")]
    flags += [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
    return flags, f"torch {torch.__version__} {torch.version.git_version} abi {abi}"


def python_flags() -> tuple[list[str], str]:
    """Return the flags that make this interpreter's headers usable, and what identifies them.

    The library is not linked against the interpreter, in which it is loaded.
    """
    include = sysconfig.get_paths()["include"]
    if not Path(include, "Python.h").is_file():
        raise BuildError(
            f"Python {platform.python_version()} comes without its C headers (no Python.h in "
            f"{include}); install them, for example with `apt install python3-dev`"
        )
    abi = sysconfig.get_config_var("SOABI")
    return ["-isystem", include], f"{sys.implementation.name} {sys.version} {abi}"


def _find_words() -> list[str] | None:
    chosen = os.environ.get("CXX", "").strip()
    try:
        words = shlex.split(chosen)
    except ValueError as error:
        raise BuildError(
            f"the environment variable CXX, {chosen!r}, is malformed: {error}"
        ) from error
    if words:
        return words if shutil.which(words[0]) else None
    return next(([path] for path in map(shutil.which, _CANDIDATES) if path), None)
