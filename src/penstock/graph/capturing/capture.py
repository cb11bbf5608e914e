"""`capture`: forward, backward and optimizer update of one training step, written down.

The step runs once, imperatively, on fake tensors: no memory, no arithmetic. What torch would have
run is recorded (`_recorder`), then put in order (`_finish`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import module as torch_modules

from penstock.errors import CaptureError, PenstockError
from penstock.graph._user_line import is_raised_by_torch, line_of
from penstock.graph.batches import constants_in, is_full_mask, tensors_in
from penstock.graph.capturing._graph_builder import finish
from penstock.graph.capturing._optimizer import OptimizerCopy
from penstock.graph.capturing._program_lines import NotedLines
from penstock.graph.capturing._random_state import no_other_draws, traced_random_state
from penstock.graph.capturing._recapture import Captured
from penstock.graph.capturing.fake_tensors import StandIns
from penstock.graph.capturing.recorder import Recorder
from penstock.graph.capturing.step_program import StepProgram, check_accumulation
from penstock.graph.executable import make_executable
from penstock.graph.fsdp.capture import Gathering
from penstock.graph.fsdp.shards import ShardedModel
from penstock.graph.modes import autocast_of, evaluation_modules, frozen_parameters
from penstock.graph.step_graph import Kind, StepGraph, TensorView

_Places = list[tuple[torch.Tensor, torch.Tensor]]


def capture(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    before_step: Callable[[], object] | None = None,
    accumulate: int | None = None,
) -> StepGraph:
    """Write down one training step as a graph: forward, backward and optimizer update.

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
            device are taken to be where the others are; if all are there, where the batch is. Of a
            module that `fully_shard` was called with the graph is that of this rank.
        optimizer: A stock optimizer of its parameters. State that it does not have yet is taken as
            it is from the second step on.
        batch: What the model is called with: a mapping as `model(**batch)`, a tuple as
            `model(*batch)`, anything else as `model(batch)`. Only shapes and dtypes of its tensors
            matter; other values become part of the graph.
        loss: `loss(output, batch)` returns the scalar tensor that is minimised; by default the
            output's `.loss`, or the output itself if that is a scalar.
        before_step: Called between backward and the optimizer's step, for what changes gradients:
            `lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`. It has to ask the
            model for its parameters when it is called.
        accumulate: The batch is a list of this many micro-batches, each of which runs forward and
            backward, with its loss divided by their number; one update follows, and the step's
            loss is the sum. None: the batch is one.

    Returns:
        The step as plain data; with what its operators cost in `flops`, `bytes_read` and
        `bytes_written`.

    Raises:
        CaptureError: The step depends on the data beyond values of tensors, or does something else
            that a graph cannot hold; the message names the line.
        TypeError: An argument is of the wrong type, or the loss is no scalar tensor.
        ValueError: The batch has not as many micro-batches as `accumulate` says.
    """
    _check(model, optimizer)
    check_accumulation(batch, accumulate)
    program = StepProgram(model, batch, loss, before_step, accumulate)
    modules = program.roots()
    root = nn.ModuleDict(modules)
    sharded = ShardedModel(model, loss)
    names = _ModuleNames(root)
    local = sharded.locals_of(optimizer)
    mode = FakeTensorMode()
    device = _device_type(root, batch)
    stand_ins = StandIns(mode, torch.device(device), local)
    tried = _Trial(program, root, names, sharded, stand_ins)
    noted = NotedLines()
    with contextlib.ExitStack() as stack:
        watched = no_other_draws(noted), noted.noting()
        for each in (_capturing, _no_collection(), _understood(), *watched, mode):
            stack.enter_context(each)
        recorder, tensors = tried.begin()
        copy = OptimizerCopy(optimizer, stand_ins, recorder, _parameter_names(root), mode)
        with stand_ins.inside(root):
            buffers = dict(root.named_buffers(remove_duplicate=False))
            places = _places(root)
            with tried.recorded(recorder):
                result, gathering = tried.run(recorder)
                captured = Captured(recorder, program, is_sharded=bool(sharded.groups))
                with _of_optimizer(optimizer):
                    copy.step()
                gathering.check(copy.state)
                _write_back_buffers(root, buffers)
                _write_back_data(places)
                _refuse_lost_changes(stand_ins.changed_attributes(), names, recorder, noted)
            loss_view = recorder.view(result)
            tried.again(recorder, captured, places)
        tensors |= copy.tensors
        metadata = {
            "model": type(model).__qualname__,
            "optimizer": type(optimizer).__qualname__,
            "torch": torch.__version__,
            "hyper_parameters": copy.constants,
            "initial_state": copy.initial_state,
            "batch_constants": constants_in(batch, "batch"),
            "evaluation": evaluation_modules(modules),
            "frozen": frozen_parameters(modules),
            "autocast": autocast_of(device),
            "full_masks": sorted(recorder.full_masks),
        }
        graph = finish(recorder, tensors, loss_view, device, metadata)
    return dataclasses.replace(make_executable(graph), captured=captured)


def verify(captured: Captured, program: StepProgram, device: str) -> None:
    """Call a program once more on stand-ins, and compare what runs with what was captured.

    Args:
        captured: Of a graph that was captured in this process; of an unsharded model.
        program: The user's program, as it was given to `capture`, with any batch of the same form;
            without `before_step` only what comes before that is compared.
        device: Type of the device that the graph is for.

    Raises:
        CaptureError: The program does something else now; the message says at which line, and what.
    """
    if not captured.has_before_step or program.before_step is None:
        program = program._replace(before_step=None)
    root = nn.ModuleDict(program.roots())
    names = _ModuleNames(root)
    mode = FakeTensorMode()
    stand_ins = StandIns(mode, torch.device(device), below=device != "cpu")
    tried = _Trial(program, root, names, ShardedModel(program.model, program.loss), stand_ins)
    to_gradients = captured.has_before_step and program.before_step is None
    with _capturing, _no_collection(), _understood(), mode:
        recorder, _ = tried.begin()
        with stand_ins.inside(root):
            comparison = captured.compare(recorder, to_gradients=to_gradients)
            with tried.recorded(recorder):
                tried.run(recorder)
            comparison.end()


class _Trial:
    """Calls of a program on stand-ins, each under a recorder of its own.

    Args:
        program: The program.
        root: Its modules.
        names: What knows which of them is running.
        sharded: Shards of the model.
        stand_ins: What stands for its tensors.
    """

    def __init__(
        self,
        program: StepProgram,
        root: nn.Module,
        names: _ModuleNames,
        sharded: ShardedModel,
        stand_ins: StandIns,
    ) -> None:
        self._program, self._root, self._names = program, root, names
        self._sharded, self._stand_ins = sharded, stand_ins
        held = (*root.parameters(), *root.buffers())
        self._replaced = [stand_ins.local.get(id(each), each) for each in held]

    def begin(self) -> tuple[Recorder, dict[str, TensorView]]:
        """Make a recorder that knows what a step begins with; return it with these tensors."""
        recorder = Recorder(self._names.current, self._replaced)
        tensors = _adopt_model(self._root, recorder, self._stand_ins)
        batch = self._stand_ins.in_batch(self._program.batch, "batch")
        real = dict(tensors_in(self._program.batch, "batch"))
        for name, tensor in tensors_in(batch, "batch"):
            tensors[name] = recorder.adopt(tensor, name, Kind.INPUT)
            if is_full_mask(real[name]):
                recorder.note_mask(tensor, real[name], name)
        self._fake = self._program._replace(batch=batch)
        return recorder, tensors

    @contextlib.contextmanager
    def recorded(self, recorder: Recorder) -> Iterator[None]:
        """Let a recorder write down what runs in the block."""
        with (
            traced_random_state(recorder),
            _eagers_branches(recorder),
            self._names,
            recorder,
        ):
            yield

    def run(self, recorder: Recorder) -> tuple[torch.Tensor, Gathering]:
        """Call the program; return its loss, and what has gathered parameters."""
        gathering = Gathering(self._sharded, self._stand_ins, recorder)
        return self._fake.run(recorder, self._root, gathering), gathering

    def again(self, first: Recorder, captured: Captured, places: _Places) -> None:
        """Call the program a second time, with its Python as the first call has left it.

        Raises:
            CaptureError: It does something else.
        """
        self._stand_ins.put_tensors_back(first.is_known)
        for tensor, place in places:
            if tensor.untyped_storage()._cdata != place.untyped_storage()._cdata:
                tensor.data = place
        recorder, _ = self.begin()
        comparison = captured.compare(recorder)
        with self.recorded(recorder):
            self.run(recorder)
        comparison.end()


def check_optimizer(optimizer: object) -> None:
    """Refuse what is no optimizer of PyTorch, or wraps one (Accelerate, Lightning).

    Raises:
        TypeError: It is; the message names its class, and the way to the optimizer within.
    """
    kind = type(optimizer).__name__
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer is a {kind} around an optimizer of class {type(inner).__name__}; pass "
            "optimizer.optimizer: a planned step scales and accumulates gradients itself"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer has to be a torch.optim.Optimizer, and is a {kind}")


def _check(model: object, optimizer: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model has to be an nn.Module, and is a {type(model).__name__}")
    check_optimizer(optimizer)
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise CaptureError(
                f"{name or 'model'} is wrapped for data parallelism; pass its .module, with "
                "before_step=lambda: penstock.executor.average_gradients(model)"
            )
        if _is_compiled(module):
            raise CaptureError(
                f"{name or 'model'} is compiled (torch.compile, torch.jit), and what it runs is "
                "not seen; pass the module as it was before"
            )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise CaptureError(
                f"parameter {name!r} has hooks on its gradient, which run Python that a graph does "
                "not hold; remove them, or do their work in the loss or in the optimizer"
            )


def _is_compiled(module: nn.Module) -> bool:
    return (
        isinstance(module, torch.jit.ScriptModule)
        or hasattr(module, "_orig_mod")
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


def _device_type(root: nn.Module, batch: Any) -> str:
    """Where the step runs: where parameters are, or else where the batch is."""
    types = {each.device.type for each in root.parameters()} - {"meta"}
    if len(types) > 1:
        raise CaptureError(
            f"the parameters are on {', '.join(sorted(types))}; a step graph is of one device"
        )
    types = types or {each.device.type for _, each in tensors_in(batch, "batch")} - {"meta"}
    if len(types) > 1:
        raise CaptureError(
            "the parameters are on the meta device, and the batch's tensors on "
            f"{', '.join(sorted(types))}, so the device of the step is not known; move the batch "
            "to one"
        )
    return types.pop() if types else "cpu"


def _parameter_names(root: nn.Module) -> dict[int, str]:
    return {id(each): _plain_name(name) for name, each in root.named_parameters()}


def _plain_name(name: str) -> str:
    """Parameters of the model are called as the model calls them."""
    return name.removeprefix("model.")


def _adopt_model(root: nn.Module, recorder: Recorder, stand_ins: StandIns) -> dict[str, TensorView]:
    tensors = {}
    for kind, named in (
        (Kind.PARAMETER, root.named_parameters(remove_duplicate=False)),
        (Kind.BUFFER, root.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in named:
            fake = stand_ins.of(tensor, name)
            tensors[name] = recorder.adopt(fake, _plain_name(name), kind)
    return tensors


def _write_back_buffers(root: nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    """Bring a buffer that the model replaced by another tensor to where the buffer lies."""
    for name, tensor in root.named_buffers(remove_duplicate=False):
        old = before.get(name)
        if old is None or old is tensor:
            continue
        if (old.shape, old.dtype) != (tensor.shape, tensor.dtype):
            raise CaptureError(
                f"buffer {name!r} becomes {tensor.dtype} of shape {tuple(tensor.shape)} in a step "
                f"and was {old.dtype} of {tuple(old.shape)}; a captured step has static shapes"
            )
        with torch.no_grad():
            old.copy_(tensor)


def _places(root: nn.Module) -> _Places:
    """Each parameter and buffer with a tensor that goes on looking at where it lies now."""
    with torch.no_grad():
        return [(each, each.detach()) for each in (*root.parameters(), *root.buffers())]


def _write_back_data(places: _Places) -> None:
    """Bring what was assigned to a tensor's `.data` to where the tensor lies."""
    for tensor, place in places:
        if tensor.untyped_storage()._cdata != place.untyped_storage()._cdata:
            with torch.no_grad():
                place.copy_(tensor)


