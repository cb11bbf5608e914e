"""`plan`: sizes and machines are parsed once, here, and the method is chosen."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable

from penstock.errors import InfeasibleError, PenstockError
from penstock.graph import StepGraph, split
from penstock.memory import (
    FileStore,
    Link,
    LinkProfile,
    MachineProfile,
    Tier,
    TierProfile,
    find_machine,
)
from penstock.planner._assemble import compute_bound
from penstock.planner._plan import Plan
from penstock.planner._plan_records import Bound, Budget, Found
from penstock.planner._request import PlanRequest
from penstock.planner.bounds import lower_bound
from penstock.planner.exact import exact
from penstock.planner.genetic import plan_genetic
from penstock.planner.paging import (
    PAGING_POLICIES,
    PagingPolicy,
    estimate_paging_seconds,
    peak_of_program_order,
    plan_by_paging,
    require_tiers,
)
from penstock.planner.search import interference_per_byte, load_engine, plan_auto
from penstock.units import parse_bytes, parse_count, parse_seconds, parse_share

_logger = logging.getLogger(__name__)

METHODS = ("auto", "exact", "genetic")
MAX_EXACT_OPERATORS = 200
# One data-centre NVMe drive, where a profile was made without a store: bytes per second.
_ASSUMED_FILE_WRITE, _ASSUMED_FILE_READ = 2e9, 3e9
_REFERENCE_SHARE = 0.05  # of the time limit, at least, for plans without a search
_BOUND_SHARE, _MAX_BOUND_SECONDS = 0.2, 24.0  # of the time limit
_FROZEN_BOUND_SHARE = 0.4  # for an order that may not change: its integer programs take longer
# Making the plan after a search takes so many times as long as a first scan of the graph, about; at
# most this share of the time limit is kept for it.
_PLAN_TIMES, _MAX_PLAN_SHARE = 2.0, 0.25
_LEAST_SHARE = 0.3  # of the time limit, for a graph after another one was too large
# A plan on demand that takes this many times as long in bytes alone gets no addresses; of short
# steps all do.
_HOPELESS, _FEW_OPERATORS = 1.25, 500


def plan(
    graph: StepGraph,
    *,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    store: FileStore | str | os.PathLike[str] | None = None,
    machine: MachineProfile | str | None = None,
    reorder: bool = True,
    recompute: bool = True,
    split_products: bool = False,
    method: str = "auto",
    time_limit: float = 60,
    seed: int = 0,
    progress: Callable[[Found], None] | None = None,
) -> Plan:
    """Plan a training step: order, residency, recomputation, transfers and addresses, together.

    Example:
        >>> plan = plan(graph, device_memory="4GiB", machine="v100-16gb-pcie3")  # doctest: +SKIP
        >>> plan.step_seconds, plan.lower_bound_seconds  # doctest: +SKIP
        (0.71, 0.66)

    Args:
        graph: The step, from `penstock.capture` or a file.
        device_memory: Bytes, or a size such as `"8GiB"`, for the arena and the operators'
            workspace; it may be more than the device has. Or a share, as `"1/8"` or `"25%"`, of the
            program's own peak. None: as many bytes as needed.
        host_memory: Bytes, or a size, of the host tier. None: on a machine with a GPU and without
            `store=` all that its host has, else there is no host tier.
        store: Directory or `FileStore` of the file tier. Where the machine's profile was made
            without one, 2 GB/s of writing and 3 GB/s of reading are assumed.
        machine: A name that `penstock.memory.machine` takes, a profile, or None for this machine.
            Links of a probed one count as fast as they are while both directions are busy.
        reorder: Whether operators may run in another order than the program's.
        recompute: Whether operators may run again, so that their results need not be kept or moved.
        split_products: Whether products of matrices may run in slices of rows, as
            `penstock.iomodel.run_chain` runs them, where they need too much at once: the logits of
            a large vocabulary. They add in another order then, so that results differ by rounding.
        method: `"auto"`; `"exact"`: the least bytes that move, proved, for steps of about a
            hundred operators (COSMA); `"genetic"`: SwapAdvisor's algorithm, to compare
            with.
        time_limit: Seconds for planning.
        seed: Of random numbers. The same seed gives the same plan, where the time limit does not
            end the search.
        progress: Called with each improvement; Ctrl-C takes the best plan so far.

    Returns:
        The plan, which `penstock.planner.check` accepts. Where single operators would need too much
        of the budget it is for the graph with these operators split: see `Plan.split_bytes` and
        `Plan.planned_graph`.

    Raises:
        InfeasibleError: No plan fits the budgets, or none was found. With `proved` no plan fits
            less than `minimum_device_bytes`, in any order, because of `operator`;
            `sufficient_device_bytes` would do.
        PenstockError: The process may not take the memory that planning needs.
        ValueError, TypeError: An argument has a wrong value or type.
    """
    _check_arguments(graph, method, progress)
    time_limit = parse_seconds(time_limit, name="time_limit")
    if time_limit == math.inf:
        raise ValueError(f"time_limit={time_limit!r}: must end")
    for name, flag in (("reorder", reorder), ("recompute", recompute)):
        if flag not in (True, False):
            raise TypeError(f"{name}={flag!r}: must be True or False")
    share = parse_share(device_memory)
    if share is not None:
        device_memory = int(peak_of_program_order(graph) * share)
    profile = find_machine(machine, store)
    profile = profile.while_both_are_busy()
    budget, profile = _tiers(profile, device_memory, host_memory, store)
    if method == "exact":
        _check_exact(graph, budget)
    request = PlanRequest(
        graph=graph,
        budget=budget,
        machine=profile,
        reorder=bool(reorder),
        recompute=bool(recompute),
        split_products=split_products,
        seed=parse_count(seed, name="seed"),
        progress=progress,
    )
    found = plan_request(request.within(time_limit), method=method)
    return dataclasses.replace(found, times="graph")


def plan_request(request: PlanRequest, *, method: str = "auto") -> Plan:
    """Plan a request; see `plan`.

    Raises:
        InfeasibleError: No plan was found.
        PenstockError: The process may not take the memory that planning needs.
    """
    planners = {"auto": _plan_auto, "exact": exact, "genetic": plan_genetic}
    try:
        found = _plan_whole_or_split(request, planners[method], method)
    except MemoryError as error:
        raise PenstockError(
            f"planning {len(request.graph.operators)} operators needs more memory than this "
            "process may take: raise its limit, or plan in another process (graph.save, plan.save) "
            "and load the plan here"
        ) from error
    require_tiers(found)
    return found


def _plan_whole_or_split(
    request: PlanRequest, planner: Callable[[PlanRequest], Plan], method: str
) -> Plan:
    """Plan the graph whole, or split; the first of the choices for which there is a plan."""
    graph, began, time_limit = request.graph, time.monotonic(), request.seconds_left()
    choices = _split_choices(request, method)
    # Making the plan after a search takes longer where the graph or the load is larger.
    looked = time.monotonic() - began
    deadline = began + time_limit - min(_PLAN_TIMES * looked, _MAX_PLAN_SHARE * time_limit)
    for split_bytes in choices:
        parts = request if split_bytes is None else request.of(_split(request, split_bytes))
        left = max(deadline - time.monotonic(), _LEAST_SHARE * time_limit)
        try:
            found = planner(parts.ending_in(left))
        except InfeasibleError:
            if split_bytes == choices[-1]:
                raise
            continue
        if split_bytes is None:
            return found
        _logger.info(
            "planned for %d parts of operators (split_bytes=%d)",
            len(parts.graph.operators) - len(graph.operators),
            split_bytes,
        )
        return dataclasses.replace(
            found,
            graph_digest=graph.digest,
            split_bytes=split_bytes,
            splits_products=request.split_products,
        )
    raise AssertionError("there is a graph to plan")


def _split(request: PlanRequest, split_bytes: int) -> StepGraph:
    return split(request.graph, split_bytes, products=request.split_products)


def _split_choices(request: PlanRequest, method: str) -> list[int | None]:
    """Return split sizes to try: None for the whole graph, else bytes of an operator at most.

    Parts never need more than the whole, so `auto` splits wherever memory is short and an operator
    needs half of it; other methods split where they have to.
    """
    graph, device_bytes = request.graph, request.budget.device_bytes
    if device_bytes is None or method == "exact":
        return [None]
    if method == "auto" and peak_of_program_order(graph, in_place=True) <= device_bytes:
        return [None]
    choices: list[int | None] = [] if method == "auto" else [None]
    for split_bytes in (device_bytes // 2, 1):
        if _split(request, split_bytes) is not graph:
            choices.append(split_bytes)
    return choices or [None]


def _check_exact(graph: StepGraph, budget: Budget) -> None:
    if len(graph.operators) > MAX_EXACT_OPERATORS:
        raise ValueError(
            f"method='exact' is for at most {MAX_EXACT_OPERATORS} operators and the graph has "
            f"{len(graph.operators)}; use method='auto'"
        )
    if budget.device_bytes is None:
        raise ValueError("method='exact' needs device_memory=: without a limit nothing moves")


def _plan_auto(request: PlanRequest) -> Plan:
    time_limit = request.seconds_left()
    search_until = request.deadline - time_limit * _REFERENCE_SHARE
    try:
        bound = _bound(request)
    except KeyboardInterrupt:  # then the first plan that is found
        bound, search_until = compute_bound(request), 0.0
    found = failure = None
    try:
        left = max(0.0, search_until - time.monotonic())
        found = plan_auto(request.ending_in(left), bound=bound)
    except InfeasibleError as error:
        if error.proved:
            raise
        failure = error
    with contextlib.suppress(KeyboardInterrupt):
        found = fastest_with_references(request, found, bound)
    if found is None:
        assert failure is not None
        raise failure
    if load_engine() is None:
        found = dataclasses.replace(found, notes={**found.notes, "searched": False})
    return found


def _bound(request: PlanRequest) -> Bound:
    share = _BOUND_SHARE if request.reorder else _FROZEN_BOUND_SHARE
    try:
        return lower_bound(request.within(min(request.seconds_left() * share, _MAX_BOUND_SECONDS)))
    except InfeasibleError:  # the planner raises it too, with the bytes that suffice
        return compute_bound(request)


def _check_arguments(graph: StepGraph, method: str, progress: object) -> None:
    if not isinstance(graph, StepGraph):
        raise TypeError(
            f"graph must be a StepGraph, from penstock.capture or StepGraph.load; got {graph!r}"
        )
    if method not in METHODS:
        raise ValueError(f"method={method!r}: must be one of {', '.join(map(repr, METHODS))}")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress={progress!r}: must be a function of a Found, or None")


def _tiers(
    profile: MachineProfile,
    device_memory: int | str | None,
    host_memory: int | str | None,
    store: FileStore | str | os.PathLike[str] | None,
) -> tuple[Budget, MachineProfile]:
    """Return budgets in bytes, and the profile with the links to the tiers below."""
    links, tiers = dict(profile.links), dict(profile.tiers)
    host_bytes = None if host_memory is None else parse_bytes(host_memory, name="host_memory")
    if host_bytes is None and store is None and Tier.HOST in tiers:
        host_bytes = tiers[Tier.HOST].capacity_bytes
    if host_bytes is not None and Link.DEVICE_TO_HOST not in links:
        # RAM below a budget of RAM: moving is copying.
        links[Link.DEVICE_TO_HOST] = links[Link.HOST_TO_DEVICE] = profile.memcpy
        tiers[Tier.HOST] = TierProfile(host_bytes)
    file_bytes = None
    if store is not None:
        file_store = FileStore.of(store)
        _join_links(links)
        to_file = (Link.DEVICE_TO_FILE, Link.FILE_TO_DEVICE)
        missing = [link.value for link in to_file if link not in links]
        if missing:
            raise ValueError(
                f"store={os.fspath(file_store.path)!r}: the profile of machine {profile.name!r} "
                f"does not say how fast {missing[0]} is; pass machine=penstock.probe(store)"
            )
        known = tiers.get(Tier.FILE)
        file_bytes = file_store.max_bytes or (known.capacity_bytes if known else 1 << 60)
    device_bytes = (
        None if device_memory is None else parse_bytes(device_memory, name="device_memory")
    )
    budget = Budget(device_bytes=device_bytes, host_bytes=host_bytes, file_bytes=file_bytes)
    return budget, dataclasses.replace(profile, links=links, tiers=tiers)


def _join_links(links: dict[Link, LinkProfile]) -> None:
    """Add links between device and file, through the host, at the rate of the slower link."""
    for direct, first, second, assumed in (
        (Link.DEVICE_TO_FILE, Link.DEVICE_TO_HOST, Link.HOST_TO_FILE, _ASSUMED_FILE_WRITE),
        (Link.FILE_TO_DEVICE, Link.FILE_TO_HOST, Link.HOST_TO_DEVICE, _ASSUMED_FILE_READ),
    ):
        if direct in links:
            continue
        for link in (first, second):
            if link not in links and Tier.FILE in (link.source, link.destination):
                _logger.info("%s was not measured: assuming %.1e bytes per second", link, assumed)
                links[link] = LinkProfile(assumed, (assumed, assumed), 0)
        if first in links and second in links:
            links[direct] = min(links[first], links[second], key=lambda link: link.bytes_per_second)


def fastest_with_references(request: PlanRequest, found: Plan | None, bound: Bound) -> Plan | None:
    """Return a plan, or one on demand for the same budget and machine that is faster, if any.

    After the deadline nothing more is tried, if there is a plan. Another plan has `bound`, and
    `notes["finalist"]` says which it is.
    """
    best = found
    for policy in PAGING_POLICIES:
        if best is not None and not request.seconds_left():
            break
        unlimited = dataclasses.replace(request, deadline=math.inf)
        try:
            other = _plan_if_worth_it(unlimited if best is None else request, policy, best)
        except InfeasibleError:
            continue
        if other is None or (best is not None and _total_seconds(other) >= _total_seconds(best)):
            continue
        _logger.info("paging on demand (%s) is faster than what the search found", policy)
        best = other
    if best is None or best is found:
        return found
    notes = {**(found.notes if found is not None else {}), "finalist": best.method}
    return dataclasses.replace(best, bound=bound, method="auto", notes=notes)


def _plan_if_worth_it(request: PlanRequest, policy: PagingPolicy, best: Plan | None) -> Plan | None:
    """Return the policy's plan; None if it cannot be the fastest."""
    if best is not None and len(request.graph.operators) > _FEW_OPERATORS:
        seconds = estimate_paging_seconds(request, policy=policy)
        if seconds > best.step_seconds * _HOPELESS:
            return None
    return plan_by_paging(dataclasses.replace(request, progress=None), policy=policy)


def _total_seconds(plan: Plan) -> float:
    """Time of a step with what its copies cost computing, which is what the search minimises."""
    moved = plan.bytes_moved.items()
    return plan.step_seconds + sum(
        num_bytes * interference_per_byte(link, plan.machine) for link, num_bytes in moved
    )
