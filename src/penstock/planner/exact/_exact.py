"""Plans of small steps with the least bytes that leave and come back, proved.

COSMA's question (arXiv 2311.18246), asked of training steps too: which bytes have to leave and come
back, whatever their time. Its model with address pairs has no useful bound; here residency is
solved without addresses, then packed, and a packing that fails becomes a cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import InfeasibleError
from penstock.graph import StepGraph, alignment_bytes
from penstock.memory import Link
from penstock.planner._assemble import assemble
from penstock.planner._live_ranges import ResidentInterval, live_ranges
from penstock.planner._plan import Plan
from penstock.planner._request import PlanRequest
from penstock.planner.bounds import made_anew, working_set
from penstock.planner.exact._addresses import (
    aligned_graph,
    derive_movement,
    find_offsets,
    last_read,
    place,
)
from penstock.planner.exact._groups import OperatorGroups, group_operators
from penstock.planner.exact._peak import find_reuses, min_peak
from penstock.planner.exact._traffic_search import Packed, TrafficSearch

_DEFAULT_SECONDS = 60.0  # where the request has no deadline
_PACK_SECONDS = 10.0


def exact(request: PlanRequest) -> Plan:
    """Plan a small step, of training or inference, with the least bytes that leave and come back.

    Steps repeat: a step begins with what the one before has left, wherever it is. No operator runs
    twice. Values leave to the nearest tier below. A result reuses the place of an operand only
    where both have the same bytes; offsets are multiples of `penstock.graph.alignment_bytes`. The
    integer program is that of `ExactProgram`.

    Example:
        >>> plan = exact(request)  # doctest: +SKIP
        >>> plan.notes["non_compulsory_bytes"], plan.notes["proved"]  # doctest: +SKIP
        (3426564, True)

    Args:
        request: A step of about a hundred operators at most. Its times say nothing about what is
            best. Without a deadline the solver has 60 seconds.

    Returns:
        The plan; `notes` has `non_compulsory_bytes`, `lower_bound_bytes` and `proved`.

    Raises:
        InfeasibleError: No plan fits, or none was found in time.
        ValueError: The budget has no device bytes, or an operator makes a persistent storage's
            content elsewhere instead of changing it.
    """
    graph, device_bytes = request.graph, request.budget.device_bytes
    links = request.links[0] if request.links else None
    time_limit = request.ending(_DEFAULT_SECONDS).seconds_left()
    require_kept_storages(graph)
    if device_bytes is None:
        raise ValueError("budget.device_bytes is None: an exact plan is for a number of bytes")
    _require_working_set(graph, device_bytes)
    orders = start_orders(graph) if request.reorder else [tuple(range(len(graph.operators)))]
    for order in orders:
        intervals = _keep_resident(graph, order, with_unused=links is None)
        offsets = find_offsets(
            graph, order, intervals, device_bytes, time_limit=min(time_limit, _PACK_SECONDS)
        )
        if offsets is not None:
            return _plan(request, Packed(order, intervals, [], offsets), 0, True)
    if links is None:
        raise InfeasibleError(
            f"{device_bytes} bytes are too little for the best order that was found, and there is "
            "no tier to which anything could leave: pass host_memory= or store=",
            proved=False,
        )
    search = TrafficSearch(graph, device_bytes, reorder=request.reorder, time_limit=time_limit)
    best = search.run(orders)
    if best.packed is None:
        raise InfeasibleError(
            f"no plan for {device_bytes} bytes "
            + ("runs nothing twice" if best.proved else f"was found in {time_limit:.3g} seconds"),
            minimum_device_bytes=working_set(graph).num_bytes,
        )
    least = best.packed.traffic if best.proved else best.least
    return _plan(request, best.packed, least, best.proved)


def _plan(request: PlanRequest, found: Packed, least: int, proved: bool) -> Plan:
    transfers = [
        transfer._replace(link=request.links[0][transfer.link is not Link.DEVICE_TO_HOST])
        for transfer in found.transfers
    ]
    notes = {
        "non_compulsory_bytes": found.traffic,
        "lower_bound_bytes": least,
        "proved": proved,
    }
    placements = place(request.graph, found.intervals, found.offsets)
    return assemble(request, found.order, placements, transfers, method="exact", notes=notes)


def start_orders(graph: StepGraph) -> list[tuple[int, ...]]:
    """Return good orders to search near: of least peak, the program's, and a frugal one."""
    groups = group_operators(aligned_graph(graph))
    orders = [tuple(range(len(graph.operators)))]
    if not any(storage.persistent and storage.num_bytes for storage in graph.storages):
        orders.append(min_peak(graph).order)
    orders = [_join_groups(groups, order) for order in orders]
    return list(dict.fromkeys([*orders[1:], orders[0], _frugal_order(graph, groups)]))


