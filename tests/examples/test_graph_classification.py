"""The example learns from small graphs in both arms, and its cap holds when measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="penstock[viz] installs matplotlib").use("Agg")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Rings of many sizes, whose class is the label of most of their nodes."""
    folder = tmp_path / "batching" / "tu" / "RINGS"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    edges, graph_of, labels, classes = [], [], [], []
    for graph in range(120):
        count, first = int(random.lognormal(2.3, 0.7)) + 3, len(labels) + 1
        ring = [(first + k, first + (k + 1) % count) for k in range(count)]
        edges += [f"{a}, {b}" for a, b in ring] + [f"{b}, {a}" for a, b in ring]
        graph_of += [str(graph + 1)] * count
        classes.append(str(graph % 2 + 1))
        labels += [str(int(random.random() < (0.2, 0.8)[graph % 2])) for _ in range(count)]
    lines = {"A": edges, "graph_indicator": graph_of, "node_labels": labels}
    for part, text in {**lines, "graph_labels": classes}.items():
        (folder / f"RINGS_{part}.txt").write_text("\n".join(text) + "\n")
    return tmp_path


def test_one_seed_has_no_spread(example):
    assert example.mean_of_seeds([0.25]) == "0.250"
    assert example.mean_of_seeds([0.25, 0.75]) == "0.500 ± 0.250"


def test_both_arms_learn_and_the_cap_holds(example, data, capsys):
    figure = data / "figure.png"
    options = ("--data", str(data), "--dataset", "RINGS", "--seeds", "2", "--epochs", "4")
    runs, peaks, cap = example.main([*options, "--batch-size", "8", "--figure", str(figure)])
    assert figure.read_bytes().startswith(b"\x89PNG")
    for arm in ("fixed count", "byte cap"):
        assert min(run["curve"][-1][0] for run in runs[arm]) > 0.7
        seen = sorted(index for batch in runs[arm][0]["batches"] for index in batch)
        assert seen == list(range(96))
    assert max(peaks["byte cap"]) <= cap
    assert len(peaks["byte cap"]) < len(peaks["fixed count"]) == 12
    said = capsys.readouterr().out
    assert "byte model" in said and "largest measured peak" in said


def test_graphs_lie_side_by_side_in_a_batch(example, data):
    graphs = example.Graphs(data / "batching" / "tu" / "RINGS", "RINGS")
    _, edges, graph_of, y = graphs.batch([3, 5], "cpu")
    assert y.tolist() == graphs.y[[3, 5]].tolist()
    assert len(graph_of) == graphs.num_nodes[[3, 5]].sum()
    assert (graph_of[edges[0]] == graph_of[edges[1]]).all()  # no edge between graphs
    assert edges.shape[1] == graphs.num_edges[[3, 5]].sum() == 2 * len(graph_of)


def test_the_folder_of_the_data_has_to_be_known(example, monkeypatch, capsys):
    monkeypatch.delenv("PENSTOCK_DATA", raising=False)
    with pytest.raises(SystemExit):
        example.main([])
    assert "--data is missing" in capsys.readouterr().err
