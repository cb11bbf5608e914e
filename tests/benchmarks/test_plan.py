import dataclasses
import functools

import pytest

import _plan_figure
import _plan_points
import graph_cases
import penstock.graph
from _plan_arms import ARMS, GENETIC, ODSWAP, OURS, Planner
from _plan_models import CASES, SWAPADVISOR
from _plan_table import FROZEN, bars, show
from _rows import BenchmarkRow, environment, read_rows, write_rows
from penstock.errors import InfeasibleError
from penstock.memory import LinkProfile, machine
from penstock.planner import Budget, check
from penstock.planner.paging import _plan_paging, peak_of_program_order
from plan import arm_row, budgets, minimum_bytes

UNIT = 256


@pytest.fixture(scope="module")
def graph():
    return graph_cases.chain_step(8, weight_bytes=UNIT, activation_bytes=4 * UNIT)


def slow_machine():
    """A V100 whose links move an activation of the graph while five operators run."""
    fast = machine("v100-16gb-pcie3")
    slow = LinkProfile(5e7, (5e7, 5e7), 1)
    return dataclasses.replace(fast, links=dict.fromkeys(fast.links, slow))


@pytest.fixture(scope="module")
def planner(graph):
    """A planner that makes each arm's plan once.

    Searches end when their time is up: what is tested here holds of all that they find.
    """
    found = Planner(
        graph,
        Budget(device_bytes=int(peak_of_program_order(graph) * 0.6), host_bytes=1 << 40),
        slow_machine(),
        time_limit=0.3,
        seed=0,
    )
    found.plan = functools.cache(found.plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_plan_paging, "PACK_SECONDS", 0.05)
        yield found


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("wresnet-152-10", 5820.4),
        ("inception-v4", 42.7),  # as published
        ("nasnet-25", 102.0),
        ("brnn-8k", 3221.4),
        ("gpt2-48", 1557.6),
        ("llama-7b", 6738.4),
        ("t5-3b", 2851.6),
        ("bert-large", 335.2),
    ],
)
def test_models_have_the_parameters_that_they_should(name, millions):
    model, optimizer, _ = CASES[name].build(batch_size=1)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.06)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))


def test_the_table_of_the_paper_is_there():
    assert set(SWAPADVISOR) <= set(CASES)


def test_nasnet_a_of_the_paper_is_a_case_of_ours():
    import torch

    from _plan_convolutions import nasnet

    with torch.device("meta"):
        parameters = nasnet(6).parameters()
        count = sum(parameter.numel() for parameter in parameters)
    assert count / 1e6 == pytest.approx(88.75, abs=0.01)  # NASNet-A (6 @ 4032)


def test_a_small_recurrent_net_is_captured_as_it_is_counted():
    import torch

    from _plan_recurrent import Recurrent

    model = Recurrent(num_layers=2, width=8, bidirectional=True, cell="lstm")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.zeros(3, 4, 8), torch.zeros(4, 8))
    graph = penstock.graph.capture(model, optimizer, batch)
    # Both directions of both layers take 3 steps: the input's product each, the state's for two.
    products = [
        o for o in graph.operators if o.phase == "forward" and o.target.endswith("mm.default")
    ]
    assert len(products) == 2 * 2 * (3 + 2) + 1
    layer = 4 * 8 * 8 * (3 + 2)
    assert sum(o.flops for o in products) == 2 * 4 * (2 * layer + 2 * (layer + 3 * 4 * 8 * 8) + 128)


def test_budgets_end_at_the_minimum(graph):
    peak, least = peak_of_program_order(graph), minimum_bytes(graph)
    # A backward: activation, weight, its gradient, and the gradient that is written over.
    assert least == (4 + 1 + 1 + 4) * UNIT
    found = budgets(graph, ["1/2", "1/4", "1/100"])
    assert found["1/2"] == peak // 2
    assert found["minimum"] == int(least * 1.05)
    assert "1/100" not in found


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_makes_plans_that_pass_the_checker(arm, planner):
    try:
        check(planner.graph, planner.plan(arm))
    except InfeasibleError:
        assert arm in ("LP per layer (torchtitan)", "torch's memory budget")


@pytest.mark.usefixtures("processor_time")
def test_rows_are_held_against_the_bound_of_what_was_frozen(planner):
    where = environment("cpu")
    free, frozen, other = (
        arm_row(planner, arm, "c", {}, where) for arm in (OURS, FROZEN, "on demand, LRU")
    )
    assert free.limit is not None
    assert frozen.limit is not None
    assert other.limit is not None
    assert frozen.limit.value > free.limit.value
    assert other.limit.value == pytest.approx(free.limit.value)


