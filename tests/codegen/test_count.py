"""Bytes of Triton kernels: counted under the interpreter, refused where nothing is interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.codegen import count_bytes
from penstock.errors import PenstockError
from triton_tests import needs_triton, run_interpreted

HERE = Path(__file__).resolve().parent


@needs_triton
def test_counts_under_the_interpreter():
    run_interpreted(HERE / "interpreted_count.py", at_least=19)


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
