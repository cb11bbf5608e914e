"""Two changed lines make a PyG script's features a table, and change nothing that it computes."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.cli._vector_math import settle_vector_math
from penstock.unified import UnifiedTensor

pytest.importorskip("torch_geometric", reason="penstock[pyg] installs PyTorch Geometric")

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = REPOSITORY / "examples" / "two_lines"

pytestmark = pytest.mark.usefixtures("one_thread")


def changes() -> list[str]:
    """The difference between the two scripts, without the names of the files."""
    before, after = ((SCRIPTS / f"{name}.py").read_text() for name in ("before", "after"))
    return list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm=""))[2:]


@pytest.fixture(params=["tolokers", "synthetic"])
def path(request, tmp_path) -> Path:
    """The real graph where it is at hand, and a small one in the same form."""
    if request.param == "tolokers":
        found = Path(os.environ.get("PENSTOCK_DATA", ""), "graphs", "tolokers.npz")
        if not found.is_file():
            pytest.skip("PENSTOCK_DATA has no graphs/tolokers.npz")
        return found
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 1500)
    training = random.random((1, 1500)) < 0.5
    np.savez(
        tmp_path / "graph.npz",
        node_features=random.normal(labels[:, None], 2, (1500, 10)).astype(np.float32),
        node_labels=labels,
        edges=random.integers(0, 1500, (6000, 2)),
        train_masks=training,
        test_masks=~training,
    )
    return tmp_path / "graph.npz"


def test_two_lines_are_changed():
    changed = [line for line in changes() if line[0] in "+-"]
    assert changed == ["+import penstock", "+    data.x = penstock.unify(data.x)"]


def test_both_scripts_compute_the_same(path, load_example, monkeypatch):
    settle_vector_math()
    before, after = load_example("two_lines/before"), load_example("two_lines/after")
    num_epochs = 3 if path.name == "graph.npz" else 1  # the real graph has many batches
    losses, scores = before.train(path, num_epochs=num_epochs)
    tables: list[UnifiedTensor] = []
    unify = after.penstock.unify
    monkeypatch.setattr(after.penstock, "unify", lambda x: tables.append(unify(x)) or tables[0])
    found_losses, found_scores = after.train(path, num_epochs=num_epochs)
    assert len(losses) >= 3 and losses[-1] < losses[0]
    if torch.cuda.is_available():  # where sums are in another order from run to run
        assert found_losses == pytest.approx(losses, rel=1e-3)
        assert torch.allclose(found_scores, scores, rtol=1e-2, atol=1e-2)
    else:
        assert found_losses == losses
        assert torch.equal(found_scores, scores)
    # Every batch of training and of the test came from the table, by Penstock's kernels.
    num_test_batches = -(-len(scores) // 512)
    assert tables[0].report().num_gathers == len(losses) + num_test_batches


def test_the_documentation_shows_this_difference():
    page = (REPOSITORY / "docs" / "unified.md").read_text()
    assert page.partition("```diff\n")[2].partition("```")[0].splitlines() == changes()
