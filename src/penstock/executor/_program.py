"""A plan as a flat list of calls: operators, and at the boundaries what transfers begin and who
waits for which.

The sequence at a boundary is the plan's (see `penstock.planner.Plan`): transfers out of the device
begin; those out of it and between host and file that end here are waited for; transfers into it
and between host and file begin; those into it that end here are waited for.
"""

from __future__ import annotations

import enum
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.executor._device import Device
from penstock.executor._links import ThreadLink
from penstock.executor._numbers import Live, Numbers
from penstock.executor._operators import (
    Call,
    Result,
    call_of,
    checked,
    looks_at_storages,
    random_again,
)
from penstock.executor._places import Places
from penstock.executor._room import Room
from penstock.graph import Kind, Operator, Phase, StepGraph, TensorView
from penstock.graph.encoding import CONSTANT, GET_RNG_STATE, SCALAR, SET_RNG_STATE, decode
from penstock.memory import Link, Tier
from penstock.planner import Plan

_LOOKS = (SCALAR, GET_RNG_STATE, SET_RNG_STATE)  # at results, or at what is no tensor of the step


class Stage(enum.IntEnum):
    """How far a boundary is.

    LEAVING: what ends here is still in its place. ENTERING: others may take the places, but not
    those of the operator's operands. RUNNING: the operator has begun.
    """

    LEAVING = 0
    ENTERING = 1
    RUNNING = 2


@dataclass
class Program:
    """The calls of a step.

    Attributes:
        calls: What to call, in order.
        first: The same for the first step, in which results are compared with their promises.
        positions: For each call the position that it belongs to.
        stages: For each call how far its boundary is.
        plain: For each call whether it is an operator whose arguments are the same in all steps,
            and which neither draws random numbers nor looks at results.
        random: Whether operators draw random numbers.
    """

    calls: list[Call] = field(default_factory=list)
    first: list[Call] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    plain: list[bool] = field(default_factory=list)
    random: bool = False

    def add(
        self,
        call: Call,
        position: int,
        stage: Stage,
        *,
        first: Call | None = None,
        is_plain: bool = False,
    ) -> None:
        """Append a call; `first` runs instead of it in the first step."""
        self.calls.append(call)
        self.first.append(first or call)
        self.positions.append(position)
        self.stages.append(stage)
        self.plain.append(is_plain)


Extra = Callable[[int, str], Iterator[Call]]
"""What else is called: for a position and `"left"`, `"entered"` or `"before"` the operator."""


def program_of(
    graph: StepGraph,
    plan: Plan,
    places: Places,
    room: Room,
    links: Mapping[Link, ThreadLink],
    numbers: Numbers,
    extra: Extra,
    device: Device,
) -> Program:
    """Compile a plan.

    Args:
        graph: The step.
        plan: A plan for it that `check` accepts.
        places: Where its values are.
        room: Its memory.
        links: What carries out its transfers.
        numbers: Numbers that change from step to step.
        extra: What else is called, and when.
        device: Where operators run.

    Returns:
        The calls of one step.
    """
    compiler = _Compiler(graph, plan, room, numbers, device)
    boundaries = _boundaries(plan, links)
    program = compiler.program
    forward: bool | None = None
    for position, index in enumerate(plan.order):
        operator = graph.operators[index]
        before, after = boundaries.get(position, ([], []))
        for call in before:
            program.add(call, position, Stage.LEAVING)
        for calls in (extra(position, "left"), after, extra(position, "entered")):
            for call in calls:
                program.add(call, position, Stage.ENTERING)
        # As eager runs them: some kernels ask whether gradients are wanted.
        if forward is not (operator.phase is Phase.FORWARD):
            forward = operator.phase is Phase.FORWARD
            set_mode = functools.partial(torch._C._set_grad_enabled, forward)
            program.add(set_mode, position, Stage.ENTERING)
        for call in extra(position, "before"):
            program.add(call, position, Stage.ENTERING)
        compiler.add_operator(index, position)
    return program


