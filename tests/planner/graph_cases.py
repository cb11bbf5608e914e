"""Small step graphs, and random plans for them, that the tests of planners share."""

import dataclasses
import math
import random
import time

from hypothesis import strategies as st

from penstock.graph import Kind, Operator, Phase, StepGraph, Storage, TensorView
from penstock.memory import Link, LinkProfile, MachineProfile, Tier, TierProfile
from penstock.planner import Budget, Plan, PlanRequest, Transfer
from penstock.planner._assemble import assemble
from penstock.planner._live_ranges import ResidentInterval as Interval
from penstock.planner.exact._addresses import first_fit, place


def machine(*, out=1.0, back=1.0, file=0.5) -> MachineProfile:
    """A machine with links of so many bytes per second."""
    rates = {
        Link.DEVICE_TO_HOST: out,
        Link.HOST_TO_DEVICE: back,
        Link.HOST_TO_FILE: file,
        Link.FILE_TO_HOST: file,
    }
    return MachineProfile(
        name="test",
        device="cuda",
        device_name="test",
        num_cores=1,
        tiers={tier: TierProfile(1 << 40) for tier in Tier},
        links={link: LinkProfile(rate, (rate, rate), 1) for link, rate in rates.items()},
        memcpy=LinkProfile(1.0, (1.0, 1.0), 1),
    )


def request(graph, budget, profile=None, *, seconds=1.0, time_limit=None, **decisions):
    """A request to plan `graph`; `seconds` of each operator, or of all."""
    if isinstance(seconds, int | float):
        seconds = [float(seconds)] * len(graph.operators)
    deadline = math.inf if time_limit is None else time.monotonic() + time_limit
    return PlanRequest(
        graph=graph,
        budget=budget,
        machine=profile or machine(),
        operator_seconds=seconds,
        deadline=deadline,
        **decisions,
    )


def plan_from(asked, order, intervals, transfers, *, offsets=None) -> Plan:
    """A plan of resident intervals and transfers; without offsets by first fit."""
    if offsets is None:
        offsets = first_fit(asked.graph, order, intervals)
    placements = place(asked.graph, intervals, offsets)
    return assemble(asked, order, placements, transfers, method="assembled")


class GraphBuilder:
    """Storages, values and operators, one after the other."""

    def __init__(self):
        self.storages: list[dict] = []
        self.storage_of_value: list[int] = []
        self.operators: list[Operator] = []

    def storage(self, num_bytes, kind=Kind.ACTIVATION, *, given=False) -> int:
        """A storage with its first value, which is returned; `given`: the step begins with it."""
        value = len(self.storage_of_value)
        storage = len(self.storages)
        persistent = kind.persistent
        self.storages.append(
            {
                "name": f"s{storage}",
                "num_bytes": num_bytes,
                "kind": kind,
                "initial": value if given or persistent else None,
                "final": value if persistent else None,
            }
        )
        self.storage_of_value.append(storage)
        return value

    def version(self, value) -> int:
        """The next value in the storage of `value`."""
        storage = self.storage_of_value[value]
        self.storage_of_value.append(storage)
        new = len(self.storage_of_value) - 1
        if self.storages[storage]["kind"].persistent:
            self.storages[storage]["final"] = new
        return new

    def run(self, *, phase=Phase.FORWARD, **fields) -> int:
        index = len(self.operators)
        self.operators.append(Operator(name=f"op{index}", target="aten.op", phase=phase, **fields))
        return index

    def graph(self, loss=None) -> StepGraph:
        if loss is not None:
            self.storages[self.storage_of_value[loss]]["final"] = loss
        return StepGraph(
            storages=tuple(Storage(**fields) for fields in self.storages),
            storage_of_value=tuple(self.storage_of_value),
            operators=tuple(self.operators),
            loss=None if loss is None else TensorView(loss, "float32", (), ()),
        )


