"""The example reads trees, learns them in batches, and computes what node by node computes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib", reason="penstock[viz] installs matplotlib").use("Agg")

pytestmark = pytest.mark.usefixtures("one_thread")


def phrase(source: random.Random, num_words: int) -> tuple[str, int]:
    """A bracketed tree whose label is that of its last word."""
    if num_words == 1:
        label = source.randrange(5)
        return f"({label} word{label})", label
    left = source.randint(1, num_words - 1)
    (first, _), (second, label) = phrase(source, left), phrase(source, num_words - left)
    return f"({label} {first} {second})", label


@pytest.fixture
def data(tmp_path: Path) -> Path:
    source = random.Random(0)
    (tmp_path / "batching" / "text").mkdir(parents=True)
    lines = [phrase(source, source.randint(1, 9))[0] for _ in range(200)]
    (tmp_path / "batching" / "text" / "sst_trees.txt").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.parametrize("more", [(), ("--max-bytes", "2MiB")], ids=str)
def test_it_learns(example, data, capsys, more):
    figure = data / "figure.png"
    options = ("--data", str(data), "--epochs", "10", "--batch-size", "16", "--hidden", "16")
    scores, seconds, reports = example.main([*options, *more, "--figure", str(figure)])
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert scores[-1][0] > 0.8 and scores[-1][1] > 0.6
    assert all(report.num_batches == report.lower_bound for report in reports)
    assert set(seconds) == {"together", "node by node"}
    assert "test accuracy of sentences" in capsys.readouterr().out


def test_trees_are_read(example):
    vocabulary: dict[str, int] = {}
    graph, labels = example.read_tree("(3 (2 The) (4 (1 bad) (0 film)))", vocabulary)
    assert vocabulary == {"the": 0, "bad": 1, "film": 2}
    assert labels.tolist() == [2, 1, 0, 4, 3]
    kinds = [graph.signatures[code][0] for code in graph.nodes.types.tolist()]
    assert kinds.count("word") == 3 and kinds.count("phrase") == 2 and kinds.count("class") == 5


def test_batches_compute_what_node_by_node_computes(example):
    source, vocabulary = random.Random(1), {}
    trees = [example.read_tree(phrase(source, n)[0], vocabulary)[0] for n in (1, 4, 7)]
    cells = {
        "word": example.Word(len(vocabulary), 8),
        "phrase": example.Phrase(8),
        "class": example.Classify(8).eval(),
    }
    together, _ = example.logits_of(example.DynamicBatcher(cells), trees)
    alone = torch.cat([example.logits_node_by_node(cells, tree) for tree in trees])
    torch.testing.assert_close(together, alone)
