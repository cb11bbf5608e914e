"""`penstock env`: the state of an installation, also when the installation is broken.

It is run because something does not work. Nothing but the standard library is imported at
module level, every check stands alone, and torch is imported in a process of its own, where it may
crash or hang without taking the answer with it. `python -m penstock.env` needs not even typer.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "note", "broken"]

_IMPORT_TIMEOUT_SECONDS = 120
_COMPILE_TIMEOUT_SECONDS = 60
_REQUIRED = ("numpy", "rich", "typer", "platformdirs", "filelock", "highspy")
_OPTIONAL = {
    "matplotlib": "pictures: pip install 'penstock[viz]'",
    "transformers": "penstock demo: pip install 'penstock[demo]'",
    "triton": "GPU kernels; comes with the CUDA builds of torch",
    "torch-geometric": "penstock.integrations.pyg: pip install 'penstock[pyg]'",
    "kvikio": "GPUDirect Storage: pip install 'penstock[gds]'",
}
# Only these are shown: the rest of the environment has no place in a bug report.
_VARIABLE_PREFIXES = ("PENSTOCK_", "MALLOC_", "OMP_", "MKL_", "PYTORCH_", "TORCH_", "CUDA_")
_VARIABLES = ("CXX", "LD_PRELOAD", "XDG_CACHE_HOME")

_NEWEST_TESTED_TORCH = (2, 15)
_FAULTS_OF_TORCH: dict[tuple[int, ...], tuple[str, ...]] = {
    (2, 11): (
        "planned steps of slice_scatter, select_scatter, diagonal_scatter and view_copy on "
        "transposed tensors end in an error of torch's",
        "linalg.vander is equal to rounding only",
        "checkpoints of partitions whose shards lie in turns are refused",
        "the fork of a process that has captured a step cannot differentiate",
    ),
    (2, 14): ("the fork of a process that has trained crashes",),
}
"""Faults of torch itself, by release; 2.13 has none of them."""
_INTERNALS = {
    "torch._C._current_graph_task_id": "penstock.offload",
    "torch._C._AutoDispatchBelowAutograd": "penstock.capture",
    "torch._subclasses.fake_tensor.FakeTensorMode": "penstock.capture",
    "torch.fx.experimental.proxy_tensor.make_fx": "penstock.capture",
    "torch._C.DisableTorchFunctionSubclass": "penstock.unify",
    "torch.ops.aten._sparse_coo_tensor_unsafe": "penstock.unify(requires_grad=True)",
    "torch._C._are_functorch_transforms_active": "penstock.rgnn",
    "torch.library.custom_op": "penstock.rgnn inside torch.compile",
    "torch.backends.cuda.matmul.fp32_precision": "penstock.rgnn on a GPU",
}
"""Private names of torch, each with the part of Penstock that does not work without it."""
_TORCH_QUESTIONS = f"""
import json, pydoc, torch
cuda = torch.cuda.is_available()
print(json.dumps({{
    "lacks": [name for name in {list(_INTERNALS)} if pydoc.locate(name) is None],
    "version": torch.__version__,
    "threads": torch.get_num_threads(),
    "cuda": torch.version.cuda,
    "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if cuda else [],
}}))
"""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the answer: a part of the installation, its state, and a remedy."""

    name: str
    """The part that was looked at."""
    status: Status
    """``"ok"``, ``"note"`` (optional, but worth knowing) or ``"broken"``."""
    value: str
    """The version or value that was found, or the fault."""
    remedy: str = ""
    """The way to repair it; empty if there is none."""


def collect_checks() -> Iterator[Finding]:
    """Look at everything that Penstock depends on, one check after the other.

    Example:
        >>> [check.name for check in collect_checks()][:2]
        ['penstock', 'python']

    Yields:
        The checks, each as soon as it is known. A check that itself fails becomes a broken check.
    """
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("penstock", _check_penstock),
        ("python", _check_python),
        ("machine", _check_machine),
        ("torch", _check_torch),
        ("packages", _check_packages),
        ("compiler", _check_compiler),
        ("headers", _check_headers),
        ("cache", _check_cache),
        ("store", _check_store),
        ("variables", _check_variables),
    ]
    for name, check in checks:
        try:
            yield from check()
        except Exception as error:
            yield Finding(name, "broken", f"cannot tell: {type(error).__name__}: {error}")


