"""Comparison of a second capture with the first: a program has to do the same at every call.

Python that changes from call to call (a counter, a list that grows, an iterator, a hook that
counts) is part of a graph as it was during the capture. So the program is captured once more, and
compared operator by operator with the first record.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch

from penstock.compat.dispatch import no_dispatch
from penstock.errors import CaptureError, GraphFileError
from penstock.graph.capturing._drafts import Draft
from penstock.graph.capturing._program_lines import error_here
from penstock.graph.capturing.python_numbers import Number
from penstock.graph.capturing.recorder import Recorder
from penstock.graph.capturing.step_program import StepProgram
from penstock.graph.encoding import CONSTANT
from penstock.graph.step_graph import Phase

_PAUSE_SECONDS = 0.01
_MESSAGE = "called again, the program does something else"
_REMEDY = (
    "planned steps would go on with what it was during the capture: keep what changes from step "
    "to step in a buffer or in a tensor of the batch, and draw random numbers with torch's default "
    "generator"
)


class CaptureRecord:
    """A capture in the process that has made it, beside the graph.

    It is made when forward, backward and `before_step` have run; the program is not kept.

    Attributes:
        accumulate: The number of micro-batches; None if the batch is one.
        numbers: What the program's variables held at the end of the capture.
        outside: Tensors that are neither the model's nor the batch's, by the names of the operators
            that make constants of them; planned steps read them anew.
    """

    def __init__(self, recorder: Recorder, program: StepProgram, *, is_sharded: bool) -> None:
        self.accumulate = program.accumulate
        self.has_loss = program.loss is not None
        self.has_before_step = program.before_step is not None
        self.is_sharded = is_sharded
        self.numbers: list[Number] = []
        self.outside = dict(recorder.outside.by_name)
        self._callables = {
            name: _make_reference(each) for name, each in program.callables().items()
        }
        self._forms = {name: _describe_form(each) for name, each in self.outside.items()}
        self._observed = list(recorder.outside.observed.values())
        self._drafts = list(recorder.drafts)
        phases = [draft.phase for draft in recorder.drafts]
        self._num_of_gradients = sum(phase is not Phase.OPTIMIZER for phase in phases)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # another process does not have it

    def __deepcopy__(self, memo: object) -> CaptureRecord:
        return self

    def is_of(self, program: StepProgram) -> bool:
        """Return whether what a program calls is what was captured, and not another instance."""
        return all(
            name in self._callables and _is_same(self._callables[name](), each)
            for name, each in program.callables().items()
        )

    @contextlib.contextmanager
    def compare(self, recorder: Recorder, *, to_gradients: bool = False) -> Iterator[None]:
        """Compare the operators that are recorded in the block, without `before_step` if
        `to_gradients`.

        Raises:
            CaptureError: They are others; the message names the line and the difference.
        """
        expected = iter(self._drafts[: self._num_of_gradients] if to_gradients else self._drafts)

        def compare_next(draft: Draft) -> None:
            before = next(expected, None)
            if before is None:
                raise _make_error(f"{_describe(draft)} runs, which did not run the first time")
            if difference := _describe_difference(before, draft):
                raise _make_error(difference)
            if draft.is_outside:
                self._compare_outside(recorder.outside.by_name[draft.name], draft.name)

        recorder.watch = compare_next
        yield
        if missing := next(expected, None):
            difference = f"{_describe(missing)} does not run, which ran the first time"
            raise CaptureError(f"{_MESSAGE}: {difference}; {_REMEDY}")

    def _compare_outside(self, now: torch.Tensor, name: str) -> None:
        then = self.outside.get(name)
        with no_dispatch():
            same = now is then or (then is not None and torch.equal(now, then))
        if not same:
            raise _make_error(
                f"a tensor of shape {tuple(now.shape)}, neither the model's nor the batch's, is "
                "another one with other numbers"
            )

    def check_outside(self) -> None:
        """Compare tensors from outside of the step with their state during the capture.

        Raises:
            GraphFileError: One has another shape or dtype, or other numbers than those that have
                decided the course of the step.
        """
        for name, tensor in self.outside.items():
            if _describe_form(tensor) != self._forms[name]:
                raise GraphFileError(
                    "a tensor that is neither the model's nor the batch's is "
                    f"{_describe_form(tensor)} and was {self._forms[name]} when the step was "
                    "captured; capture the step again"
                )
        for tensor, content, line in self._observed:
            if not torch.equal(tensor.detach(), content):
                raise GraphFileError(
                    f"{line}: the program has looked at the numbers of a tensor of shape "
                    f"{tuple(tensor.shape)} that is neither the model's nor the batch's, and they "
                    "have changed since the step was captured; capture the step again"
                )


def refuse_counting(numbers: list[Number], call_again: Callable[[], object]) -> None:
    """Raise if the program has changed one of the numbers that it can read.

    A number that moves without a call, or not in each call, is another thread's.

    Args:
        numbers: Numbers as they were before a call.
        call_again: Calls the program once more.

    Raises:
        CaptureError: It has; the message names the variable.
    """
    changed = [each.renew() for each in numbers if not each.is_identity and each.has_changed()]
    if not changed:
        return
    time.sleep(_PAUSE_SECONDS)
    changed = [each for each in changed if not each.has_changed()]
    if changed:
        call_again()
    for number in changed:
        if number.has_changed():
            raise CaptureError(
                f"the step changes {number.name} ({number.place}), which planned steps would not, "
                "as they do not run its Python: count, keep times and show progress outside of the "
                "step, and keep what it needs from step to step in a buffer or in a tensor of the "
                "batch"
            )


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two are one object, or one method of it; a module may compare by value."""
    return one is other or (isinstance(one, MethodType) and one == other)


def _make_reference(value: Any) -> Callable[[], Any]:
    """Return a function that returns a value, or None once the program no longer has it."""
    try:
        return weakref.WeakMethod(value) if isinstance(value, MethodType) else weakref.ref(value)
    except TypeError:  # of a class with slots
        return lambda: value


def _make_error(difference: str) -> CaptureError:
    return error_here(f"{_MESSAGE}: {difference}; {_REMEDY}")


def _describe_difference(before: Draft, now: Draft) -> str | None:
    """Describe the difference between two operators; None if they are the same."""
    old_fields, new_fields = _compared_fields(before), _compared_fields(now)
    if old_fields == new_fields or repr(old_fields) == repr(new_fields):  # a NaN is unlike itself
        return None
    if before.target != now.target:
        return f"{_describe(now)} runs where {_describe(before)} ran"
    if before.module != now.module:
        return f"{_describe(now)} runs where it ran in {before.module or 'no module'}"
    pairs = dict(enumerate(_args(before))) | before.kwargs
    others = dict(enumerate(_args(now))) | now.kwargs
    for key in [*pairs, *others]:
        old, new = pairs.get(key), others.get(key)
        if repr(old) != repr(new):
            if isinstance(new, bool | int | float | str):
                return f"argument {key} of {_describe(now)} is {new!r} and was {old!r}"
            if now.target == CONSTANT:
                return "a tensor that is made from Python numbers has other numbers"
            return f"argument {key} of {_describe(now)} is another tensor"
    return f"{_describe(now)} works on other tensors"


def _describe(operator: Draft) -> str:
    return f"{operator.target} (module {operator.module!r})" if operator.module else operator.target


def _compared_fields(draft: Draft) -> tuple[Any, ...]:
    return draft.target, draft.module, _args(draft), draft.kwargs, draft.reads, draft.mutates


def _args(draft: Draft) -> tuple[Any, ...]:
    return ("outside",) if draft.is_outside else draft.args


def _describe_form(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
