"""A step graph is plain data: it survives JSON, refuses damage, and checks that its parts fit."""

import dataclasses
import json
import math

import pytest

from penstock.errors import GraphFileError
from penstock.graph import Kind, Operator, Phase, StepGraph, Storage, TensorView


def small_graph() -> StepGraph:
    """A weight that is read, then updated in place: value 0 becomes 1; value 2 is a gradient."""
    view = TensorView(0, "float32", (2, 3), (3, 1), 6)
    return StepGraph(
        storages=(
            Storage(name="w", num_bytes=48, kind=Kind.PARAMETER, initial=0, final=1),
            Storage(name="grad", num_bytes=24, kind=Kind.GRADIENT),
        ),
        storage_of_value=(0, 0, 1),
        operators=(
            Operator(
                name="read",
                target="aten.mul.Tensor",
                args=(view, (1, -math.inf, None, "x"), {"dtype": "float32"}),
                kwargs={"alpha": 2.5},
                outputs=(TensorView(2, "float32", (2, 3), (3, 1)), None),
                reads=(0,),
                creates=(2,),
                flops=6,
            ),
            Operator(
                name="update",
                target="aten.add_.Tensor",
                reads=(2,),
                mutates=((0, 1),),
                after=(0,),
                phase=Phase.OPTIMIZER,
                recomputable=False,
            ),
        ),
        metadata={"model": "Linear"},
    )


def test_json_gives_an_equal_graph(tmp_path):
    graph = small_graph()
    assert StepGraph.from_dict(json.loads(json.dumps(graph.to_dict()))) == graph
    for name in ("graph.json", "graph.json.gz"):
        graph.save(tmp_path / name)
        assert StepGraph.load(tmp_path / name) == graph


def test_producers_consumers_and_predecessors():
    graph = small_graph()
    assert graph.producers == (None, 1, 0)
    assert graph.consumers == ((0, 1), (), (1,))
    assert graph.predecessors == ((), (0,))
    assert graph.num_bytes(1) == 48


def test_a_writer_comes_after_every_reader_of_what_it_overwrites():
    graph = StepGraph(
        storages=(
            Storage(name="x", num_bytes=8, kind=Kind.PARAMETER, initial=0, final=1),
            Storage(name="y", num_bytes=8, kind=Kind.ACTIVATION),
        ),
        storage_of_value=(0, 0, 1),
        operators=(
            Operator(name="read", target="aten.neg.default", reads=(0,), creates=(2,)),
            Operator(name="write", target="aten.zero_.default", mutates=((0, 1),)),
        ),
    )
    assert graph.predecessors == ((), (0,))


def test_metadata_does_not_change_the_digest_and_content_does():
    graph = small_graph()
    assert dataclasses.replace(graph, metadata={}).digest == graph.digest
    assert dataclasses.replace(graph, device="cuda").digest != graph.digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "something"}, "no step graph"),
        ({"version": 99}, "version 99"),
        ({"device": "cuda"}, "digest"),
        ({"operators": None}, "damaged"),
        ({"storage_of_value": [0, 0, 9]}, "damaged"),
    ],
)
def test_damage_is_refused(change, message):
    with pytest.raises(GraphFileError, match=message):
        StepGraph.from_dict(small_graph().to_dict() | change)


@pytest.mark.parametrize("content", [b"", b"{", b"\x1f\x8b123", b"[]", b'"x"'])
def test_a_damaged_file_is_refused(tmp_path, content):
    (tmp_path / "graph.json").write_bytes(content)
    with pytest.raises(GraphFileError):
        StepGraph.load(tmp_path / "graph.json")


@pytest.mark.parametrize(
    ("operators", "message"),
    [
        ([Operator(name="a", target="t", reads=(2,))], "needs value 2"),
        ([Operator(name="a", target="t", creates=(0,))], "once more"),
        ([Operator(name="a", target="t", reads=(0,))], "made by no operator"),
        ([Operator(name="a", target="t", mutates=((0, 2),))], "another storage"),
        ([Operator(name="a", target="t", after=(0,))], "comes after"),
        (
            [
                Operator(name="a", target="t", mutates=((0, 1),)),
                Operator(name="b", target="t", reads=(0,), creates=(2,)),
            ],
            "needs value 0",
        ),
        (
            [Operator(name="a", target="t", creates=(2,), may_overwrite=((0, 2),))],
            "may overwrite",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(operators, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(small_graph(), operators=tuple(operators))