def chain_step(num_layers=3, *, weight_bytes=4, activation_bytes=6, in_place=True) -> StepGraph:
    """Layers with a weight each, forward and backward, and a step of SGD after each gradient.

    Operators: a forward per layer, the loss, then a backward and an update per layer.
    """
    build = GraphBuilder()
    x = build.storage(activation_bytes, Kind.INPUT, given=True)
    weights = [build.storage(weight_bytes, Kind.PARAMETER) for _ in range(num_layers)]
    activations = [x]
    for weight in weights:
        y = build.storage(activation_bytes)
        build.run(reads=(activations[-1], weight), creates=(y,), flops=8)
        activations.append(y)
    loss, gradient = build.storage(1), build.storage(activation_bytes, Kind.GRADIENT)
    build.run(reads=(activations[-1],), creates=(loss, gradient), phase=Phase.BACKWARD)
    for layer in reversed(range(num_layers)):
        weight_gradient = build.storage(weight_bytes, Kind.GRADIENT)
        earlier = build.storage(activation_bytes, Kind.GRADIENT)
        build.run(
            reads=(activations[layer], weights[layer], gradient),
            creates=(weight_gradient, earlier),
            may_overwrite=((gradient, earlier),) if in_place else (),
            phase=Phase.BACKWARD,
        )
        build.run(
            reads=(weight_gradient,),
            mutates=((weights[layer], build.version(weights[layer])),),
            recomputable=False,
            phase=Phase.OPTIMIZER,
        )
        gradient = earlier
    return build.graph(loss)


