"""Planned steps: the object that is called with batches, and `bind` and `fit`, which make it."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from penstock.errors import PenstockError, StoreError
from penstock.executor.run.binder import Binder
from penstock.executor.run.execution import Execution
from penstock.executor.run.interrupts import end_early_on_interrupt
from penstock.executor.run.planning import CachedPlanner, PlannedGraph, Refinement
from penstock.executor.run.report import ExecutionReport
from penstock.executor.run.shadow import Shadow
from penstock.executor.state.initial import Initialization, Initializer
from penstock.graph import StepGraph
from penstock.graph.capturing.step_program import StepProgram, check_optimizer, check_program
from penstock.memory import FileStore, MachineProfile, Uncopied
from penstock.planner import Found, Plan
from penstock.units import parse_bytes

if TYPE_CHECKING:
    from penstock.partitioner import Partition


def bind(
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    graph: StepGraph | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    before_step: Callable[[], object] | None = None,
    accumulate: int | None = None,
    extra_plans: Sequence[tuple[Plan, StepGraph]] = (),
    initialize: Initializer | None = None,
    store: FileStore | str | os.PathLike[str] | None = None,
    debug: bool = False,
    shadow: int | None = None,
) -> PlannedStep:
    """Make a training step that runs exactly as planned.

    One arena of the planned bytes is allocated, in which every value has its planned offset; values
    are offloaded to host memory or a file behind the computation. The results are those of
    `penstock.graph.run`, bit for bit.

    Example:
        >>> graph = penstock.capture(model, optimizer, batch)  # doctest: +SKIP
        >>> plan = penstock.plan(graph, device_memory="4GiB", store="/mnt/nvme")  # doctest: +SKIP
        >>> with penstock.bind(plan, model, optimizer, store="/mnt/nvme") as step:  # doctest: +SKIP
        ...     for batch in batches:
        ...         loss = step(batch)

    Args:
        plan: A plan for the step of this model and optimizer.
        model: The model; its parameters and buffers move to the plan's places.
        optimizer: Its optimizer; state that does not exist yet is made.
        graph: The step that was planned. None: it is captured with the first batch, which also
            proves that the plan is for this model, optimizer and batch.
        loss: `loss(output, batch)`, as given to `penstock.capture`. None: the output has the loss.
        before_step: Called between backward and the optimizer's step, as given to
            `penstock.capture`; for a step without `graph`, and for `shadow`.
        accumulate: The number of micro-batches in a batch, as given to `penstock.capture`; for a
            step without `graph`.
        extra_plans: Plans for batches of other forms, with their graphs. All plans share one arena,
            one block of host memory and one extent of the file, as large as the largest needs; each
            step runs the plan that its batch fits, after parameters and state have moved to that
            plan's places. State below the device stays where it is.
        initialize: First numbers of parameters and buffers on the meta device, which are made in
            the plan's places: a function that is called with each module that has such, or
            safetensors files with the model's names. None: the module's `reset_parameters`.
        store: Directory or `FileStore` of the file tier; needed if the plan uses it.
        debug: Overwrite bytes that are freed, and compare bytes that come back with those that
            left.
        shadow: Compare every so many-th step with the program itself: its operators with those that
            were captured, and its loss, called eagerly on the same numbers, with the step's. None:
            the first two steps, and then at distances that double; the eager call only if the
            budget has room for it (the report says so). 0: never.

    Returns:
        The step: `loss = step(batch)`.

    Raises:
        PlanError: The plan is wrong, or for another graph (rule `"graph"`).
        GraphFileError: The graph is not of this model and optimizer; nothing has moved.
        CaptureError: The model is sharded (FSDP2) in a way that a graph does not hold; or there are
            several ranks, and the step averages no gradients over them.
        StoreError: The store cannot be used, or has not enough room.
        TypeError, ValueError: An argument is wrong; the message names it.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a Plan, from penstock.plan or Plan.load; got {plan!r}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module; got {type(model).__name__}")
    check_optimizer(optimizer)
    if extra_plans and graph is None:
        raise ValueError(
            "extra_plans=[...] needs graph=: the graphs of all plans, to tell batches apart"
        )
    file_bytes = max(each.peak_file_bytes for each in [plan, *(extra for extra, _ in extra_plans)])
    if store is None and file_bytes:
        raise ValueError(
            f"store=None: the plan keeps up to {file_bytes} bytes in a file; pass the directory"
        )
    file_store = None if store is None else FileStore.of(store)
    program = StepProgram(model, None, loss, before_step, accumulate)
    binder = Binder(program=program, optimizer=optimizer, store=file_store, debug=debug)
    initialization = Initialization([*program.roots().values()], initialize)
    checks = Shadow(program, shadow)
    if graph is None:
        return PlannedStep(binder, plan, initialization, checks)
    planned = [PlannedGraph(*each) for each in [(plan, graph), *extra_plans]]
    return PlannedStep(binder, planned, initialization, checks)


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    *,
    device_memory: int | str,
    host_memory: int | str | None = None,
    store: FileStore | str | os.PathLike[str] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    before_step: Callable[[], object] | None = None,
    accumulate: int | None = None,
    extra_batches: Sequence[Any] = (),
    initialize: Initializer | None = None,
    machine: MachineProfile | str | None = None,
    split_products: bool = False,
    time_limit: float = 60,
    seed: int = 0,
    progress: Callable[[Found], None] | None = None,
    cache: bool = True,
    debug: bool = False,
    shadow: int | None = None,
    partition: Partition | None = None,
) -> PlannedStep:
    """Make a training step that keeps within a memory budget: capture, plan, check and bind.

    If the first steps take more than a quarter longer than planned, the step is planned again with
    the times that they have shown, once, before the seventh; the faster plan of the two is kept.

    Example:
        >>> step = penstock.fit(  # doctest: +SKIP
        ...     model, optimizer, batch, device_memory="4GiB", store="/mnt/nvme"
        ... )
        >>> for batch in batches:  # doctest: +SKIP
        ...     loss = step(batch)
        >>> print(step.report())  # doctest: +SKIP

    Args:
        model: The model; its parameters and buffers move to the plan's places.
        optimizer: Its optimizer; state that does not exist yet is made.
        batch: A batch; all batches must have its shapes and dtypes, or those of one in
            `extra_batches`.
        device_memory: Bytes, or a size such as `"8GiB"`, for parameters, optimizer state,
            activations and the operators' workspace.
        host_memory: Bytes of the host tier: RAM beside that budget.
        store: Directory or `FileStore` of the file tier.
        loss: `loss(output, batch)`, which returns a scalar. None: the output has the loss.
        before_step: Called without arguments between backward and the optimizer's step, for example
            to clip gradients.
        accumulate: A batch is a list of this many micro-batches, whose gradients are added up.
        extra_batches: Batches of other shapes, or lists of another number of micro-batches; each
            has a plan, and all share the memory. `PlannedStep.add` takes more of them later.
        initialize: First numbers of parameters and buffers on the meta device: a function that is
            called with each module that has such, or safetensors files with the model's names.
            None: the module's `reset_parameters`.
        machine: The machine whose times plans are based on: a name of `penstock.memory.machine` or
            a profile. None: this machine, whose links are probed and on which each distinct
            operator runs a few times.
        split_products: Whether products of matrices may run in slices, as `penstock.plan` has it:
            the logits of a large vocabulary. Results then differ by rounding, and so may losses
            from those that `shadow` compares them with.
        time_limit: Seconds that planning may take. Planning again may take as many, but no more
            than 10 steps could save.
        seed: Seed of the planner's random numbers.
        progress: Called with each improvement of the plan.
        cache: Whether plans are kept, and used again for the same step, budget and machine.
        debug: Overwrite bytes that are freed, and compare bytes that come back with those that
            left.
        shadow: Compare every so many-th step with the program itself, as `bind` describes. None:
            the first two steps, and then at distances that double. 0: never.
        partition: A split of the step over all ranks of this process group, one of which calls
            this in each process, as torchrun starts them. Each rank plans its own part within
            `device_memory`. `batch` is that of all ranks together, on each of them, in steps too;
            model and optimizer are distributed as by `penstock.partitioner.apply`. Steps are not
            compared with the program.

    Returns:
        The step: `loss = step(batch)`.

    Raises:
        InfeasibleError: No plan fits the budgets; the message names a budget that would do.
        CaptureError: The step depends on the data beyond values of tensors.
        StoreError: The store cannot be used, or has not enough room.
        PlanError, GraphFileError: The step cannot be planned or bound, as in `penstock.plan` and
            `bind`.
        TypeError, ValueError: An argument is wrong; the message names it.
    """
    file_store = None if store is None else FileStore.of(store)
    planner = CachedPlanner(
        device_memory=_parse_optional(device_memory, "device_memory"),
        host_memory=_parse_optional(host_memory, "host_memory"),
        store=file_store,
        machine=machine,
        split_products=split_products,
        time_limit=time_limit,
        seed=seed,
        progress=progress,
        cache=cache,
    )
    program = StepProgram(model, None, loss, before_step, accumulate)
    binder = Binder(program=program, optimizer=optimizer, store=file_store, debug=debug)
    if partition is not None:
        _check_partitioned(extra_batches, shadow)
        binder = binder.distribute(partition, batch)
        assert binder.partitioned is not None
        planned = [planner.make_plan(binder.partitioned.graph)]
        return PlannedStep(binder, planned, Initialization([], None), Shadow(program, 0), planner)
    checks = Shadow(program, shadow)
    check_program(program)
    initialization = Initialization([*program.roots().values()], initialize)
    planned = [planner.make_plan(binder.capture(batch))]
    for each in extra_batches:
        planned.append(planner.make_plan(binder.capture(each, is_extra=True)))
    return PlannedStep(binder, planner.fit_one_arena(planned), initialization, checks, planner)


