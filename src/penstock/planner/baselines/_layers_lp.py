"""A linear program per layer: which fractions of its activations are kept, recomputed, offloaded.

This is the style of planning that training frameworks have begun to ship (pytorch/torchtitan, pull
requests 3943 and 4636): an outer linear program over layers, whose memory model is a proxy, and a
choice of tensors within each layer that follows its fractions. Order, parameters, gradients and the
optimizer's state stay as they are: what does not fit with them has no plan here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import InfeasibleError
from penstock.graph import Kind, Phase, StepGraph
from penstock.memory import MachineProfile
from penstock.planner._plan import Budget, Plan
from penstock.planner.baselines._decisions import (
    Below,
    Found,
    Progress,
    device_capacity,
    require_times,
    speeds_of,
)
from penstock.planner.baselines._on_demand import plan_on_demand
from penstock.planner.baselines._order import ordered_step
from penstock.planner.baselines._recompute import Recomputation, Saved

CAPS = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.45, 0.3, 0.15, 0.0)  # of the modelled peak, tried in turn


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What the linear program knows about a layer.

    Attributes:
        name: Of the module.
        saved: What its forward saves.
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
    layers: Sequence[Layer],
    capacity: float,
    *,
    out_bytes_per_second: float,
    in_bytes_per_second: float,
) -> list[Fractions] | None:
    """Minimise recomputation and waiting so that what is kept fits.

    With k, r, o the kept, recomputed and offloaded bytes of a layer (k + r + o are all it saves),
    before the backward of layer l the device holds k of all layers up to l and all of layer l. What
    layers from l on send out has the rest of forward's time, what they get back the backward of the
    layers behind them; the link's remaining time is waited for.

    Args:
        layers: In the order of forward.
        capacity: Bytes for what layers save.
        out_bytes_per_second: Of the link out of the device.
        in_bytes_per_second: Of the link into it.

    Returns:
        The fractions of each layer; None if the linear program has no solution.
    """
    import highspy
    import numpy as np

    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    count, infinity = len(layers), highspy.kHighsInf
    scale = max(layer.num_bytes for layer in layers)  # keeps coefficients near one
    for layer in layers:  # variable l: recomputed; count + l: offloaded
        cost = layer.recompute_seconds / max(1, layer.recomputable_bytes) * scale
        solver.addVar(0.0, layer.recomputable_bytes / scale)
        solver.changeColCost(solver.getNumCol() - 1, cost)
    for layer in layers:
        solver.addVar(0.0, layer.num_bytes / scale)
        solver.changeColCost(solver.getNumCol() - 1, 1e-6)
    wait_out, wait_in = 2 * count, 2 * count + 1
    for _ in range(2):
        solver.addVar(0.0, infinity)
        solver.changeColCost(solver.getNumCol() - 1, 1.0)

    def row(low: float, high: float, terms: dict[int, float]) -> None:
        columns = np.array(list(terms), dtype=np.int32)
        solver.addRow(low, high, len(terms), columns, np.array(list(terms.values())))

    total = np.cumsum([layer.num_bytes for layer in layers]) / scale
    for index, layer in enumerate(layers):
        size = layer.num_bytes / scale
        row(-infinity, size, {index: 1.0, count + index: 1.0})
        before = range(index)  # kept ones up to this layer, and this one whole
        gone = {place: -1.0 for other in before for place in (other, count + other)}
        if gone or size > capacity / scale:
            row(-infinity, capacity / scale - float(total[index]), gone or {wait_out: 0.0})
        sent = {count + other: scale / out_bytes_per_second for other in range(index, count)}
        time_left = sum(other.forward_seconds for other in layers[index + 1 :])
        row(-infinity, time_left, {**sent, wait_out: -1.0})
        fetched = {count + other: scale / in_bytes_per_second for other in range(index, count)}
        time_before = sum(other.backward_seconds for other in layers[index + 1 :])
        row(-infinity, time_before, {**fetched, wait_in: -1.0})
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    values = solver.getSolution().col_value
    return [
        Fractions(
            recompute=values[index] * scale / layer.num_bytes,
            offload=values[count + index] * scale / layer.num_bytes,
        )
        for index, layer in enumerate(layers)
    ]


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


def plan_layers_lp(
    graph: StepGraph,
    *,
    operator_seconds: Sequence[float],
    budget: Budget,
    machine: MachineProfile,
    time_limit: float = 60.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Plan:
    """Plan with a linear program per layer.

    Example:
        >>> plan = plan_layers_lp(  # doctest: +SKIP
        ...     graph, operator_seconds=seconds, budget=Budget(device_bytes=2**34), machine=machine
        ... )

    Args:
        graph: A captured step.
        operator_seconds: Time of each operator.
        budget: Bytes of the tiers.
        machine: The links' bandwidths.
        time_limit: Seconds after which no further cap of the model's memory is tried.
        seed: Of the packer.
        progress: Called whenever there is a better plan.

    Returns:
        A plan that `check` accepts: the fastest of several caps, as the memory model is a proxy.

    Raises:
        InfeasibleError: Nothing fits: parameters, gradients and the optimizer's state stay.
    """
    began = time.monotonic()
    require_times(graph, operator_seconds)
    recomputation = Recomputation(graph)
    layers = find_layers(recomputation, operator_seconds)
    step = ordered_step(graph)
    speeds = speeds_of(Below.of(machine, budget), machine, operator_seconds)
    fixed = sum(s.num_bytes for s in graph.storages if s.persistent or s.kind is Kind.INPUT)
    room = max(0, device_capacity(step, budget) - fixed)
    modelled = min(room, sum(layer.num_bytes for layer in layers))
    best: Plan | None = None
    tried: set[tuple[frozenset[int], frozenset[int]]] = set()
    for cap in CAPS if layers else ():
        if best is not None and time.monotonic() - began > time_limit:
            break
        fractions = solve_fractions(
            layers,
            cap * modelled,
            out_bytes_per_second=speeds.out_bytes_per_second,
            in_bytes_per_second=speeds.in_bytes_per_second,
        )
        if fractions is None:  # less than its largest layer
            continue
        chosen = [
            choose_values(*pair, operator_seconds) for pair in zip(layers, fractions, strict=True)
        ]
        dropped = frozenset().union(*(values for values, _ in chosen))
        offloaded = frozenset().union(*(values for _, values in chosen))
        if (dropped, offloaded) in tried:
            continue
        tried.add((dropped, offloaded))
        order, really = recomputation.order_without(dropped)
        try:
            plan = plan_on_demand(
                graph,
                operator_seconds=operator_seconds,
                budget=budget,
                machine=machine,
                order=order,
                candidates=offloaded,
                seed=seed,
                method="layers-lp",
                notes={"cap": cap, "num_dropped": len(really), "num_offloaded": len(offloaded)},
            )
        except InfeasibleError:
            continue
        if best is None or plan.step_seconds < best.step_seconds:
            best = plan
            if progress is not None:
                elapsed = time.monotonic() - began
                progress(Found(elapsed, best.step_seconds, best.ideal_seconds))
    if best is None:
        raise InfeasibleError(
            f"method='layers-lp' found nothing for device_memory={budget.device_bytes}: it keeps "
            f"parameters, buffers and the optimizer's state on the device, {fixed} bytes; give "
            "more, or use method='auto'",
            proved=False,
        )
    return best
