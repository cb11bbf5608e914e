"""A linear program over layers: fractions of activations that are kept, recomputed, offloaded.

This is the style of planning that training frameworks have begun to ship (pytorch/torchtitan, pull
requests 3943 and 4636): an outer linear program over layers, whose memory model is a proxy, and a
choice of tensors within each layer that follows its fractions. Order, parameters, gradients and the
optimizer's state stay as they are: what does not fit with them has no plan here.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.errors import InfeasibleError
from penstock.graph import Kind, Phase
from penstock.planner._plan import Plan
from penstock.planner._plan_records import Found
from penstock.planner._request import LinkRates, PlanRequest
from penstock.planner.paging._checkpointing import Recomputation, Saved
from penstock.planner.paging._plan_paging import (
    count_arena_bytes,
    find_swap_rates,
    plan_by_paging,
)
from penstock.solvers import LinearProgram

CAPS = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.45, 0.3, 0.15, 0.0)  # of the modelled peak, tried in turn


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer, as the linear program sees it.

    Attributes:
        name: Of the module.
        saved: Values that its forward saves.
        recomputable_bytes: Of `saved` what can be made again from the layer's borders.
        recompute_seconds: Time that making all of that again takes.
        forward_seconds: Of its operators.
        backward_seconds: Of the operators that follow its backward, up to the layer before it.
    """

    name: str
    saved: tuple[Saved, ...]
    recomputable_bytes: int
    recompute_seconds: float
    forward_seconds: float
    backward_seconds: float

    @property
    def num_bytes(self) -> int:
        """Of all that it saves."""
        return sum(saved.num_bytes for saved in self.saved)


@dataclass(frozen=True)
class Fractions:
    """Of one layer's saved bytes, the parts that are made again and that leave the device."""

    recompute: float
    offload: float


def find_layers(
    recomputation: Recomputation, operator_seconds: Sequence[float]
) -> tuple[Layer, ...]:
    """Split a step into its layers, in the order of forward."""
    graph, names = recomputation.graph, recomputation.layers
    saved: dict[str, list[Saved]] = {}
    for one in recomputation.saved():
        saved.setdefault(one.layer, []).append(one)
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    for index, operator in enumerate(graph.operators):
        if operator.phase is not Phase.OPTIMIZER:
            times = forward if operator.phase is Phase.FORWARD else backward
            times[names[index]] = times.get(names[index], 0.0) + operator_seconds[index]
    layers = []
    for name, values in saved.items():
        again = {i for one in values if one.is_droppable for i in one.chain or ()}
        layers.append(
            Layer(
                name=name,
                saved=tuple(values),
                recomputable_bytes=sum(one.num_bytes for one in values if one.is_droppable),
                recompute_seconds=sum(operator_seconds[index] for index in again),
                forward_seconds=forward.get(name, 0.0),
                backward_seconds=backward.get(name, 0.0),
            )
        )
    return tuple(layers)


def solve_fractions(
    layers: Sequence[Layer], capacity: float, rates: LinkRates
) -> list[Fractions] | None:
    """Return the fractions of each layer that cost the least time, so that what is kept fits.

    With k, r and o the bytes of a layer that are kept, recomputed and offloaded (k + r + o is all
    n that it saves), cost[i] the seconds that a byte takes to recompute, and w the seconds of
    waiting for links:

        min  sum_i cost[i] r[i]  +  w_out + w_in  +  1e-6 sum_i o[i]
        r[i] + o[i] <= n[i]                                            for each layer i
        n[i] + sum_{j < i} k[j] <= capacity                            before the backward of i
        sum_{j >= i} o[j] / B_out  <=  forward seconds behind i + w_out
        sum_{j >= i} o[j] / B_in   <=  backward seconds behind i + w_in

    Args:
        layers: In the order of forward.
        capacity: Bytes for what layers save.
        rates: B of the links out of the device and into it.

    Returns:
        The fractions of each layer; None if the linear program has no solution.
    """
    program = LinearProgram()
    scale = max(layer.num_bytes for layer in layers)  # keeps coefficients near one
    recomputed, offloaded, waits = _add_columns(program, layers, scale)
    _add_memory_rows(program, layers, [*zip(recomputed, offloaded, strict=True)], scale, capacity)
    for index in range(len(layers)):
        behind, moved = layers[index + 1 :], offloaded[index:]
        for rate, wait, seconds in (
            (rates.outward, waits[0], sum(layer.forward_seconds for layer in behind)),
            (rates.inward, waits[1], sum(layer.backward_seconds for layer in behind)),
        ):
            program.row([*moved, wait], [*[scale / rate] * len(moved), -1.0], upper=seconds)
    if program.solve(time_limit=math.inf) is None:
        return None
    return [
        Fractions(
            recompute=program.values[r] * scale / layer.num_bytes,
            offload=program.values[o] * scale / layer.num_bytes,
        )
        for layer, r, o in zip(layers, recomputed, offloaded, strict=True)
    ]


