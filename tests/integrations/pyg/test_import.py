"""PyG is loaded when it is wanted, and its absence says what to install."""

from __future__ import annotations

import subprocess

import pytest

import penstock
from fork_servers import find_python

WITHOUT = """
import sys
sys.modules["torch_geometric"] = None
import penstock
import penstock.unified, penstock.integrations
try:
    penstock.integrations.pyg
except ModuleNotFoundError as error:
    print(error)
"""


def test_without_pyg_the_error_names_the_extra():
    done = subprocess.run([find_python("torch"), "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (
        "penstock.integrations.pyg needs PyTorch Geometric: pip install 'penstock[pyg]'"
    )


def test_tables_do_not_load_pyg():
    script = "import sys, penstock; penstock.unify; print('torch_geometric' in sys.modules)"
    done = subprocess.run([find_python("torch"), "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_other_names_are_attribute_errors():
    assert penstock.integrations.pyg.NeighborLoader
    assert "pyg" in dir(penstock.integrations)
    with pytest.raises(AttributeError, match="no attribute 'dgl'"):
        penstock.integrations.dgl  # noqa: B018


def test_rows_are_gathered_by_penstock_also_where_pyg_was_imported_first():
    """PyG replaces `torch.index_select`; the calls still reach the table."""
    script = (
        "import torch, torch_geometric, penstock\n"
        "u = penstock.unify(torch.eye(4))\n"
        "torch.index_select(u, 0, torch.tensor([2]))\n"
        "print(u.report().num_gathers)"
    )
    done = subprocess.run([find_python("libraries"), "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "1", done.stderr
