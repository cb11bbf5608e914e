"""Errors of a search that found nothing, with the memory that would be sufficient."""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from penstock.errors import InfeasibleError
from penstock.memory import Tier
from penstock.planner._request import PlanRequest
from penstock.planner.bounds import WorkingSet
from penstock.planner.search._finalists import find_offsets
from penstock.planner.search._grid import GridRequest
from penstock.planner.search._library import load_engine
from penstock.planner.search._offsets import sufficient_bytes
from penstock.planner.search._residency import Arena, EvictionChoice, ResidencySearch
from penstock.planner.search._sequence import OperatorSequence
from penstock.units import format_bytes


def explain_missing_engine(request: PlanRequest) -> InfeasibleError:
    """Return the error of a search without a compiler."""
    return InfeasibleError(
        f"device_memory={request.budget.device_bytes} bytes: plans are searched for by C++, and "
        "without it nothing was found that fits; install a compiler, or give more",
        proved=False,
    )


def explain_infeasible(grid: GridRequest, least: WorkingSet | None = None) -> InfeasibleError:
    """Return the error of a search that found nothing, or of a budget below the working set."""
    request, arena = grid.request, grid.arena
    if least is not None and load_engine() is None:
        return _explain_working_set(request, least)
    sequence = grid.program()
    if arena.lower is not None and arena.lower.first_bytes is not None:
        unlimited = dataclasses.replace(arena.lower, first_bytes=None)
        choice = ResidencySearch(sequence, Arena(arena.capacity, unlimited)).quick()
        if choice is not None:
            tier = request.links[0][0].destination
            return _explain_small_tier(choice, arena.lower.first_bytes, tier)
    needed = sequence.base if arena.lower is None else sequence.working_set
    position = int(np.argmax(needed))
    name = request.graph.operators[int(sequence.order[position])].name
    enough = _sufficient_capacity(sequence, Arena(int(needed[position]), arena.lower))
    enough += arena.workspace_bytes
    reason = (
        "there is no tier to which anything could leave: pass store= (or host_memory=), or raise it"
        if arena.lower is None
        else "nothing but its own operands and results is there then: raise it, or split it"
    )
    given = (
        f"device_memory={format_bytes(request.budget.device_bytes or 0)} is too little: operator "
    )
    if least is not None:
        return InfeasibleError(
            f"{given}{least.operator!r} alone needs {format_bytes(least.num_bytes)} with its "
            f"workspace, and a plan was found for {format_bytes(enough)}; {reason}",
            minimum_device_bytes=least.num_bytes,
            operator=least.operator,
            proved=True,
            sufficient_device_bytes=enough,
        )
    return InfeasibleError(
        f"{given}{name!r} needs {format_bytes(enough)} with its workspace where the program runs "
        f"it, and no other order was found that needs less; {reason}",
        operator=name,
        sufficient_device_bytes=enough,
    )


def _explain_working_set(request: PlanRequest, least: WorkingSet) -> InfeasibleError:
    """Return the error of a budget below the working set, where nothing can be searched."""
    return InfeasibleError(
        f"device_memory={request.budget.device_bytes} bytes is too little: operator "
        f"{least.operator!r} alone needs {least.num_bytes} bytes with its workspace: raise it, or "
        "split it",
        minimum_device_bytes=least.num_bytes,
        operator=least.operator,
        proved=True,
    )


def _explain_small_tier(choice: EvictionChoice, given: int, tier: Tier) -> InfeasibleError:
    """Return the error of a lower tier that is too small for the evictions."""
    sequence, is_evicted = choice.sequence, choice.evicted != 0
    low, high = given, given + int(sequence.hole_bytes[is_evicted].sum())
    while low < high:
        middle = (low + high) // 2
        does_not_fit = sequence.tiers(choice.evicted, middle)[is_evicted].any()
        low, high = (middle + 1, high) if does_not_fit else (low, middle)
    position = int(np.argmax(sequence.base))
    name = "host_memory" if tier == Tier.HOST else "store"
    return InfeasibleError(
        f"{name}={given} bytes: what has to leave the device needs {low} bytes there; raise it, or "
        "device_memory=",
        operator=sequence.problem.graph.operators[int(sequence.order[position])].name,
        proved=False,
    )


def _sufficient_capacity(sequence: OperatorSequence, arena: Arena) -> int:
    """Return the least capacity for which a plan was found, from that of the arena on."""
    choice = ResidencySearch(sequence, arena).quick()
    if choice is None:
        return arena.capacity
    try:
        find_offsets(choice, arena, deadline=time.monotonic(), seed=0)
    except InfeasibleError as error:
        return sufficient_bytes(error)
    return arena.capacity
