"""Shared by tests of Triton kernels: its interpreter, and compilation for GPUs that are not there.

The interpreter has to be chosen before Triton is imported, and is wrong to have for other tests:
what it runs is in files `interpreted_*.py`, each run by pytest in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fork_servers import find_python

if TYPE_CHECKING:
    from _kernel_resources import Resources

ROOT = Path(__file__).resolve().parents[2]
SHARED_BYTES = {"sm_90": 227 * 1024, "gfx942": 64 * 1024}
"""Memory that the warps of a program share, at most."""

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, which comes with CUDA"
)


def is_triton_since(major: int, minor: int) -> bool:
    """Return whether Triton is of this version or a later one."""
    return tuple(map(int, version("triton").split(".")[:2])) >= (major, minor)


def run_interpreted(path: Path, *, at_least: int) -> None:
    """Run the tests of a file in a process of its own, where Triton interprets its kernels.

    Args:
        path: The file.
        at_least: The number of its tests that pass is this or larger, and none fails.
    """
    done = subprocess.run(
        [
            find_python("interpreter"),
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            str(path),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= at_least


def run_without(module: str, code: str) -> None:
    """Run code in a process of its own, which must not have imported a module at its end."""
    code = f"import sys\n{code}\nassert {module!r} not in sys.modules\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([find_python("torch"), "-c", code], env=environment, check=False)
    assert done.returncode == 0


def compile_well(launch: Any, target: str, *, max_spill_bytes: int = 0) -> tuple[str, Resources]:
    """Compile a launch for a GPU: the assembly neither spills nor has atomics.

    Args:
        launch: Its kernel must not be interpreted.
        target: A key of `SHARED_BYTES`.
        max_spill_bytes: Spills of each thread that pass.

    Returns:
        The assembly, and what it takes of a processor.
    """
    from _kernel_resources import compile_launch

    compiled, name = compile_launch(launch, target), launch.kernel.__name__
    resources = compiled.resources
    assert resources.spill_bytes <= max_spill_bytes, (name, resources)
    assert resources.shared_bytes <= SHARED_BYTES[target], (name, resources)
    text = str(compiled.asm.get("ptx", compiled.asm.get("amdgcn")))
    assert not re.search(r"\b(atom|red)\.|atomic", text), name
    return text, resources
