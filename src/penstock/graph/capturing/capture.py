"""`capture`: forward, backward and optimizer update of one training step, recorded as a graph.

The step runs once, imperatively, on fake tensors: no memory, no arithmetic. The operators that
torch would have run are recorded (`recorder`), and become a graph (`_graph_builder`). Then forward
and backward run a second time, to compare (`_recapture`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from penstock.compat.autocast import outside_autocast
from penstock.compat.fake_tensors import FakeTensor, new_mode
from penstock.errors import CaptureError
from penstock.graph.batches import (
    constants_in,
    describe_calls,
    is_full_mask,
    replace_tensors,
    tensors_in,
)
from penstock.graph.capturing._conditions import (
    isolate_capture,
    name_optimizer_in_errors,
    patch_transformers_checks,
    refuse_other_draws,
    trace_batch_counts,
    trace_random_state,
)
from penstock.graph.capturing._fake_results import run_nested
from penstock.graph.capturing._graph_builder import build_graph
from penstock.graph.capturing._kept_tensors import materialize_constants
from penstock.graph.capturing._model import (
    InitialPlaces,
    RunningModules,
    adopt_model,
    parameter_names,
    refuse_lost_changes,
)
from penstock.graph.capturing._optimizer import OptimizerCopy
from penstock.graph.capturing._program_lines import ProgramLines
from penstock.graph.capturing._recapture import CaptureRecord, refuse_counting
from penstock.graph.capturing.fake_tensors import FakeTensors
from penstock.graph.capturing.module_state import (
    ModuleSnapshot,
    autocast_of,
    evaluation_modules,
    frozen_parameters,
)
from penstock.graph.capturing.python_numbers import find_again, find_numbers
from penstock.graph.capturing.recorder import Recorder
from penstock.graph.capturing.step_program import (
    StepProgram,
    check_accumulation,
    check_model,
    check_optimizer,
    check_program,
    find_device_type,
)
from penstock.graph.executable import make_executable
from penstock.graph.fsdp.capture import FsdpCapture
from penstock.graph.fsdp.shards import ShardedModel
from penstock.graph.step_graph import Kind, StepGraph, TensorView


def capture(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    before_step: Callable[[], object] | None = None,
    accumulate: int | None = None,
) -> StepGraph:
    """Record one training step as a graph: forward, backward and optimizer update.

    Nothing is computed and no memory is taken, so the model may be of any size and may be on the
    meta device. Model, optimizer and random state are as before afterwards.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> graph = capture(
        ...     model, optimizer, (torch.zeros(3, 4),), loss=lambda output, batch: output.sum()
        ... )
        >>> [operator.target for operator in graph.operators][:2]
        ['aten.addmm.default', 'aten.sum.default']

    Args:
        model: An ordinary module, in training mode if the step is to train. Parameters on the meta
            device count as where the others are; if all are there, as where the batch is. For a
            module that `fully_shard` was called with, the graph is that of this rank.
        optimizer: A stock optimizer of its parameters. State that it does not have yet is as from
            the second step on.
        batch: The argument of the model: a mapping as `model(**batch)`, a tuple as
            `model(*batch)`, anything else as `model(batch)`. Only shapes and dtypes of its tensors
            matter; other values become part of the graph.
        loss: `loss(output, batch)` returns the scalar tensor that is minimised; by default the
            output's `.loss`, or the output itself if that is a scalar.
        before_step: Called between backward and the optimizer's step, to change gradients:
            `lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`. It has to ask the
            model for its parameters when it is called.
        accumulate: The batch is a list of this many micro-batches, each of which runs forward and
            backward, with its loss divided by their number; one update follows, and the step's
            loss is the sum. None: the batch is one.

    Returns:
        The step as plain data, with the costs of its operators in `flops`, `bytes_read` and
        `bytes_written`; ready for `penstock.plan`.

    Raises:
        CaptureError: The step depends on the data beyond values of tensors, or does something else
            that a graph cannot hold; the message names the line.
        TypeError: An argument is of the wrong type, or the loss is no scalar tensor.
        ValueError: The batch has not as many micro-batches as `accumulate` says.
    """
    return capture_program(StepProgram(model, batch, loss, before_step, accumulate), optimizer)


def capture_program(program: StepProgram, optimizer: torch.optim.Optimizer) -> StepGraph:
    """Record a step as `capture` does, of which `program` has the arguments."""
    if torch.is_inference_mode_enabled():
        raise CaptureError(
            "a step is captured in torch.inference_mode(), in which nothing has gradients: leave "
            "it around the capture, or enter torch.inference_mode(False)"
        )
    if torch.is_anomaly_check_nan_enabled() and torch.is_anomaly_enabled():
        raise CaptureError(
            "a step is captured under torch.autograd.set_detect_anomaly(True), which looks at the "
            "numbers of each gradient: leave it around the capture, or pass check_nan=False"
        )
    check_program(program)
    check_optimizer(optimizer)
    check_accumulation(program.batch, program.accumulate)
    return make_executable(record_step(program, optimizer))


def record_step(program: StepProgram, optimizer: torch.optim.Optimizer) -> StepGraph:
    """Record a step as `capture` does, without the workspace that its execution adds."""
    kept: list[bool] = []
    try:
        return _record_step(program, optimizer, kept)
    except CaptureError:
        if not any(kept):
            raise
    return _record_step(program, optimizer, [])  # what was kept is there now, as after any call


def _record_step(
    program: StepProgram, optimizer: torch.optim.Optimizer, kept: list[bool]
) -> StepGraph:
    """Record a step; add to `kept` whether its second call has met constants of the first."""
    model, batch, loss = program.model, program.batch, program.loss
    root = nn.ModuleDict(program.roots())
    sharded = ShardedModel(model, loss)
    local = sharded.locals_of(optimizer)
    mode = new_mode(run_nested)
    device = find_device_type(root, batch)
    tracer = _Tracer(program, root, sharded, FakeTensors(mode, torch.device(device), local))
    lines = ProgramLines()
    with isolate_capture(), refuse_other_draws(lines), lines.note(), mode:
        recorder, tensors = tracer.begin()
        copy = OptimizerCopy(optimizer, tracer.fakes, recorder, parameter_names(root))
        with tracer.materialize(recorder, kept), tracer.fakes.replace_in(root) as before:
            places = InitialPlaces(root)
            with tracer.activate(recorder):
                result, fsdp = tracer.run(recorder)
                record = CaptureRecord(recorder, program, is_sharded=bool(sharded.groups))
                with name_optimizer_in_errors(optimizer), outside_autocast(device):
                    copy.step()
                fsdp.check(copy.state)
                places.write_back()
                refuse_lost_changes(before, tracer.modules, recorder, lines)
            loss_view = recorder.storages.view(result)
            before.restore_tensors(recorder.is_constant)
            places.restore()
            numbers = find_numbers(program.callables())
            tracer.repeat(record, before)
            refuse_counting(numbers, lambda: tracer.repeat(record, before))
        metadata = {
            "model": type(model).__qualname__,
            "optimizer": type(optimizer).__qualname__,
            "torch": torch.__version__,
            "hyper_parameters": copy.constants,
            "initial_state": copy.initial_state,
            "batch_constants": constants_in(batch, "batch"),
            "calls": describe_calls(batch, program.accumulate),
            "evaluation": evaluation_modules(program.roots()),
            "frozen": frozen_parameters(program.roots()),
            "autocast": autocast_of(device),
            "full_masks": sorted(recorder.full_masks),
        }
        graph = build_graph(recorder, tensors | copy.tensors, loss_view, device, metadata)
    record.numbers = find_again(numbers, program.callables())
    tracer.refuse_shared_memory(graph)
    return dataclasses.replace(graph, captured=record)


def verify(record: CaptureRecord, program: StepProgram, device: str) -> None:
    """Call an unsharded program once more on fake tensors, and compare its operators.

    Args:
        record: The `captured` of its graph, which was captured in this process.
        program: The program with any batch of the same form; without `before_step` only the
            operators before it are compared.
        device: Type of the device that the graph is for.

    Raises:
        CaptureError: The program does something else now; the message names the line and the
            difference.
    """
    if not record.has_before_step:
        program = program._replace(before_step=None)
    check_model(program.model)  # it may have got hooks
    root = nn.ModuleDict(program.roots())
    mode = new_mode(run_nested)
    fakes = FakeTensors(mode, torch.device(device), below=device != "cpu")
    tracer = _Tracer(program, root, ShardedModel(program.model, program.loss), fakes)
    with isolate_capture(), mode:
        recorder, _ = tracer.begin()  # has fake tensors made for lists and attributes, too
        with fakes.replace_in(root):
            tracer.run_again(recorder, record)


class _Tracer:
    """Calls of a program on fake tensors, each under a recorder of its own."""

    def __init__(
        self, program: StepProgram, root: nn.Module, sharded: ShardedModel, fakes: FakeTensors
    ) -> None:
        self.fakes = fakes
        self.modules = RunningModules(root)
        self._program, self._root, self._sharded = program, root, sharded
        self._num_calls = 0
        held = (*root.parameters(), *root.buffers())
        self._replaced = [fakes.local.get(id(each), each) for each in held]

    def refuse_shared_memory(self, graph: StepGraph) -> None:
        """Raise if a tensor of the batch lies in the memory of one that the step changes.

        Raises:
            CaptureError: It does. Binding moves that one, and the batch's would be left behind.
        """
        held = (*self._root.named_parameters(), *self._root.named_buffers())
        batch = [
            (path, _byte_range(each)) for path, each in tensors_in(self._program.batch, "batch")
        ]
        for name, tensor in held:
            storage, memory = graph.storage(graph.tensors[name].value), _byte_range(tensor)
            if storage.initial == storage.final:
                continue
            for path, other in batch:
                if memory and other and memory[0] < other[1] and other[0] < memory[1]:
                    raise CaptureError(
                        f"{path} lies in the memory of {name!r}, which the step changes, and would "
                        "not follow it to where the plan has it: pass a copy "
                        "(tensor.detach().clone()), or let the model read its tensor itself"
                    )

    def begin(self) -> tuple[Recorder, dict[str, TensorView]]:
        """Return a recorder with the tensors that a step begins with, and these by name."""
        recorder = Recorder(self.modules.current, self._replaced, self.fakes.device.type)
        tensors = adopt_model(self._root, recorder, self.fakes)
        # Each in memory of its own: inputs that are their own labels today may be others tomorrow.
        batch = replace_tensors(self._program.batch, "batch", self.fakes.make_separate)
        real = dict(tensors_in(self._program.batch, "batch"))
        for name, tensor in tensors_in(batch, "batch"):
            on_device = not recorder.is_on_host(tensor)
            tensors[name] = recorder.adopt(tensor, name, Kind.INPUT, on_device=on_device)
            if is_full_mask(real[name]):
                recorder.adopt_mask(tensor, real[name], name)
        self._fake_program = self._program._replace(batch=batch)
        return recorder, tensors

    @contextlib.contextmanager
    def materialize(self, recorder: Recorder, kept: list[bool]) -> Iterator[None]:
        """Give the constants that the program keeps in the block their numbers, at its end.

        Add to `kept` whether there are any and the program was called a second time.
        """
        try:
            yield
        finally:
            kept.append(materialize_constants(recorder) and self._num_calls > 1)

    @contextlib.contextmanager
    def activate(self, recorder: Recorder) -> Iterator[None]:
        """Let a recorder record the operators that run in the block."""
        with (
            trace_random_state(recorder),
            patch_transformers_checks(recorder),
            trace_batch_counts(recorder),
            self.modules,
            recorder,
        ):
            yield

    def run(self, recorder: Recorder) -> tuple[torch.Tensor, FsdpCapture]:
        """Call the program; return its loss, and the capture of its shards."""
        self._num_calls += 1
        torch.clear_autocast_cache()  # casts of parameters belong to each call
        fsdp = FsdpCapture(self._sharded, self.fakes, recorder)
        return self._fake_program.run(recorder, self._root, fsdp), fsdp

    def repeat(self, record: CaptureRecord, before: ModuleSnapshot) -> None:
        """Call the program as `run_again` does, and restore tensors and what is constant."""
        recorder, _ = self.begin()
        self.run_again(recorder, record)
        before.restore_tensors(recorder.is_constant)

    def run_again(self, recorder: Recorder, record: CaptureRecord) -> None:
        """Call the program once more, and compare its operators with those of a capture."""
        to_gradients = record.has_before_step and self._program.before_step is None
        with record.compare(recorder, to_gradients=to_gradients), self.activate(recorder):
            self.run(recorder)


def _byte_range(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return where a tensor's memory begins and ends; None where it has none of its own."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return None
    try:
        begin = tensor.data_ptr()
    except (NotImplementedError, RuntimeError):  # a subclass, a sparse tensor
        return None
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    reach = sum((length - 1) * step for length, step in pairs) + 1
    return (begin, begin + reach * tensor.element_size()) if begin and tensor.numel() else None