def _join_groups(groups: OperatorGroups, order: Sequence[int]) -> tuple[int, ...]:
    """Change an order so that each group runs together, where its last operator did."""
    position_of = {operator: position for position, operator in enumerate(order)}
    left = sorted(groups.groups, key=lambda group: max(position_of[each] for each in group))
    found: list[int] = []
    while left:
        group = next(g for g in left if groups.ancestors[g[0]].issubset(found))
        left.remove(group)
        found += group
    return tuple(found)


def _frugal_order(graph: StepGraph, groups: OperatorGroups) -> tuple[int, ...]:
    """Return the order in which the group after which the fewest bytes are live runs next."""
    found: list[int] = []
    left = list(groups.groups)

    def growth(group: list[int]) -> int:
        done = {*found, *group}
        made = (v for index in group for v in graph.operators[index].creates)
        needed = {v for index in group for v in graph.operators[index].needs}
        dead = (
            v
            for v in needed
            if done.issuperset(graph.consumers[v])
            and not any(v == old for i in group for old, _ in graph.operators[i].mutates)
            and graph.storages[graph.storage_of_value[v]].final != v
        )
        return sum(map(graph.num_bytes, made)) - sum(map(graph.num_bytes, dead))

    while left:
        ready = [g for g in left if groups.ancestors[g[0]].issubset(found)]
        group = min(ready, key=lambda each: (growth(each), each))
        left.remove(group)
        found += group
    return tuple(found)


def require_kept_storages(graph: StepGraph) -> None:
    """Refuse steps that make a persistent storage without having had it."""
    for index in made_anew(graph, recompute=False):
        raise ValueError(
            f"storage {graph.storages[index].name!r} lives from step to step, and an operator "
            "makes its content in memory of its own; the exact planner is for storages that are "
            "changed in place"
        )


def _require_working_set(graph: StepGraph, device_bytes: int) -> None:
    """Refuse a budget below the largest operator's storages, in multiples of the alignment."""
    aligned = working_set(aligned_graph(graph))
    if aligned.num_bytes <= device_bytes:
        return
    least = working_set(graph)
    proved = device_bytes < least.num_bytes
    rest = "" if proved else ", and other methods in smaller multiples: use method='auto'"
    raise InfeasibleError(
        f"{aligned.operator!r} alone needs {aligned.num_bytes} bytes; the budget is "
        f"{device_bytes}. The exact method counts in multiples of {alignment_bytes(graph)} "
        f"bytes{rest}",
        minimum_device_bytes=least.num_bytes,
        operator=aligned.operator,
        proved=proved,
    )


def _keep_resident(
    graph: StepGraph, order: Sequence[int], *, with_unused: bool
) -> list[ResidentInterval]:
    """Keep all values on the device for their live ranges; perhaps also those without uses."""
    ranges = live_ranges(graph, order)
    for position, index in enumerate(order):
        reads = graph.operators[index].reads
        dying = {
            live_range.value: number
            for number, live_range in enumerate(ranges)
            if live_range.value in reads and last_read(graph, live_range) == position
        }
        for read, _ in find_reuses(graph, index, dying):
            ranges[dying[read]] = ranges[dying[read]]._replace(end=position)
    intervals, _ = derive_movement(graph, len(order), ranges, ())
    if with_unused:
        placed = {live_range.value for live_range in ranges}
        intervals += [
            ResidentInterval(storage.initial, 0, len(order))
            for storage in graph.storages
            if storage.persistent and storage.num_bytes and storage.initial == storage.final
            if storage.initial is not None and storage.initial not in placed
        ]
    return intervals
