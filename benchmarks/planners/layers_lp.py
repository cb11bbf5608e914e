"""A linear program per layer: which fractions of its activations are kept, recomputed, offloaded.

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
from penstock.planner._plan import Found, Plan
from penstock.planner._request import PlanRequest
from penstock.planner.paging._accesses import ordered_step
from penstock.planner.paging._decisions import device_capacity, speeds_of
from penstock.planner.paging._plan_paging import plan_by_paging
from penstock.planner.paging._recompute import Recomputation, Saved
from penstock.planner.paging._timing import Speeds

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
    program = _Program(layers, capacity, out_bytes_per_second, in_bytes_per_second)
    values = program.solve()
    if values is None:
        return None
    count = len(layers)
    return [
        Fractions(
            recompute=values[index] * program.scale / layer.num_bytes,
            offload=values[count + index] * program.scale / layer.num_bytes,
        )
        for index, layer in enumerate(layers)
    ]


class _Program:
    """The linear program: what each layer recomputes and offloads, and the waiting for links."""

    def __init__(
        self, layers: Sequence[Layer], capacity: float, out_rate: float, in_rate: float
    ) -> None:
        import highspy

        self.layers = layers
        self.scale = max(layer.num_bytes for layer in layers)  # keeps coefficients near one
        self._optimal = highspy.HighsModelStatus.kOptimal
        self._infinity = highspy.kHighsInf
        self._solver = highspy.Highs()
        self._solver.setOptionValue("output_flag", False)
        self._add_variables()
        self._add_memory(capacity / self.scale)
        self._add_links(self.scale / out_rate, self.scale / in_rate)

    def solve(self) -> list[float] | None:
        """Values of the variables, those of recomputation first; None without a solution."""
        self._solver.run()
        if self._solver.getModelStatus() != self._optimal:
            return None
        return list(self._solver.getSolution().col_value)

    def _add_variables(self) -> None:
        """By layer recomputed, then by layer offloaded bytes, then waiting out and in."""
        for layer in self.layers:
            cost = layer.recompute_seconds / max(1, layer.recomputable_bytes) * self.scale
            self._variable(layer.recomputable_bytes / self.scale, cost)
        for layer in self.layers:
            self._variable(layer.num_bytes / self.scale, 1e-6)
        for _ in range(2):
            self._variable(self._infinity, 1.0)

    def _add_memory(self, capacity: float) -> None:
        """Before the backward of a layer: what is kept of earlier ones, and this one whole."""
        count, total = len(self.layers), 0.0
        for index, layer in enumerate(self.layers):
            num_bytes = layer.num_bytes / self.scale
            total += num_bytes
            self._row(num_bytes, {index: 1.0, count + index: 1.0})
            gone = {place: -1.0 for other in range(index) for place in (other, count + other)}
            if gone or num_bytes > capacity:
                self._row(capacity - total, gone or {2 * count: 0.0})

    def _add_links(self, out_seconds: float, in_seconds: float) -> None:
        """What is behind a layer has the time of what is behind it, and what is waited for."""
        count = len(self.layers)
        for index in range(count):
            behind = self.layers[index + 1 :]
            for seconds, wait, time_left in (
                (out_seconds, 2 * count, sum(layer.forward_seconds for layer in behind)),
                (in_seconds, 2 * count + 1, sum(layer.backward_seconds for layer in behind)),
            ):
                moved = {count + other: seconds for other in range(index, count)}
                self._row(time_left, {**moved, wait: -1.0})

    def _variable(self, upper: float, cost: float) -> None:
        self._solver.addVar(0.0, upper)
        self._solver.changeColCost(self._solver.getNumCol() - 1, cost)

    def _row(self, upper: float, terms: dict[int, float]) -> None:
        """The sum of terms is at most so much."""
        import numpy as np

        columns = np.array(list(terms), dtype=np.int32)
        values = np.array(list(terms.values()))
        self._solver.addRow(-self._infinity, upper, len(terms), columns, values)


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
    room = max(0, device_capacity(ordered_step(graph), request.budget) - fixed)
    unlimited = dataclasses.replace(request, deadline=math.inf, progress=None)
    best: Plan | None = None
    for cap, dropped, offloaded in _choices(layers, room, speeds_of(request)):
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
    layers: Sequence[Layer], room: int, speeds: Speeds
) -> Iterator[tuple[float, frozenset[int], frozenset[int]]]:
    """For each cap of the model's memory what is dropped and offloaded; each choice once."""
    modelled = min(room, sum(layer.num_bytes for layer in layers))
    tried: set[tuple[frozenset[int], frozenset[int]]] = set()
    for cap in CAPS if layers else ():
        fractions = solve_fractions(
            layers,
            cap * modelled,
            out_bytes_per_second=speeds.out_bytes_per_second,
            in_bytes_per_second=speeds.in_bytes_per_second,
        )
        if fractions is None:  # less than its largest layer
            continue
        chosen = [
            choose_values(*pair, speeds.operator_seconds)
            for pair in zip(layers, fractions, strict=True)
        ]
        dropped = frozenset().union(*(values for values, _ in chosen))
        offloaded = frozenset().union(*(values for _, values in chosen))
        if (dropped, offloaded) not in tried:
            tried.add((dropped, offloaded))
            yield cap, dropped, offloaded
