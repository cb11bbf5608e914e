"""A plan with memory, links and the user's tensors: runs step after step, or undoes one.

Everything that can be refused is refused in `Execution.__init__`; nothing moves before `take_turn`.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from penstock.errors import NonFiniteLossError, PenstockError, TornStepError, UnlikeEagerError
from penstock.executor._debug import Debug
from penstock.executor._device import Device
from penstock.executor._interrupts import Interrupts
from penstock.executor._links import ThreadLink
from penstock.executor._memory import Blocks, FileBlock, Layout
from penstock.executor._numbers import Numbers
from penstock.executor._operators import Call
from penstock.executor._places import Places
from penstock.executor._program import Stage, program_of
from penstock.executor._recovery import Recovery
from penstock.executor._report import ExecutionReport
from penstock.executor._room import Room
from penstock.executor._seam import Seam, copy_elements, given_by_caller
from penstock.executor._shadow import Shadow, alike
from penstock.executor._stretches import Stretches
from penstock.executor._timing import Timing, predicted_phase_seconds
from penstock.executor._unchanged import Unchanged
from penstock.graph import StepGraph
from penstock.graph.bindings import bind_batch, bind_group_tensors, bind_numbers
from penstock.graph.executable import copies_results
from penstock.memory import Ledger, Link, Tier
from penstock.planner import Plan, Transfer, simulate

_CHECK_EVERY = 16  # positions between two looks for Ctrl-C
_MAX_TIMES = 1000


class Execution:
    """One plan, bound.

    Args:
        graph: The step.
        plan: A plan for it.
        model: The model.
        optimizer: Its optimizer.
        loss: The loss, if it is a module with parameters or buffers.
        layout: Where the plan's copies lie below the device.
        blocks: Its memory.
        device: Where operators run.
        debug: Whether to overwrite what is freed, and to compare what comes back.

    Attributes:
        ledger: What has moved.
        room: The plan's memory.
        interrupts: Held back by the caller around a step, which looks at them.

    Raises:
        PlanError: The plan is wrong, or not for this graph.
        GraphFileError: The graph is not of this model and optimizer.
    """

    def __init__(
        self,
        graph: StepGraph,
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss: object,
        layout: Layout,
        blocks: Blocks,
        device: Device,
        debug: bool,
    ) -> None:
        self._captured, graph = graph, plan.planned_graph(graph)
        self._graph, self._plan, self._optimizer = graph, plan, optimizer
        self._device = device
        self.ledger = Ledger()
        self._places = Places(graph, plan)
        self.room = Room(graph, self._places, device.device, layout, blocks)
        self._seam = Seam(graph, plan, self._places, self.room, model, optimizer, loss)
        roots = {"model": model} | ({"loss": loss} if isinstance(loss, nn.Module) else {})
        self._unchanged = Unchanged(graph, roots, optimizer)
        self._debug = Debug(graph, plan, self.room) if debug else None
        self._links = {
            link: self._link(link) for link in dict.fromkeys(t.link for t in plan.transfers)
        }
        self._numbers = Numbers()
        self.interrupts = Interrupts()
        self._recovery = Recovery(graph, plan, self._places, self.room, self._seam, self._links)
        self._loss = self._loss_tensor()
        self._early_loss = self._find_early_loss()
        self._early_reading: Callable[[], torch.Tensor]  # of the step under way
        self._program = program_of(
            *(graph, plan, self._places, self.room, self._links, self._numbers, self._extra),
            device,
        )
        self._stretches = Stretches(self._program, device) if device.is_behind else None
        self._timing = Timing(graph, plan, self._program)
        self._inputs = given_by_caller(graph, self._places, self.room)
        self._calls = self._program.first
        self._given: dict[str, torch.Tensor] = {}
        self._times: list[float] = []
        self._seconds = 0.0  # of all steps
        self._expected: torch.Tensor | None = None  # the loss of the program itself
        self._num_steps = 0
        self._has_turned = self._has_run = False
        self._process = os.getpid()

    @property
    def is_measured(self) -> bool:
        """Whether as many steps have been timed as will be."""
        return not self._timing.wanted

    @property
    def num_full_masks(self) -> int:
        """Tensors of the batch that have to be masks of which nothing is masked."""
        return len(self._graph.metadata.get("full_masks", ()))

    def accepts(self, batch: Any) -> bool:
        """Whether a batch has the form that was captured."""
        try:
            bind_batch(self._graph, batch)
        except ValueError:
            return False
        return True

    def take_turn(self) -> None:
        """Bring the user's tensors to where this plan has them; nothing is under way."""
        self._seam.take_over()
        if not self._has_run:  # later nothing comes from anywhere else: no allocator is emptied
            self._device.let_go_of_unused()
            self._has_run = True
        self._has_turned = True

    def take_up_initial(self) -> None:
        """Bring first numbers, which only the homes have, to all other places."""
        self._seam.spread_all()

    def step(self, batch: Any, shadow: Shadow) -> torch.Tensor:
        """Run one step; returns the loss.

        Args:
            batch: Its batch.
            shadow: What compares some of the steps with the program itself.
        """
        if os.getpid() != self._process:
            raise PenstockError(
                "this step was bound in another process, of which this one is a fork: its threads "
                "and its file are not here; bind the plan in this process"
            )
        self._seam.reshard()
        self._unchanged.check()
        given = bind_batch(self._graph, batch) | bind_group_tensors(self._graph, self._optimizer)
        numbers = bind_numbers(self._graph, self._optimizer)
        changed = self._seam.take_up_changes(self.drain)
        if self._has_turned:
            changed |= self._seam.places_of.keys()
            self._has_turned = False
        changed |= self._seam.give(given, self.drain)
        self._given = given
        self._numbers.give(numbers)
        self._expected = shadow.begin(
            self._captured, self._plan, self._device, batch, self._seconds, self.drain
        )
        if self._debug is not None:
            self._debug.begin_step(self._seam.settled(changed))
        begin = time.perf_counter()
        try:
            loss = self._take_step()
        except UnlikeEagerError:
            if self._is_repeatable(shadow, batch):
                raise
            return self.step(batch, shadow)
        self._seconds += time.perf_counter() - begin
        shadow.end(compared=self._expected is not None)
        self._times.append(time.perf_counter() - begin)
        del self._times[:-_MAX_TIMES]
        self._num_steps += 1
        # What schedulers of the learning rate look at.
        self._optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
        self._calls = self._next_calls()
        self._given = {}
        self.ledger.begin_step()
        if self._early_loss is None:
            self._check_loss(
                self._loss, "everything has been updated with it", "load the last checkpoint"
            )
        return loss

    @property
    def num_steps(self) -> int:
        """Steps that were finished."""
        return self._num_steps

    def _take_step(self) -> torch.Tensor:
        with self._device.computing():
            self._run()
        if self._debug is not None:
            self.drain()  # what is compared later must not be what the user has changed since
        assert self._loss is not None
        loss = self._loss.clone()
        for link in self._links.values():
            link.next_step()
        self._seam.note_versions()
        return loss

    def _is_repeatable(self, shadow: Shadow, batch: Any) -> bool:
        """Whether the program has the same loss when it is called eagerly once more."""
        expected, self._expected = self._expected, None
        again = shadow.repeat(self._captured, self._device, batch)
        if again is None or expected is None or not alike(again, expected):
            shadow.give_up("two eager calls of the same step had losses of other bits")
            return False
        return True

    def drain(self) -> None:
        """Wait until nothing moves."""
        for link in self._links.values():
            link.drain()

    def give_back(self) -> None:
        """Give the user's tensors memory of their own."""
        self._seam.give_back()

    def stand_back(self) -> None:
        """Look at the user's tensors no more, which another plan has taken over."""
        self._seam.let_go()

    def stop(self) -> None:
        """End the threads."""
        for link in self._links.values():
            link.stop()

    def report(self, shadow: Shadow) -> ExecutionReport:
        """Lay what happened next to what was planned."""
        plan, simulation = self._plan, simulate(self._captured, self._plan)
        num_steps = max(1, self._num_steps)
        links = list(self._links)
        times = sorted(self._times[1:] or self._times or [0.0])
        moved = {link: self.ledger.moved(link) // num_steps for link in links}
        file = next((b for b in self.room.blocks() if isinstance(b, FileBlock)), None)
        operators = [self._graph.operators[index] for index in plan.order]
        return ExecutionReport(
            num_steps=self._num_steps,
            num_operators=len(plan.order),
            step_seconds=times[len(times) // 2],
            predicted_step_seconds=plan.step_seconds,
            phase_seconds=dict(self._timing.phase_seconds()),
            predicted_phase_seconds=dict(predicted_phase_seconds(self._graph, plan, simulation)),
            stall_seconds=self.ledger.stall_seconds / num_steps,
            predicted_stall_seconds=simulation.stall_seconds,
            moved_bytes={link.value: count for link, count in moved.items()},
            predicted_moved_bytes={link.value: n for link, n in plan.bytes_moved.items()},
            bytes_per_second={link.value: self.ledger.bandwidth(link) or 0.0 for link in links},
            predicted_bytes_per_second={
                link.value: plan.machine.links[link].bytes_per_second for link in links
            },
            arena_bytes=self.room.num_bytes(Tier.DEVICE),
            workspace_bytes=self._graph.workspace_bytes,
            held_bytes=self._device.held_bytes(),
            host_bytes=self.room.num_bytes(Tier.HOST),
            undo_bytes=self._recovery.num_bytes,
            predicted_host_bytes=plan.peak_host_bytes,
            file_bytes=self.room.num_bytes(Tier.FILE),
            predicted_file_bytes=plan.peak_file_bytes,
            num_copied_results=sum(map(copies_results, operators)),
            direct_io=None if file is None else file.file.direct,
            is_refined=plan.times == "given",
            debug=self._debug is not None,
            num_shadow_steps=shadow.num_steps,
            num_captures_again=shadow.num_captures,
            shadow_seconds=shadow.seconds,
            shadow_left_out=shadow.left_out,
            num_recorded=0 if self._stretches is None else self._stretches.num_recorded,
            operator_seconds=self._timing.operator_seconds(),
        )

    # Running.

    def _run(self) -> None:
        state = self._device.random_state() if self._program.random else None
        is_timed = self._timing.wanted and self._calls is self._program.calls
        index, begin, ends = -1, time.perf_counter_ns(), []
        try:
            with torch._C._AutoDispatchBelowAutograd(), _mode_of_the_caller(self._device):
                if is_timed:
                    self._device.timed(self._calls, ends)
                else:
                    for index, call in enumerate(self._calls):
                        call()
        except BaseException as error:
            with self.interrupts.masked():
                if state is not None:
                    self._device.set_random_state(state)
                self._undo(len(ends) if is_timed else index, error)
            raise
        if is_timed:
            self._timing.note(begin, ends)

    def _undo(self, index: int, error: BaseException) -> None:
        """Bring everything to where it was before the step, or say what cannot be."""
        for link in self._links.values():
            link.halt()
        self._device.settle()
        position, stage = self._where(index)
        outcome = self._recovery.restore(position, stage)
        for link in self._links.values():
            link.reset()
        if not (outcome.updated or outcome.lost):
            error.add_note("penstock: model and optimizer are as before this step")
            return
        lost = _listed(outcome.lost)
        raise TornStepError(
            f"a step failed in the middle of its update ({type(error).__name__}: {error}): "
            f"{len(outcome.updated)} tensors are as after the step, the others as before it, "
            + (f"except {lost}, which are lost" if outcome.lost else "none is lost")
            + "; load the last checkpoint",
            updated=outcome.updated,
            lost=outcome.lost,
        ) from error

    def _next_calls(self) -> list[Call]:
        """What the steps from the second one on call: in stretches, once they have been timed."""
        if self._stretches is None or self._debug is not None or self._timing.wanted:
            return self._program.calls
        return self._stretches.calls

    def _where(self, index: int) -> tuple[int, Stage]:
        """The position and stage of one of the calls."""
        if self._stretches is not None and self._calls is self._stretches.calls:
            return self._stretches.where(index)
        return self._program.positions[index], self._program.stages[index]

    def _extra(self, position: int, when: str) -> Iterator[Call]:
        """What runs beside operators and transfers."""
        commit = self._recovery.commit
        if when == "left":
            if self._early_loss is not None:
                made, checked, place = self._early_loss
                if position == made:
                    yield functools.partial(self._read_loss, place)
                if position == checked:
                    yield self._check_early_loss
            if self._debug is not None:
                yield from self._debug.at(position)
            if position == 0:  # not before: what lies there may still be leaving
                yield self._place_inputs
            if position < commit and position % _CHECK_EVERY == 0:
                yield self.interrupts.check
        elif when == "entered" and position == commit:
            yield self.interrupts.check
        elif when == "before":
            yield from self._recovery.before(position)

    def _place_inputs(self) -> None:
        for name, _, place in self._inputs:
            copy_elements(self._given[name], place)

    # The loss.

    def _loss_tensor(self) -> torch.Tensor | None:
        view, last = self._graph.loss, len(self._plan.order) - 1
        if view is None:
            return None
        if self._graph.num_bytes(view.value) and self._graph.producers[view.value] is not None:
            for stay in self._places.stays[view.value]:
                if stay.tier is Tier.DEVICE and stay.end == last + 1:
                    return self.room.view_of(stay, view)
        return self.room.operand(view, last)

    def _find_early_loss(self) -> tuple[int, int, torch.Tensor] | None:
        """Return the boundary at which the loss has been made, the last one before the update, and
        the place where its operator puts it; None if the update precedes it.
        """
        view, last = self._graph.loss, len(self._plan.order) - 1
        if view is None or not self._graph.num_bytes(view.value):
            return None
        checked = min(self._recovery.commit, last)
        found = [
            (stay.start + 1, self.room.view_of(stay, view))
            for stay in self._places.stays[view.value]
            if stay.tier is Tier.DEVICE and stay.transfer is None and 0 <= stay.start < checked
        ]
        if not found:
            return None
        made, place = min(found, key=lambda each: each[0])
        return made, checked, place

    def _read_loss(self, place: torch.Tensor) -> None:
        """Begin to read the loss: a device that is behind goes on with the backward pass then."""
        self._early_reading = self._device.read(place)

    def _check_early_loss(self) -> None:
        self._check_loss(self._early_reading())

    def _check_loss(
        self,
        value: torch.Tensor | None,
        outcome: str = "nothing has been updated",
        remedy: str = "skip this batch, or lower the learning rate",
    ) -> None:
        if value is None:
            return
        loss = value.item()
        if self._expected is not None and not alike(value, self._expected):
            expected = self._expected.item()
            raise UnlikeEagerError(
                f"step {self._num_steps + 1}: the planned loss is {loss!r} and the program itself, "
                f"called eagerly, has {expected!r}; it depends on something that its graph has as "
                "it was when it was captured, as a number of Python that has changed: keep that in "
                f"a buffer or in a tensor of the batch ({outcome})",
                loss=loss,
                expected=expected,
            )
        if not math.isfinite(loss):
            raise NonFiniteLossError(f"the loss is {loss}: {outcome}; {remedy}", loss=loss)

    # Transfers.

    def _link(self, link: Link) -> ThreadLink:
        transfers = [transfer for transfer in self._plan.transfers if transfer.link is link]
        return ThreadLink(
            link,
            [self._move(transfer) for transfer in transfers],
            [transfer.num_bytes for transfer in transfers],
            self.ledger,
            self._device,
        )

    def _move(self, transfer: Transfer) -> Callable[[], None]:
        """Return what carries out a transfer."""
        value, link, num_bytes, start, _ = transfer
        if not num_bytes:
            return lambda: None
        source = self.room.offset(link.source, self._places.source(value, link.source, start))
        target = self.room.offset(
            link.destination, self._places.destination(value, link.destination, start)
        )
        from_block, to_block = self.room.block(link.source), self.room.block(link.destination)
        here, there = from_block.bytes_at(source, num_bytes), to_block.bytes_at(target, num_bytes)
        if isinstance(to_block, FileBlock):
            move = self._device.to_file(to_block.write, target, here)
        elif isinstance(from_block, FileBlock):
            move = self._device.from_file(from_block.read, source, there)
        else:
            move = self._device.mover(link, there, here)
        if self._debug is None:
            return move
        return self._debug.watched(
            transfer, (link.source, source), (link.destination, target), move
        )


class _mode_of_the_caller:
    """Puts the gradient mode back, and keeps autocast away."""

    def __init__(self, device: Device) -> None:
        self._type = device.device.type

    def __enter__(self) -> None:
        self._enabled = torch.is_grad_enabled()
        self._autocast = torch.autocast(self._type, enabled=False)
        self._autocast.__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        self._autocast.__exit__(*exc_info)
        torch._C._set_grad_enabled(self._enabled)


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} others"
