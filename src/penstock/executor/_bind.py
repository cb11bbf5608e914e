"""`bind`: a plan, a model and an optimizer become a step that is called with batches."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from penstock.errors import GraphFileError, PenstockError, PlanError, StoreError
from penstock.executor._debug import poison
from penstock.executor._device import Device
from penstock.executor._devices import device_of
from penstock.executor._distributed import refuse_ranks_apart
from penstock.executor._execution import Execution
from penstock.executor._initial import Initial, Initializer
from penstock.executor._interrupts import heard_afterwards
from penstock.executor._memory import Blocks, Layout, layout_of
from penstock.executor._operators import ALIGNMENT_BYTES
from penstock.executor._refinement import Refinement
from penstock.executor._report import ExecutionReport
from penstock.executor._shadow import Shadow
from penstock.graph import StepGraph
from penstock.graph.capturing.arguments import check_optimizer
from penstock.graph.capturing.capture import capture
from penstock.graph.capturing.step_program import StepProgram
from penstock.graph.executable import is_executable
from penstock.memory import FileStore
from penstock.planner import Plan, check

_Extend = Callable[[Sequence[tuple[Plan, StepGraph]], Any], list[tuple[Plan, StepGraph]]]
"""Makes plans that share their memory with one for a further batch."""


_Make = Callable[[Any, Blocks | None], list[Execution]]
"""Binds the plans; in memory that others have before them, if that is given."""


class PlannedStep:
    """A training step that runs as planned; `bind` makes it.

    Between steps the model's parameters and buffers and the optimizer's state look at the places
    where the plan has them then, be that the arena, host memory or the file: reading and changing
    them, `state_dict()`, evaluation and checkpoints are as always.

    Usable in a `with` block, which closes it.

    Attributes:
        plan: The plan.
    """

    def __init__(
        self,
        plan: Plan,
        make: _Make,
        ready: list[Execution],
        initial: Initial,
        shadow: Shadow,
    ) -> None:
        self.plan = plan
        self._shadow = shadow
        self._lock = threading.RLock()  # threads take turns, step by step
        self._make = make
        self._initial = initial
        self._executions: list[Execution] = []
        self._current: Execution | None = None
        self._closed = False
        self._ended: list[ExecutionReport] = []  # of plans whose memory has been given back
        self._pairs: list[tuple[Plan, StepGraph]] = []
        self._extended: _Extend | None = None
        self._refinement: Refinement | None = None
        if ready:
            self._use(ready)

    def __call__(self, batch: Any) -> torch.Tensor:
        """Take one training step.

        Args:
            batch: A batch of the planned form, or of one of them.

        Returns:
            The loss, detached.

        Raises:
            ValueError: The batch has another form; nothing has moved.
            NonFiniteLossError: The loss is infinite or NaN; nothing has been updated.
            CaptureError: The program does something else now than when it was captured; nothing has
                moved.
            UnlikeEagerError: Likewise, as its loss shows; nothing has been updated.
            TornStepError: Something failed in the middle of the update; the error says what is
                lost. Whatever else is raised leaves model and optimizer as before the step.
        """
        with self._lock:
            if self._closed:
                raise PenstockError("this planned step is closed; bind the plan again")
            if not self._executions:
                self._use(self._make(batch, None))
            self._refine()
            execution = self._execution_for(batch)
            with execution.interrupts:
                if execution is not self._current:
                    if self._current is not None:
                        self._current.drain()
                    execution.take_turn()
                    self._current = execution
                loss = execution.step(batch, self._shadow)
            execution.interrupts.check()
        return loss

    def report(self) -> ExecutionReport:
        """Return what the steps so far took, next to what was planned; of several plans, those of
        the one that ran last. After `close` what it was then.

        Raises:
            PenstockError: There was no step yet.
        """
        if self._current is None and self._ended:
            return self._ended[-1]
        if self._current is None:
            raise PenstockError("there is nothing to report before the first step")
        return self._current.report(self._shadow)

    def reports(self) -> tuple[ExecutionReport, ...]:
        """Return the reports of all plans that steps have run by; also after `close`.

        A plan whose memory was given back in between, by `release` or `add`, has one for each time.
        """
        running = [each.report(self._shadow) for each in self._executions if each.num_steps]
        return (*self._ended, *running)

    def add(self, batch: Any) -> None:
        """Plan for batches of one more form; of a step that `fit` has made.

        Example:
            >>> step = penstock.fit(model, optimizer, short, device_memory="4GiB")  # doctest: +SKIP
            >>> step.add(long)  # doctest: +SKIP

        Args:
            batch: A batch of that form; of accumulated micro-batches there may be another number.

        Raises:
            PenstockError: The step is closed, or not made by `fit`.
            InfeasibleError, CaptureError, ValueError: As of `penstock.fit`; the step is as before.
        """
        if self._extended is None or self._closed:
            raise PenstockError("only an open step that penstock.fit has made takes further forms")
        self.release()
        self._pairs[:] = self._extended(self._pairs, batch)

    def release(self) -> None:
        """Give model and optimizer memory of their own until the next step, which takes all again.

        For ordinary steps in between that need the memory. Not for a model from the meta device.

        Raises:
            PenstockError: The model was on the meta device; it may not fit anywhere else.
        """
        if self._initial.needed:
            raise PenstockError(
                "the model was on the meta device and lies where its plan has it: a planned step "
                "of it cannot give its memory back; pass all batches to penstock.fit(also=[...])"
            )
        with self._lock:
            self._leave()

    def close(self) -> None:
        """Give model and optimizer memory of their own, and return everything else. Further calls
        do nothing.

        Of a model that was on the meta device everything stays where it is, as there may be no room
        for it elsewhere, and the memory is kept as long as the model is.
        """
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._closed = True
        self._leave()

    def _leave(self) -> None:
        """Bring what is the user's to memory of its own, and end everything else."""
        executions, self._executions = self._executions, []
        current, self._current = self._current, None
        if current is None:
            return
        self._end(executions, current)
        current.give_back()
        current.room.shared.close()

    def __enter__(self) -> PlannedStep:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refine(self) -> None:
        """Go on by another plan where the first steps of the current one say so."""
        current = self._current
        if self._refinement is None or current is None or not current.is_measured:
            return
        index = self._executions.index(current)
        plan, graph = self._pairs[index]
        if self._refinement.is_decided(graph):
            return
        held = {block.tier: block.num_bytes for block in current.room.shared}
        with heard_afterwards():
            found = self._refinement.decide(plan, graph, current.report(self._shadow), held)
        if found is not plan:
            self._pairs[index] = found, graph
            try:
                self._exchange(index)
            except StoreError as error:  # the file has no room for both
                self._pairs[index] = plan, graph
                self._refinement.stay(graph, str(error))
            del current
            gc.collect()  # executions are cycles, and hold the memory that they had

    def _exchange(self, index: int) -> None:
        """Bind anew what are the plans now, and let them take over in the memory that there is."""
        before, current = self._executions, self._current
        assert current is not None
        executions = self._make(None, current.room.shared)
        with current.interrupts:
            self._end(before, current)
            self._executions, self._current = executions, executions[index]
            self._current.take_turn()
            current.stand_back()
            current.room.shared.close(after=self._current.room.shared)
            self._finalizer = weakref.finalize(self, _stop, executions)
        current.interrupts.check()

    def _end(self, executions: list[Execution], current: Execution) -> None:
        """End threads, when what is under way has arrived, and keep the reports."""
        self._finalizer.detach()
        try:
            current.drain()
        finally:
            _stop(executions)
        ran = sorted((each for each in executions if each.num_steps), key=lambda e: e is current)
        # The one that ran last is the last.
        self._ended += [each.report(self._shadow) for each in ran]

    def _execution_for(self, batch: Any) -> Execution:
        first, *others = dict.fromkeys((self._current or self._executions[0], *self._executions))
        fitting = [each for each in (first, *others) if others and each.accepts(batch)]
        # Of those for any mask and those for full ones the latter, which branch as eager steps do.
        return max(fitting, key=lambda each: each.num_full_masks, default=first)

    def _use(self, executions: list[Execution]) -> None:
        self._executions = executions
        self._current = executions[0]
        self._current.take_turn()
        if self._initial.needed:
            self._initial.run(self._current.room.put_away)
            self._current.take_up_initial()
        self._finalizer = weakref.finalize(self, _stop, executions)


