"""A second capture beside the first: what a program does otherwise when it is called again.

Python that changes from call to call (a counter, a list that grows, an iterator, a hook that
counts) is part of a graph as it was during the capture. So the program is captured once more, and
operator by operator compared with what was written down the first time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._mode_utils import no_dispatch

from penstock.errors import CaptureError, GraphFileError
from penstock.graph._user_line import user_line
from penstock.graph.capturing.recorder import Draft, Recorder
from penstock.graph.capturing.step_program import StepProgram
from penstock.graph.encoding import CONSTANT
from penstock.graph.step_graph import Phase

_REMEDY = (
    "planned steps would go on with what it was during the capture: keep what changes from step "
    "to step in a buffer or in a tensor of the batch, and draw random numbers with torch's default "
    "generator"
)


class _Written(NamedTuple):
    """What is compared of an operator."""

    target: str
    module: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    reads: tuple[int, ...]
    mutates: tuple[tuple[int, int], ...]


class Captured:
    """What this process knows of a capture beside the graph.

    Args:
        recorder: The recorder, when forward, backward and `before_step` have run.
        program: What has run; nothing of it is kept.
        is_sharded: Whether its model is.

    Attributes:
        accumulate: As of `capture`.
        has_loss: Whether there was a `loss`.
        has_before_step: Whether there was a `before_step`.
        is_sharded: Whether the model is sharded.
        outside: Tensors that are neither the model's nor the batch's, by the names of the operators
            that make constants of them; planned steps read them anew.
    """

    def __init__(self, recorder: Recorder, program: StepProgram, *, is_sharded: bool) -> None:
        self.accumulate = program.accumulate
        self.has_loss = program.loss is not None
        self.has_before_step = program.before_step is not None
        self.is_sharded = is_sharded
        self.outside = dict(recorder.outside)
        self._forms = {name: _form(each) for name, each in self.outside.items()}
        self._looked_at = [
            (tensor, content, line) for tensor, content, line in recorder.looked_at.values()
        ]
        self._written = [_written(draft, self.outside) for draft in recorder.drafts]
        phases = [draft.phase for draft in recorder.drafts]
        self._num_of_gradients = sum(phase is not Phase.OPTIMIZER for phase in phases)

    def compare(self, recorder: Recorder, *, to_gradients: bool = False) -> Comparison:
        """Compare what a recorder writes down from now on with this.

        Args:
            recorder: What captures again.
            to_gradients: Whether it does so without `before_step`.
        """
        written = self._written[: self._num_of_gradients] if to_gradients else self._written
        comparison = Comparison(written, self.outside, recorder)
        recorder.watch = comparison.take
        return comparison

    def check_outside(self) -> None:
        """Compare tensors from outside of the step with what the capture has made of them.

        Raises:
            GraphFileError: One has another shape or dtype, or another number in it than the program
                has looked at during the capture.
        """
        for name, tensor in self.outside.items():
            if _form(tensor) != self._forms[name]:
                raise GraphFileError(
                    f"a tensor that is neither the model's nor the batch's is {_form(tensor)} and "
                    f"was {self._forms[name]} when the step was captured; capture the step again"
                )
        for tensor, content, line in self._looked_at:
            if not torch.equal(tensor.detach(), content):
                raise GraphFileError(
                    f"{line}: the program has looked at the numbers of a tensor of shape "
                    f"{tuple(tensor.shape)} that is neither the model's nor the batch's, and they "
                    "have changed since the step was captured; capture the step again"
                )


class Comparison:
    """Compares operators with those of the first capture, one by one.

    Args:
        written: Those of the first.
        outside: Its tensors from outside of the step.
        recorder: What captures again.
    """

    def __init__(
        self,
        written: list[_Written],
        outside: Mapping[str, torch.Tensor],
        recorder: Recorder,
    ) -> None:
        self._written = written
        self._outside = outside
        self._recorder = recorder
        self._at = 0

    def take(self, draft: Draft) -> None:
        """Compare an operator.

        Raises:
            CaptureError: It is another one; the message says at which line, and what.
        """
        found = _written(draft, self._recorder.outside)
        if self._at >= len(self._written):
            raise _refusal(f"{_named(found)} runs, which did not run the first time")
        before = self._written[self._at]
        self._at += 1
        difference = _difference(before, found)
        if difference:
            raise _refusal(difference)
        if draft.name in self._recorder.outside:
            now, then = self._recorder.outside[draft.name], self._outside.get(draft.name)
            with no_dispatch():
                same = now is then or (then is not None and torch.equal(now, then))
            if not same:
                raise _refusal(
                    f"a tensor of shape {tuple(now.shape)}, neither the model's nor the batch's, "
                    "is another one with other numbers"
                )

    def end(self) -> None:
        """Compare the number of operators.

        Raises:
            CaptureError: There are fewer.
        """
        if self._at < len(self._written):
            missing = _named(self._written[self._at])
            raise _refusal(f"{missing} does not run, which ran the first time", line=False)


def _refusal(difference: str, *, line: bool = True) -> CaptureError:
    place = f"{user_line()}: " if line else ""
    return CaptureError(
        f"{place}called again, the program does something else: {difference}; {_REMEDY}"
    )


def _difference(before: _Written, now: _Written) -> str | None:
    """Say in what an operator is another one than before; None if it is the same."""
    if before == now or repr(before) == repr(now):  # a NaN is unlike itself
        return None
    if before.target != now.target:
        return f"{_named(now)} runs where {_named(before)} ran"
    if before.module != now.module:
        return f"{_named(now)} runs where it ran in {before.module or 'no module'}"
    pairs = dict(enumerate(before.args)) | dict(before.kwargs)
    others = dict(enumerate(now.args)) | dict(now.kwargs)
    for key in [*pairs, *others]:
        old, new = pairs.get(key), others.get(key)
        if repr(old) != repr(new):
            if isinstance(new, bool | int | float | str):
                return f"argument {key} of {_named(now)} is {new!r} and was {old!r}"
            if now.target == CONSTANT:
                return "a tensor that is made from Python numbers has other numbers"
            return f"argument {key} of {_named(now)} is another tensor"
    return f"{_named(now)} works on other tensors"


def _named(operator: _Written) -> str:
    return f"{operator.target} (module {operator.module!r})" if operator.module else operator.target


def _written(draft: Draft, outside: Mapping[str, torch.Tensor]) -> _Written:
    args = draft.args if draft.name not in outside else ("outside",)
    return _Written(
        draft.target, draft.module, args, draft.kwargs, tuple(draft.reads), tuple(draft.mutates)
    )


def _form(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
