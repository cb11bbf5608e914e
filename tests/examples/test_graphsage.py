"""The example trains from memory and from a file alike, and says where its time went."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torch_geometric", reason="penstock[pyg] installs PyTorch Geometric")
pytest.importorskip("matplotlib", reason="penstock[viz] installs matplotlib").use("Agg")

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_NODES, BUDGET_BYTES, WIDTH = 600, 256 * 1024, 32


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """A small graph in the form of the real one, in which neighbours are alike."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, NUM_NODES)
    edges = random.integers(0, NUM_NODES, (8000, 2))
    training = random.random((1, NUM_NODES)) < 0.5
    np.savez(
        tmp_path / "graph.npz",
        node_features=random.normal(labels[:, None], 1, (NUM_NODES, 10)).astype(np.float32),
        node_labels=labels,
        edges=edges[labels[edges[:, 0]] == labels[edges[:, 1]]],
        train_masks=training,
        test_masks=~training,
    )
    return tmp_path / "graph.npz"


def run(example: Any, graph: Path, *more: str) -> tuple[float, dict[str, Any], Any]:
    figure = graph.with_suffix(".png")
    figure.unlink(missing_ok=True)
    result = example.main(
        [
            *(str(graph), "--budget", str(BUDGET_BYTES), "--width", str(WIDTH)),
            *("--epochs", "1", "--batch-size", "100", "--figure", str(figure), "--device", "cpu"),
            *more,
        ]
    )
    assert figure.read_bytes().startswith(b"\x89PNG")
    return result


def test_memory_and_file_give_the_same(example, graph, store, capsys):
    metric, rows, report = run(example, graph)
    in_file, _, file_report = run(example, graph, "--where", "file", "--store", str(store))
    assert metric > 0.9 and in_file == metric
    assert (report.tier, file_report.tier) == ("host", "file")
    assert report.num_rows_gathered == file_report.num_rows_gathered
    assert file_report.cache_bytes == BUDGET_BYTES // 2 and file_report.bytes_read > 0
    bars = [sum(parts.values()) for parts in rows.values()]
    assert bars[0] == pytest.approx(bars[1])  # both threads lived from the beginning to the end
    said = capsys.readouterr().out
    num_copies = math.ceil(2 * BUDGET_BYTES / (NUM_NODES * WIDTH * 4))
    assert f"{num_copies * NUM_NODES:,} nodes" in said
    assert "host memory, the budget is 256.00 KiB" in said and "test ROC AUC" in said


def test_a_file_needs_a_directory(example, graph, capsys):
    with pytest.raises(SystemExit):
        run(example, graph, "--where", "file")
    assert "--where file needs --store DIR" in capsys.readouterr().err


def test_the_metric_is_the_area_under_the_curve(example):
    scores, labels = torch.tensor([0.1, 0.4, 0.35, 0.8, 0.4]), torch.tensor([0, 0, 1, 1, 1])
    # Of six pairs of a one and a zero, four are in order, one is tied, one is not in order.
    assert example.roc_auc(scores, labels) == pytest.approx(4.5 / 6)