def in_units(graph: StepGraph, unit: int) -> StepGraph:
    """The graph with storages of multiples of so many bytes, as planners place them anyway."""
    storages = (
        dataclasses.replace(storage, num_bytes=-(-storage.num_bytes // unit) * unit)
        for storage in graph.storages
    )
    return dataclasses.replace(graph, storages=tuple(storages))


@st.composite
def step_graphs(draw, *, min_operators=1, max_operators=9, persistent=True):
    """Step graphs with everything a graph may have: versions, hand-overs, second runs, scratch.

    `persistent=False`: inference, without storages that live from step to step.
    """
    rng = draw(st.randoms(use_true_random=False))
    return random_graph(rng, draw(st.integers(min_operators, max_operators)), persistent=persistent)


def random_graph(rng: random.Random, num_operators: int, *, persistent=True) -> StepGraph:
    build = GraphBuilder()
    values = [build.storage(rng.randint(1, 8), Kind.INPUT, given=True)]  # that may be read
    for _ in range(rng.randint(1, 3) if persistent else 0):
        kind = rng.choice([Kind.PARAMETER, Kind.OPTIMIZER_STATE, Kind.BUFFER])
        values.append(build.storage(rng.randint(1, 8), kind))
    loss = None
    for _ in range(num_operators):
        reads = sorted(set(rng.choices(values, k=rng.randint(1, min(3, len(values))))))
        mutates, may_overwrite, creates = (), (), ()
        chance = rng.random()
        if chance < 0.3:
            old = reads.pop(rng.randrange(len(reads)))
            mutates = ((old, build.version(old)),)
            values.remove(old)
            values.append(mutates[0][1])
            loss = None if old == loss else loss
        if not mutates or rng.random() < 0.3:
            sizes = [rng.randint(0, 8) or rng.randint(0, 8) for _ in range(rng.choice([1, 1, 2]))]
            creates = tuple(build.storage(num_bytes) for num_bytes in sizes)
            values += creates
            loss = creates[-1]
            if chance > 0.6:
                may_overwrite = ((rng.choice(reads), creates[0]),) if reads else ()
        earlier = len(build.operators)
        build.run(
            reads=tuple(reads),
            creates=creates,
            mutates=mutates,
            may_overwrite=may_overwrite,
            after=(rng.randrange(earlier),) if earlier and rng.random() < 0.1 else (),
            recomputable=rng.random() < 0.8 if not mutates else rng.random() < 0.3,
            recompute_args=() if mutates and creates else None,
            workspace_bytes=rng.choice([0, 0, 3]),
        )
    return build.graph(loss)


@st.composite
def planned_steps(draw, *, max_operators=9, again=True, **fields):
    """A random graph with a random plan for it, with any amount of memory."""
    graph = draw(step_graphs(max_operators=max_operators, **fields))
    rng = draw(st.randoms(use_true_random=False))
    return graph, random_plan(graph, rng, again=again)


def random_order(graph: StepGraph, rng: random.Random) -> list[int]:
    """A topological order."""
    order, left = [], set(range(len(graph.operators)))
    while left:
        ready = [i for i in sorted(left) if not left.intersection(graph.predecessors[i])]
        order.append(rng.choice(ready))
        left.remove(order[-1])
    return order


def with_second_runs(graph: StepGraph, order: list[int], rng: random.Random) -> list[int]:
    """Insert runs again where everything that they read has not been written over yet."""
    for _ in range(rng.choice([0, 0, 1, 2])):
        index = rng.choice(order)
        operator = graph.operators[index]
        partly = operator.recompute_args is not None
        if not operator.recomputable or (operator.mutates and not partly):
            continue
        writers = [
            i
            for i, other in enumerate(graph.operators)
            if {old for old, _ in other.mutates}.intersection(operator.reads)
        ]
        latest = min((order.index(writer) for writer in writers), default=len(order))
        earliest = order.index(index) + 1
        if earliest <= latest:
            order.insert(rng.randint(earliest, latest), index)
    return order


def random_plan(
    graph: StepGraph,
    rng: random.Random,
    *,
    order: list[int] | None = None,
    again: bool = True,
    keep: float = 0.5,
    rates: tuple[float, float] = (1.0, 1.0),
    seconds: list[float] | None = None,
    early: bool = True,
) -> Plan:
    """A valid plan whose decisions are random: what leaves between two uses, and when.

    `keep`: chance that a value stays on the device between two uses. `early`: transfers in may
    begin long before they have to.
    """
    if order is None:
        order = random_order(graph, rng)
        if again:
            order = with_second_runs(graph, order, rng)
    intervals, transfers = [], []
    for value, born, uses, last in lives(graph, order):
        _live(graph, len(order), value, born, uses, last, rng, keep, early, intervals, transfers)
    transfers.sort(key=lambda t: (t.end, t.start))
    if seconds is None:
        seconds = [float(rng.randint(0, 6)) for _ in graph.operators]
    return plan_from(
        request(
            graph,
            budget=Budget(device_bytes=1 << 20, host_bytes=1 << 20),
            profile=machine(out=rates[0], back=rates[1]),
            seconds=seconds,
        ),
        order,
        intervals,
        transfers,
    )


def lives(graph: StepGraph, order: list[int]):
    """Yield (value, born, uses, last): from which position, used at which, until which boundary.

    Lives of what the next step begins with go on beyond the end. `born` is None for what never
    changes, and `last` None where it ends with its last use.
    """
    num_positions = len(order)
    first_runs: set[int] = set()
    births: dict[int, list[int]] = {}
    uses: dict[int, list[int]] = {}
    handed: dict[int, int] = {}
    for position, index in enumerate(order):
        operator = graph.operators[index]
        partly = index in first_runs and operator.recompute_args is not None
        first_runs.add(index)
        for value in operator.reads:
            uses.setdefault(value, []).append(position)
        for value in operator.creates:
            births.setdefault(value, []).append(position)
        for old, new in () if partly else operator.mutates:
            handed[old] = position
            births.setdefault(new, []).append(position)
    for value, storage in enumerate(graph.storage_of_value):
        storage = graph.storages[storage]
        if not storage.num_bytes or (storage.persistent and value == storage.initial):
            if storage.num_bytes and value == storage.final:
                yield value, None, sorted(set(uses.get(value, ()))), None
            continue
        born = births.get(value, [])
        if value == storage.initial:
            born = [-1]
        for birth, rebirth in zip(born, [*born[1:], None], strict=True):
            beyond = num_positions if rebirth is None else rebirth
            these = [p for p in uses.get(value, ()) if birth < p < beyond or p == beyond == -1]
            last = None
            if birth < handed.get(value, -2) <= beyond:
                last = handed[value]
            if rebirth is None and value == storage.final:
                last = num_positions
                if storage.persistent:
                    these += [num_positions + p for p in uses.get(storage.initial, ())]
                    last = num_positions + handed[storage.initial]
                elif birth < num_positions - 1:
                    these.append(num_positions - 1)  # it may come back until then
            yield value, birth, sorted(set(these)), last


def _live(graph, num_positions, value, born, uses, last, rng, keep, early, intervals, transfers):
    """Decide about each gap between two uses; `uses` do not include the handing over at `last`."""
    num_bytes = graph.num_bytes(value)
    storage = graph.storages[graph.storage_of_value[value]]

    def add(kind, *fields):
        """Name it as the step calls it in which it begins."""
        *head, start, end = fields
        if start >= num_positions:
            head[0], start, end = storage.initial, start - num_positions, end - num_positions
        (intervals if kind is Interval else transfers).append(kind(*head, start, end))

    if born is None:
        gaps = list(zip(uses, [*uses[1:], uses[0] + num_positions], strict=True)) if uses else []
        leaves = [rng.random() >= keep for _ in gaps]
        if not any(leaves):
            intervals.append(Interval(value, 0, num_positions))
            return
        first = leaves.index(True)  # begin where it comes in
        anchors = [*uses[first + 1 :], *(p + num_positions for p in uses[: first + 1])]
        starts = [begin for begin, _ in gaps]
        start = gaps[first][0] + 1
        arrive = rng.randint(start, anchors[0]) if early else anchors[0]
        add(Transfer, value, Link.HOST_TO_DEVICE, num_bytes, arrive, anchors[0])
        copied, begin, at = True, arrive, anchors[0]
        assert len(starts) == len(anchors)
        anchors = anchors[1:]
    else:
        copied, begin, at = False, max(born, 0), max(born, 0)
        anchors = [use for use in uses if use > at]
    if last is not None and (storage.persistent or value != storage.final):
        anchors.append(last)  # where it is written over
    for use in anchors:
        room = use - (at + 1)  # boundaries between the end of one and the start of the other
        if rng.random() < keep or room < (0 if copied else 1):
            at = use
            continue
        leave = at + 1
        if not copied:
            leave = rng.randint(at + 2, use)
            add(Transfer, value, Link.DEVICE_TO_HOST, num_bytes, at + 1, leave)
            copied = True
        add(Interval, value, begin, leave)
        begin = rng.randint(leave, use) if early else use
        add(Transfer, value, Link.HOST_TO_DEVICE, num_bytes, begin, use)
        at = use
    add(Interval, value, begin, last if last is not None else at + 1)


def occupied_bytes(graph: StepGraph, plan: Plan) -> int:
    """The most bytes that have a place while an operator runs, workspace included.

    Bounds know nothing of addresses: they hold for this budget too, which is smaller than the
    arena.
    """
    num_positions = len(plan.order)
    most = 0
    for position, index in enumerate(plan.order):
        needed = graph.operators[index].needs
        places = set()
        for value, offset, num_bytes, start, end in plan.placements:
            storage = graph.storages[graph.storage_of_value[value]]
            for shift in (0, num_positions):
                now = storage.initial if shift and storage.persistent else value
                lasts = end > position + shift or (end == position + shift and now in needed)
                if start <= position + shift and lasts:
                    places.add((offset, offset + num_bytes))
        end = total = 0
        for first, last in sorted(places):
            total += max(0, last - max(first, end))
            end = max(end, last)
        most = max(most, total)
    return most + plan.workspace_bytes