def _refuse_lost_changes(
    changes: Iterator[tuple[nn.Module, str, Any, Any]],
    names: _ModuleNames,
    recorder: Recorder,
    noted: NotedLines,
) -> None:
    for module, key, before, now in changes:
        is_number = isinstance(before, bool | int | float) and isinstance(now, bool | int | float)
        if (is_number and before != now) or recorder.has_lifted(before):
            where = noted.assignments.get((id(module), key))
            raise CaptureError(
                (f"{where}: " if where else "")
                + f"the step reads and changes the attribute {key!r} of {names.name_of(module)}, "
                "which planned steps would not: keep it in a buffer (register_buffer); if only the "
                "first call does so, call the model once before"
            )


class _ModuleNames(contextlib.AbstractContextManager):
    """Knows which module is running, by hooks on all modules."""

    def __init__(self, root: nn.Module) -> None:
        self._names = {id(each): _plain_name(name) for name, each in root.named_modules()}
        self._stack: list[str] = [""]
        self._hooks: list[Any] = []

    def current(self) -> str:
        return self._stack[-1]

    def name_of(self, module: nn.Module) -> str:
        return repr(self._names[id(module)] or "model")

    def __enter__(self) -> None:
        thread = threading.get_ident()

        def enter(module: nn.Module, args: Any) -> None:
            if threading.get_ident() == thread:
                self._stack.append(self._names.get(id(module), self._stack[-1]))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() == thread:
                self._stack.pop()

        self._hooks = [
            torch_modules.register_module_forward_pre_hook(enter),
            torch_modules.register_module_forward_hook(leave, always_call=True),
        ]

    def __exit__(self, *exc_info: object) -> None:
        for hook in self._hooks:
            hook.remove()


