"""`partition`: one step over several devices, each within a budget."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterable

import numpy as np

from penstock.errors import InfeasibleError
from penstock.graph import StepGraph, operator_seconds
from penstock.memory import MachineProfile, find_machine
from penstock.partitioner._bound import bound_by_levels, bound_exchanged_bytes
from penstock.partitioner._fold import find_groups
from penstock.partitioner._mesh import PARTIAL, level_byte_seconds, share
from penstock.partitioner._partition import Collective, FrontierPoint, Partition
from penstock.partitioner._rank import find_peak
from penstock.partitioner._search import FoundSplit, SplitSearch
from penstock.partitioner._split import Model, StepSplit
from penstock.partitioner._styles import METHODS
from penstock.partitioner.axes import find_axes
from penstock.units import format_bytes, parse_bytes, parse_count, parse_seconds

_SEARCH_SHARE = 0.75  # of the time limit; the rest is for trials and the bound
_NUM_TRIALS = 8  # of partitions that might fit
_NEARLY = 1.001  # times the budget, by an estimate
_NUM_PLACES = 64  # operators at which most is live, for a bound
_NUM_NAMED = 5  # tensors in the message of a step that does not fit


def partition(
    graph: StepGraph,
    *,
    devices: int,
    device_memory: int | str | None = None,
    machine: MachineProfile | str | None = None,
    time_limit: float = 60,
    seed: int = 0,
    method: str = "auto",
) -> Partition:
    """Split a training step over devices so that each fits its memory and few bytes are exchanged.

    Example:
        >>> graph = penstock.capture(model, optimizer, batch)  # doctest: +SKIP
        >>> print(penstock.partition(graph, devices=8, device_memory="16GiB"))  # doctest: +SKIP

    Parameters, gradients, optimizer state and activations may all be split or replicated. Where
    memory is free, that is data parallelism; where it is short, parameters are split at rest, or
    products are split along the axes of their weights.

    Args:
        graph: A captured step of the whole batch.
        devices: Number of ranks, at least 2.
        device_memory: Budget of each, in bytes or as `"16GiB"`; None: as many bytes as needed.
        machine: A device and its links, or its name, as of `plan`; None: this machine, measured.
        time_limit: Seconds, of which the search takes three quarters.
        seed: Kept in the result; the search draws no random numbers yet.
        method: `"auto"`, or to compare with: `"batch"` (data parallelism), `"fsdp"` (with
            parameters, gradients and optimizer state split at rest), `"tensor"` (products split
            along axes of parameters, between nodes by batch), `"chop"` (every tensor along one
            axis), `"greedy"` (one operator after the other).

    Returns:
        The best partition that was found.

    Raises:
        InfeasibleError: None was found that fits; it names the largest tensors that do not split.
        ValueError: `devices` or `seed` is too small, `time_limit` not above 0, or `method` none.
        TypeError: `graph` is no step graph, or `devices` or `seed` no whole number.

    The search follows Wang, Huang and Li, EuroSys 2019, sections 4 and 5, with replication at a
    price in the place of none.
    """
    if not isinstance(graph, StepGraph):
        raise TypeError(
            f"graph must be a StepGraph, from penstock.capture or StepGraph.load; got {graph!r}"
        )
    if not graph.operators:
        raise ValueError("graph has no operators: there is nothing to split")
    devices = parse_count(devices, name="devices", least=2)
    time_limit = parse_seconds(time_limit, name="time_limit")
    seed = parse_count(seed, name="seed")
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; accepted are {', '.join(map(repr, METHODS))}")
    budget = None if device_memory is None else parse_bytes(device_memory, name="device_memory")
    profile = find_machine(machine)
    start = time.monotonic()
    ends = start + time_limit
    search = make_search(graph, profile, budget, start + _SEARCH_SHARE * time_limit)
    if method == "auto":
        search.run(devices)
    else:
        search.run_style(devices, method)
    found = _find_fitting(search, devices, seed, ends)
    search.deadline = ends
    notes = {**found.notes, "search_seconds": time.monotonic() - start}
    return with_bound(search, dataclasses.replace(found, notes=notes))


def _find_fitting(search: SplitSearch, devices: int, seed: int, ends: float) -> Partition:
    """Return the best partition whose rank's own step fits, with all copies for its collectives.

    The search counts copies roughly. By how much it is wrong for one split, it is about for others.
    Nor does it know all operators that cannot run on pieces: splits that ranks can run come first.
    """
    ranked, budget = search.rank_candidates(), search.budget
    if budget is None:
        found = _first_written(assemble(search, each, seed) for each in ranked[:_NUM_TRIALS])
        assert found is not None, "a search has candidates"
        return found
    ratio, fitting, cheaper, tried = 1.0, None, ranked, set[FoundSplit]()
    unwritten: list[Partition] = []
    for _ in range(_NUM_TRIALS):
        limit = _NEARLY * budget / ratio
        best = next((e for e in cheaper if e.peak_bytes <= limit and e not in tried), None)
        if best is None or (fitting is not None and time.monotonic() > ends):
            break
        tried.add(best)
        found = assemble(search, best, seed)
        if not found.notes["is_written"]:
            unwritten.append(found)
            continue
        ratio = found.peak_device_bytes / max(1, best.peak_bytes)
        if found.peak_device_bytes <= budget:
            fitting, cheaper = found, ranked[: ranked.index(best)]
    if fitting is None:
        smallest = sorted(ranked, key=lambda each: each.peak_bytes)
        rest = [each for each in smallest if each not in tried][:_NUM_TRIALS]
        trials = itertools.chain(unwritten, (assemble(search, each, seed) for each in rest))
        fitting = _first_written(e for e in trials if e.peak_device_bytes <= budget)
    if fitting is None:
        raise _infeasible(search, devices)
    return dataclasses.replace(fitting, device_bytes=budget)


def _first_written(trials: Iterable[Partition]) -> Partition | None:
    """Return the first partition whose rank's step can be written; the first one if none can."""
    first = None
    for each in trials:
        if each.notes["is_written"]:
            return each
        first = first or each
    return first


