"""Guards: assumptions of a captured step on model and optimizer, compared before each step.

A graph is one course of events: of these modules, in these modes, with gradients of these
parameters. A change of that between steps is an error, instead of training as before.
"""

from __future__ import annotations

import collections
import inspect
import warnings
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.errors import GraphFileError, stacklevel_of_user
from penstock.graph.capturing.hooks import describe_gradient_hooks, describe_step_hooks
from penstock.graph.capturing.module_state import (
    autocast_of,
    evaluation_modules,
    frozen_parameters,
    modules_in,
    parameters_in,
)
from penstock.graph.capturing.python_numbers import Number, find_numbers
from penstock.graph.capturing.step_program import StepProgram
from penstock.graph.step_graph import StepGraph

_REMEDY = "put it back before the step, or capture, plan and bind the step as it is now"


class _Snapshot(NamedTuple):
    """The state that is compared, objects by identity."""

    modules: list[int]
    is_training: list[bool]
    parameters: list[int]
    has_gradient: list[bool]
    groups: list[list[int]]


class Guards:
    """The guards of a bound step.

    Raises:
        GraphFileError: They are not as they were captured; the message names the difference.
    """

    def __init__(
        self, graph: StepGraph, program: StepProgram, optimizer: torch.optim.Optimizer
    ) -> None:
        roots = program.roots()
        self._device = graph.device
        self._captured = graph.captured
        self._autocast = graph.metadata.get("autocast")
        self._roots = roots
        self._optimizer = optimizer
        self._names = [name for name, _ in modules_in(roots)]
        self._parameters = [name for name, _ in parameters_in(roots)]
        self._check_captured_modes(graph)
        self._bound, self._objects = self._take_snapshot()
        self._program = program
        # Of another instance of the model, as one on the meta device, the numbers are others.
        record = self._captured
        self._record = record if record is not None and record.is_of(program) else None
        self._numbers = [] if self._record is None else list(self._record.numbers)
        self._numbers = self._numbers or find_numbers(program.callables())
        self._of_optimizer = _find_numbers_of_step(optimizer)
        self._changed: dict[int, Number] = {}  # by index, as they are now
        self._num_changes = collections.Counter[int]()  # by holder
        self._is_postponed = False

    def check(self) -> list[str]:
        """Compare the guards with the state now.

        Returns:
            Names of Python numbers that have changed, with which the program may be another one. It
            should be compared with the graph before `accept_numbers`, or they are returned again
            after `postpone_numbers`. Of a holder whose numbers change often only each change is
            returned whose count is a power of two.

        Raises:
            GraphFileError: The step would not be the one that was captured; nothing has moved.
        """
        now, objects = self._take_snapshot()
        is_replaced = len(now.parameters) == len(self._bound.parameters) and (
            now.parameters != self._bound.parameters and now.modules == self._bound.modules
        )
        if is_replaced:
            self._refuse_orphans(now)
            if _index_groups(now) == _index_groups(self._bound):
                self._bound = self._bound._replace(parameters=now.parameters, groups=now.groups)
                self._objects = objects
        if now != self._bound:
            raise GraphFileError(f"{self._describe_difference(now)}; {_REMEDY}")
        self._refuse_hooks(objects[1])
        dtype = autocast_of(self._device)
        if dtype not in (None, self._autocast):
            was = f"with {self._autocast}" if self._autocast else "without it"
            raise GraphFileError(
                f"autocast to {dtype} is on, and the step was captured {was}: enter autocast "
                "around the capture (penstock.fit); around the step it changes nothing"
            )
        if self._captured is not None:
            self._captured.check_outside()
        self._warn_of_optimizer()
        return self._look_at_numbers()

    def accept_numbers(self) -> None:
        """Take the numbers as they were at the last check for those of the graph."""
        changed, self._changed, self._is_postponed = self._changed, {}, False
        for index, now in changed.items():
            number, self._numbers[index] = self._numbers[index], now
            is_number = isinstance(now.value, bool | int | float) and not now.is_identity
            if number.is_public and is_number:
                warnings.warn(
                    f"{number.name} is {now.value!r} and was {number.value!r} when the step was "
                    "bound; planned steps go on with that, as Python numbers are part of the "
                    "graph: keep it in a buffer, or capture the step again",
                    stacklevel=stacklevel_of_user(),
                )
        if any(now.is_identity for now in changed.values()):  # what it holds has other numbers
            self._numbers = find_numbers(self._program.callables())
            if self._record is not None:
                self._record.numbers = self._numbers  # keeps nothing that has been replaced

    def postpone_numbers(self) -> None:
        """Have the next check return the same numbers."""
        self._changed, self._is_postponed = {}, True

    def _take_snapshot(self) -> tuple[_Snapshot, list[Any]]:
        """Return a snapshot, and its objects: no other object has their identity as they live."""
        modules = [module for root in self._roots.values() for module in root.modules()]
        parameters = [each for module in modules for each in module._parameters.values()]
        groups = [group["params"] for group in self._optimizer.param_groups]
        seen = _Snapshot(
            [id(each) for each in modules],
            [each.training for each in modules],
            [id(each) for each in parameters],
            [each is not None and each.requires_grad for each in parameters],
            [[id(each) for each in group] for group in groups],
        )
        return seen, [modules, parameters, *map(list, groups)]

    def _refuse_hooks(self, parameters: list[nn.Parameter | None]) -> None:
        """Refuse hooks that were added since the capture."""
        found = describe_step_hooks(self._optimizer)
        for name, each in zip(self._parameters, parameters, strict=True):
            if found is None and each is not None:
                found = describe_gradient_hooks(name, each)
        if found is not None:
            raise GraphFileError(found)

    def _refuse_orphans(self, now: _Snapshot) -> None:
        """Refuse new parameters in the place of parameters that the optimizer updates."""
        known = {number for group in now.groups for number in group}
        pairs = zip(self._parameters, self._bound.parameters, now.parameters, strict=True)
        for name, before, after in pairs:
            if before != after and before in known and after not in known:
                raise GraphFileError(
                    f"{name!r} is another parameter than when the step was bound, which the "
                    "optimizer does not have: copy into the one that it has "
                    "(parameter.copy_(...) under torch.no_grad(), load_state_dict without assign), "
                    "or make the optimizer and bind the plan anew"
                )

    def _describe_difference(self, now: _Snapshot) -> str:
        before = self._bound
        if now.modules != before.modules:
            return "a module of the model has been replaced, added or removed"
        for name, was, is_training in zip(
            self._names, before.is_training, now.is_training, strict=True
        ):
            if was != is_training:
                mode = "training" if is_training else "evaluation"
                return f"module {name!r} is in {mode} mode, in which it was not captured"
        if len(now.parameters) != len(before.parameters):
            return "parameters have been added or removed"
        if now.has_gradient != before.has_gradient:
            pairs = zip(self._parameters, before.has_gradient, now.has_gradient, strict=True)
            changed = next(name for name, was, has in pairs if was != has)
            return f"requires_grad of {changed!r} has changed"
        if _index_groups(now) != _index_groups(before):
            return "the optimizer's groups have other parameters than when the step was bound"
        return "parameters have been added or removed"

    def _check_captured_modes(self, graph: StepGraph) -> None:
        """Compare with the graph's metadata, if it has any."""
        pairs = (
            ("evaluation", "in evaluation mode", evaluation_modules(self._roots)),
            ("frozen", "frozen (requires_grad=False)", frozen_parameters(self._roots)),
        )
        for key, words, found in pairs:
            captured = graph.metadata.get(key)
            for name in sorted({*found} ^ {*captured}) if captured is not None else ():
                now, then = ("is", "was not") if name in found else ("is not", "was")
                raise GraphFileError(
                    f"{name!r} {now} {words} and {then} when the step was captured; {_REMEDY}"
                )

    def _warn_of_optimizer(self) -> None:
        """Warn once of each variable that the optimizer's step can read, which is not called."""
        changed = [each for each in self._of_optimizer if each.has_changed()]
        for number in changed:
            self._of_optimizer.remove(number)
            warnings.warn(
                f"{number.name} ({number.place}) is {number.renew().value!r} and was "
                f"{number.value!r} when the step was bound; planned steps go on with what the "
                "optimizer's step has read at the capture: change lr, momentum, betas and "
                "weight_decay of param_groups alone, or capture the step again",
                stacklevel=stacklevel_of_user(),
            )

    def _look_at_numbers(self) -> list[str]:
        changed = [index for index, each in enumerate(self._numbers) if each.has_changed()]
        self._changed = {index: self._numbers[index].renew() for index in changed}
        holders = {self._numbers[index].holder for index in changed}
        if not self._is_postponed:
            self._num_changes.update(holders)
        counts = {each: self._num_changes[each] for each in holders}
        names = [
            each.name
            for each in self._changed.values()
            if self._is_postponed or counts[each.holder] & (counts[each.holder] - 1) == 0
        ]
        self._is_postponed = bool(names)  # until they are accepted: the step may be refused
        return names


def _find_numbers_of_step(optimizer: torch.optim.Optimizer) -> list[Number]:
    """Return the numbers among global variables and attributes of classes that the step of an
    optimizer of the user's can read; those of its own attributes are in the graph.
    """
    kind = type(optimizer)
    roots = {kind.__name__: kind, f"{kind.__name__}.step": inspect.unwrap(kind.step)}
    return [each for each in find_numbers(roots) if not each.is_identity]


def _index_groups(snapshot: _Snapshot) -> list[list[int]]:
    """Return the optimizer's groups as indices of their parameters in the model."""
    indices = {identity: index for index, identity in enumerate(snapshot.parameters)}
    return [[indices.get(identity, -1) for identity in group] for group in snapshot.groups]