@pytest.mark.usefixtures("processor_time")
def test_a_bound_may_be_proved_for_longer(planner, monkeypatch):
    """Of what was frozen, too; it is never lower than the one that the plan has."""
    made = planner.plan(FROZEN)
    assert planner.bound_of(FROZEN, made) is made.bound
    monkeypatch.setattr(planner, "bound_seconds", 2.0)
    weak = dataclasses.replace(made.bound, seconds=0.0)
    proved = planner.bound_of(FROZEN, dataclasses.replace(made, bound=weak))
    assert not proved.reorder and not proved.recompute
    assert proved.seconds == pytest.approx(made.bound.seconds)
    strong = dataclasses.replace(made.bound, seconds=1e9)
    assert planner.bound_of(FROZEN, dataclasses.replace(made, bound=strong)) is strong


def test_rows_say_what_came_of_it(planner, tmp_path, capsys):
    where = environment("cpu")
    extra = {"share": "1/8", "model": "brnn-8k", "device_bytes": 1}
    rows = [arm_row(planner, arm, "a case", extra, where) for arm in (OURS, ARMS[0])]
    write_rows(rows, tmp_path)
    assert [row.extra["outcome"] for row in rows] == ["planned"] * 2
    assert rows[0].median_seconds <= rows[1].median_seconds
    (path,) = tmp_path.glob("*/plan.json")
    assert len(read_rows(path)) == 2
    show(where["device_name"], tmp_path)
    shown = capsys.readouterr().out
    assert "a case" in shown
    assert "in 0 of 1 comparisons" in shown
    assert "brnn-8k at 1/8" in shown


def rows_of(**seconds):
    """A row per arm that takes so long; None: it has no plan."""
    where = environment("cpu")
    extra = {"share": "1/8", "model": "brnn-8k", "device_bytes": 1}
    return {
        ("c", arm): BenchmarkRow.of(
            [many or 0.0],
            topic="plan",
            case="c",
            arm=arm,
            extra=extra | ({"share_of_ideal": 1 / many, "gap": many - 1} if many else {}),
            **where,
        )
        for arm, many in zip((OURS, GENETIC, FROZEN), seconds.values(), strict=True)
    }


def test_bars_are_met():
    lines = "\n".join(bars(rows_of(ours=1.05, genetic=1.26, frozen=1.09), ["c"]))
    assert "in 1 of 1 cases, worst 9.0%" in lines
    assert "slower than another arm in 0 of 1 comparisons" in lines
    assert "slower than with decisions frozen in 0 of 1 comparisons" in lines
    assert "free: within 15% of the bound in 1 of 1 cases, worst 5.0%" in lines
    assert "by 20.0% (geometric mean of 1); in 0 cases" in lines
    assert "brnn-8k at 1/8: 95.2% of ideal" in lines


def test_bars_are_missed():
    lines = "\n".join(bars(rows_of(ours=1.25, genetic=1.2, frozen=1.11), ["c"]))
    assert "in 0 of 1 cases" in lines
    assert "slower than another arm in 1 of 1 comparisons" in lines
    assert "slower than with decisions frozen in 1 of 1 comparisons" in lines
    assert "free: within 15% of the bound in 0 of 1 cases, worst 25.0%" in lines
    assert "by -4.0%" in lines
    none = "\n".join(bars(rows_of(ours=None, genetic=1.2, frozen=None), ["c"]))
    assert "only it has one" in none
    assert "without a plan: ['c']" in none
    alone = "\n".join(bars(rows_of(ours=1.1, genetic=None, frozen=None), ["c"]))
    assert "geometric mean" not in alone


def test_what_is_not_in_a_plan_is_a_point(graph, tmp_path, monkeypatch):
    monkeypatch.setitem(_plan_points.CASES, "chain", _plan_points.CASES["rnn-8k"])
    stock, checkpointed = _plan_points.point_rows(
        "chain", graph, machine("v100-16gb-pcie3"), environment("cpu")
    )
    assert stock.extra["share_of_ideal"] == 1.0
    assert stock.extra["device_bytes"] == peak_of_program_order(graph)
    # One layer, nothing between its borders: a checkpoint keeps all, and results take free room.
    assert checkpointed.extra["device_bytes"] <= stock.extra["device_bytes"]
    write_rows([stock], tmp_path)
    show("a CPU", tmp_path)  # neither is a row of the table


def test_the_figure_is_drawn_from_the_rows(planner, tmp_path):
    pytest.importorskip("matplotlib")
    where = environment("cpu") | {"device_name": "A CPU"}
    extra = {"share": "1/8", "model": "brnn-8k", "device_bytes": 10**10}
    target = tmp_path / "figure.svg"
    _plan_figure.draw("A CPU", tmp_path, target)
    assert not target.exists()
    write_rows([arm_row(planner, arm, "c", extra, where) for arm in (OURS, ODSWAP)], tmp_path)
    _plan_figure.draw("A CPU", tmp_path, target)
    text = target.read_text()
    assert OURS in text
    assert ODSWAP in text
    assert "genetic" not in text