_capturing = threading.RLock()
"""Held while a step is captured: parts of torch are other ones then, for all threads."""


@contextlib.contextmanager
def _understood() -> Iterator[None]:
    """Say of errors that torch raises where the program was."""
    try:
        yield
    except (PenstockError, TypeError, ValueError):
        raise
    except Exception as error:
        if not (is_raised_by_torch(error) or "supported for tensor subclasses" in str(error)):
            raise
        raise CaptureError(
            f"{line_of(error)}: torch cannot run this on tensors without data, as a capture does "
            f"({type(error).__name__}: {error}){_way_out(error)}"
        ) from error


def _way_out(error: Exception) -> str:
    """Name what models offer instead, where that is known."""
    # Each version of torch words its refusal otherwise; the function that refuses keeps its name.
    calls = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any("grouped_mm" in text for text in (str(error), *calls)):
        return (
            '; models of Transformers with experts take experts_implementation="batched_mm", whose '
            "products torch can run"
        )
    return ""


@contextlib.contextmanager
def _of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Say of errors in the optimizer's step which optimizer it is, and what else there is."""
    try:
        yield
    except CaptureError as error:
        kind = type(optimizer).__name__
        tensors = [
            f"optimizer.param_groups[{number}][{key!r}]"
            for number, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
            if isinstance(value, torch.Tensor)
        ]
        if tensors:
            way = f"{', '.join(tensors)} is a tensor: make it a Python number (schedules change it)"
        else:
            way = (
                "use one whose steps are alike (SGD, Adam, AdamW, Adagrad, RMSprop, NAdam, Adamax, "
                "Adadelta, Rprop, Muon), or this one without a plan under penstock.offload"
            )
        raise CaptureError(f"the optimizer {kind} cannot be captured: {error}; {way}") from error


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python from searching all that was written down for cycles, again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _eagers_branches(recorder: Recorder) -> Iterator[None]:
    """Let Transformers look at values that are known, and so branch as it does in eager mode.

    It asks whether a tensor is fake before it looks, and takes another path with other kernels. In
    half precision that gives other bits, so there it may also look at a batch's masks if they mask
    nothing; the step is then for such batches.
    """
    library = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(library, "is_fake_tensor"):
        yield
        return

    def is_fake_tensor(tensor: object) -> bool:
        known = isinstance(tensor, FakeTensor) and (
            recorder.is_known(tensor) or recorder.follows_full_mask(tensor)
        )
        return isinstance(tensor, FakeTensor) and not known

    with mock.patch.object(library, "is_fake_tensor", is_fake_tensor):
        yield
