import dataclasses
import io
import json
import re

import pytest

import graph_cases
from penstock.graph import Kind
from penstock.memory import Link, Tier
from penstock.planner import Budget, simulate
from penstock.planner.paging import Recomputation, plan_by_paging
from penstock.report import (
    Sweep,
    SweepPoint,
    _plan,
    draw_plan,
    draw_sweep,
    plan_blocks,
    plan_table,
    plan_timeline,
    plan_trace,
    write_plan_trace,
)
from penstock.report._plan import bin_memory

UNIT = 256


@pytest.fixture(scope="module")
def graph():
    graph = graph_cases.chain_step(6, weight_bytes=UNIT, activation_bytes=2 * UNIT)
    return graph_cases.in_units(graph, UNIT)


@pytest.fixture(scope="module")
def plan(graph):
    saved = Recomputation(graph).saved()
    order, dropped = Recomputation(graph).order_without({saved[1].value})
    assert dropped
    return plan_by_paging(
        graph_cases.request(
            graph,
            budget=Budget(device_bytes=14 * UNIT, host_bytes=1 << 40),
            profile=graph_cases.machine(out=UNIT, back=UNIT),
            seconds=[0.5] * len(graph.operators),
        ),
        order=order,
    )


def test_the_timeline_has_everything_that_moves(graph, plan):
    timeline = plan_timeline(graph, plan)
    seconds = {}
    for span in timeline.spans:
        seconds[span.lane] = seconds.get(span.lane, 0) + (span.end_ns - span.start_ns) / 1e9
        assert 0 <= span.start_ns <= span.end_ns <= timeline.end_ns + 1
    simulation = simulate(graph, plan)
    assert plan.transfers
    assert seconds["compute"] == pytest.approx(sum(0.5 for _ in plan.order))
    assert seconds["stall"] == pytest.approx(simulation.stall_seconds)
    for link, busy in simulation.busy_seconds.items():
        assert seconds[link.value] == pytest.approx(busy)
    peaks = {tier: max(taken for _, taken in s) for tier, s in timeline.samples.items()}
    assert peaks[Tier.HOST] == plan.peak_host_bytes
    assert peaks[Tier.DEVICE] <= plan.arena_bytes
    assert timeline.end_ns == pytest.approx(plan.step_seconds * 1e9, abs=1)


def test_computations_are_named_by_operator_or_by_phase(graph, plan):
    names = [s.name for s in plan_timeline(graph, plan).spans if s.lane == "compute"]
    assert len(names) == len(plan.order)
    assert any(name.endswith("(again)") for name in names)
    by_phase = plan_timeline(graph, plan, name_operators=False)
    phases = [s.name for s in by_phase.spans if s.lane == "compute"]
    assert set(phases) == {"forward", "backward", "optimizer", "recomputation"}
    assert len(phases) < len(names)


def test_the_trace_counts_memory_by_kind(graph, plan, tmp_path):
    path = write_plan_trace(graph, plan, tmp_path / "new" / "trace.json")
    trace = json.loads(path.read_text())
    assert trace == json.loads(json.dumps(plan_trace(graph, plan)))
    counters = [e for e in trace["traceEvents"] if e["name"] == "device memory by kind"]
    most = max(sum(event["args"].values()) for event in counters)
    assert most == max(map(sum, zip(*simulate(graph, plan).memory_bytes.values(), strict=True)))


def test_the_table_says_what_matters(graph, plan):
    text = plan_table(graph, plan)
    for part in ("step", "no plan beats", "gap", "host->device", "recomputed", "1 operators"):
        assert part in text


def test_a_plan_at_its_bound_has_no_gap(graph, plan):
    rounded = dataclasses.replace(plan, step_seconds=plan.lower_bound_seconds * (1 - 1e-15))
    (line,) = (line for line in plan_table(graph, rounded).splitlines() if "gap" in line)
    assert line.split()[2] == "0.0%"


