"""One step of a stock optimizer on fake tensors, in the form of all steps after the first."""

from __future__ import annotations

import base64
import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from penstock.compat.dispatch import no_dispatch
from penstock.errors import CaptureError
from penstock.graph.bindings import SCHEDULED, describe_rounding, hyper_parameters_of
from penstock.graph.capturing._drafts import Draft
from penstock.graph.capturing._model import copy_to_places
from penstock.graph.capturing._program_lines import error_here
from penstock.graph.capturing.fake_tensors import FakeTensors
from penstock.graph.capturing.hooks import describe_step_hooks
from penstock.graph.capturing.recorder import Recorder
from penstock.graph.encoding import CONSTANT, FULL, SCALAR
from penstock.graph.step_graph import Kind, Phase, TensorView

_PLAIN = (int, float, str, type(None))  # no flags: what is done once may be noted in one


class OptimizerCopy:
    """A copy of a stock optimizer that works on fake tensors; the original is not touched.

    Attributes:
        tensors: Views of its state and hyper-parameters, by their names in the graph.
        constants: Hyper-parameters that must not change, by name.
        initial_state: The number that fills state which does not exist before the first step, by
            name; None where there is none.

    Raises:
        CaptureError: It needs a closure, has hooks or a `step` of its own, or a parameter that is
            not in the model.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        fakes: FakeTensors,
        recorder: Recorder,
        names: Mapping[int, str],
    ) -> None:
        _check(optimizer, names)
        self.tensors: dict[str, TensorView] = {}
        self.constants: dict[str, Any] = {}
        self.initial_state: dict[str, float | None] = {}
        self._optimizer = optimizer
        self._fakes = fakes
        self._recorder = recorder
        self._name_of = {
            id(fakes.of(parameter, "parameter")): names[id(parameter)]
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self._copy = object.__new__(type(optimizer))
        self._copy.__dict__.update(
            {key: _copy_container(value) for key, value in optimizer.__dict__.items()}
        )
        self._copy.__dict__.pop("step", None)  # a scheduler's wrapper around the original's
        self._copy.param_groups = [
            {**group, "params": [fakes.of(each, "parameter") for each in group["params"]]}
            for group in optimizer.param_groups
        ]
        for group in self._copy.param_groups:
            _choose_implementation(group)
        self._copy.state = defaultdict(dict)
        for parameter, state in optimizer.state.items():
            if not isinstance(parameter, torch.Tensor):
                raise self._refuse_owner(parameter)
            self._copy.state[fakes.of(parameter, "parameter")] = {
                key: _copy_container(value) for key, value in state.items()
            }

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the fake tensors of the state, by their names in the graph."""
        for parameter, state in self._copy.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield self._name_state(parameter, key), value

    def _name_state(self, parameter: object, key: str) -> str:
        if id(parameter) not in self._name_of:
            raise self._refuse_owner(parameter)
        return f"optimizer.state.{self._name_of[id(parameter)]}.{key}"

    def _refuse_owner(self, owner: object) -> CaptureError:
        is_tensor = isinstance(owner, torch.Tensor)
        what = f"a tensor of shape {tuple(owner.shape)}" if is_tensor else repr(owner)
        return CaptureError(
            f"{type(self._optimizer).__name__} keeps state under {what} (optimizer.state), which "
            "is none of its parameters: keep it under one of them, as its first, or delete it"
        )

    def step(self) -> None:
        """Record one step; the gradients are in `.grad` of the fake tensors."""
        scratches = self._record_first_step()
        self._adopt_state()
        numbers = {key: dict(state) for key, state in self._python_numbers()}
        # An attribute that the first step has changed, as a flag, is none that is constant.
        found, now = hyper_parameters_of(self._optimizer), hyper_parameters_of(self._copy)
        self.constants = {
            name: value
            for name, value in found.items()
            if name.startswith("optimizer.param_groups.") or now.get(name, value) == value
        }
        self._adopt_hyper_parameters()
        start = len(self._recorder.drafts)
        before = self._python_state()
        adopted = {
            parameter: {key: _copy_container(value) for key, value in state.items()}
            for parameter, state in self._copy.state.items()
        }
        self._call_step()
        self._refuse_changes(before)
        if dict(self._python_numbers()) != numbers:
            raise CaptureError(
                f"{type(self._optimizer).__name__} counts its steps in Python numbers in its "
                "state, so that no two steps are alike; use an optimizer that keeps tensors there"
            )
        self._refuse_idleness(start)
        steady = [draft.target for draft in self._recorder.drafts[start:]]
        is_replaced = self._write_back_state(adopted)
        if scratches:
            first, *seconds = scratches
            if seconds:
                steady = [draft.target for draft in seconds[0].drafts]
            self._find_initial_state(first, steady)
            if is_replaced:  # what the first step made is not what it has left there
                self.initial_state = dict.fromkeys(self.initial_state)

    def _python_numbers(self) -> list[tuple[int, dict[str, Any]]]:
        return [
            (id(parameter), {k: v for k, v in state.items() if isinstance(v, int | float)})
            for parameter, state in self._copy.state.items()
        ]

    def _python_state(self) -> dict[str, Any]:
        """Return what `step` may change besides tensors, by name: numbers as they are, and copies
        of lists and dictionaries of them.
        """
        found = {
            f"optimizer.param_groups[{index}][{key!r}]": value
            for index, group in enumerate(self._copy.param_groups)
            for key, value in group.items()
        }
        for key, value in vars(self._copy).items():
            if key not in ("state", "param_groups"):
                found[f"optimizer.{key}"] = value
        return {name: _copy_container(each) for name, each in found.items()}

    def _refuse_changes(self, before: dict[str, Any]) -> None:
        for name, now in self._python_state().items():
            if name not in before and not isinstance(now, bool | None):
                raise CaptureError(
                    f"{type(self._optimizer).__name__}.step makes {name}, which planned steps "
                    "would not: make it in __init__, or take one ordinary step before"
                )
            if name in before and not _is_same(before[name], now, self._is_read):
                raise CaptureError(
                    f"{type(self._optimizer).__name__}.step changes {name}, which planned steps "
                    "would not; keep it in a tensor of the optimizer's state, or change it between "
                    "steps, as a scheduler does"
                )

    def _refuse_idleness(self, start: int) -> None:
        """Raise if the step, from an operator on, has changed no parameter that has a gradient."""
        storages = self._recorder.storages
        written = {
            storages.storage_of_value[new]
            for draft in self._recorder.drafts[start:]
            for _, new in draft.mutates
        }
        trained = [
            each
            for group in self._copy.param_groups
            for each in group["params"]
            if each.grad is not None
        ]
        unchanged = [
            each
            for each in trained
            if storages.of(each).kind is Kind.PARAMETER and storages.index_of(each) not in written
        ]
        if unchanged and len(unchanged) == len(trained):
            kind = type(self._optimizer).__name__
            raise CaptureError(
                f"{kind}.step changes none of its parameters, of which {len(trained)} have "
                "gradients; it has to change those in optimizer.param_groups, as these are others "
                "during a capture than it may hold elsewhere"
            )

    def _write_back_state(self, adopted: dict[torch.Tensor, dict[str, Any]]) -> bool:
        """Copy tensors of the state that the step has replaced to the places of the old ones.

        Returns:
            Whether there are any.

        Raises:
            CaptureError: There is other state than before, or of another form.
        """
        pairs: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for parameter in {**adopted, **self._copy.state}:
            before, now = adopted.get(parameter, {}), self._copy.state.get(parameter, {})
            for key in {**before, **now}:
                name = self._name_state(parameter, key)
                if change := _describe_change(before, now, key, name):
                    raise CaptureError(f"{type(self._optimizer).__name__}.step {change}")
                if isinstance(before[key], torch.Tensor):
                    pairs.append((name, before[key], now[key]))
        self._refuse_shared_state(pairs)
        replaced = [(old, new) for _, old, new in pairs if _place_of(old) != _place_of(new)]
        copy_to_places(replaced)
        self._copy.state = defaultdict(dict, adopted)
        return bool(replaced)

    def _refuse_shared_state(self, pairs: list[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
        """Raise if tensors of the state have come to share memory that did not before."""
        old_of: dict[Any, Any] = {}
        storages = self._recorder.storages
        for name, old, new in pairs:
            place, shared = _place_of(old), "another tensor of the state"
            is_shared = old_of.setdefault(_place_of(new), place) != place
            is_moved = place != _place_of(new) and new in storages
            if is_moved and storages.of(new).kind is Kind.PARAMETER:
                is_shared, shared = True, "a parameter"
            if is_shared:
                raise CaptureError(
                    f"{type(self._optimizer).__name__}.step lets {name} be the memory of {shared}, "
                    "and planned state has its own: copy it (clone())"
                )

    def _is_read(self, tensor: torch.Tensor) -> bool:
        """Return whether the recorded step has used a tensor that was there before."""
        return id(tensor) in self._recorder.outside.used or tensor in self._recorder.storages

    def _record_first_step(self) -> list[Recorder]:
        """Let the optimizer make the state that it does not have.

        Returns:
            What it did for the parameters without state: nothing; or the first step, which is to be
            like the step of all parameters; or, where others have state, the first and the second.
        """
        with_gradient = [
            [each for each in group["params"] if each.grad is not None]
            for group in self._copy.param_groups
        ]
        stateless = [
            [each for each in some if not self._copy.state.get(each)] for some in with_gradient
        ]
        if not any(stateless):
            return []
        groups = self._copy.param_groups
        self._copy.param_groups = [
            {**group, "params": some} for group, some in zip(groups, stateless, strict=True) if some
        ]
        parameters = [each for some in stateless for each in some]
        scratches = [self._record_scratch_step(parameters)]
        if len(parameters) < sum(map(len, with_gradient)):
            scratches.append(self._record_scratch_step(parameters))
        self._copy.param_groups = groups
        return scratches

    def _record_scratch_step(self, parameters: list[torch.Tensor]) -> Recorder:
        scratch = Recorder()
        scratch.phase = Phase.OPTIMIZER
        for parameter in parameters:
            assert parameter.grad is not None
            scratch.adopt(parameter, "parameter", Kind.PARAMETER)
            scratch.adopt(parameter.grad, "gradient", Kind.GRADIENT)
            for tensor in self._copy.state.get(parameter, {}).values():
                if isinstance(tensor, torch.Tensor):
                    _adopt_state(scratch, tensor, "state")
        with self._recorder.pause(), scratch:
            self._call_step()
        return scratch

    def _call_step(self) -> None:
        """Let the copy step, and give its parameters the gradients back that it may have freed.

        Raises:
            CaptureError: It adds to a group, which may be one of the first step only.
        """
        groups = self._copy.param_groups
        parameters = [each for group in groups for each in group["params"]]
        gradients = [each.grad for each in parameters]
        known = [set(group) for group in groups]
        type(self._copy).step(self._copy)
        for keys in (group.keys() - before for group, before in zip(groups, known, strict=True)):
            if keys:
                raise CaptureError(
                    f"{type(self._optimizer).__name__}.step adds {min(keys)!r} to "
                    "optimizer.param_groups, which planned steps would not; keep it in a tensor of "
                    "the state of a parameter, as the group's first"
                )
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    def _adopt_state(self) -> None:
        """Replace the state by fake tensors that have no past in the graph."""
        self._made: dict[str, torch.Tensor] = {}
        with self._recorder.pause():
            for parameter, state in self._copy.state.items():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor):
                        name = self._name_state(parameter, key)
                        self._made[name] = value
                        state[key] = self._fakes.of(value, name)
                        self.tensors[name] = _adopt_state(self._recorder, state[key], name)

    def _adopt_hyper_parameters(self) -> None:
        for index, group in enumerate(self._copy.param_groups):
            for key, value in group.items():
                name = f"optimizer.param_groups.{index}.{key}"
                if isinstance(value, torch.Tensor):
                    with self._recorder.pause():
                        group[key] = self._fakes.of(value, name)
                    on_device = value.dim() > 0 or value.device.type != "cpu"
                    self.tensors[name] = self._recorder.adopt(
                        group[key], name, Kind.INPUT, on_device=on_device
                    )
                elif key in SCHEDULED:
                    group[key] = self._adopt_numbers(name, value)

    def _adopt_numbers(self, name: str, value: Any) -> Any:
        if isinstance(value, tuple | list):
            items = (self._adopt_numbers(f"{name}.{i}", item) for i, item in enumerate(value))
            return type(value)(items)
        if (problem := describe_rounding(name, value)) is not None:
            raise CaptureError(problem)
        number = self._recorder.adopt_number(name, float(value))
        self.tensors[name] = number.node.expression
        return number

    def _find_initial_state(self, first: Recorder, steady: list[str]) -> None:
        """Find the numbers that fill state which does not exist before the first step.

        They are right if the first step, after making the state, is like every other one.
        """
        storages = first.storages
        of = storages.storage_of_value
        maker_of = {of[value]: draft for draft in first.drafts for value in draft.creates}
        makers: set[str] = set()
        for name, tensor in self._made.items():
            if tensor in storages:
                maker = maker_of.get(storages.index_of(tensor))
                self.initial_state[name] = maker and _read_fill(maker, tensor.dtype)
                makers.add(maker.name if maker else "")
        # Numbers of groups that are tensors are constants in the first step, and not adopted yet.
        rest = [
            each.target for each in first.drafts if each.name not in makers and not each.is_outside
        ]
        rest, steady = ([each for each in some if each != SCALAR] for some in (rest, steady))
        if rest != steady or None in self.initial_state.values():
            fill = _find_first_momentum(self._optimizer)
            self.initial_state = dict.fromkeys(self.initial_state, fill)


def _describe_change(
    before: Mapping[str, Any], now: Mapping[str, Any], key: str, name: str
) -> str | None:
    """Describe a change of an item of the state that a graph cannot say; None if there is none."""
    if key not in before or key not in now:
        return (
            f"{'makes' if key in now else 'removes'} {name}, which the steps that follow would "
            "not: take ordinary steps (loss.backward(); optimizer.step()) until the state stays "
            "the same"
        )
    old, new = _describe_form(before[key]), _describe_form(now[key])
    if old != new:
        return (
            f"lets {name} become {new}, and it was {old}; planned state keeps its form: change it "
            "in place, or take one ordinary step before"
        )
    if not (isinstance(before[key], torch.Tensor) or _is_same(before[key], now[key])):
        return f"changes {name}, which planned steps would not; keep each tensor under its own key"
    return None


def _describe_form(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{value.dtype} of shape {tuple(value.shape)} with strides {value.stride()}"


def _place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


def _adopt_state(recorder: Recorder, tensor: torch.Tensor, name: str) -> TensorView:
    counter = tensor.dim() == 0 and tensor.device.type == "cpu"
    return recorder.adopt(tensor, name, Kind.OPTIMIZER_STATE, on_device=not counter)


def _read_fill(maker: Draft, dtype: torch.dtype) -> float | None:
    if maker.target == FULL and isinstance(maker.args[0], int | float):
        return float(maker.args[0])
    if maker.target == CONSTANT:
        data = bytearray(base64.b64decode(maker.args[0]["bytes"]))
        with no_dispatch():
            tensor = torch.frombuffer(data, dtype=dtype)
            return float(tensor[0]) if tensor.numel() == 1 else None
    return None


def _find_first_momentum(optimizer: torch.optim.Optimizer) -> float | None:
    """Return -0.0 for SGD, from which every step makes its first buffer, the gradient itself.

    -0 * momentum + gradient has the gradient's bits, also where those are a zero of either sign.
    """
    plain = isinstance(optimizer, torch.optim.SGD) and not any(
        group["dampening"] for group in optimizer.param_groups
    )
    return -0.0 if plain else None


def _choose_implementation(group: dict[str, Any]) -> None:
    """Set `foreach` as torch would for the real parameters: it never does so for fake ones."""
    if group.get("foreach", False) is None and not group.get("fused"):
        on_gpu = all(each.device.type == "cuda" for each in group["params"])
        group["foreach"] = on_gpu and not isinstance(group.get("lr"), torch.Tensor)


def _copy_container(value: Any) -> Any:
    return copy.copy(value) if type(value) in (list, dict, set, defaultdict) else value


def _is_same(
    before: Any, now: Any, is_read: Callable[[torch.Tensor], bool] = lambda _: True
) -> bool:
    """Return whether a value is the same as before, or a tensor that has not been read; of
    containers, their content.
    """
    if isinstance(before, torch.Tensor):
        return before is now or not is_read(before)
    if isinstance(before, torch.SymFloat):
        return before is now
    if type(before) in _PLAIN:
        return before is None or now == before or before != before  # a NaN
    if type(before) is not type(now):
        return True
    if isinstance(before, list | tuple):
        return len(before) == len(now) and all(
            _is_same(*pair, is_read) for pair in zip(before, now, strict=True)
        )
    if isinstance(before, dict):
        return before.keys() == now.keys() and all(
            _is_same(before[key], now[key], is_read) for key in now
        )
    return True


def _check(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise error_here(
            f"{kind} calls the model several times a step through a closure, which is not one "
            "course of events; use an optimizer whose step() needs no closure"
        )
    for key, value in vars(optimizer).items():
        items = value.values() if isinstance(value, dict) else value
        for inner in items if isinstance(value, dict | list | tuple) else [value]:
            if isinstance(inner, torch.optim.Optimizer) and inner is not optimizer:
                raise CaptureError(
                    f"{kind} holds another optimizer, of class {type(inner).__name__} "
                    f"(optimizer.{key}), whose steps would be lost: pass that one, and do between "
                    f"planned steps what {kind} adds, or train without a plan under "
                    "penstock.offload"
                )
    if (hooks := describe_step_hooks(optimizer)) is not None:
        raise CaptureError(hooks)
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise CaptureError(
                    f"optimizer.param_groups[{number}]['params'][{place}], of shape "
                    f"{tuple(parameter.shape)}, is no parameter of the model; build the optimizer "
                    "from model.parameters() of this model"
                )
