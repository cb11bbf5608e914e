"""The arms of the relational benchmark compute the same, and its rows say what was measured."""

from __future__ import annotations

import pytest
import torch

import _rgnn_bars
import _rgnn_roofline
import _rgnn_rows
from _rgnn_arms import (
    EDGEWISE,
    EDGEWISE_CSR,
    MODELS,
    PYG,
    PYG_FAST,
    Arm,
    Layer,
    OurProgram,
    maker,
    ours,
)
from _rgnn_case import is_out_of_memory, plan_facts
from _rgnn_steps import INFERENCE, MODES, TRAINING, Step, error_of, measure, num_rounds
from _rows import Environment, read_rows, write_rows
from penstock import rgnn
from penstock.codegen import find_compiler
from penstock.rgnn.backends.cpp._graph_arrays import find_arrays

pytestmark = pytest.mark.usefixtures("one_thread")

WHERE = Environment(device_name="A CPU", versions={}, commit="abc", command="python3 x.py")
WIDTH = 8


def typed_graph(num_nodes: int = 40, num_edges: int = 400) -> rgnn.Graph:
    """Three node types; relation 3 has no edges."""
    generator = torch.Generator().manual_seed(0)
    edges, relations = [], []
    bounds = {0: (0, 20), 1: (20, 30), 2: (30, num_nodes)}
    for relation, (source, target) in {0: (0, 1), 1: (1, 0), 2: (2, 0), 4: (0, 0)}.items():
        ends = [
            torch.randint(*bounds[kind], (num_edges // 4,), generator=generator)
            for kind in (source, target)
        ]
        edges.append(torch.stack(ends))
        relations.append(torch.full((num_edges // 4,), relation))
    return rgnn.Graph(
        torch.cat(edges, dim=1),
        torch.cat(relations),
        num_nodes=num_nodes,
        num_relations=5,
        node_type=torch.tensor([0] * 20 + [1] * 10 + [2] * (num_nodes - 30)),
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", [EDGEWISE_CSR, PYG, PYG_FAST, "ours"])
def test_every_arm_computes_what_segment_mm_does(model, name):
    if name.startswith(PYG):
        pytest.importorskip("torch_geometric")
    if name == PYG_FAST and model != "RGCN":
        pytest.skip("PyG has no such layer")
    layer = Layer(model, typed_graph(), WIDTH)
    arm = OurProgram(layer, "torch").arm() if name == "ours" else maker(layer, name)()
    expected = maker(layer, EDGEWISE)()
    for mode in MODES:
        steps = [Step(each, mode, "cpu") for each in (arm, expected)]
        found = [step.answers() for step in steps]
        error = error_of(*found)
        assert error is not None and error < 1e-5  # of float32 sums in another order
        assert len(found[0]) == (len(found[1]) if mode == TRAINING else len(steps[0]()))


def test_some_nodes_stand_for_all_when_a_graph_is_large():
    layer = Layer("RGCN", typed_graph(), WIDTH)
    rows = torch.arange(layer.graph.num_nodes) % 3 == 0
    some = Step(maker(layer, EDGEWISE)(), TRAINING, "cpu", among=[rows])
    results, *gradients = some.answers()
    everything = Step(maker(layer, EDGEWISE)(), INFERENCE, "cpu").answers()[0]
    assert torch.equal(results, everything[rows])
    (everywhere,) = some.everywhere().answers()[1:]
    assert error_of(gradients, [everywhere]) != 0  # gradients came from these rows only


def test_a_training_step_leaves_gradients_of_every_parameter_that_counts():
    layer = Layer("RGAT", typed_graph(), WIDTH)
    gradients = []
    for arm in (maker(layer, EDGEWISE)(), OurProgram(layer, "torch").arm()):
        Step(arm, TRAINING, "cpu")()
        gradients.append([leaf.grad.clone() for leaf in arm.leaves if leaf.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) == 5  # x, weight, q, k, bias
    error = error_of(*gradients)
    assert error is not None and error < 1e-5


def test_the_peak_is_that_of_the_tensors_alive_at_once():
    megabyte = 1 << 20

    def forward():
        first = torch.empty(megabyte, dtype=torch.uint8)
        second = torch.empty(2 * megabyte, dtype=torch.uint8)
        del first
        third = torch.empty(megabyte // 2, dtype=torch.uint8)
        del second
        return (third,)

    step = Step(Arm(forward, [], []), INFERENCE, "cpu")
    assert step.peak_bytes() == 3 * megabyte
    assert step.rough_seconds > 0


def test_memory_that_is_kept_between_steps_counts():
    kept: list[torch.Tensor] = []

    def forward():
        if not kept:
            kept.append(torch.empty(1 << 20, dtype=torch.uint8))
        return (kept[0],)

    step = Step(Arm(forward, [], [], kept.clear), INFERENCE, "cpu")
    step()
    assert step.peak_bytes() == 1 << 20


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_our_kept_memory_is_let_go_of():
    graph = typed_graph(num_nodes=40_000)
    arm = OurProgram(Layer("RGCN", graph, WIDTH), "cpp").arm()
    Step(arm, TRAINING, "cpu")()
    assert find_arrays(graph).buffers._buffers
    arm.release()
    assert not find_arrays(graph).buffers._buffers


def test_long_arms_are_measured_less_often_and_beside_the_short_ones():
    assert num_rounds(0.001, 2.0) == 15
    assert num_rounds(0.4, 2.0) == 9
    assert num_rounds(1.0, 2.0) == 3
    assert num_rounds(30.0, 2.0) == 1
    order, steps = [], {}
    for name, seconds in {"short": 0.25, "long": 0.6}.items():
        step = Step(Arm(lambda name=name: order.append(name) or (), [], []), INFERENCE, "cpu")
        step.rough_seconds = seconds
        steps[name] = step
    found = measure(steps, 2.0)
    assert {name: len(times) for name, times in found.items()} == {"short": 9, "long": 3}
    # A short arm is warmed up before it counts, and the order of each round is the other one.
    assert order[:7] == ["short", "short", "long", "long", "short", "short", "short"]


def test_rows_over_edges_are_those_of_the_plan():
    graph = typed_graph()
    layer = Layer("RGCN", graph, WIDTH)
    chosen = plan_facts(OurProgram(layer, "torch").explain(training=True))
    counts = graph.counts
    fewest = min(counts.num_src_pairs, counts.num_dst_pairs)
    assert chosen["rows_over_edges"] == pytest.approx(fewest / counts.num_edges)
    assert chosen["applied"]
    edgewise = plan_facts(OurProgram(layer, "torch", rgnn.REWRITES).explain(training=True))
    assert edgewise["rows_over_edges"] == 1.0
    assert edgewise["applied"] == []


def test_running_out_of_memory_is_told_from_other_errors():
    with pytest.raises(RuntimeError) as failure:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(failure.value)
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))


@pytest.mark.parametrize("model", MODELS)
def test_kernels_run_one_by_one_and_move_at_least_what_they_read_and_write(model, monkeypatch):
    monkeypatch.setattr(_rgnn_roofline, "REPETITIONS", 1)
    layer = Layer(model, typed_graph(), WIDTH)
    program = OurProgram(layer, "torch")
    roofline = _rgnn_roofline.Roofline(bytes_per_second=1e9, operations_per_second=1e9)
    facts = _rgnn_roofline.kernel_facts(layer, program, "torch", roofline)
    kernels = program.explain(training=True).kernels
    assert [fact["backward"] for fact in facts] == [kernel.is_backward for kernel in kernels]
    for fact, kernel in zip(facts, kernels, strict=True):
        # The fraction is rounded to four digits after the point.
        assert fact["least_bytes"] > sum(value.memory_bytes for value in kernel.values)
        least = max(fact["least_bytes"], fact["operations"]) / 1e9
        assert fact["roofline_fraction"] == pytest.approx(least / fact["seconds"], abs=1e-4)


def test_least_bytes_of_a_product_are_its_rows_its_weights_and_its_result():
    graph = typed_graph()
    layer = Layer("RGCN", graph, WIDTH)
    roofline = _rgnn_roofline.Roofline(bytes_per_second=1e9, operations_per_second=1e9)
    facts = _rgnn_roofline.kernel_facts(layer, OurProgram(layer, "torch"), "torch", roofline)
    (product,) = [
        fact for fact in facts if "GEMM over node" in fact["kernel"] and not fact["backward"]
    ]
    row = 4 * WIDTH  # of floats
    num_rows = graph.num_nodes
    assert product["least_bytes"] == (2 * num_rows + WIDTH) * row
    assert product["operations"] == 2 * num_rows * WIDTH**2


REFERENCE = ours("torch")


def events(*, speedup: float, peak: int) -> list[dict]:
    """What a process tells about three arms, of which PyG's fast one has failed."""
    told: list[dict] = [{"event": "graph", "num_edges": 400}]
    for arm, seconds in {REFERENCE: 0.1, EDGEWISE: 0.3, PYG: 0.1 * speedup}.items():
        fields = {"arm": arm, "mode": TRAINING}
        peak_bytes = peak if arm == REFERENCE else 1000
        told.append({"event": "tried", **fields, "peak_bytes": peak_bytes, "largest_error": 0.0})
        told.append({"event": "measured", **fields, "seconds": [seconds] * 3})
    told.append({"event": "failed", "arm": PYG_FAST, "mode": TRAINING, "seconds": 2.0})
    planned = {"rows_over_edges": 0.5, "rewrites_that_change_nothing": ["split concat"]}
    told.append({"event": "planned", "arm": REFERENCE, "mode": TRAINING, **planned})
    without = {"arm": ours("torch", ["compaction"]), "mode": TRAINING}
    told.append({"event": "measured", **without, "seconds": [0.2] * 3})
    told.append({"event": "prepared", "arm": REFERENCE, "seconds": [0.45]})
    told.append({"event": "prepared", "arm": EDGEWISE, "seconds": [0.1]})
    return told


def rows_of(tmp_path, **told) -> _rgnn_bars.Rows:
    record = _rgnn_rows.Record("RGCN", "aifb", REFERENCE, WIDTH)
    record.add(events(**told))
    (path,) = write_rows(record.rows(WHERE), tmp_path)
    return _rgnn_bars.Rows(read_rows(path))


def test_rows_hold_ratios_failures_and_when_preparation_is_paid_off(tmp_path):
    rows = rows_of(tmp_path, speedup=25, peak=500)
    reference = rows.ours("RGCN", "aifb")
    assert reference is not None
    assert reference.extra["paid_off_after_steps"] == {EDGEWISE: 2, PYG: 1}
    assert reference.limit is not None and reference.limit.name == f"{PYG} / 20"
    assert reference.limit_fraction == pytest.approx(20 / 25)
    assert rows.speedup("RGCN", "aifb", EDGEWISE) == pytest.approx(3.0)
    failed = rows.get("RGCN", "aifb", PYG_FAST)
    assert failed is not None
    assert (failed.num_repetitions, failed.extra["outcome"]) == (0, "out of memory")
    assert rows.speedup("RGCN", "aifb", PYG_FAST) == "out of memory"
    assert _rgnn_bars.ablation(rows) == {("RGCN", "aifb"): {"split concat": 1.0, "compaction": 2.0}}


@pytest.mark.parametrize(("told", "is_met"), [((25, 549), True), ((19, 551), False)])
def test_bars_are_met_or_not(tmp_path, told, is_met):
    speedup, peak = told
    rows = rows_of(tmp_path, speedup=speedup, peak=peak)
    found = {bar.what: bar for bar in _rgnn_bars.bars(rows)}
    assert found["RGCN over PyG, aifb"].is_met is is_met
    assert found["RGCN over PyG, mutag"].is_met is None
    (of_peak,) = [bar for what, bar in found.items() if "peak, aifb" in what]
    assert of_peak.is_met is is_met
    (survives,) = [bar for what, bar in found.items() if "out of memory" in what]
    assert survives.is_met


def test_the_figure_is_drawn_from_the_rows(tmp_path):
    pytest.importorskip("matplotlib")
    import _rgnn_figure

    rows_of(tmp_path, speedup=25, peak=500)
    target = tmp_path / "figure.svg"
    _rgnn_figure.draw("A CPU", tmp_path, target)
    first = target.read_text()
    assert "compaction" in first
    assert "split concat" not in first  # it changes nothing anywhere
    _rgnn_figure.draw("A CPU", tmp_path, target)
    assert target.read_text() == first
