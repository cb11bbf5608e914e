"""Assertions of all test files, rewritten once before workers begin.

In a fresh checkout each worker would rewrite all of them itself: some eight seconds of a processor,
which others have to wait for as well. A worker reads what lies beside a file from an earlier time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def list_tests(config: pytest.Config) -> list[Path]:
    """Return the test files that a run was asked for."""
    asked = [config.invocation_params.dir / argument.split("::")[0] for argument in config.args]
    return [
        path
        for each in asked
        for path in (each.rglob("test_*.py") if each.is_dir() else [each])
        if path.suffix == ".py" and path.exists()
    ]


def rewrite_all(config: pytest.Config, paths: Sequence[Path]) -> None:
    """Rewrite test files that have not been, in as many processes as there are processors."""
    names = ("_rewrite_test", "_write_pyc", "_read_pyc", "get_cache_dir", "assertstate_key")
    if sys.dont_write_bytecode or not all(hasattr(rewrite, name) for name in names):
        return  # private to pytest: each worker does it then
    stale = [path for path in paths if rewrite._read_pyc(path, _rewritten(path)) is None]
    count = min(len(stale), os.cpu_count() or 1)
    processes = []
    for number in range(count):
        process = os.fork()
        if process == 0:
            try:
                for path in stale[number::count]:
                    _rewrite(config, path)
            finally:
                os._exit(0)  # what was not written a worker writes
        processes.append(process)
    for process in processes:
        os.waitpid(process, 0)


def _rewritten(path: Path) -> Path:
    return rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"


def _rewrite(config: pytest.Config, path: Path) -> None:
    source_stat, code = rewrite._rewrite_test(path, config)
    rewritten = _rewritten(path)
    if rewrite.try_makedirs(rewritten.parent):
        state = config.stash[rewrite.assertstate_key]
        rewrite._write_pyc(state, code, source_stat, rewritten)
