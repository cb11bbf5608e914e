"""Processes that workers of a loader are have imported PyG already."""

import multiprocessing

import pytest

from fork_servers import find_python


@pytest.fixture(autouse=True)
def _workers_have_imported_pyg():
    multiprocessing.set_executable(find_python("libraries"))
    yield
    multiprocessing.set_executable(find_python("torch"))
