"""Conditions under which a program is captured.

One thread captures at a time, and errors explain. Random numbers are traced where torch draws them
and refused where others do: the states of Python's, NumPy's and torch's default generators are
compared before and after, and those of every generator that the program has made for itself.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn.modules import batchnorm

from penstock.compat.dispatch import HigherOrderOperator, current_modes
from penstock.compat.fake_tensors import FakeTensor
from penstock.compat.user_line import is_raised_by_user, user_line, user_line_of
from penstock.errors import CaptureError, PenstockError
from penstock.graph.capturing._program_lines import (
    SYSTEM,
    ProgramLines,
    default_generators,
    describe_line,
    error_here,
)
from penstock.graph.capturing.recorder import Recorder
from penstock.graph.encoding import GET_RNG_STATE, SET_RNG_STATE
from penstock.graph.step_graph import Kind

_CONTROL_FLOW = ("cond", "while_loop", "map_impl", "scan", "associative_scan")
_lock = threading.RLock()
"""Held while a step is captured: parts of torch are patched then, for all threads."""


@contextlib.contextmanager
def isolate_capture() -> Iterator[None]:
    """Let one thread capture at a time, without garbage collection, and translate errors.

    Python would search the growing record for cycles again and again.
    """
    with _lock:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with _translate_torch_errors(), _refuse_control_flow():
                yield
        finally:
            if was_enabled:
                gc.enable()


@contextlib.contextmanager
def _translate_torch_errors() -> Iterator[None]:
    """Turn errors that torch raises into errors that name the line of the program."""
    try:
        yield
    except (PenstockError, TypeError, ValueError):
        raise
    except Exception as error:
        is_unsupported = "supported for tensor subclasses" in str(error)
        if is_raised_by_user(error) and not is_unsupported:
            raise
        # Where torch's code alone has run since the capture began, the line that asked for it.
        line = describe_line(user_line_of(error) or user_line())
        raise CaptureError(
            f"{line}: torch cannot run this on tensors without data, as a capture does "
            f"({type(error).__name__}: {error}){_remedy(error)}"
        ) from error


@contextlib.contextmanager
def _refuse_control_flow() -> Iterator[None]:
    """Refuse operators that let the data decide which others run.

    Beside a dispatch mode torch ends the process where `torch.cond` needs gradients.
    """
    dispatch, thread = HigherOrderOperator.dispatch, threading.get_ident()

    def refuse(operator: HigherOrderOperator, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and operator.name() in _CONTROL_FLOW:
            raise error_here(
                f"torch's {operator.name()} lets the data decide which operators run; a captured "
                "step has one course of events: use torch.where, or train under penstock.offload"
            )
        return dispatch(operator, *args, **kwargs)

    with mock.patch.object(HigherOrderOperator, "dispatch", refuse):
        yield


def _remedy(error: Exception) -> str:
    """Name the alternative that models have, where it is known."""
    # Each version of torch words its refusal otherwise; the function that refuses keeps its name.
    calls = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any("grouped_mm" in text for text in (str(error), *calls)):
        return (
            '; models of Transformers with experts take experts_implementation="batched_mm", whose '
            "products torch can run"
        )
    if ".numpy()" in str(error):
        return "; calculate with torch instead, or pass the number as a tensor of the batch"
    return ""


@contextlib.contextmanager
def name_optimizer_in_errors(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Add to errors in the optimizer's step the optimizer's class, and the alternatives."""
    try:
        with _translate_torch_errors():
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
def patch_transformers_checks(recorder: Recorder) -> Iterator[None]:
    """Let Transformers read constant values, and so branch as it does in eager mode.

    It asks whether a tensor is fake before it reads one, and takes another path with other kernels.
    In half precision that gives other bits, so there it may also read a batch's masks if they mask
    nothing; the step is then for such batches.
    """
    library = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(library, "is_fake_tensor"):
        yield
        return

    def is_fake_tensor(tensor: object) -> bool:
        if not isinstance(tensor, FakeTensor):
            return False
        return not (recorder.is_constant(tensor) or recorder.follows_full_mask(tensor))

    with mock.patch.object(library, "is_fake_tensor", is_fake_tensor):
        yield


@contextlib.contextmanager
def trace_batch_counts(recorder: Recorder) -> Iterator[None]:
    """Trace the factor of batch norms with `momentum=None`: one over their number of batches."""

    def to_float(value: Any) -> Any:
        return recorder.trace_count(value) if isinstance(value, FakeTensor) else float(value)

    with mock.patch.object(batchnorm, "float", to_float, create=True):
        yield


