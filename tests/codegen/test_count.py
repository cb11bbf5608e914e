"""Bytes of Triton kernels: counted under the interpreter, refused where nothing is interpreted."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fork_servers import find_python
from penstock.codegen import count_bytes
from penstock.errors import PenstockError

HERE = Path(__file__).resolve().parent
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, which comes with CUDA"
)


@needs_triton
def test_counts_under_the_interpreter():
    """In a process of its own: what is interpreted is chosen when Triton is imported."""
    done = subprocess.run(
        [
            *(find_python("torch"), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
            str(HERE / "interpreted_count.py"),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE.parents[1],
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= 20


@needs_triton
def test_without_the_interpreter_the_remedy_is_named():
    with pytest.raises(PenstockError, match="set TRITON_INTERPRET=1 in the environment"):
        count_bytes(lambda: None)


def test_without_triton_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(PenstockError, match=r"install triton>=3\.6"):
        count_bytes(lambda: None)


def test_triton_is_imported_by_the_first_count_alone():
    code = "import sys, penstock.codegen\nassert 'triton' not in sys.modules\n"
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src")}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
    )
