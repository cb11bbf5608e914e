"""Executable: a plan as a flat list of calls, operators and at the boundaries transfers.

The sequence at a boundary is the plan's (see `penstock.planner.Plan`): transfers out of the device
begin; those out of it and between host and file that end here are waited for; transfers into it
and between host and file begin; those into it that end here are waited for. Segments of plain
operators become one call on a device that records and replays them, as CUDA graphs.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from penstock.compat.autograd import set_grad_enabled
from penstock.compat.dispatch import tree_leaves
from penstock.executor.device.base import Device
from penstock.executor.device.links import ThreadLink
from penstock.executor.memory.blocks import PlanMemory
from penstock.executor.program.operators import (
    Bindings,
    Call,
    check_results,
    make_call,
    make_random_calls,
    reads_storages,
)
from penstock.executor.program.scalars import Scalars, has_scalars
from penstock.graph import Kind, Operator, Phase
from penstock.graph.capturing.schemas import COLLECTIVES
from penstock.graph.encoding import CONSTANT, GET_RNG_STATE, SCALAR, SET_RNG_STATE, decode_arguments
from penstock.memory import Link, Tier
from penstock.planner import Plan

_MIN_CALLS = 4  # of a segment; below it recording gains nothing
_IMPURE = (SCALAR, GET_RNG_STATE, SET_RNG_STATE)  # they read results, or what is no tensor


class BoundaryStage(enum.IntEnum):
    """Progress at a boundary.

    LEAVING: values that end here are still in their places. ENTERING: others may take the places,
    but not those of the operator's operands. RUNNING: the operator has begun.
    """

    LEAVING = 0
    ENTERING = 1
    RUNNING = 2


@dataclass
class Executable:
    """The calls of a step.

    Attributes:
        calls: The calls in their order.
        first: The calls of the first step, which compare results with those of fake kernels.
        positions: For each call its position.
        stages: For each call the stage of its boundary.
        plain: For each call whether it is an operator whose arguments are the same in all steps and
            all on the device, and which neither draws random numbers nor waits for ranks.
        random: Whether operators draw random numbers.
    """

    calls: list[Call] = field(default_factory=list)
    first: list[Call] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    stages: list[BoundaryStage] = field(default_factory=list)
    plain: list[bool] = field(default_factory=list)
    random: bool = False

    def add(
        self,
        call: Call,
        position: int,
        stage: BoundaryStage,
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


def compile_plan(
    memory: PlanMemory,
    links: Mapping[Link, ThreadLink],
    scalars: Scalars,
    after_leaving: Callable[[int], Iterator[Call]],
    before_operator: Callable[[int], Iterator[Call]],
) -> Executable:
    """Compile a plan to the calls of one step.

    Further calls at a position come from `after_leaving`, once the values that end there have left,
    and from `before_operator`.
    """
    compiler = _Compiler(memory, scalars)
    transfers = _compile_transfers(memory.plan, links)
    executable = compiler.executable
    forward: bool | None = None
    for position, index in enumerate(memory.plan.order):
        before, after = transfers.get(position, ([], []))
        for call in before:
            executable.add(call, position, BoundaryStage.LEAVING)
        for call in (*after_leaving(position), *after):
            executable.add(call, position, BoundaryStage.ENTERING)
        # As in eager steps: some kernels depend on the gradient mode.
        is_forward = memory.graph.operators[index].phase is Phase.FORWARD
        if forward is not is_forward:
            forward = is_forward
            set_mode = functools.partial(set_grad_enabled, forward)
            executable.add(set_mode, position, BoundaryStage.ENTERING)
        for call in before_operator(position):
            executable.add(call, position, BoundaryStage.ENTERING)
        compiler.add_operator(index, position)
    return executable


def _compile_transfers(
    plan: Plan, links: Mapping[Link, ThreadLink]
) -> dict[int, tuple[list[Call], list[Call]]]:
    """Return for each boundary the releases and waits before bytes may come in, and after."""
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


class _Compiler:
    """Compiler of operators at positions to calls."""

    def __init__(self, memory: PlanMemory, scalars: Scalars) -> None:
        graph = memory.graph
        self.executable = Executable(random=any(operator.random for operator in graph.operators))
        self._graph = graph
        self._memory = memory
        self._scalars = scalars
        self._num_runs = Counter(memory.plan.order)
        self._seen: set[int] = set()
        captured = graph.captured
        self._outside: Mapping[str, torch.Tensor] = {} if captured is None else captured.outside
        self._random_states: dict[int, list[torch.Tensor]] = {}  # by operator
        for storage in graph.storages:
            if storage.kind is Kind.SCALAR and storage.initial is not None:
                scalars.slot_of(storage.initial)

    def add_operator(self, index: int, position: int) -> None:
        """Compile an operator at a position: its first run, or a recomputation."""
        operator = self._graph.operators[index]
        again = index in self._seen
        self._seen.add(index)
        if again and operator.recompute_target is not None:
            assert operator.recompute_args is not None
            operator = dataclasses.replace(
                operator,
                target=operator.recompute_target,
                args=operator.recompute_args,
                kwargs={},
            )
        target = operator.target
        slot = self._scalars.slot_of(operator.creates[0]) if target == SCALAR else None
        bindings = self._bind_arguments(operator, position)
        is_live = has_scalars((bindings.args, bindings.kwargs))
        outside = self._outside.get(operator.name) if target == CONSTANT else None
        if outside is not None:
            place = bindings.results[0]
            call = lambda: place.copy_(outside.detach())  # noqa: E731 (as it is then)
        else:
            call = make_call(operator, bindings, self._scalars, slot)
        if call is None:
            return
        if operator.random and (again or self._num_runs[index] > 1):
            state = self._random_states.setdefault(index, [])
            calls = make_random_calls(call, state, self._memory.blocks.device)
            call = calls[1] if again else calls[0]
        is_live |= operator.random or outside is not None or target in COLLECTIVES
        self.executable.add(
            call,
            position,
            BoundaryStage.RUNNING,
            first=check_results(operator, call, bindings.results),
            is_plain=not (is_live or target in _IMPURE or self._uses_host(operator, bindings)),
        )

    def _uses_host(self, operator: Operator, bindings: Bindings) -> bool:
        """Return whether a GPU's operator reads or writes host memory, which no recording sees."""
        if self._memory.device.type == "cpu":
            return False
        leaves = tree_leaves((bindings.args, bindings.kwargs, bindings.results))
        return operator.target == CONSTANT or any(
            isinstance(each, torch.Tensor) and each.device.type == "cpu" for each in leaves
        )

    def _bind_arguments(self, operator: Operator, position: int) -> Bindings:
        """Return arguments and results as tensors in their places, and scalar expressions."""
        isolated = reads_storages(operator.target)
        memory, scalars = self._memory, self._scalars
        results = {
            index: memory.view_result(view, position)
            for index, view in enumerate(operator.outputs)
            if view is not None and view.value in operator.creates and operator.target != SCALAR
        }
        args, kwargs = decode_arguments(
            operator,
            memory.device,
            lambda view: memory.view_operand(view, position, isolated=isolated),
            lambda expression: scalars.compile_expression(
                expression, lambda view: memory.view_operand(view, position)
            ),
        )
        return Bindings(args, kwargs, results)