def _check_partitioned(extra_batches: Sequence[Any], shadow: int | None) -> None:
    if extra_batches:
        raise ValueError(
            "extra_batches=[...] with partition=: a partition is for batches of one form; leave "
            "them out, and pad batches to that form"
        )
    if shadow:
        raise ValueError(
            f"shadow={shadow!r} with partition=: no rank holds the whole model to compare a step "
            "with; leave it out, or pass shadow=0"
        )


def _parse_optional(size: int | str | None, name: str) -> int | None:
    return None if size is None else parse_bytes(size, name=name)


class PlannedStep(Uncopied):
    """A training step that runs as planned; `bind` and `fit` make it.

    Between steps the model's parameters and buffers and the optimizer's state view the plan's
    places for them, in the arena, host memory or the file: reading and changing them,
    `state_dict()`, evaluation and checkpoints work as always.

    Usable in a `with` block, which closes it.

    Attributes:
        plan: The plan.
        partitioned: This rank's part of a step over several devices, with the `state_dict()` of a
            checkpoint; None of a step on one.
    """

    instead_of_copies = "save state_dict() of the model and the optimizer, or fit another step"

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
        self.partitioned = binder.partitioned
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
            RankError: A collective has failed, as when another rank has ended; nothing has been
                updated.
            TornStepError: The step failed in the middle of its update; the error names the tensors
                that are lost. After any other error model and optimizer are as before the step.
        """
        with self._lock:
            if self._closed:
                raise PenstockError("this planned step is closed; bind the plan again")
            if not self._executions:
                planned = self._planned or [PlannedGraph(self.plan, self._binder.capture(batch))]
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
            PenstockError: The step is closed, not made by `fit`, or over several devices.
            InfeasibleError: No plan fits the budgets; the step is as before.
            CaptureError, ValueError: The step cannot be captured with this batch, as in
                `penstock.fit`; the step is as before.
        """
        if self._planner is None or self._closed:
            raise PenstockError("only an open step that penstock.fit has made takes further forms")
        if self._binder.partitioned is not None:
            raise PenstockError(
                "a step over several devices takes batches of the form that was partitioned only"
            )
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
        self._finalizer = weakref.finalize(self, _stop, executions)
        if self._initialization.is_needed:
            try:
                self._initialization.run(self._current.memory.evict_pages)
            except BaseException:
                self._current.state.undo()
                self._leave()
                raise
            self._current.state.copy_all_homes()  # only the homes have first numbers

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