def test_bins_hold_the_fullest_moment(graph, plan):
    simulation = simulate(graph, plan)
    whole = bin_memory(simulation, [0.0, simulation.step_seconds])
    totals = [sum(column) for column in zip(*simulation.memory_bytes.values(), strict=True)]
    assert sum(taken[0] for taken in whole.values()) == max(totals)
    fine = bin_memory(simulation, [i * simulation.step_seconds / 999 for i in range(1000)])
    columns = [sum(column) for column in zip(*fine.values(), strict=True)]
    assert max(columns) == max(totals)
    assert len(columns) == 999


def test_blocks_are_as_high_as_the_memory(graph, plan):
    text = plan_blocks(graph, plan, num_columns=40, num_rows=8, unicode=False).plain
    lines = text.splitlines()
    assert text.isascii()
    assert [line.count("|") for line in lines] == [1] * 8 + [0] * (len(lines) - 8)
    body = [line.split("|", 1)[1] for line in lines[:8]]
    assert {len(line) for line in body} == {40}
    assert set(body[-1]) <= set("PObiags")  # something is there all the time
    legend = [line.strip() for line in lines[10:]]
    assert max(map(len, legend)) <= 40
    assert "aa activations" in {entry for line in legend for entry in line.split("  ")}
    assert all(re.fullmatch(r"(\S\S [a-z ]+)(  \S\S [a-z ]+)*", line) for line in legend)


def test_pictures_are_written(graph, plan, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = draw_plan(graph, plan, tmp_path / "new" / "plan.png")
    assert image.imread(path).shape[1] > 1000
    points = [SweepPoint(name="stock", device_bytes=100, step_seconds=1.0)]
    points += [
        SweepPoint(
            name="plans", device_bytes=n, step_seconds=50.0 / n, lower_bound_seconds=25.0 / n
        )
        for n in (25, 50)
    ]
    sweep = Sweep(title="x", machine="m", ideal_seconds=1.0, points=tuple(points), minimum_bytes=20)
    assert sweep.names == ("plans", "stock")
    assert [point.device_bytes for point in sweep.curve("plans")] == [25, 50]
    assert image.imread(draw_sweep(sweep, tmp_path / "sweep.png")).std() > 0.01
    json.dump(sweep.to_dict(), io.StringIO())


def test_a_plan_that_moves_nothing_is_drawn_too(graph, tmp_path):
    pytest.importorskip("matplotlib")
    plan = plan_by_paging(
        graph_cases.request(
            graph,
            budget=Budget(),
            profile=graph_cases.machine(),
            seconds=[0.5] * len(graph.operators),
        )
    )
    assert "nothing" in plan_table(graph, plan)
    assert draw_plan(graph, plan, tmp_path / "plan.png").exists()
    kinds = bin_memory(simulate(graph, plan), [0.0, plan.step_seconds])
    assert kinds.keys() == {Kind.PARAMETER, Kind.INPUT, Kind.ACTIVATION, Kind.GRADIENT}
    assert Link.HOST_TO_DEVICE not in plan.bytes_moved


def test_the_workspace_is_said_to_be_of_the_device(graph, plan):
    """Also where operators were split, about which there is a row."""
    of_parts = dataclasses.replace(plan, workspace_bytes=UNIT, split_bytes=10**9)
    lines = plan_table(graph, of_parts).splitlines()
    device = next(number for number, line in enumerate(lines) if "device  " in line)
    assert "of it workspace" in lines[device + 1] and "split" in lines[device + 2]


def test_pictures_of_small_steps_have_small_units_and_an_ordered_legend(
    graph, plan, tmp_path, monkeypatch
):
    figures = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    draw_plan(graph, plan, tmp_path / "plan.png")
    monkeypatch.setattr(_plan, "MOST_MILLISECONDS", 10**9)
    draw_plan(graph, plan, tmp_path / "plan.png")
    units = [(f.axes[0].get_ylabel()[-5:], f.axes[1].get_xlabel()[-4:]) for f in drawn]
    assert units == [(", MiB", "p, s"), (", MiB", ", ms")]
    (legend,) = (f.axes[1].get_legend() for f in drawn[1:])
    names = [text.get_text() for text in legend.get_texts()]
    assert names[:2] == ["forward", "backward"]