def make_search(
    graph: StepGraph, machine: MachineProfile, budget: int | None, deadline: float
) -> SplitSearch:
    """Return a search that has not begun."""
    axes = find_axes(graph)
    return SplitSearch(Model(graph, axes, find_groups(graph, axes)), machine, budget, deadline)


def with_bound(search: SplitSearch, found: Partition) -> Partition:
    """Return a partition with the lower bound of what any within its budget exchanges."""
    model, devices = search.model, found.devices
    bound = max(
        bound_exchanged_bytes(model, devices, found.device_bytes),
        bound_by_levels(model, devices, search.deadline),
    )
    return dataclasses.replace(
        found, lower_bound_bytes=math.floor(min(bound, found.exchanged_bytes))
    )


def _infeasible(search: SplitSearch, devices: int) -> InfeasibleError:
    """Describe the split that needs the least memory, by the largest tensors that it leaves."""
    model, budget = search.model, search.budget
    assert budget is not None
    least = min(search.candidates, key=lambda each: each.peak_bytes)
    graph, step = model.graph, least.step
    place = int(model.device_bytes(step).argmax())
    local = model.local_bytes(step)
    live = (model.first <= place) & (place < model.last)
    whole = [
        index
        for index in np.flatnonzero(live & (local == model.num_bytes) & (local > 0))
        if local[index] * devices >= budget // 100
    ]
    largest = sorted(whole, key=lambda index: -local[index])[:_NUM_NAMED]
    names = ", ".join(f"{graph.storages[i].name} ({format_bytes(int(local[i]))})" for i in largest)
    least_bytes = least_device_bytes(model, devices)
    proved = least_bytes > budget
    sufficient = assemble(search, least, 0).peak_device_bytes
    remedy = "use more devices, a smaller batch, or a larger budget"
    return InfeasibleError(
        f"no partition over {devices} devices was found that fits device_memory = "
        f"{format_bytes(budget)}: the fullest rank needs {format_bytes(sufficient)}, at "
        f"{graph.operators[place].name!r}"
        + (f"; the largest tensors that do not split: {names}" if names else "")
        + (f"; none fits less than {format_bytes(least_bytes)}" if proved else "")
        + f"; {remedy}",
        minimum_device_bytes=least_bytes,
        operator=graph.operators[place].name,
        proved=proved,
        sufficient_device_bytes=sufficient,
    )


def least_device_bytes(model: Model, devices: int) -> int:
    """Return the bytes that a rank holds before some operator in any partition."""
    pieces = [math.gcd(devices, math.prod(extents)) for extents in model.extents]
    least = model.num_bytes // np.array(pieces, dtype=np.int64)
    # As many are live at the operator, of which those that it makes are not there before.
    places = np.argsort(-model.live_bytes(least), kind="stable")[:_NUM_PLACES]
    return max((int(least[model.is_live_before(int(each))].sum()) for each in places), default=0)