class Segments:
    """An executable in which each segment of plain operators is one call.

    A segment is recorded the first time that it is called; if that fails it runs call by call.
    """

    def __init__(self, executable: Executable, device: Device) -> None:
        self.calls: list[Call] = []
        self._executable = executable
        self._begins: list[int] = []
        begin = 0
        while begin < len(executable.calls):
            end = begin
            while end < len(executable.calls) and executable.plain[end]:
                end += 1
            self._begins.append(begin)
            if end - begin >= _MIN_CALLS:
                self.calls.append(_CallSegment(executable.calls[begin:end], device))
                begin = end
            else:
                self.calls.append(executable.calls[begin])
                begin += 1

    def locate(self, index: int) -> tuple[int, BoundaryStage]:
        """Return position and stage of a call that failed."""
        call = self.calls[index]
        at = self._begins[index] + (call.at if isinstance(call, _CallSegment) else 0)
        return self._executable.positions[at], self._executable.stages[at]

    @property
    def num_recorded(self) -> int:
        """Operators that are replayed."""
        segments = (call for call in self.calls if isinstance(call, _CallSegment))
        return sum(len(each.calls) for each in segments if each.is_recorded)


class _CallSegment:
    """Consecutive operators."""

    def __init__(self, calls: Sequence[Call], device: Device) -> None:
        self.calls = calls
        self.at = 0  # the last call, while they are called one by one
        self._device = device
        self._replay: Call | None = None
        self.is_recorded = False

    def __call__(self) -> None:
        if self._replay is None:
            recorded = self._device.record(self.calls)
            self._replay = recorded or self._run_one_by_one
            self.is_recorded = recorded is not None
            if self.is_recorded:  # recording has run them
                return
        self._replay()

    def _run_one_by_one(self) -> None:
        for at, call in enumerate(self.calls):
            self.at = at
            call()
