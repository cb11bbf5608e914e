"""`penstock partition`: a table, a frontier and a map of a step's split."""

import re

import pytest
from typer.testing import CliRunner

from _networks import make_network
from penstock.cli import app
from penstock.graph import StepGraph
from penstock.partitioner import Partition, check
from penstock.report import describe_placement, partition_map


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "graph.json"
    make_network(64, [16, 64, 16]).save(path)
    return path


def run(*arguments):
    options = ("--machine", "h100-80gb", "--time-limit", "5")
    command = ["partition", *map(str, arguments), *options]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def test_a_saved_graph_is_split_shown_and_everything_written(saved, tmp_path):
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "new" / "partition.json", tmp_path / "new" / "frontier.png"
    code, out, _ = run(saved, "--devices", 4, "--save", file, "--picture", picture)
    assert code == 0
    graph = StepGraph.load(saved)
    found = Partition.load(file, graph=graph)
    check(graph, found)
    assert found.devices == 4
    assert picture.stat().st_size > 1000
    assert re.search(r"one device would need \d", out)
    assert "<- this" in out
    assert partition_map(graph, found) in out


def test_what_does_not_fit_is_said_in_a_line(saved):
    code, _, err = run(saved, "--devices", 2, "--device-memory", 256)
    assert code == 2
    assert "none fits less than" in err


def test_placements_are_said_by_dimension(saved):
    graph = StepGraph.load(saved)
    code, _, _ = run(saved, "--devices", 4, "--save", saved.parent / "p.json")
    assert code == 0
    found = Partition.load(saved.parent / "p.json")
    view = graph.operators[0].outputs[0]  # 64 x 64
    levels = (0,) * (len(found.mesh) - 1)
    size = found.mesh[0]
    assert describe_placement(found, view, (64, *levels)) == f"dim 0 /{size}"
    assert describe_placement(found, view, (1, *levels)) == f"dim 1 /{size}"
    assert describe_placement(found, view, (0, *levels)) == "whole"
    assert describe_placement(found, view, (-1, *levels)) == f"sums /{size}"
