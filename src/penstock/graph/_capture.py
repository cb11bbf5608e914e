"""`capture`: forward, backward and optimizer update of one training step, written down.

The step runs once, imperatively, on fake tensors: no memory, no arithmetic. What torch would have
run is recorded (`_recorder`), then put in order (`_finish`).
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import module as torch_modules

from penstock.errors import CaptureError, PenstockError
from penstock.graph._batches import constants_in, tensors_in
from penstock.graph._finish import finish
from penstock.graph._gathering import Gathering
from penstock.graph._modes import autocast_of, evaluation_modules, frozen_parameters
from penstock.graph._optimizer import OptimizerCopy
from penstock.graph._recorder import Recorder
from penstock.graph._shards import ShardedModel
from penstock.graph._stand_ins import StandIns
from penstock.graph._step_graph import Kind, Phase, StepGraph, TensorView
from penstock.graph._user_line import is_raised_by_torch, line_of


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
    _check_accumulation(batch, accumulate)
    modules = {"model": model} | ({"loss": loss} if isinstance(loss, nn.Module) else {})
    root = nn.ModuleDict(modules)
    sharded = ShardedModel(model, loss)
    names = _ModuleNames(root)
    local = sharded.locals_of(optimizer)
    tensors_of_root = (*root.parameters(), *root.buffers())
    recorder = Recorder(names.current, [local.get(id(each), each) for each in tensors_of_root])
    mode = FakeTensorMode()
    device = _device_type(root, batch)
    stand_ins = StandIns(mode, torch.device(device), local)
    gathering = Gathering(sharded, stand_ins, recorder)
    tensors: dict[str, TensorView] = {}
    around = (_capturing, _no_collection(), _understood(), _unrandom(recorder))
    with contextlib.ExitStack() as stack:
        for each in (*around, _eagers_branches(recorder), mode):
            stack.enter_context(each)
        tensors |= _adopt_model(root, recorder, stand_ins)
        fake_batch = stand_ins.in_batch(batch, "batch")
        for name, tensor in tensors_in(fake_batch, "batch"):
            tensors[name] = recorder.adopt(tensor, name, Kind.INPUT)
        copy = OptimizerCopy(optimizer, stand_ins, recorder, _parameter_names(root), mode)
        with stand_ins.inside(root), names, recorder:
            buffers = dict(root.named_buffers(remove_duplicate=False))
            places = _places(root)
            with gathering.active():
                result = _all_gradients(model, fake_batch, loss, recorder, gathering, accumulate)
            recorder.phase = Phase.OPTIMIZER
            _mark_gradients(recorder, root)
            if before_step is not None:
                with gathering.norms_over_ranks():
                    _run_before_step(before_step, recorder, root)
            copy.step()
            gathering.check(copy.state)
            _write_back_buffers(root, buffers)
            _write_back_data(places)
            _refuse_lost_changes(stand_ins.changed_attributes(), names, recorder)
        loss_view = recorder.view(result)
        tensors |= copy.tensors
        graph = finish(
            recorder,
            tensors,
            loss_view,
            device,
            {
                "model": type(model).__qualname__,
                "optimizer": type(optimizer).__qualname__,
                "torch": torch.__version__,
                "hyper_parameters": copy.constants,
                "initial_state": copy.initial_state,
                "batch_constants": constants_in(batch, "batch"),
                "evaluation": evaluation_modules(modules),
                "frozen": frozen_parameters(modules),
                "autocast": autocast_of(device),
            },
        )
    return graph


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch, as `capture` does."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple):
        return model(*batch)
    return model(batch)


def loss_of(output: Any, batch: Any, loss: Callable[[Any, Any], Any] | None) -> torch.Tensor:
    """Return the scalar tensor that a step minimises.

    Raises:
        TypeError: There is none.
    """
    if loss is not None:
        value = loss(output, batch)
    elif isinstance(output, Mapping) and "loss" in output:
        value = output["loss"]
    else:
        value = getattr(output, "loss", output)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise TypeError(
            f"the loss has to be a tensor with one element, and is {shape}; pass "
            "loss=lambda output, batch: ..., or a model whose output has .loss"
        )
    return value


def _all_gradients(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any, Any], Any] | None,
    recorder: Recorder,
    gathering: Gathering,
    accumulate: int | None,
) -> torch.Tensor:
    """Forward and backward of the batch, or of one micro-batch after the other."""
    if accumulate is None:
        return _gradients(model, batch, loss, recorder, gathering, 1)
    total = None
    for part in batch:
        recorder.phase = Phase.FORWARD
        value = _gradients(model, part, loss, recorder, gathering, accumulate)
        total = value if total is None else total + value
    assert total is not None
    return total


def _run_before_step(
    before_step: Callable[[], object], recorder: Recorder, root: nn.Module
) -> None:
    num_drafts = len(recorder.drafts)
    before_step()
    gradients = [each.grad for each in root.parameters() if each.grad is not None]
    blocks = {id(recorder.block(gradient)) for gradient in gradients}
    touched = {
        id(recorder.blocks[recorder.block_of_value[value]])
        for draft in recorder.drafts[num_drafts:]
        for value in (*draft.reads, *(old for old, _ in draft.mutates))
    }
    if not blocks & touched:
        raise CaptureError(
            "before_step has not looked at any gradient; it has to ask the model for its "
            "parameters when it is called (model.parameters()), as these are others during a "
            "capture"
        )


def _gradients(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any, Any], Any] | None,
    recorder: Recorder,
    gathering: Gathering,
    num_parts: int,
) -> torch.Tensor:
    with torch.enable_grad():
        value = loss_of(call_model(model, batch), batch, loss)
        if num_parts > 1:
            value = value / num_parts
        if not value.requires_grad:
            raise CaptureError(
                "the loss depends on no parameter that requires a gradient; is the model frozen, "
                "or the loss detached?"
            )
        recorder.phase = Phase.BACKWARD
        value.backward()
        gathering.after_backward()
    return value.detach()


def _check_accumulation(batch: Any, accumulate: int | None) -> None:
    if accumulate is None:
        return
    found = len(batch) if isinstance(batch, list | tuple) else type(batch).__name__
    if found != accumulate or accumulate < 1:
        raise ValueError(
            f"accumulate={accumulate}: the batch has to be a list of so many micro-batches, at "
            f"least one, and is {found if isinstance(found, str) else f'one of {found}'}"
        )


def _check(model: object, optimizer: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model has to be an nn.Module, and is a {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"optimizer has to be a torch.optim.Optimizer, and is a {kind}")
    for name, module in model.named_modules():
        if _is_compiled(module):
            raise CaptureError(
                f"{name or 'model'} is compiled (torch.compile, torch.jit), and what it runs is "
                "not seen; pass the module as it was before"
            )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise CaptureError(
            "model is wrapped for data parallelism; pass model.module, with "
            "before_step=lambda: penstock.executor.average_gradients(model.module)"
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


def _mark_gradients(recorder: Recorder, root: nn.Module) -> None:
    for parameter in root.parameters():
        if parameter.grad is not None:
            block = recorder.block(parameter.grad)
            if block.kind is Kind.ACTIVATION:
                block.kind = Kind.GRADIENT
                block.name = f"{block.name}.grad"


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


def _places(root: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter and buffer with a tensor that goes on looking at where it lies now."""
    with torch.no_grad():
        return [(each, each.detach()) for each in (*root.parameters(), *root.buffers())]