def _boundaries(
    plan: Plan, links: Mapping[Link, ThreadLink]
) -> dict[int, tuple[list[Call], list[Call]]]:
    """For each boundary what begins and is waited for: before bytes may come in, and after."""
    num_positions = len(plan.order)
    begun: dict[Link, int] = defaultdict(int)
    count: dict[Link, int] = defaultdict(int)
    release: dict[tuple[int, Link], int] = {}
    wait: dict[tuple[int, Link], int] = {}
    for transfer in plan.transfers:
        link = transfer.link
        begun[link] = max(begun[link], transfer.start)
        count[link] += 1
        release[begun[link], link] = count[link]
        steps, boundary = divmod(transfer.end, num_positions)
        target = count[link] - steps * links[link].num_moves
        wait[boundary, link] = max(wait.get((boundary, link), target), target)
    calls: defaultdict[int, tuple[list[Call], list[Call]]] = defaultdict(lambda: ([], []))
    for (boundary, link), number in release.items():
        leaves = link.source is Tier.DEVICE
        calls[boundary][0 if leaves else 1].append(functools.partial(links[link].release, number))
    for (boundary, link), number in wait.items():
        enters = link.destination is Tier.DEVICE
        calls[boundary][1 if enters else 0].append(functools.partial(links[link].wait, number))
    return dict(calls)


def _read_anew(place: torch.Tensor, outside: torch.Tensor) -> None:
    """Copy what a tensor that is neither the model's nor the batch's has in it now."""
    place.copy_(outside.detach())


class _Compiler:
    """Turns operators at positions into calls."""

    def __init__(
        self, graph: StepGraph, plan: Plan, room: Room, numbers: Numbers, device: Device
    ) -> None:
        self._device = device
        self.program = Program(random=any(operator.random for operator in graph.operators))
        self._graph = graph
        self._room = room
        self._numbers = numbers
        self._runs_left: dict[int, int] = defaultdict(int)
        for index in plan.order:
            self._runs_left[index] += 1
        self._seen: set[int] = set()
        self._operand = room.operand
        captured = graph.captured
        self._outside: Mapping[str, torch.Tensor] = {} if captured is None else captured.outside
        self._again: dict[int, list[torch.Tensor]] = {}  # states of the random generator
        for storage in graph.storages:
            if storage.kind is Kind.SCALAR and storage.initial is not None:
                numbers.slot(storage.initial)

    def add_operator(self, index: int, position: int) -> None:
        """Compile an operator where it runs, for the first time or again."""
        operator = self._graph.operators[index]
        again = index in self._seen
        self._seen.add(index)
        target, arguments, kwarguments = operator.target, operator.args, operator.kwargs
        if again and operator.recompute_target is not None:
            assert operator.recompute_args is not None
            target, arguments, kwarguments = operator.recompute_target, operator.recompute_args, {}
        slot = None
        if target == SCALAR:
            slot = self._numbers.slot(operator.creates[0])
        own = looks_at_storages(target)
        self._operand = self._room.operand_alone if own else self._room.operand
        live = Live([], [])
        args: list[Any] = [None] * len(arguments)
        for place, value in enumerate(arguments):
            args[place] = self._decode(value, args, place, position, live)
        kwargs: dict[str, Any] = {}
        for name, value in kwarguments.items():
            kwargs[name] = self._decode(value, kwargs, name, position, live)
        results = self._results(operator, position) if slot is None else []
        outside = self._outside.get(operator.name) if target == CONSTANT else None
        if outside is not None:
            call = functools.partial(_read_anew, results[0].tensor, outside)
        else:
            call = call_of(operator, target, args, kwargs, results, live, self._numbers, slot)
        if call is None:
            return
        if operator.random and (again or self._runs_left[index] > 1):
            first, second = random_again(call, self._again.setdefault(index, []), self._device)
            call = second if again else first
        first = checked(operator, call, results)
        changes = live.reads or live.places or operator.random or outside is not None
        is_plain = not (changes or target in _LOOKS)
        self.program.add(call, position, Stage.RUNNING, first=first, is_plain=is_plain)

    def _results(self, operator: Operator, position: int) -> list[Result]:
        return [
            Result(index, self._room.result(view, position))
            for index, view in enumerate(operator.outputs)
            if view is not None and view.value in operator.creates
        ]

    def _decode(self, value: Any, holder: Any, place: Any, position: int, live: Live) -> Any:
        """Return an argument; where it is a live number, note where it goes."""
        if isinstance(value, tuple) and not isinstance(value, TensorView):
            items: list[Any] = [None] * len(value)
            for index, item in enumerate(value):
                items[index] = self._decode(item, items, index, position, live)
            return items
        if isinstance(value, Mapping) and "scalar" in value:
            source, reads = self._numbers.source(
                value["scalar"], lambda view: self._room.operand(view, position)
            )
            live.reads.extend(reads)
            live.places.append((holder, place, source))
            return None
        return decode(
            value,
            self._room.device,
            lambda view: self._operand(view, position),
            lambda expression: None,
        )