def _check_penstock() -> Iterator[Finding]:
    import penstock

    where = Path(penstock.__file__ or "?").parent
    yield Finding("penstock", "ok", f"{penstock.__version__} in {where}")


def _check_python() -> Iterator[Finding]:
    value = f"{platform.python_version()} ({sys.executable})"
    is_old = sys.version_info < (3, 11)
    remedy = "Use Python 3.11 or later." if is_old else ""
    yield Finding("python", "broken" if is_old else "ok", value, remedy)


def _check_machine() -> Iterator[Finding]:
    status, remedy = "ok", ""
    if sys.platform != "linux":
        status = "note"
        remedy = "Penstock is tested on Linux; elsewhere files go through the page cache."
    yield Finding("system", status, platform.platform(), remedy)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("cores", "ok", f"{usable} usable of {os.cpu_count()}")
    if hasattr(os, "sysconf"):
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        total_bytes = page_bytes * os.sysconf("SC_PHYS_PAGES")
        yield Finding("memory", "ok", f"{_gib(total_bytes)} installed")


def _check_torch() -> Iterator[Finding]:
    answers = _ask_torch()
    if isinstance(answers, Finding):
        yield answers
        return
    release = answers["version"].split("+")[0]  # an index may have another build of it
    version = tuple(int(part) for part in release.split(".")[:2])
    old, new = version < (2, 11), version > _NEWEST_TESTED_TORCH
    tested = f"2.11 to {'.'.join(map(str, _NEWEST_TESTED_TORCH))}"
    status, remedy = "ok", ""
    if old:
        status, remedy = "broken", "Penstock needs 2.11 or later: pip install -U 'torch>=2.11'"
    elif new:
        status = "note"
        remedy = f"Penstock is tested with {tested}; `make test TORCH={release}` tells."
    value = f"{answers['version']}, {answers['threads']} threads"
    yield Finding("torch", status, value, remedy)
    if faults := _FAULTS_OF_TORCH.get(version):
        yield Finding("torch faults", "note", "; ".join(faults), "Torch 2.13 has none of these.")
    for name in () if old else answers["lacks"]:
        yield Finding(
            "torch internals",
            "broken",
            f"{answers['version']} has no {name}, without which {_INTERNALS[name]} does not work",
            f"Install a version that Penstock is tested with: {tested}.",
        )
    yield _check_gpu(answers)


def _ask_torch() -> dict[str, Any] | Finding:
    """Import torch in a process of its own; return its answers, or a broken check."""
    remedy = "Install it again: pip install --force-reinstall 'torch>=2.11'"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH_QUESTIONS],
            capture_output=True,
            text=True,
            timeout=_IMPORT_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        value = f"did not finish importing within {_IMPORT_TIMEOUT_SECONDS} s"
        return Finding("torch", "broken", value, remedy)
    if done.returncode == 0:
        return json.loads(done.stdout.strip().splitlines()[-1])
    version = _version("torch")
    if version is None and "No module named 'torch'" in done.stderr:
        value, remedy = "is not installed", "Install it: pip install 'torch>=2.11'"
    else:
        last_line = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        ended = f"signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
        value = f"{version or 'unknown version'} does not import ({ended}): {last_line}"
    return Finding("torch", "broken", value, remedy)


