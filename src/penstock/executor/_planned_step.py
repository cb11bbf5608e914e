"""Planned steps: the object that `bind` and `fit` return."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import torch

from penstock.errors import PenstockError, StoreError
from penstock.executor.run.binder import Binder
from penstock.executor.run.execution import Execution
from penstock.executor.run.interrupts import end_early_on_interrupt
from penstock.executor.run.planning import CachedPlanner, PlannedGraph
from penstock.executor.run.refinement import Refinement
from penstock.executor.run.report import ExecutionReport
from penstock.executor.run.shadow import Shadow
from penstock.executor.state.initial import Initialization
from penstock.planner import Plan


class PlannedStep:
    """A training step that runs as planned; `bind` and `fit` make it.

    Between steps the model's parameters and buffers and the optimizer's state view the plan's
    places for them, in the arena, host memory or the file: reading and changing them,
    `state_dict()`, evaluation and checkpoints work as always.

    Usable in a `with` block, which closes it.

    Attributes:
        plan: The plan.
    """

    def __init__(
        self,
        binder: Binder,
        planned: Plan | list[PlannedGraph],
        initialization: Initialization,
        shadow: Shadow,
        planner: CachedPlanner | None = None,
    ) -> None:
        # A plan without a graph is for the step that is captured with the next batch.
        self._planned = [] if isinstance(planned, Plan) else planned
        self.plan = planned if isinstance(planned, Plan) else planned[0].plan
        self._binder = binder
        self._initialization = initialization
        self._shadow = shadow
        self._planner = planner
        self._refinement = None if planner is None else Refinement(planner.time_limit, planner.keep)
        self._lock = threading.RLock()  # threads take turns, step by step
        self._executions: list[Execution] = []
        self._current: Execution | None = None
        self._closed = False
        self._past_reports: list[ExecutionReport] = []  # of executions that have ended
        if self._planned:
            self._start(binder.bind(self._planned))

    def __call__(self, batch: Any) -> torch.Tensor:
        """Take one training step.

        Args:
            batch: A batch of a planned form.

        Returns:
            The loss, detached.

        Raises:
            ValueError: The batch has another form; nothing has moved.
            NonFiniteLossError: The loss is infinite or NaN; nothing has been updated.
            CaptureError: The program does not do what was captured; nothing has moved.
            UnlikeEagerError: The program does not compute what was captured, as its loss shows;
                nothing has been updated.
            TornStepError: The step failed in the middle of its update; the error names the tensors
                that are lost. After any other error model and optimizer are as before the step.
        """
        with self._lock:
            if self._closed:
                raise PenstockError("this planned step is closed; bind the plan again")
            if not self._executions:
                planned = self._planned or [self._binder.capture_for(self.plan, batch)]
                self._start(self._binder.bind(planned))
            self._refine()
            execution = self._choose_execution(batch)
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
        """Return measurements of the steps so far, next to the plan's predictions.

        Of several plans it is the report of the last one that ran; after `close` its last report.

        Raises:
            PenstockError: There was no step yet.
        """
        if self._current is None and self._past_reports:
            return self._past_reports[-1]
        if self._current is None:
            raise PenstockError("there is nothing to report before the first step")
        return self._current.report(self._shadow)

    def reports(self) -> tuple[ExecutionReport, ...]:
        """Return the reports of all plans that steps have run by; also after `close`.

        A plan whose memory was given back in between, by `release` or `add`, has one for each time.
        """
        running = [each.report(self._shadow) for each in self._executions if each.num_steps]
        return (*self._past_reports, *running)

    def add(self, batch: Any) -> None:
        """Plan for batches of one more form, for a step that `fit` has made.

        Example:
            >>> step = penstock.fit(model, optimizer, short, device_memory="4GiB")  # doctest: +SKIP
            >>> step.add(long)  # doctest: +SKIP

        Args:
            batch: A batch of that form; of accumulated micro-batches there may be another number.

        Raises:
            PenstockError: The step is closed, or not made by `fit`.
            InfeasibleError: No plan fits the budgets; the step is as before.
            CaptureError, ValueError: The step cannot be captured with this batch, as in
                `penstock.fit`; the step is as before.
        """
        if self._planner is None or self._closed:
            raise PenstockError("only an open step that penstock.fit has made takes further forms")
        self.release()
        extra = self._planner.make_plan(self._binder.capture(batch, is_extra=True))
        self._planned = self._planner.fit_one_arena([*self._planned, extra])

    def release(self) -> None:
        """Give model and optimizer memory of their own until the next step, which takes all again.

        For ordinary steps in between that need the memory. Not for a model from the meta device.

        Raises:
            PenstockError: The model was on the meta device; it may not fit anywhere else.
        """
        if self._initialization.is_needed:
            raise PenstockError(
                "the model was on the meta device and lies where its plan has it: a planned step "
                "of it cannot give its memory back; pass all batches to "
                "penstock.fit(extra_batches=[...])"
            )
        with self._lock:
            self._leave()

    def close(self) -> None:
        """Give model and optimizer memory of their own, and return everything else. Further calls
        do nothing.

        Of a model that was on the meta device everything stays where it is, as it may not fit
        anywhere else, and the memory is kept as long as the model is.
        """
        with self._lock:
            self._closed = True
            self._leave()

    def __enter__(self) -> PlannedStep:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, executions: list[Execution]) -> None:
        self._executions = executions
        self._current = executions[0]
        self._current.take_turn()
        if self._initialization.is_needed:
            self._initialization.run(self._current.memory.evict_pages)
            self._current.state.copy_all_homes()  # only the homes have first numbers
        self._finalizer = weakref.finalize(self, _stop, executions)

    def _leave(self) -> None:
        """Move the user's tensors to memory of their own, and end the executions."""
        executions, self._executions = self._executions, []
        current, self._current = self._current, None
        if current is None:
            return
        self._end(executions, current)
        current.state.move_out()
        current.memory.blocks.close()

    def _end(self, executions: list[Execution], current: Execution) -> None:
        """Wait for transfers, end threads, and keep the reports."""
        self._finalizer.detach()
        try:
            current.drain()
        finally:
            _stop(executions)
        ran = sorted((each for each in executions if each.num_steps), key=lambda e: e is current)
        # The one that ran last is the last.
        self._past_reports += [each.report(self._shadow) for each in ran]

    def _choose_execution(self, batch: Any) -> Execution:
        first, *others = dict.fromkeys((self._current or self._executions[0], *self._executions))
        fitting = [each for each in (first, *others) if others and each.accepts(batch)]
        # Of those for any mask and those for full ones the latter, which branch as eager steps do.
        return max(fitting, key=lambda each: each.num_full_masks, default=first)

    def _refine(self) -> None:
        """Go on by another plan if the first steps of the current one suggest it."""
        current = self._current
        refinement = self._refinement
        if refinement is None or current is None or not current.is_measured:
            return
        index = self._executions.index(current)
        plan, graph = self._planned[index]
        if refinement.is_decided(graph):
            return
        held = {block.tier: block.num_bytes for block in current.memory.blocks}
        with end_early_on_interrupt():
            found = refinement.decide(plan, graph, current.report(self._shadow), held)
        if found is not plan:
            self._planned[index] = PlannedGraph(found, graph)
            try:
                self._exchange(index)
            except StoreError as error:  # the file has no room for both
                self._planned[index] = PlannedGraph(plan, graph)
                refinement.keep_old(graph, str(error))
            del current
            gc.collect()  # executions are cycles, and keep their memory alive

    def _exchange(self, index: int) -> None:
        """Bind the plans anew, in the memory of the current ones as far as it is large enough."""
        before, current = self._executions, self._current
        assert current is not None
        executions = self._binder.bind(self._planned, current.memory.blocks)
        with current.interrupts:
            self._end(before, current)
            self._executions, self._current = executions, executions[index]
            self._current.take_turn()
            current.state.unbind()
            current.memory.blocks.close(after=self._current.memory.blocks)
            self._finalizer = weakref.finalize(self, _stop, executions)
        current.interrupts.check()


def _stop(executions: list[Execution]) -> None:
    for execution in executions:
        execution.stop()