def _add_columns(
    program: LinearProgram, layers: Sequence[Layer], scale: int
) -> tuple[list[int], list[int], list[int]]:
    """Add the columns r, o and (w_out, w_in)."""
    recomputed = [
        program.column(
            upper=layer.recomputable_bytes / scale,
            cost=layer.recompute_seconds / max(1, layer.recomputable_bytes) * scale,
        )
        for layer in layers
    ]
    offloaded = [program.column(upper=layer.num_bytes / scale, cost=1e-6) for layer in layers]
    return recomputed, offloaded, [program.column(cost=1.0) for _ in range(2)]


def _add_memory_rows(
    program: LinearProgram,
    layers: Sequence[Layer],
    pairs: Sequence[tuple[int, int]],
    scale: int,
    capacity: float,
) -> None:
    """Add the rows of what is kept: at most all of a layer, and that of earlier ones beside it."""
    total, earlier = 0.0, []
    for layer, pair in zip(layers, pairs, strict=True):
        total += layer.num_bytes / scale
        program.row(pair, [1.0, 1.0], upper=layer.num_bytes / scale)
        program.row(earlier, [-1.0] * len(earlier), upper=capacity / scale - total)
        earlier += pair


def choose_values(
    layer: Layer, fractions: Fractions, operator_seconds: Sequence[float]
) -> tuple[set[int], set[int]]:
    """Values of a layer that are dropped, and that are offloaded, to meet its fractions.

    Dropped are those that cost the least time per byte, offloaded the largest of the others.
    """

    def price(one: Saved) -> float:
        return sum(operator_seconds[index] for index in one.chain or ()) / one.num_bytes

    dropped: set[int] = set()
    left = fractions.recompute * layer.num_bytes
    for one in sorted((one for one in layer.saved if one.is_droppable), key=price):
        if left > 0.5 * one.num_bytes:
            dropped.add(one.value)
            left -= one.num_bytes
    offloaded: set[int] = set()
    left += fractions.offload * layer.num_bytes
    rest = [one for one in layer.saved if one.value not in dropped]
    for one in sorted(rest, key=lambda one: -one.num_bytes):
        if left > 0:
            offloaded.add(one.value)
            left -= one.num_bytes
    return dropped, offloaded


def plan_layers_lp(request: PlanRequest) -> Plan:
    """Plan with a linear program per layer.

    Example:
        >>> plan = plan_layers_lp(request)  # doctest: +SKIP

    Args:
        request: The step and what it is planned for. After its deadline no further cap of the
            model's memory is tried.

    Returns:
        A plan that `check` accepts: the fastest of several caps, as the memory model is a proxy.

    Raises:
        InfeasibleError: Nothing fits: parameters, gradients and the optimizer's state stay.
    """
    began, graph = time.monotonic(), request.graph
    recomputation = Recomputation(graph)
    layers = find_layers(recomputation, request.operator_seconds)
    fixed = sum(s.num_bytes for s in graph.storages if s.persistent or s.kind is Kind.INPUT)
    capacity = max(0, count_arena_bytes(request) - fixed)
    unlimited = dataclasses.replace(request, deadline=math.inf, progress=None)
    best: Plan | None = None
    for cap, dropped, offloaded in _choices(request, layers, capacity):
        if best is not None and not request.seconds_left():
            break
        order, really = recomputation.order_without(dropped)
        try:
            plan = plan_by_paging(
                unlimited,
                order=order,
                candidates=offloaded,
                method="layers-lp",
                notes={"cap": cap, "num_dropped": len(really), "num_offloaded": len(offloaded)},
            )
        except InfeasibleError:
            continue
        if best is None or plan.step_seconds < best.step_seconds:
            best = plan
            if request.progress is not None:
                elapsed = time.monotonic() - began
                request.progress(Found(elapsed, best.step_seconds, best.ideal_seconds))
    if best is None:
        raise InfeasibleError(
            f"a linear program per layer found nothing for {request.budget.device_bytes} bytes: it "
            f"keeps parameters, buffers and the optimizer's state on the device, {fixed} bytes; "
            "give more",
            proved=False,
        )
    return best


def _choices(
    request: PlanRequest, layers: Sequence[Layer], capacity: int
) -> Iterator[tuple[float, frozenset[int], frozenset[int]]]:
    """For each cap of the model's memory what is dropped and offloaded; each choice once."""
    rates = find_swap_rates(request)
    modelled = min(capacity, sum(layer.num_bytes for layer in layers))
    tried: set[tuple[frozenset[int], frozenset[int]]] = set()
    for cap in CAPS if layers else ():
        fractions = solve_fractions(layers, cap * modelled, rates)
        if fractions is None:  # less than its largest layer
            continue
        chosen = [
            choose_values(*pair, request.operator_seconds)
            for pair in zip(layers, fractions, strict=True)
        ]
        dropped = frozenset().union(*(values for values, _ in chosen))
        offloaded = frozenset().union(*(values for _, values in chosen))
        if (dropped, offloaded) not in tried:
            tried.add((dropped, offloaded))
            yield cap, dropped, offloaded
