"""The checker of scratchpad plans finds every kind of fault by its name."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.errors import PlanError
from penstock.planner import (
    Residency,
    ScratchpadBuffer,
    ScratchpadGraph,
    ScratchpadOperator,
    ScratchpadPlan,
    check_scratchpad,
)

# Buffer 0 is used at steps 0, 2 and 4, and away in between; buffers 1 and 2 take its place.
GRAPH = ScratchpadGraph(
    operators=tuple(
        ScratchpadOperator(f"op {index}", used)
        for index, used in enumerate([(0,), (1,), (0,), (2,), (0, 1)])
    ),
    buffers=(
        ScratchpadBuffer("A", 4, 8),
        ScratchpadBuffer("A", 4, 4),
        ScratchpadBuffer("A", 4, 4),
    ),
    edges=((0, 1), (1, 2), (2, 3), (3, 4)),
)
POOLS = {"A": 8}


def stay(buffer: int, start: int, end: int, offset: int) -> Residency:
    return Residency(buffer=buffer, start=start, end=end, offset=offset)


STAYS = (stay(0, 0, 3, 0), stay(0, 4, 5, 0), stay(1, 1, 5, 4), stay(2, 3, 4, 0))
GOOD = ScratchpadPlan(
    order=(0, 1, 2, 3, 4),
    residencies=STAYS,
    spill_cost=8,
    num_spills=1,
    order_lower_bound=4,
    lower_bound=0,
    optimal_for_order=False,
    searched=True,
    plan_seconds=0.0,
)


def test_a_good_plan_passes():
    check_scratchpad(GRAPH, POOLS, GOOD)


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("order", {"order": (0, 1, 2, 3)}),
        ("order", {"order": (0, 1, 2, 3, 3)}),
        ("precedence", {"order": (0, 1, 3, 2, 4)}),
        ("residency", {"residencies": (*STAYS, stay(3, 0, 1, 0))}),
        ("residency", {"residencies": (*STAYS, stay(2, 4, 4, 0))}),
        ("residency", {"residencies": (*STAYS, stay(2, 4, 6, 0))}),
        ("residency", {"residencies": (*STAYS, stay(0, 2, 4, 0))}),
        ("first use", {"residencies": (*STAYS[:3], stay(2, 2, 4, 0))}),
        ("first use", {"residencies": STAYS[:3]}),
        ("last use", {"residencies": (*STAYS[:3], stay(2, 3, 5, 0))}),
        ("use", {"residencies": (stay(0, 0, 2, 0), *STAYS[1:])}),
        ("reload", {"residencies": (stay(0, 0, 3, 0), stay(0, 3, 5, 0), *STAYS[2:])}),
        ("reload", {"residencies": (stay(0, 0, 4, 0), *STAYS[1:])}),
        ("capacity", {"residencies": (*STAYS[:3], stay(2, 3, 4, 5))}),
        ("capacity", {"residencies": (*STAYS[:3], stay(2, 3, 4, -1))}),
        ("overlap", {"residencies": (*STAYS[:3], stay(2, 3, 4, 1))}),
        ("cost", {"spill_cost": 4}),
        ("cost", {"num_spills": 2}),
        ("bound", {"order_lower_bound": 9}),
        ("bound", {"lower_bound": 5}),
    ],
)
def test_a_fault_is_named(rule: str, changes):
    with pytest.raises(PlanError) as caught:
        check_scratchpad(GRAPH, POOLS, dataclasses.replace(GOOD, **changes))
    assert caught.value.rule == rule
