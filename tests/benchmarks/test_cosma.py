"""The networks are those of the papers, the arena does what it says, and the rows say what came."""

import argparse

import pytest
import torch

from _cosma_baseline import belady_traffic
from _cosma_graph import UNIT_BYTES, inference_graph
from _cosma_models import NETWORKS, Network
from _rows import environment, read_rows
from cosma import measure, table
from graph_cases import GraphBuilder
from penstock.planner import min_peak, min_working_set

PARAMETERS = {  # of the usual implementations, without auxiliary heads and embeddings
    "resnet-50": 25_557_032,
    "densenet-121": 7_978_856,
    "resnext-50": 25_028_904,
    "r2plus1d-18": 31_505_325,
    "s3d": 8_320_048,
    "fcn": 32_957_013,
    "lraspp": 3_221_538,
    "deeplabv3": 39_638_869,
    "transformer": 44_140_544,
    "vit-b-16": 86_567_656,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_have_the_parameters_that_they_should(name):
    with torch.device("meta"):
        model = NETWORKS[name].model()
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


def test_resnet_is_an_operator_per_convolution_sum_and_pool():
    graph = inference_graph(NETWORKS["resnet-50"])
    targets = [operator.target.removeprefix("aten.").split("+")[0] for operator in graph.operators]
    counts = {target: targets.count(target) for target in set(targets)}
    assert counts == {
        "input": 1,
        "convolution": 53,
        "max_pool2d_with_indices": 1,
        "add": 16,
        "mean": 1,
        "addmm": 1,
    }
    # Two maps of 256 x 56 x 56 are added up to a third.
    assert min_working_set(graph) == min_peak(graph).num_bytes == 3 * 256 * 56 * 56


class _Shared(torch.nn.Module):
    def forward(self, x):
        y = x.add(1.0)  # two read it: the activation after it is an operator of its own
        return torch.relu(y).view(-1) + y.view(-1)


def test_what_two_read_takes_in_no_activation():
    graph = inference_graph(Network(title="", model=_Shared, inputs=((3, 100),)))
    assert [o.target for o in graph.operators] == [
        "aten.input",
        "aten.add",
        "aten.relu",
        "aten.add",
    ]
    assert graph.operators[3].reads == (2, 1)
    assert {storage.num_bytes for storage in graph.storages} == {UNIT_BYTES}


def chain(*sizes, extra_reads=()):
    """Each operator reads the one before; `extra_reads`: (reader, read)."""
    build = GraphBuilder()
    values = [build.storage(size) for size in sizes]
    for index, value in enumerate(values):
        reads = {read for reader, read in extra_reads if reader == index}
        build.run(reads=tuple({*values[max(0, index - 1) : index], *reads}), creates=(value,))
    return build.graph(values[-1])


def test_the_arena_moves_nothing_where_all_fits():
    assert belady_traffic(chain(4, 4, 4), 8) == 0


def test_the_arena_gives_up_what_is_needed_last():
    # While 3 is made of 2 there is no room for 0, which is read last of all.
    graph = chain(6, 2, 5, 5, 1, 1, extra_reads=((4, 1), (5, 0)))
    assert belady_traffic(graph, 13) == 2 * 6
    # Here 2 does not fit into the hole behind 1, and 3 not into those beside it.
    assert belady_traffic(graph, 12) == 2 * 6 + 2 * 2


def test_operands_that_are_in_the_way_move():
    # 6 bytes are free on both sides of 2 that lie in the middle.
    assert belady_traffic(chain(3, 2, 6), 8) == 2 * 2
    assert belady_traffic(chain(2, 2, 6), 10) == 0


def test_an_operator_that_does_not_fit_is_none_of_the_arenas():
    assert belady_traffic(chain(4, 5), 8) is None


def test_rows_say_what_came_of_it(tmp_path, monkeypatch):
    monkeypatch.setitem(NETWORKS, "small", Network(title="Small", model=_Shared, inputs=((3, 90),)))
    options = argparse.Namespace(out=tmp_path, time_limit=10.0, auto_time_limit=1.0)
    measure("small", options, environment("cpu"))
    (path,) = tmp_path.glob("*/cosma.json")
    rows = read_rows(path)
    assert {row.arm: row.extra["traffic"] for row in rows}["exact"] == 0
    assert any(line.startswith("| Small | 4 | M_R = M_P") for line in table(rows))