def assemble(search: SplitSearch, best: FoundSplit, seed: int) -> Partition:
    """Return the partition of a found split, without a bound."""
    model, machine, step = search.model, search.machine, best.step
    graph = model.graph
    collectives = tuple(list_collectives(model, step))
    exchanged = round(sum(each.num_bytes for each in collectives))
    byte_seconds = level_byte_seconds(step.mesh, machine)
    exchange_seconds = sum(each.num_bytes * byte_seconds[each.level] for each in collectives)
    compute_seconds = sum(
        seconds * share(step.splits[group], step.mesh.sizes)
        for seconds, group in zip(
            operator_seconds(graph, machine), model.groups.of_operator, strict=True
        )
    )
    found = Partition(
        graph_digest=graph.digest,
        mesh=step.mesh.sizes,
        placements=tuple(
            tuple(_stride(model, storage, axis) for axis in step.placements[group])
            for storage, group in enumerate(model.groups.of_storage)
        ),
        splits=tuple(
            tuple(_letter(model, operator, axis) for axis in step.splits[group])
            for operator, group in enumerate(model.groups.of_operator)
        ),
        collectives=collectives,
        device_bytes=None,
        peak_device_bytes=best.peak_bytes,
        exchanged_bytes=exchanged,
        lower_bound_bytes=0,
        step_seconds=compute_seconds + exchange_seconds,
        exchange_seconds=exchange_seconds,
        frontier=(),
        unknown=_list_unknown(model),
        machine=machine,
        seed=seed,
        notes={"num_candidates": len(search.candidates), "origin": best.origin},
    )
    written = find_peak(graph, found)
    peak = best.peak_bytes if written is None else written
    return dataclasses.replace(
        found,
        peak_device_bytes=peak,
        frontier=find_frontier(search, best, peak),
        notes={**found.notes, "is_written": written is not None},
    )


def _list_unknown(model: Model) -> dict[str, int]:
    """Return operators without a rule, with the bytes that every rank reads and writes."""
    unknown: dict[str, int] = {}
    for operator, axes in zip(model.graph.operators, model.axes.operators, strict=True):
        if not axes.is_known:
            touched = operator.bytes_read + operator.bytes_written
            unknown[operator.target] = unknown.get(operator.target, 0) + touched
    return unknown


def _stride(model: Model, storage: int, axis: int) -> int:
    if axis < 0:
        return -1 if axis == PARTIAL else 0
    return model.axes.cuts[storage][axis]


def _letter(model: Model, operator: int, axis: int) -> str:
    if axis < 0:
        return "+" if axis == PARTIAL else ""
    return model.axes.operators[operator].names[axis]


def list_collectives(model: Model, step: StepSplit) -> Iterable[Collective]:
    """Yield the collectives of a split, in the order of the operators."""
    traffic_of = [[*model.exchanges(step, group)] for group in range(len(step.splits))]
    for index, operator in enumerate(model.graph.operators):
        needed = {model.graph.storage_of_value[value]: value for value in operator.needs}
        made = {model.graph.storage_of_value[value]: value for value in operator.makes}
        axes = model.axes.operators[index]
        uses = [*dict.fromkeys(axes.inputs), *dict.fromkeys(axes.outputs)]
        traffic = traffic_of[model.groups.of_operator[index]]
        for use, (of_group, exchange) in zip(uses, traffic, strict=True):
            value = (made if of_group.is_output else needed)[use.storage]
            for move in exchange.moves:
                yield Collective(
                    index, value, move.kind, move.level, move.num_bytes, of_group.is_output
                )


def find_frontier(search: SplitSearch, best: FoundSplit, peak: int) -> tuple[FrontierPoint, ...]:
    """Return the candidates that no other beats in memory and exchange, the smallest first.

    Args:
        search: The search.
        best: A candidate that was chosen. What would fit in its place and exchanges less was tried
            and did not fit with all copies: it is left out.
        peak: Bytes that its rank needs; those of others are taken to be in the same ratio to what
            the search counts.

    Exchange is compared as it is weighted by its links.
    """
    ratio = peak / max(1, best.peak_bytes)
    found: list[FrontierPoint] = []
    least = math.inf
    for each in sorted(search.candidates, key=lambda each: (each.peak_bytes, each.weighted_bytes)):
        num_bytes = round(each.peak_bytes * ratio)
        is_refused = (
            search.budget is not None
            and peak <= search.budget
            and num_bytes <= search.budget
            and each.weighted_bytes < best.weighted_bytes
        )
        if not is_refused and round(each.weighted_bytes) < least:
            least = round(each.weighted_bytes)
            exchanged = round(each.exchanged_bytes)
            found.append(FrontierPoint(num_bytes, exchanged, each.step.mesh.sizes))
    return tuple(found)
