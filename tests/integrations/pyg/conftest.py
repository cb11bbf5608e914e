"""Processes that workers of a loader are have imported PyG already."""

import multiprocessing
from multiprocessing import spawn

import pytest

from fork_servers import find_python


@pytest.fixture(autouse=True)
def _workers_have_imported_pyg():
    before = spawn.get_executable()
    multiprocessing.set_executable(find_python("libraries"))
    yield
    multiprocessing.set_executable(before)
