"""State at the step boundary is where the step before has left it, and nowhere else."""

import dataclasses

import pytest

from penstock.executor.memory.residency import ResidencyIndex
from penstock.graph import Kind, Operator, Phase, StepGraph, Storage
from penstock.memory import Link, Tier
from penstock.planner import Copy, Transfer, plan

NUM_BYTES = 512


def updated_twice() -> StepGraph:
    """A parameter that two operators change, one after the other: values 0, 1 and 2."""
    operators = tuple(
        Operator(
            name=f"update_{value}",
            target="aten.mul_.Scalar",
            phase=Phase.OPTIMIZER,
            mutates=((value, value + 1),),
        )
        for value in (0, 1)
    )
    storage = Storage(name="weight", num_bytes=NUM_BYTES, kind=Kind.PARAMETER, initial=0, final=2)
    return StepGraph(storages=(storage,), storage_of_value=(0, 0, 0), operators=operators)


@pytest.mark.parametrize(("value", "tiers"), [(1, {Tier.DEVICE}), (2, {Tier.DEVICE, Tier.HOST})])
def test_only_copies_of_the_last_value_are_the_next_steps(value, tiers):
    graph = updated_twice()
    out = Transfer(value, Link.DEVICE_TO_HOST, NUM_BYTES, 1, 1)
    copied = dataclasses.replace(
        plan(graph, machine="h200", time_limit=0.1),
        transfers=(out,),
        copies=(Copy(value, Tier.HOST, NUM_BYTES, 1, 2),),
    )
    intervals = ResidencyIndex(graph, copied).find_at_step_boundary(0)
    assert {interval.tier for interval in intervals} == tiers