def _stop(executions: list[Execution]) -> None:
    for execution in executions:
        execution.stop()


def bind(
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    graph: StepGraph | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    before_step: Callable[[], object] | None = None,
    accumulate: int | None = None,
    also: Sequence[tuple[Plan, StepGraph]] = (),
    initialize: Initializer | None = None,
    store: FileStore | str | os.PathLike[str] | None = None,
    debug: bool = False,
    shadow: int | None = None,
) -> PlannedStep:
    """Make a training step that runs exactly as planned.

    One arena of the planned bytes is taken, in which every value is where the plan has it; what
    leaves goes to host memory or to a file behind the computation. The results are those of
    `penstock.graph.run`, bit for bit.

    Example:
        >>> graph = penstock.capture(model, optimizer, batch)  # doctest: +SKIP
        >>> plan = penstock.plan(graph, device_memory="4GiB", store="/mnt/nvme")  # doctest: +SKIP
        >>> with penstock.bind(plan, model, optimizer, store="/mnt/nvme") as step:  # doctest: +SKIP
        ...     for batch in batches:
        ...         loss = step(batch)

    Args:
        plan: A plan for the step of this model and optimizer.
        model: The model; its parameters and buffers move to where the plan has them.
        optimizer: Its optimizer; state that does not exist yet is made.
        graph: The step that was planned. None: it is captured with the first batch, which also
            proves that the plan is for this model, optimizer and batch.
        loss: `loss(output, batch)`, as given to `penstock.capture`.
        before_step: As given to `penstock.capture`; for a step without `graph`, and for `shadow`.
        accumulate: As given to `penstock.capture`, for a step without `graph`.
        also: Plans for batches of other forms, with their graphs. All plans share one arena, one
            block of host memory and one extent of the file, as large as the largest wants; each
            step runs the plan that its batch fits, after parameters and state have moved to where
            that has them. What lies below the device stays where it is.
        initialize: First numbers of parameters and buffers on the meta device, which come into
            being where the plan has them: a function that is called with each module that has such,
            or safetensors files with the model's names. None: the module's `reset_parameters`.
        store: Directory or `FileStore` of the file tier; needed if the plan uses it.
        debug: Overwrite bytes that are freed, and compare what comes back with what left.
        shadow: Compare the loss of every so many-th step with that of the program itself, called
            eagerly on the same numbers before it, and what the program does then with what was
            captured. None: the first two steps, and then at distances that double; the eager call
            only if the budget has room for it (the report says so). 0: never.

    Returns:
        The step: `loss = step(batch)`.

    Raises:
        PlanError: The plan is wrong, or for another graph (rule `"graph"`).
        GraphFileError: The graph is not of this model and optimizer; nothing has moved.
        CaptureError: The model is sharded (FSDP2) in a way that a graph does not hold; or there are
            several ranks, and nothing averages gradients over them.
        StoreError: The store cannot be used, or has not enough room.
        TypeError, ValueError: An argument is not what it must be.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a Plan, from penstock.plan or Plan.load; got {plan!r}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module; got {type(model).__name__}")
    check_optimizer(optimizer)
    if also and graph is None:
        raise ValueError("also=[...] needs graph=: the graphs of all plans, to tell batches apart")
    file_bytes = max(each.peak_file_bytes for each, _ in [(plan, graph), *also])
    if store is None and file_bytes:
        raise ValueError(
            f"store=None: the plan keeps up to {file_bytes} bytes in a file; pass the directory"
        )
    file_store = None if store is None else FileStore.of(store)

    def executions(
        pairs: Sequence[tuple[Plan, StepGraph]], before: Blocks | None = None
    ) -> list[Execution]:
        for _, each in pairs:
            refuse_ranks_apart(each)
        return _executions(pairs, model, optimizer, loss, file_store, debug, before)

    def with_first_batch(batch: Any, _: Blocks | None) -> list[Execution]:
        found = capture(
            model, optimizer, batch, loss=loss, before_step=before_step, accumulate=accumulate
        )
        return executions([(plan, found)])

    def again(_: Any, before: Blocks | None) -> list[Execution]:
        return executions(pairs, before)

    modules = [model, loss] if isinstance(loss, nn.Module) else [model]
    initial = Initial(modules, initialize)
    pairs = [] if graph is None else [(plan, graph), *also]
    ready = executions(pairs) if pairs else []
    checks = Shadow(StepProgram(model, None, loss, before_step), shadow)
    step = PlannedStep(plan, again if pairs else with_first_batch, ready, initial, checks)
    step._pairs = pairs
    return step


def _executions(
    pairs: Sequence[tuple[Plan, StepGraph]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: object,
    store: FileStore | None,
    debug: bool,
    before: Blocks | None,
) -> list[Execution]:
    """Bind plans to one memory; nothing of the model has moved yet."""
    layouts: list[Layout] = []
    known = [] if before is None else [*before.layouts]
    device = Device() if before is None else before.device
    for plan, graph in pairs:
        if before is None:
            device = device_of(graph)
        _check_executable(graph)
        check(graph, plan)
        _check_alignment(plan)
        layouts.append(layout_of(plan.planned_graph(graph), plan, [*known, *layouts]))
    blocks = Blocks(layouts, store, device, before)
    try:
        device.take_workspace(
            max(plan.planned_graph(graph).workspace_bytes for plan, graph in pairs)
        )
        found = [
            Execution(
                graph,
                plan,
                model,
                optimizer,
                loss=loss,
                layout=layout,
                blocks=blocks,
                device=device,
                debug=debug,
            )
            for (plan, graph), layout in zip(pairs, layouts, strict=True)
        ]
    except BaseException:
        blocks.close(after=before)
        raise
    if debug and before is None:
        poison(blocks.arena)
    return found


def _check_executable(graph: StepGraph) -> None:
    if not is_executable(graph):
        raise GraphFileError(
            "this step graph was captured by a version of Penstock whose graphs do not count all "
            "workspace: capture the step again with penstock.capture, and plan that"
        )


def _check_alignment(plan: Plan) -> None:
    for placement in plan.placements:
        if placement.offset % ALIGNMENT_BYTES and placement.num_bytes:
            raise PlanError(
                f"value {placement.value} lies at byte {placement.offset} of the arena; operators "
                f"run at multiples of {ALIGNMENT_BYTES} only: plan the step with penstock.plan",
                rule="alignment",
            )