def _check_gpu(answers: dict[str, Any]) -> Finding:
    if answers["devices"]:
        value = f"CUDA {answers['cuda']}: {', '.join(answers['devices'])}"
        return Finding("gpu", "ok", value)
    if answers["cuda"]:
        value = f"none visible, although torch was built for CUDA {answers['cuda']}"
        remedy = "See nvidia-smi and CUDA_VISIBLE_DEVICES if there should be one."
        return Finding("gpu", "note", value, remedy)
    value = "none; activations go from RAM to a file, needs a store"
    return Finding("gpu", "ok", value)


def _check_packages() -> Iterator[Finding]:
    for name in _REQUIRED:
        if version := _version(name):
            yield Finding(name, "ok", version)
        else:
            yield Finding(name, "broken", "is not installed", f"Install it: pip install {name}")
    for name, purpose in _OPTIONAL.items():
        version = _version(name)
        value = version or f"is not installed (only for {purpose})"
        yield Finding(name, "ok" if version else "note", value)


def _check_compiler() -> Iterator[Finding]:
    remedy = (
        "Install a C++ compiler (Debian, Ubuntu: apt-get install g++) or point CXX at one. "
        "Without it plans are not searched for, and torch's own allocator keeps more memory."
    )
    named = os.environ.get("CXX", "").strip()  # which may hold arguments: "ccache g++"
    names = [shlex.split(named)[0]] if named else ["c++", "g++", "clang++"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        value = f"CXX={named} is not a program" if named else f"none found of {', '.join(names)}"
        yield Finding("compiler", "broken" if named else "note", value, remedy)
        return
    compiler = shlex.split(named) or [found]
    # A compiler without its headers or linker prints a version like any other: let it build.
    with tempfile.TemporaryDirectory(prefix="penstock-env-") as directory:
        source = Path(directory, "check.cpp")
        source.write_text('#include <cstdint>\nextern "C" std::int64_t one() { return 1; }\n')
        output = str(source.with_suffix(".so"))
        built = _run([*compiler, "-shared", "-fPIC", "-o", output, str(source)])
    if built.returncode != 0:
        first_line = (built.stderr.strip().splitlines() or ["it printed nothing"])[0]
        value = f"{shlex.join(compiler)} cannot build a shared library: {first_line}"
        yield Finding("compiler", "broken", value, remedy)
        return
    described = _run([*compiler, "--version"]).stdout.strip().splitlines()
    first_line = described[0] if described else "unknown version"
    yield Finding("compiler", "ok", f"{shlex.join(compiler)}: {first_line}")


def _check_headers() -> Iterator[Finding]:
    """Note a Python without the headers that C++ under the hooks needs."""
    include = sysconfig.get_paths()["include"]
    if not Path(include, "Python.h").is_file():
        remedy = (
            "Install them (Debian, Ubuntu: apt-get install python3-dev). Without them Python keeps "
            "the small tensors that autograd saves under offload, each a few microseconds slower."
        )
        value = f"no Python.h in {include}"
        yield Finding("headers", "note", value, remedy)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_SECONDS, check=False
    )


def _check_cache() -> Iterator[Finding]:
    directory = _cache_directory()
    remedy = (
        f"Make it yours alone: mkdir -p {directory} && chmod 700 {directory}; "
        "or set PENSTOCK_CACHE_DIR to a directory that you own."
    )
    # A missing directory is made at first use, so the nearest existing parent decides.
    existing = next(filter(Path.exists, [directory, *directory.parents]))
    state = existing.stat()
    if not stat.S_ISDIR(state.st_mode):
        problem = f"{existing} is not a directory"
    elif not os.access(existing, os.W_OK | os.X_OK):
        problem = f"{existing} is not writable"
    elif existing == directory and state.st_uid != os.geteuid():
        problem = f"{directory} belongs to user {state.st_uid}, not to you"
    elif existing == directory and state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"others can write to {directory} (mode {stat.S_IMODE(state.st_mode):04o})"
    else:
        made = "" if existing == directory else " (made at first use)"
        yield Finding("cache", "ok", f"{directory}{made}")
        return
    yield Finding("cache", "broken", problem, remedy)


