"""Rewriting of assertions before workers begin: they find it done."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

import rewritten_tests

TEXT = "def test_numbers():\n    assert 1 + 1 == 2\n"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_files_are_rewritten_once(
    tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    paths = [tmp_path / f"test_{number}.py" for number in range(5)]
    for path in paths:
        path.write_text(TEXT)
    rewritten_tests.rewrite_all(pytestconfig, paths)
    for path in paths:
        code = rewrite._read_pyc(path, rewritten_tests._rewritten(path))
        assert code is not None and "@pytest_ar" in code.co_names

    def rewrite_again(*_: object) -> None:
        raise AssertionError("rewritten twice")

    monkeypatch.setattr(rewritten_tests, "_rewrite", rewrite_again)
    monkeypatch.setattr(rewritten_tests.os, "fork", rewrite_again)
    rewritten_tests.rewrite_all(pytestconfig, paths)


def test_files_of_a_run_are_those_that_were_asked_for(pytestconfig: pytest.Config):
    assert Path(__file__) in [path.resolve() for path in rewritten_tests.list_tests(pytestconfig)]
