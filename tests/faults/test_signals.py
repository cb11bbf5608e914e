"""Signals to processes that train tables; `signals_to_tables.py` has the long form."""

from __future__ import annotations

import ast
import os
import subprocess

import pytest

import signals_to_tables
from fork_servers import WHOLE_END, find_python

pytest.importorskip("pytest_timeout", reason="a hang would not end")


@pytest.mark.timeout(120)
def test_signals_to_processes_that_train_tables(real_disk, tmp_path_factory):
    """In a process of its own, which has no threads of autograd when it forks."""
    program = [
        find_python("torch"),
        signals_to_tables.__file__,
        str(tmp_path_factory.mktemp("tables")),
    ]
    program += ["--kills", "3", "--interrupts", "3", "--terms", "2"]
    environment = os.environ | WHOLE_END
    found = subprocess.run(
        program, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert min(ast.literal_eval(found.stdout).values()) > 0