def _write_back_data(places: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Bring what was assigned to a tensor's `.data` to where the tensor lies."""
    for tensor, place in places:
        if tensor.untyped_storage()._cdata != place.untyped_storage()._cdata:
            with torch.no_grad():
                place.copy_(tensor)


def _refuse_lost_changes(
    changes: Iterator[tuple[nn.Module, str, Any, Any]], names: _ModuleNames, recorder: Recorder
) -> None:
    for module, key, before, now in changes:
        is_number = isinstance(before, bool | int | float) and isinstance(now, bool | int | float)
        if (is_number and before != now) or recorder.has_lifted(before):
            raise CaptureError(
                f"the step reads and changes the attribute {key!r} of {names.name_of(module)}, "
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
        def enter(module: nn.Module, args: Any) -> None:
            self._stack.append(self._names.get(id(module), self._stack[-1]))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
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
            f"({type(error).__name__}: {error})"
        ) from error


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

    It asks whether a tensor is fake before it looks, and takes another path with other kernels.
    """
    library = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(library, "is_fake_tensor"):
        yield
        return

    def is_fake_tensor(tensor: object) -> bool:
        return isinstance(tensor, FakeTensor) and not recorder.is_known(tensor)

    with mock.patch.object(library, "is_fake_tensor", is_fake_tensor):
        yield


@contextlib.contextmanager
def _unrandom(recorder: Recorder) -> Iterator[None]:
    """Trace reads and writes of the random state, and refuse draws that torch does not see."""
    before = _states()
    here = {"get_rng_state": recorder.get_rng_state, "set_rng_state": recorder.set_rng_state}
    there = {
        "get_rng_state": recorder.get_cuda_rng_state,
        "set_rng_state": recorder.set_cuda_rng_state,
    }
    try:
        with (
            mock.patch.multiple(torch, **here),
            mock.patch.multiple(torch.random, **here),
            mock.patch.multiple(torch.cuda, **there),
        ):
            yield
    except BaseException:
        for _, put_back in before.values():
            put_back()
        raise
    after = _states()
    for source, (state, put_back) in before.items():
        if after[source][0] != state:
            put_back()
            raise CaptureError(
                f"the model draws from or seeds {source}, which a graph does not hold; draw "
                "numbers with torch and its default generator, or outside of the step"
            )


def _states() -> dict[str, tuple[object, Callable[[], object]]]:
    """The states of generators that a capture does not draw from, and what puts each back."""
    python = random.getstate()
    state = torch.get_rng_state()
    found: dict[str, tuple[object, Callable[[], object]]] = {
        "Python's random module": (python, lambda: random.setstate(python)),
        "torch's generator (torch.manual_seed)": (
            state.numpy().tobytes(),
            lambda: torch.set_rng_state(state),
        ),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numbers = numpy.random.get_state()
        found["NumPy's global generator (numpy.random)"] = (
            [each.tobytes() if hasattr(each, "tobytes") else each for each in numbers],
            lambda: numpy.random.set_state(numbers),
        )
    return found
