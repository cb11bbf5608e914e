"""Random numbers during a capture: traced where torch draws them, refused where others do.

The states of Python's, NumPy's and torch's default generators are compared before and after, and
those of every generator that the program has made for itself.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

from penstock.compat.dispatch import current_modes
from penstock.compat.user_line import user_line_of
from penstock.errors import CaptureError
from penstock.graph.capturing._errors import describe_line, error_here
from penstock.graph.capturing._program_lines import NUMPYS_RANDOM, PYTHONS_RANDOM, ProgramLines
from penstock.graph.capturing.recorder import Recorder
from penstock.graph.encoding import GET_RNG_STATE, SET_RNG_STATE
from penstock.graph.step_graph import Kind


class _Snapshot(NamedTuple):
    """The state of a generator.

    Attributes:
        content: The state, in a form that `==` compares.
        restore: Sets the generator to this state.
        read: Returns the content as it is now.
    """

    content: object
    restore: Callable[[], object]
    read: Callable[[], object]


@contextlib.contextmanager
def trace_random_state(recorder: Recorder) -> Iterator[None]:
    """Record reads and writes of the state of torch's default generators by the step."""

    def routed(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
        # Autograd's threads, of which each GPU has one, work under the modes of the backward pass.
        return lambda *args, **kwargs: (
            ours(*args) if recorder in current_modes() else theirs(*args, **kwargs)
        )

    def get_cpu() -> torch.Tensor:
        return _record_get(recorder, 5056)

    def get_cuda(device: object = "cuda") -> torch.Tensor:
        return _record_get(recorder, 16, "cuda")

    def set_cpu(state: torch.Tensor) -> None:
        _record_set(recorder, state)

    def set_cuda(state: torch.Tensor, device: object = "cuda") -> None:
        _record_set(recorder, state, "cuda")

    on_cpu: dict[str, Any] = {
        "get_rng_state": routed(get_cpu, torch.get_rng_state),
        "set_rng_state": routed(set_cpu, torch.set_rng_state),
    }
    on_cuda: dict[str, Any] = {
        "get_rng_state": routed(get_cuda, torch.cuda.get_rng_state),
        "set_rng_state": routed(set_cuda, torch.cuda.set_rng_state),
    }
    with (
        mock.patch.multiple(torch, **on_cpu),
        mock.patch.multiple(torch.random, **on_cpu),
        mock.patch.multiple(torch.cuda, **on_cuda),
    ):
        yield


def _record_get(recorder: Recorder, num_bytes: int, *generator: str) -> torch.Tensor:
    draft = recorder.new_draft(GET_RNG_STATE, "get_rng_state")
    draft.args = generator
    with recorder.pause():
        state = torch.empty(num_bytes, dtype=torch.uint8)
    storages = recorder.storages
    draft.creates = [storages.add(draft.name, 0, Kind.SCALAR, state.untyped_storage())]
    draft.outputs = (storages.view(state),)
    draft.random = True
    recorder.append(draft)
    return state


def _record_set(recorder: Recorder, state: torch.Tensor, *generator: str) -> None:
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

    Args:
        lines: Lines at which the program drew numbers.

    Raises:
        CaptureError: A generator has another state afterwards; the message says which.
    """
    before = dict(_take_snapshots())
    error: CaptureError | None = None
    try:
        yield
    except CaptureError as found:  # as of a second call, which has drawn other numbers
        error = found
    except BaseException:
        _restore(before)
        raise
    changed = _restore(before)
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


def _restore(before: dict[str, _Snapshot]) -> list[str]:
    """Set generators to their states; return the names of those that had another one."""
    changed = [source for source, state in before.items() if state.read() != state.content]
    for source in changed:
        before[source].restore()
    return changed


def _take_snapshots() -> Iterator[tuple[str, _Snapshot]]:
    """Yield the states of the generators of this process, by their names in messages."""
    yield "torch's generator (torch.manual_seed)", _snapshot_torch()
    yield PYTHONS_RANDOM, _snapshot_python(random)
    numpy = sys.modules.get("numpy")
    shared: list[object] = [random._inst]  # pyright: ignore[reportAttributeAccessIssue]
    kinds: tuple[type, ...] = (random.Random,)
    if numpy is not None:
        yield NUMPYS_RANDOM, _snapshot_numpy(numpy.random)
        shared.append(numpy.random.mtrand._rand)
        kinds = (*kinds, numpy.random.RandomState, numpy.random.Generator)
    found = {kind for base in kinds for kind in _with_subclasses(base)} - {random.SystemRandom}
    for each in _instances(found):
        kind = type(each)
        if any(each is known for known in shared):
            continue
        name = f"a generator of its own ({kind.__module__.partition('.')[0]}.{kind.__name__})"
        take = _snapshot_python if isinstance(each, random.Random) else _snapshot_numpy
        yield f"{name} at {id(each):#x}", take(each)


def _instances(kinds: set[type]) -> list[object]:
    """Return all objects of some types; without a loop in Python, as there are millions."""
    objects = gc.get_objects()
    return list(itertools.compress(objects, map(kinds.__contains__, map(type, objects))))


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    for each in kind.__subclasses__():
        yield from _with_subclasses(each)


def _snapshot_torch() -> _Snapshot:
    state = torch.get_rng_state()
    return _Snapshot(
        state.numpy().tobytes(),
        lambda: torch.set_rng_state(state),
        lambda: torch.get_rng_state().numpy().tobytes(),
    )


def _snapshot_python(generator: Any) -> _Snapshot:
    state = generator.getstate()
    return _Snapshot(state, lambda: generator.setstate(state), generator.getstate)


def _snapshot_numpy(generator: Any) -> _Snapshot:
    """Return the state of a `Generator`, which its bit generator has, or of a `RandomState`."""
    if hasattr(generator, "get_state"):
        read, write = generator.get_state, generator.set_state
    else:
        bits = generator.bit_generator
        read, write = (lambda: bits.state), (lambda state: setattr(bits, "state", state))
    state = read()
    return _Snapshot(_to_plain(state), lambda: write(state), lambda: _to_plain(read()))


def _to_plain(state: Any) -> Any:
    """Return a state of NumPy's in a form that `==` compares."""
    if isinstance(state, dict):
        return {key: _to_plain(item) for key, item in state.items()}
    if isinstance(state, tuple | list):
        return [_to_plain(item) for item in state]
    return state.tobytes() if hasattr(state, "tobytes") else state
