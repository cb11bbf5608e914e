"""Execution: a plan with memory, links and the user's tensors; runs step after step, or undoes one.

Every refusal is in `Execution.__init__`; nothing moves before `take_turn`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from penstock.compat.autocast import outside_autocast
from penstock.compat.autograd import below_autograd, set_grad_enabled
from penstock.errors import PenstockError, TornStepError, UnlikeEagerError
from penstock.executor.device.base import Device
from penstock.executor.device.links import ThreadLink
from penstock.executor.memory.blocks import FileBlock, PlanMemory, SharedBlocks, copy_elements
from penstock.executor.memory.residency import CopyLayout
from penstock.executor.program.executable import BoundaryStage, Segments, compile_plan
from penstock.executor.program.operators import Call
from penstock.executor.program.scalars import Scalars
from penstock.executor.run._loss import LossCheck
from penstock.executor.run._recovery import StepRecovery
from penstock.executor.run.debug import Debug
from penstock.executor.run.interrupts import Interrupts
from penstock.executor.run.planning import PlannedGraph
from penstock.executor.run.report import ExecutionReport, Timing, predict
from penstock.executor.run.shadow import Shadow
from penstock.executor.state.binding import StateBinding
from penstock.graph.bindings import (
    add_input_parts,
    bind_batch,
    bind_group_tensors,
    bind_numbers,
)
from penstock.graph.capturing.step_program import StepProgram
from penstock.graph.executable import copies_results
from penstock.graph.fsdp.collectives import as_rank_error
from penstock.graph.fsdp.shards import ShardedModel
from penstock.graph.guards import Guards
from penstock.memory import Ledger, Link, Tier
from penstock.planner import Transfer

if TYPE_CHECKING:
    from penstock.partitioner import PartitionedStep

_INTERRUPT_DISTANCE = 16  # positions between two checks for signals
_MAX_TIMES = 1000
_UNDONE = "model and optimizer are as before this step"


class Execution:
    """A bound plan.

    Attributes:
        ledger: The transfers and stalls of its steps.
        memory: The plan's memory.
        state: The user's tensors, bound to it.
        interrupts: Signals, deferred by the caller while a step runs.

    Raises:
        CaptureError: The model is sharded in a way that a graph does not hold.
        PlanError: The plan is wrong, or not for this graph.
        GraphFileError: The graph is not of this model and optimizer.
    """

    def __init__(
        self,
        planned: PlannedGraph,
        program: StepProgram,
        optimizer: torch.optim.Optimizer,
        layout: CopyLayout,
        blocks: SharedBlocks,
        debug: bool,
        partitioned: PartitionedStep | None = None,
    ) -> None:
        self._plan, self._captured = planned
        self._graph = self._plan.planned_graph(self._captured)
        self._program = program
        self._optimizer = optimizer
        self._device = blocks.device
        self.ledger = Ledger()
        self.memory = PlanMemory(self._graph, self._plan, layout, blocks)
        # Of a partitioned step, the graph itself has this rank's pieces.
        module = program.model if partitioned is None else nn.Module()
        sharded = ShardedModel(module, program.loss if partitioned is None else None)
        self.state = StateBinding(self.memory, program.model, optimizer, program.loss, sharded)
        self._partitioned = partitioned
        self._guards = Guards(self._graph, program, optimizer)
        self._debug = Debug(self.memory) if debug else None
        self._links = _make_links(self.memory, self.ledger, self._debug)
        self._scalars = Scalars()
        self.interrupts = Interrupts()
        self._recovery = StepRecovery(self.memory, self.state, self._links)
        self._loss = LossCheck(self.memory, self._recovery.commit)
        further = self._iter_calls_after_leaving, self._iter_calls_before_operator
        self._executable = compile_plan(self.memory, self._links, self._scalars, *further)
        is_behind = self._device.is_behind
        self._segments = Segments(self._executable, self._device) if is_behind else None
        self._timing = Timing(self._graph, self._plan, self._executable)
        self._inputs = self.memory.find_inputs()
        self._calls = self._executable.first
        self._input_tensors: dict[str, torch.Tensor] = {}
        self._times: list[float] = []
        self._seconds = 0.0  # of all steps
        self._has_turned = self._has_run = False
        self._process = os.getpid()

    @property
    def is_measured(self) -> bool:
        """True if as many steps have been timed as will be."""
        return not self._timing.is_open

    @property
    def num_full_masks(self) -> int:
        """Tensors of the batch that must be masks without a masked element."""
        return len(self._graph.metadata.get("full_masks", ()))

    @property
    def num_steps(self) -> int:
        """Steps that were finished."""
        return self._loss.num_steps

    def accepts(self, batch: Any) -> bool:
        """Return whether a batch has the captured form."""
        try:
            self._bind_batch(batch)
        except ValueError:
            return False
        return True

    def take_turn(self) -> None:
        """Move the user's tensors to this plan's places; no transfer is under way."""
        self.state.take_over()
        if not self._has_run:  # later nothing comes from outside: no allocator is emptied
            self._device.empty_cache()
            self._has_run = True
        self._has_turned = True

    def step(self, batch: Any, shadow: Shadow) -> torch.Tensor:
        """Run one step; return the loss."""
        self._prepare(batch, shadow)
        begin = time.perf_counter()
        try:
            loss = self._take_step()
        except UnlikeEagerError:
            if self._is_repeatable(shadow, batch):
                raise
            return self.step(batch, shadow)
        self._seconds += time.perf_counter() - begin
        shadow.end(compared=self._loss.expected is not None)
        self._times.append(time.perf_counter() - begin)
        del self._times[:-_MAX_TIMES]
        self._loss.num_steps += 1
        # Schedulers of the learning rate read it.
        self._optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
        self._calls = self._choose_calls()
        self._input_tensors = {}
        self.ledger.begin_step()
        self._loss.check_late()
        return loss

    def drain(self) -> None:
        """Wait until nothing moves."""
        for link in self._links.values():
            link.drain()

    def stop(self) -> None:
        """End the threads."""
        for link in self._links.values():
            link.stop()

    def report(self, shadow: Shadow) -> ExecutionReport:
        """Return measurements next to predictions."""
        num_steps, links = max(1, self.num_steps), list(self._links)
        times = sorted(self._times[1:] or self._times or [0.0])
        moved = {link: self.ledger.moved(link) // num_steps for link in links}
        file = next((b for b in self.memory.blocks if isinstance(b, FileBlock)), None)
        operators = [self._graph.operators[index] for index in self._plan.order]
        return ExecutionReport(
            num_steps=self.num_steps,
            num_operators=len(operators),
            step_seconds=times[len(times) // 2],
            phase_seconds=dict(self._timing.compute_phase_seconds()),
            stall_seconds=self.ledger.stall_seconds / num_steps,
            moved_bytes={link.value: count for link, count in moved.items()},
            bytes_per_second={link.value: self.ledger.bandwidth(link) or 0.0 for link in links},
            arena_bytes=self.memory.num_bytes_of(Tier.DEVICE),
            workspace_bytes=self._graph.workspace_bytes,
            held_bytes=self._device.measure_held_bytes(),
            host_bytes=self.memory.num_bytes_of(Tier.HOST),
            undo_bytes=self._recovery.num_bytes,
            file_bytes=self.memory.num_bytes_of(Tier.FILE),
            num_copied_results=sum(map(copies_results, operators)),
            direct_io=None if file is None else file.file.direct,
            is_refined=self._plan.times == "given",
            debug=self._debug is not None,
            num_recorded=0 if self._segments is None else self._segments.num_recorded,
            operator_seconds=self._timing.compute_operator_seconds(),
            **predict(self._captured, self._graph, self._plan, links),
            **shadow.report(),
        )

    def _prepare(self, batch: Any, shadow: Shadow) -> None:
        """Check guards, bind the batch and copy changes; if it is time, call the program itself."""
        if os.getpid() != self._process:
            raise PenstockError(
                "this step was bound in another process, of which this one is a fork: its threads "
                "and its file are not here; bind the plan in this process"
            )
        self.state.reshard()
        changed_numbers = self._guards.check()
        if self._partitioned is not None:
            self._partitioned.check_numbers(changed_numbers, self._program._replace(batch=batch))
            changed_numbers = []
        given = self._bind_batch(batch) | bind_group_tensors(self._graph, self._optimizer)
        numbers = bind_numbers(self._graph, self._optimizer)
        changed = self.state.copy_changes(self.drain)
        if self._has_turned:
            changed |= self.state.places.keys()
            self._has_turned = False
        changed |= self.state.write_lasting_inputs(given, self.drain)
        self._input_tensors = given
        self._scalars.assign(numbers)
        self._loss.expected = shadow.begin(
            self._captured,
            self._plan,
            self._device,
            batch,
            self._seconds,
            self.drain,
            changed_numbers=changed_numbers,
        )
        if shadow.is_postponed:
            self._guards.postpone_numbers()
        else:
            self._guards.accept_numbers()
        if self._debug is not None:
            self._debug.begin_step(self.state.iter_places(changed))

    def _bind_batch(self, batch: Any) -> dict[str, torch.Tensor]:
        if self._partitioned is None:
            return bind_batch(self._graph, batch)
        return add_input_parts(self._graph, self._partitioned.cut_batch(batch))

    def _take_step(self) -> torch.Tensor:
        with self._device.enter_step():
            self._run()
        if self._debug is not None:
            self.drain()  # the user's changes from now on must not be compared
        assert self._loss.place is not None
        loss = self._loss.place.clone()
        for link in self._links.values():
            link.next_step()
        self.state.count_changes()
        self.state.record_versions()
        return loss

    def _is_repeatable(self, shadow: Shadow, batch: Any) -> bool:
        """Return whether the program has the same loss when it is called eagerly once more."""
        expected, self._loss.expected = self._loss.expected, None
        again = shadow.repeat(self._captured, self._device, batch)
        if again is None or expected is None or not self._loss.is_equal(again, expected):
            shadow.give_up("two eager calls of the same step had losses of other bits")
            return False
        return True

    def _run(self) -> None:
        state = self._device.get_random_state() if self._executable.random else None
        is_timed = self._timing.is_open and self._calls is self._executable.calls
        index, begin, ends = -1, time.perf_counter_ns(), []
        try:
            with below_autograd(), _restore_modes(self._device):
                if is_timed:
                    self._device.run_timed(self._calls, ends)
                else:
                    for index, call in enumerate(self._calls):
                        call()
        except BaseException as error:
            with self.interrupts.mask():
                if state is not None:
                    self._device.set_random_state(state)
                self._undo(len(ends) if is_timed else index, error)
            failure = as_rank_error(error)
            if failure is None:
                raise
            failure.add_note(f"penstock: {_UNDONE}")
            raise failure from error
        if is_timed:
            self._timing.record(begin, ends)

    def _undo(self, index: int, error: BaseException) -> None:
        """Restore the state before the step, or raise an error with the tensors that are lost."""
        for link in self._links.values():
            link.halt()
        self._device.synchronize()
        updated, lost = self._recovery.restore(*self._locate(index))
        for link in self._links.values():
            link.reset()
        if not (updated or lost):
            error.add_note(f"penstock: {_UNDONE}")
            return
        raise TornStepError(
            f"a step failed in the middle of its update ({type(error).__name__}: {error}): "
            f"{len(updated)} tensors are as after the step, the others as before it, "
            + (f"except {_join(lost)}, which are lost" if lost else "none is lost")
            + "; load the last checkpoint",
            updated=updated,
            lost=lost,
        ) from error

    def _choose_calls(self) -> list[Call]:
        """Return the calls of the next step: segments are replayed once steps have been timed."""
        if self._segments is None or self._debug is not None or self._timing.is_open:
            return self._executable.calls
        return self._segments.calls

    def _locate(self, index: int) -> tuple[int, BoundaryStage]:
        """Return the position and stage of one of the calls."""
        if self._segments is not None and self._calls is self._segments.calls:
            return self._segments.locate(index)
        return self._executable.positions[index], self._executable.stages[index]

    def _iter_calls_after_leaving(self, position: int) -> Iterator[Call]:
        yield from self._loss.iter_calls_at(position)
        if self._debug is not None:
            yield from self._debug.poison_freed(position)
        if position == 0:  # not before: a value in an input's place may still be leaving
            yield self._place_inputs
        if position < self._recovery.commit and position % _INTERRUPT_DISTANCE == 0:
            yield self.interrupts.check

    def _iter_calls_before_operator(self, position: int) -> Iterator[Call]:
        if position == self._recovery.commit:
            yield self.interrupts.check
        yield from self._recovery.iter_calls_before(position)

    def _place_inputs(self) -> None:
        for name, places in self._inputs.items():
            for place in places:
                copy_elements(self._input_tensors[name], place)


def _make_links(memory: PlanMemory, ledger: Ledger, debug: Debug | None) -> dict[Link, ThreadLink]:
    """Return the links of a plan; their threads start with the first transfer."""
    links: dict[Link, ThreadLink] = {}
    for link in dict.fromkeys(transfer.link for transfer in memory.plan.transfers):
        transfers = [transfer for transfer in memory.plan.transfers if transfer.link is link]
        links[link] = ThreadLink(
            link,
            [_make_move(memory, transfer, debug) for transfer in transfers],
            [transfer.num_bytes for transfer in transfers],
            ledger,
            memory.blocks.device,
        )
    return links


def _make_move(memory: PlanMemory, transfer: Transfer, debug: Debug | None) -> Callable[[], None]:
    value, link, num_bytes, start, _ = transfer
    if not num_bytes:
        return lambda: None
    index, device = memory.index, memory.blocks.device
    source = memory.offset_of(link.source, index.find_source(value, link.source, start))
    target = memory.offset_of(
        link.destination, index.find_destination(value, link.destination, start)
    )
    from_block, to_block = memory.block_of(link.source), memory.block_of(link.destination)
    from_bytes = from_block.bytes_at(source, num_bytes)
    to_bytes = to_block.bytes_at(target, num_bytes)
    if isinstance(to_block, FileBlock):
        move = device.make_write(to_block.write, target, from_bytes)
    elif isinstance(from_block, FileBlock):
        move = device.make_read(from_block.read, source, to_bytes)
    else:
        move = device.make_copy(link, to_bytes, from_bytes)
    if debug is None:
        return move
    return debug.compare_bytes(transfer, (link.source, source), (link.destination, target), move)


@contextlib.contextmanager
def _restore_modes(device: Device) -> Iterator[None]:
    """Restore the gradient mode at the end, and disable autocast until then."""
    enabled = torch.is_grad_enabled()
    try:
        with outside_autocast(device.device.type):
            yield
    finally:
        set_grad_enabled(enabled)


def _join(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} others"
