"""The example learns labels from a small graph, whole and in parts, without their source."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib", reason="penstock[viz] installs matplotlib").use("Agg")

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_PEOPLE, NUM_GROUPS = 60, 2


def person(number: int) -> str:
    return f"http://a.b/person{number}"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """People who write about their group's topics, and triples that tell the group itself."""
    folder = tmp_path / "rgnn" / "aifb"
    folder.mkdir(parents=True)
    lines = []
    for number in range(NUM_PEOPLE):
        group = number % NUM_GROUPS
        topics = torch.randint(5, (3,)).tolist()
        lines += [f"<{person(number)}> <http://a.b#about> <topic{group}-{t}> ." for t in topics]
        lines.append(f"<{person(number)}> <http://a.b#affiliation> <group{group}> .")
        lines.append(f"<group{group}> <http://a.b#employs> <{person(number)}> .")
    with gzip.open(folder / "aifb_stripped.nt.gz", "wt") as file:
        file.write("\n".join(lines))
    for part, people in (("training", range(40)), ("test", range(40, NUM_PEOPLE))):
        rows = [f"{person(number)}\t{number}\tgroup{number % NUM_GROUPS}" for number in people]
        text = "\n".join(["person\tid\tlabel_affiliation", *rows])
        (folder / f"{part}Set.tsv").write_text(text)
    return tmp_path


def run(example: Any, data: Path, *more: str) -> tuple[list[float], Any]:
    figure = data / "figure.png"
    options = ("--data", str(data), "--seeds", "2", "--epochs", "8", "--figure", str(figure))
    result = example.main([*options, *more])
    assert figure.read_bytes().startswith(b"\x89PNG")
    return result


@pytest.mark.parametrize("how", [(), ("--mini-batch", "--batch-size", "16")], ids=str)
def test_it_learns(example, data, capsys, how):
    accuracies, task = run(example, data, *how)
    assert len(accuracies) == 2 and min(accuracies) > 0.9
    assert task.num_removed == 2 * NUM_PEOPLE
    said = capsys.readouterr().out
    assert "120 triples told the labels" in said and "plans of the second layer" in said


def test_no_edge_leads_to_what_the_labels_were_made_from(example, data):
    task = example.load(data / "rgnn" / "aifb", "aifb", example.DATASETS["aifb"])
    relations = task.graph.edge_type.unique().tolist()
    assert len(relations) == 2  # "about" and its reverse; the other four have no edge
    assert task.graph.num_edges == 2 * 3 * NUM_PEOPLE


def test_bases_are_summed_by_relation(example):
    graph = example.rgnn.Graph(torch.tensor([[0, 1, 1], [2, 2, 0]]), torch.tensor([0, 1, 1]))
    model = example.EntityClassifier(3, 2, 2, num_bases=4)
    rows = graph.edge_type * 3 + graph.edge_index[0]
    layer = example.rgnn.RGCNConv(3, example.HIDDEN, 2, num_bases=4)
    *comp, own = model.coefficients
    state = {"weight": model.tables, "comp": torch.stack(comp), "bias": model.bias}
    layer.load_state_dict(state | {"root": torch.tensordot(own, model.tables, 1)})
    expected = model.second(torch.relu(layer(None, graph)), graph)
    torch.testing.assert_close(model(graph, torch.arange(3), rows), expected)


def test_the_folder_of_the_data_has_to_be_known(example, monkeypatch, capsys):
    monkeypatch.delenv("PENSTOCK_DATA", raising=False)
    with pytest.raises(SystemExit):
        example.main([])
    assert "--data is missing" in capsys.readouterr().err