class _Generator:
    """A generator of random numbers with its state of now, by functions that read and set it."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self._read, self._write = read, write
        self._state = read()

    def restore(self) -> bool:
        """Set the generator to that state; return whether it had another one."""
        has_changed = _to_plain(self._read()) != _to_plain(self._state)
        if has_changed:
            self._write(self._state)
        return has_changed


@contextlib.contextmanager
def trace_random_state(recorder: Recorder) -> Iterator[None]:
    """Record reads and writes of the state of torch's default generators by the step."""

    def route(record: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
        # Autograd's threads, of which each GPU has one, work under the modes of the backward pass.
        return lambda *args, **kwargs: (record if recorder in current_modes() else function)(
            *args, **kwargs
        )

    with contextlib.ExitStack() as stack:
        for module, num_bytes, *generator in (
            (torch, 5056),
            (torch.random, 5056),
            (torch.cuda, 16, "cuda"),
        ):
            read = functools.partial(_record_read, recorder, generator, num_bytes)
            write = functools.partial(_record_write, recorder, generator)
            patched: dict[str, Any] = {
                "get_rng_state": route(read, module.get_rng_state),
                "set_rng_state": route(write, module.set_rng_state),
            }
            stack.enter_context(mock.patch.multiple(module, **patched))
        yield


def _record_read(
    recorder: Recorder, generator: list[str], num_bytes: int, device: object = None
) -> torch.Tensor:
    draft = recorder.new_draft(GET_RNG_STATE, "get_rng_state")
    draft.args = tuple(generator)
    with recorder.pause():
        state = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    storages = recorder.storages
    draft.creates = [storages.add(draft.name, 0, Kind.SCALAR, state.untyped_storage())]
    draft.outputs = (storages.view(state),)
    draft.random = True
    recorder.append(draft)
    return state


def _record_write(
    recorder: Recorder, generator: list[str], state: torch.Tensor, device: object = None
) -> None:
    if state not in recorder.storages:
        raise error_here("the random state is set to one that was not taken in this step")
    draft = recorder.new_draft(SET_RNG_STATE, "set_rng_state")
    view = recorder.storages.view(state)
    draft.args, draft.reads = (view, *generator), [view.value]
    draft.random = draft.side_effect = True
    recorder.append(draft)


@contextlib.contextmanager
def refuse_other_draws(lines: ProgramLines) -> Iterator[None]:
    """Refuse draws that a graph does not hold; all generators are then as before.

    Raises:
        CaptureError: A generator has another state afterwards; the message says which.
    """
    before = dict(_find_generators())
    error: CaptureError | None = None
    try:
        yield
    except CaptureError as found:  # as of a second call, which has drawn other numbers
        error = found
    except BaseException:
        _restore(before)
        raise
    changed = _restore(before)
    if SYSTEM in lines.draws:  # these have no state
        changed.append(SYSTEM)
    if changed:
        line = "" if error is None else describe_line(user_line_of(error))
        line = lines.draws.get(changed[0], line)
        raise CaptureError(
            (f"{line}: " if line else "")
            + f"the model draws from or seeds {changed[0]}, which a graph does not hold; draw "
            "numbers with torch and its default generator, or outside of the step"
        ) from error
    if error is not None:
        raise error


def _restore(before: dict[str, _Generator]) -> list[str]:
    """Set generators to their states; return the names of those that had another one."""
    return [source for source, generator in before.items() if generator.restore()]


def _find_generators() -> Iterator[tuple[str, _Generator]]:
    """Yield the generators of this process, with their names in messages."""
    torchs = _Generator(torch.get_rng_state, torch.set_rng_state)
    yield "torch's generator (torch.manual_seed)", torchs
    shared, kinds = [], {random.Random}
    for source, module, generator in default_generators():
        yield source, _open_generator(module)
        shared.append(generator)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kinds |= {numpy.random.RandomState, numpy.random.Generator}
    found = {kind for base in kinds for kind in _subclasses_of(base)} - {random.SystemRandom}
    for each in _find_instances(found):
        kind = type(each)
        if not any(each is known for known in shared):
            name = f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
            yield f"a generator of its own ({name}) at {id(each):#x}", _open_generator(each)


def _find_instances(kinds: set[type]) -> list[object]:
    """Return all objects of some types; without a loop in Python, as there are millions."""
    objects = gc.get_objects()
    return list(itertools.compress(objects, map(kinds.__contains__, map(type, objects))))


def _subclasses_of(kind: type) -> Iterator[type]:
    yield kind
    for each in kind.__subclasses__():
        yield from _subclasses_of(each)


def _open_generator(generator: Any) -> _Generator:
    """Return a generator of Python or NumPy, or the default one of a module."""
    if hasattr(generator, "getstate"):
        return _Generator(generator.getstate, generator.setstate)
    if hasattr(generator, "get_state"):
        return _Generator(generator.get_state, generator.set_state)
    bits = generator.bit_generator
    return _Generator(lambda: bits.state, lambda state: setattr(bits, "state", state))


def _to_plain(state: Any) -> Any:
    """Return a state in a form that `==` compares."""
    if isinstance(state, dict):
        return {key: _to_plain(item) for key, item in state.items()}
    if isinstance(state, tuple | list):
        return [item if type(item) is int else _to_plain(item) for item in state]
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    return state.tobytes() if hasattr(state, "tobytes") else state