def _check_store() -> Iterator[Finding]:
    store = os.environ.get("PENSTOCK_STORE")
    remedy = "Set PENSTOCK_STORE, or pass --store, to a directory on a fast local disk."
    status = "broken"
    if not store:
        status, value = "note", "PENSTOCK_STORE is not set"
    elif not os.path.isdir(store):
        value = f"PENSTOCK_STORE={store} is not a directory"
    elif not os.access(store, os.W_OK | os.X_OK):
        value = f"PENSTOCK_STORE={store} is not writable"
    else:
        from penstock.memory import RAM_FILESYSTEMS, filesystem_type

        status, free, kind = "ok", _gib(shutil.disk_usage(store).free), filesystem_type(store)
        value = f"{store}: {kind or 'unknown file system'}, {free} free, {_direct_io(store)}"
        if kind in RAM_FILESYSTEMS:
            status = "note"
            value += "; this file system is RAM, so offloading to it frees nothing"
    yield Finding("store", status, value, "" if status == "ok" else remedy)


def _check_variables() -> Iterator[Finding]:
    for name, value in sorted(os.environ.items()):
        if name in _VARIABLES or name.startswith(_VARIABLE_PREFIXES):
            yield Finding(name, "ok", value)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        # kvikio and triton are distributed under names that carry the CUDA version. All files of
        # all distributions are listed for that, so the module is looked for first.
        if importlib.util.find_spec(distribution.replace("-", "_")) is None:
            return None
        for name in importlib.metadata.packages_distributions().get(distribution, ()):
            return importlib.metadata.version(name)
        return None


def _cache_directory() -> Path:
    chosen = os.environ.get("PENSTOCK_CACHE_DIR")
    if chosen:
        return Path(os.path.realpath(os.path.expanduser(chosen)))
    try:
        import platformdirs
    except ImportError:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return Path(home, "penstock")
    return Path(platformdirs.user_cache_dir("penstock"))


def _direct_io(directory: str) -> str:
    """Try to open a nameless file past the page cache, and return the result in words."""
    if not hasattr(os, "O_DIRECT") or not hasattr(os, "O_TMPFILE"):
        return "no O_DIRECT on this system"
    try:
        os.close(os.open(directory, os.O_TMPFILE | os.O_DIRECT | os.O_RDWR, 0o600))
    except OSError as error:
        return f"no O_DIRECT ({errno.errorcode.get(error.errno or 0, error.errno)})"
    return "O_DIRECT works"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def format_check(check: Finding) -> str:
    """Write one check as one line of plain text, and its remedy as a second one.

    Example:
        >>> print(format_check(Finding(name="torch", status="ok", value="2.13.0")))
        ok      torch          2.13.0
    """
    status = check.status.replace("broken", "BROKEN")
    line = f"{status:<7} {check.name:<14} {check.value}"
    return f"{line}\n{'':<8}{'':<14} -> {check.remedy}" if check.remedy else line


def to_dict(checks: list[Finding]) -> dict[str, Any]:
    """Turn checks into plain data: ``{"ok": whether nothing is broken, "checks": [...]}``."""
    return {
        "ok": all(check.status != "broken" for check in checks),
        "checks": [dataclasses.asdict(check) for check in checks],
    }


def main(arguments: list[str] | None = None) -> int:
    """Print the state of the installation, as the arguments, by default the process's, ask.

    Returns:
        The exit status: 1 if something is broken, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="penstock env", description="Show what Penstock finds on this machine."
    )
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    as_json = parser.parse_args(arguments).json
    checks: list[Finding] = []
    for check in collect_checks():
        checks.append(check)
        if not as_json:
            sys.stdout.write(format_check(check) + "\n")
            sys.stdout.flush()
    num_broken = sum(check.status == "broken" for check in checks)
    verdict = f"\n{num_broken} broken: see above." if num_broken else "\nNothing is broken."
    sys.stdout.write((json.dumps(to_dict(checks), indent=2) if as_json else verdict) + "\n")
    return 1 if num_broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
