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
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as current_modes

from penstock.errors import CaptureError
from penstock.graph._user_line import line_of
from penstock.graph.capturing._program_lines import NUMPYS_RANDOM, PYTHONS_RANDOM, NotedLines
from penstock.graph.capturing.recorder import Recorder


class _State(NamedTuple):
    """The state of a generator.

    Attributes:
        content: What is compared.
        put_back: Sets the generator to this state.
        read: Returns the content as it is now.
    """

    content: object
    put_back: Callable[[], object]
    read: Callable[[], object]


@contextlib.contextmanager
def traced_random_state(recorder: Recorder) -> Iterator[None]:
    """Write down reads and writes of the state of torch's default generators by the step."""

    def routed(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
        # Autograd's threads, of which each GPU has one, work under the modes of the backward pass.
        return lambda *args, **kwargs: (ours if recorder in current_modes() else theirs)(
            *args, **kwargs
        )

    here: dict[str, Any] = {
        "get_rng_state": routed(recorder.get_rng_state, torch.get_rng_state),
        "set_rng_state": routed(recorder.set_rng_state, torch.set_rng_state),
    }
    there: dict[str, Any] = {
        "get_rng_state": routed(recorder.get_cuda_rng_state, torch.cuda.get_rng_state),
        "set_rng_state": routed(recorder.set_cuda_rng_state, torch.cuda.set_rng_state),
    }
    with (
        mock.patch.multiple(torch, **here),
        mock.patch.multiple(torch.random, **here),
        mock.patch.multiple(torch.cuda, **there),
    ):
        yield


@contextlib.contextmanager
def no_other_draws(noted: NotedLines) -> Iterator[None]:
    """Refuse draws that a graph does not hold; all generators are then as before.

    Args:
        noted: Lines at which the program drew numbers.

    Raises:
        CaptureError: A generator has another state afterwards; the message says which.
    """
    before = dict(_states())
    error: CaptureError | None = None
    try:
        yield
    except CaptureError as found:  # as of a second call, which has drawn other numbers
        error = found
    except BaseException:
        _put_back(before)
        raise
    changed = _put_back(before)
    if changed:
        where = noted.draws.get(changed[0], "" if error is None else line_of(error))
        where = f"{where}: " if where else ""
        raise CaptureError(
            f"{where}the model draws from or seeds {changed[0]}, which a graph does not hold; draw "
            "numbers with torch and its default generator, or outside of the step"
        ) from error
    if error is not None:
        raise error


def _put_back(before: dict[str, _State]) -> list[str]:
    """Set generators to their states; return the names of those that had another one."""
    changed = [source for source, state in before.items() if state.read() != state.content]
    for source in changed:
        before[source].put_back()
    return changed


def _states() -> Iterator[tuple[str, _State]]:
    """Yield the generators of this process by what a message calls them."""
    yield "torch's generator (torch.manual_seed)", _of_torch()
    yield PYTHONS_RANDOM, _of_python(random)
    numpy = sys.modules.get("numpy")
    shared: list[object] = [random._inst]  # pyright: ignore[reportAttributeAccessIssue]
    kinds: tuple[type, ...] = (random.Random,)
    if numpy is not None:
        yield NUMPYS_RANDOM, _of_numpy(numpy.random)
        shared.append(numpy.random.mtrand._rand)
        kinds = (*kinds, numpy.random.RandomState, numpy.random.Generator)
    found = {kind for base in kinds for kind in _with_subclasses(base)} - {random.SystemRandom}
    for each in _instances(found):
        kind = type(each)
        if any(each is known for known in shared):
            continue
        name = f"a generator of its own ({kind.__module__.partition('.')[0]}.{kind.__name__})"
        if isinstance(each, random.Random):
            yield f"{name} at {id(each):#x}", _of_python(each)
        else:
            yield f"{name} at {id(each):#x}", _of_numpy(each)


def _instances(kinds: set[type]) -> list[object]:
    """Return all objects of some types; without a loop in Python, as there are millions."""
    objects = gc.get_objects()
    return list(itertools.compress(objects, map(kinds.__contains__, map(type, objects))))


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    for each in kind.__subclasses__():
        yield from _with_subclasses(each)


def _of_torch() -> _State:
    state = torch.get_rng_state()
    return _State(
        state.numpy().tobytes(),
        lambda: torch.set_rng_state(state),
        lambda: torch.get_rng_state().numpy().tobytes(),
    )


def _of_python(generator: Any) -> _State:
    state = generator.getstate()
    return _State(state, lambda: generator.setstate(state), generator.getstate)


def _of_numpy(generator: Any) -> _State:
    """Of a `Generator`, whose bit generator has the state, or of the older interface."""
    if hasattr(generator, "get_state"):
        read, write = generator.get_state, generator.set_state
    else:
        bits = generator.bit_generator
        read, write = (lambda: bits.state), (lambda state: setattr(bits, "state", state))
    state = read()
    return _State(_plain(state), lambda: write(state), lambda: _plain(read()))


def _plain(state: Any) -> Any:
    """Return a state of NumPy's as what `==` compares."""
    if isinstance(state, dict):
        return {key: _plain(item) for key, item in state.items()}
    if isinstance(state, tuple | list):
        return [_plain(item) for item in state]
    return state.tobytes() if hasattr(state, "tobytes") else state
