"""One step of a stock optimizer on stand-ins, in the form that all steps after the first have."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from penstock.errors import CaptureError
from penstock.graph._user_line import user_line
from penstock.graph.capturing.fake_tensors import StandIns
from penstock.graph.capturing.recorder import Draft, Recorder
from penstock.graph.encoding import CONSTANT, FULL, SCALAR, dtype_named
from penstock.graph.step_graph import Kind, Phase, TensorView

_SCHEDULED = ("lr", "momentum", "weight_decay", "betas")  # what schedulers change


class OptimizerCopy:
    """A copy of an optimizer that works on stand-ins; the original is not touched.

    Args:
        optimizer: A stock optimizer.
        stand_ins: Where the parameters' stand-ins are.
        recorder: What writes its step down.
        names: Name of each parameter, by its identity.
        mode: The fake tensor mode.

    Raises:
        CaptureError: It needs a closure, has hooks, or a parameter that is not in the model.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        stand_ins: StandIns,
        recorder: Recorder,
        names: Mapping[int, str],
        mode: FakeTensorMode,
    ) -> None:
        _refuse(optimizer, names)
        self.tensors: dict[str, TensorView] = {}
        self.constants: dict[str, Any] = {}
        self.initial_state: dict[str, float | None] = {}
        self._optimizer = optimizer
        self._stand_ins = stand_ins
        self._recorder = recorder
        self._mode = mode
        self._name_of = {
            id(stand_ins.of(parameter, "parameter")): names[id(parameter)]
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self._copy = object.__new__(type(optimizer))
        self._copy.__dict__.update(optimizer.__dict__)
        self._copy.__dict__.pop("step", None)  # a scheduler's wrapper around the original's
        self._copy.param_groups = [
            {**group, "params": [stand_ins.of(each, "parameter") for each in group["params"]]}
            for group in optimizer.param_groups
        ]
        for group in self._copy.param_groups:
            _choose_implementation(group)
        self._copy.state = defaultdict(dict)
        for parameter, state in optimizer.state.items():
            self._copy.state[stand_ins.of(parameter, "parameter")] = dict(state)

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the stand-ins of the state, by their names in the graph."""
        for parameter, state in self._copy.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield f"optimizer.state.{self._name_of[id(parameter)]}.{key}", value

    def step(self) -> None:
        """Write one step down; the gradients are in `.grad` of the stand-ins."""
        first = self._first_step()
        self._adopt_state()
        numbers = {key: dict(state) for key, state in self._numbers()}
        self._adopt_hyper_parameters()
        start = len(self._recorder.drafts)
        type(self._copy).step(self._copy)
        if dict(self._numbers()) != numbers:
            raise CaptureError(
                f"{type(self._optimizer).__name__} counts its steps in Python numbers in its "
                "state, so that no two steps are alike; use an optimizer that keeps tensors there"
            )
        if first is not None:
            steady = self._recorder.drafts[start:]
            self._find_initial_state(first, [draft.target for draft in steady])

    def _numbers(self) -> list[tuple[int, dict[str, Any]]]:
        return [
            (id(parameter), {k: v for k, v in state.items() if isinstance(v, int | float)})
            for parameter, state in self._copy.state.items()
        ]

    def _first_step(self) -> Recorder | None:
        """Make the state that does not exist yet, as the optimizer itself makes it.

        Returns:
            What was written down of it; None if all state is there.
        """
        parameters = [
            parameter
            for group in self._copy.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        before = {id(each): set(self._copy.state.get(each, {})) for each in parameters}
        if all(before.values()):
            return None
        scratch = Recorder()
        scratch.phase = Phase.OPTIMIZER
        for parameter in parameters:
            scratch.adopt(parameter, "parameter", Kind.PARAMETER)
            scratch.adopt(parameter.grad, "gradient", Kind.GRADIENT)
            for tensor in self._copy.state.get(parameter, {}).values():
                if isinstance(tensor, torch.Tensor):
                    with self._mode:
                        _adopt_state(scratch, self._stand_ins.of(tensor, "state"), "state")
        for parameter, state in list(self._copy.state.items()):
            self._copy.state[parameter] = self._stand_ins.in_state(state, "optimizer.state")
        with self._recorder.paused(), scratch:
            type(self._copy).step(self._copy)
        return scratch

    def _adopt_state(self) -> None:
        """Replace the state by stand-ins that know nothing of how they were made."""
        self._made: dict[str, torch.Tensor] = {}
        with self._recorder.paused():
            for parameter, state in self._copy.state.items():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor):
                        name = f"optimizer.state.{self._name_of[id(parameter)]}.{key}"
                        self._made[name] = value
                        state[key] = self._stand_ins.of(value, name)
                        self.tensors[name] = _adopt_state(self._recorder, state[key], name)

    def _adopt_hyper_parameters(self) -> None:
        for index, group in enumerate(self._copy.param_groups):
            for key, value in group.items():
                name = f"optimizer.param_groups.{index}.{key}"
                if isinstance(value, torch.Tensor):
                    group[key] = self._stand_ins.of(value, name)
                    on_device = value.dim() > 0 or value.device.type != "cpu"
                    self.tensors[name] = self._recorder.adopt(
                        group[key], name, Kind.INPUT, on_device=on_device
                    )
                elif key in _SCHEDULED:
                    group[key] = self._symbolic(name, value)
                elif isinstance(value, bool | int | float | str | None):
                    self.constants[name] = self._optimizer.param_groups[index][key]

    def _symbolic(self, name: str, value: Any) -> Any:
        if isinstance(value, tuple | list):
            items = (self._symbolic(f"{name}.{i}", item) for i, item in enumerate(value))
            return type(value)(items)
        number = self._recorder.adopt_number(name, float(value))
        self.tensors[name] = number.node.expression
        return number

    def _find_initial_state(self, first: Recorder, steady: list[str]) -> None:
        """Find the number that fills state which does not exist before the first step.

        It is right if the first step, after making the state, is like every other one.
        """
        creators = {value: draft for draft in first.drafts for value in draft.creates}
        origins: dict[int, int] = {}  # of each block the first value
        for value, block in enumerate(first.block_of_value):
            origins.setdefault(block, value)
        makers: set[str] = set()
        for name, tensor in self._made.items():
            if not first.knows(tensor) or first.block(tensor).kind is not Kind.ACTIVATION:
                continue
            view = first.view(tensor)
            maker = creators.get(origins[first.block_of_value[view.value]])
            fill = None if maker is None else _fill(maker, view.dtype)
            if maker is not None:
                makers.add(maker.name)
            self.initial_state[name] = fill
        rest = [draft.target for draft in first.drafts if draft.name not in makers]
        steady = [target for target in steady if target != SCALAR]
        if [target for target in rest if target != SCALAR] != steady or None in (
            self.initial_state.values()
        ):
            fill = _first_momentum(self._optimizer)
            self.initial_state = dict.fromkeys(self.initial_state, fill)


def _adopt_state(recorder: Recorder, tensor: torch.Tensor, name: str) -> TensorView:
    counter = tensor.dim() == 0 and tensor.device.type == "cpu"
    return recorder.adopt(tensor, name, Kind.OPTIMIZER_STATE, on_device=not counter)


def _fill(maker: Draft, dtype: str) -> float | None:
    if maker.target == FULL and isinstance(maker.args[0], int | float):
        return float(maker.args[0])
    if maker.target == CONSTANT:
        data = bytearray(base64.b64decode(maker.args[0]["bytes"]))
        with no_dispatch():
            tensor = torch.frombuffer(data, dtype=dtype_named(dtype))
            return float(tensor[0]) if tensor.numel() == 1 else None
    return None


def _first_momentum(optimizer: torch.optim.Optimizer) -> float | None:
    """SGD's first buffer is the gradient: from negative zeros every later step makes just that.

    -0 * momentum + gradient has the gradient's bits, also where those are a zero of either sign.
    """
    plain = isinstance(optimizer, torch.optim.SGD) and not any(
        group["dampening"] for group in optimizer.param_groups
    )
    return -0.0 if plain else None


def _choose_implementation(group: dict[str, Any]) -> None:
    """Choose as torch would for the real parameters: it never takes `foreach` for fake ones."""
    if group.get("foreach", False) is None and not group.get("fused"):
        on_gpu = all(each.device.type == "cuda" for each in group["params"])
        group["foreach"] = on_gpu and not isinstance(group.get("lr"), torch.Tensor)


def _refuse(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise CaptureError(
            f"{user_line()}: {kind} calls the model several times a step through a closure, which "
            "is not one course of events; use an optimizer whose step() needs no closure"
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise CaptureError(
            f"the {kind} has hooks around step(), which run Python that a graph does not hold; "
            "remove them (register_step_pre_hook, register_step_post_hook)"
        )
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise CaptureError(
                    f"optimizer.param_groups[{number}]['params'][{place}], of shape "
                    f"{tuple(parameter.shape)}, is no parameter of the model; build the optimizer "
                    "from model.parameters() of this model"
                )
