"""Signals to processes that train tables; `signals_to_tables.py` has the long form."""

from __future__ import annotations

import pytest

from signals_to_tables import run

pytest.importorskip("pytest_timeout", reason="a hang would not end")


@pytest.mark.timeout(120)
def test_signals_to_processes_that_train_tables(real_disk, tmp_path_factory):
    steps = run(tmp_path_factory.mktemp("tables"), kills=3, interrupts=3, terms=2)
    assert min(steps.values()) > 0
