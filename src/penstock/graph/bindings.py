"""Real tensors and numbers for the names of a step graph, checked against the graph.

A graph is data about one model, one optimizer and batches of one shape. Its execution begins with
the tensors that are found here; an error names the first one that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from penstock.errors import GraphFileError
from penstock.graph._expressions import evaluate
from penstock.graph.batches import constants_in, is_full_mask, tensors_in
from penstock.graph.encoding import dtype_from_name, dtype_name
from penstock.graph.fsdp.shards import local_of, sharded_like
from penstock.graph.splitting.input_pieces import part_of_input
from penstock.graph.step_graph import StepGraph, TensorView, views_in

_STATE, _GROUPS, _BATCH = "optimizer.state.", "optimizer.param_groups.", "batch"


def named_tensors(model: nn.Module, loss: object = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers under each of their names in a step graph."""
    for prefix, module in (("model", model), ("loss", loss)):
        if isinstance(module, nn.Module):
            for name, tensor in module.named_parameters(prefix, remove_duplicate=False):
                yield name, tensor
            for name, tensor in module.named_buffers(prefix, remove_duplicate=False):
                yield name, tensor


def bind_model(graph: StepGraph, model: nn.Module, loss: object = None) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that a graph begins with, by their names.

    Of a tensor that ranks share it is this rank's part.

    Raises:
        GraphFileError: The graph is of another model; the message names the first difference.
    """
    found = {name: local_of(tensor) for name, tensor in named_tensors(model, loss)}
    wanted = {name for name in graph.tensors if name.startswith(("model.", "loss."))}
    for name in sorted(wanted ^ found.keys()):
        owner = "the graph" if name in wanted else "the model"
        raise GraphFileError(
            f"only {owner} has a tensor {name!r}: this graph is of another model; capture this one"
        )
    _check_all(graph, found)
    _check_sharing(graph, found)
    return found


def bind_batch(graph: StepGraph, batch: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a batch by their names in a graph.

    Raises:
        ValueError: The batch has other tensors, shapes, dtypes or constants than the captured one.
        TypeError: It has something else.
    """
    found = dict(tensors_in(batch, _BATCH))
    wanted = {name for name in graph.tensors if name.split(".")[0] == _BATCH}
    if wanted != found.keys():
        raise ValueError(
            f"the batch has the tensors {sorted(found)} and the captured one had {sorted(wanted)}; "
            "pass a batch of the same form, or capture one of this form"
        )
    _check_constants(graph, batch)
    for name, tensor in found.items():
        view = graph.tensors[name]
        if (dtype_name(tensor.dtype), tuple(tensor.shape)) != (view.dtype, view.shape):
            raise ValueError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} and was captured as "
                f"{view.dtype} of shape {view.shape}; pad to that shape, or capture this one"
            )
        if name in graph.metadata.get("full_masks", ()) and not is_full_mask(tensor):
            raise ValueError(
                f"{name} masks tokens, and that of the captured batch masked none: Transformers "
                "runs other kernels then, with other roundings in half precision; plan for such a "
                "batch too (extra_batches=[batch]), or pass one that masks some as the first of "
                "its shape"
            )
        if tensor.stride() != view.stride or tensor.storage_offset() != view.offset:
            found[name] = _lay_out(tensor, view)
    for name in graph.tensors:
        if part := part_of_input(name):
            whole, begin, end = part
            found[name] = found[whole].as_strided((end - begin,), (1,), begin)
    return found


def _check_constants(graph: StepGraph, batch: Any) -> None:
    captured = graph.metadata.get("batch_constants")
    if captured is None:  # the graph is of an older version
        return
    found = constants_in(batch, _BATCH)
    for name in sorted(captured.keys() | found.keys()):
        now, then = found.get(name, "not there"), captured.get(name, "not there")
        if now != then:
            raise ValueError(
                f"{name} is {now} and was {then} when the step was captured, of which it is a "
                "part: pass it as a tensor if the model can take one, or capture a step for it"
            )


def _lay_out(tensor: torch.Tensor, view: TensorView) -> torch.Tensor:
    """Copy a tensor into a storage in which its elements lie as in a view."""
    steps = zip(view.shape, view.stride, strict=True)
    num_elements = view.offset + sum((size - 1) * stride for size, stride in steps) + 1
    memory = torch.empty(num_elements, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(view.shape, view.stride, view.offset).copy_(tensor)


def bind_state(
    graph: StepGraph, model: nn.Module, optimizer: torch.optim.Optimizer, loss: object = None
) -> dict[str, torch.Tensor]:
    """Return the optimizer's state by its names in a graph; make state that does not exist yet.

    Raises:
        GraphFileError: The optimizer has other state than the captured one.
        ValueError: State is missing, and the graph does not say how it begins.
    """
    parameters: dict[str, torch.Tensor] = {}
    for name, tensor in named_tensors(model, loss):
        parameters.setdefault(name.removeprefix("model."), tensor)
    found = {}
    for name, view in graph.tensors.items():
        if name.startswith(_STATE):
            owner, key = name.removeprefix(_STATE).rsplit(".", 1)
            if owner not in parameters:
                raise GraphFileError(f"the graph has {name!r}, and the model no {owner!r}")
            state = optimizer.state[parameters[owner]]
            if key not in state:
                made = _initial_state(graph, name, view, parameters[owner])
                state[key] = sharded_like(made, parameters[owner])
            found[name] = local_of(state[key])
    _check_all(graph, found)
    return found


def bind_numbers(graph: StepGraph, optimizer: torch.optim.Optimizer) -> dict[int, float]:
    """Return the hyper-parameters of this step, by value.

    Raises:
        GraphFileError: One has changed that the graph holds as a constant, or compares otherwise.
    """
    numbers = {}
    for name, view in graph.tensors.items():
        if (
            name.startswith(_GROUPS)
            and graph.storages[graph.storage_of_value[view.value]].kind == "scalar"
        ):
            numbers[view.value] = float(_group_entry(optimizer, name))
    for name, constant in graph.metadata.get("hyper_parameters", {}).items():
        now = _group_entry(optimizer, name)
        if now != constant:
            raise GraphFileError(
                f"{name} is {now!r} and was {constant!r} at the capture: capture again"
            )
    check_guards(graph, lambda view: numbers[view.value])
    return numbers


def bind_group_tensors(
    graph: StepGraph, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Return the hyper-parameters that are tensors, by their names."""
    entries = {
        name: _group_entry(optimizer, name) for name in graph.tensors if name.startswith(_GROUPS)
    }
    return {name: entry for name, entry in entries.items() if isinstance(entry, torch.Tensor)}


def check_guards(graph: StepGraph, read: Callable[[TensorView], float]) -> None:
    """Raise if a comparison that the optimizer made has another outcome now."""
    for expression, outcome in graph.guards:
        if bool(evaluate(expression, read)) != outcome:
            names = {view: name for name, view in graph.tensors.items()}
            found = {names.get(view, "a number"): read(view) for view in views_in(expression)}
            now = ", ".join(f"{name} is {number!r}" for name, number in found.items())
            raise GraphFileError(
                f"{now} and has passed a value at which the optimizer takes another branch "
                f"({expression[0]} with {expression[-1]}): capture again"
            )


def _group_entry(optimizer: torch.optim.Optimizer, name: str) -> Any:
    index, key, *rest = name.removeprefix(_GROUPS).split(".")
    try:
        value = optimizer.param_groups[int(index)][key]
        for place in rest:
            value = value[int(place)]
    except (IndexError, KeyError, TypeError) as error:
        raise GraphFileError(
            f"the optimizer has no {name!r}: the graph is of another optimizer; capture again"
        ) from error
    return value


def _initial_state(
    graph: StepGraph, name: str, view: TensorView, parameter: torch.Tensor
) -> torch.Tensor:
    fill = graph.metadata.get("initial_state", {}).get(name)
    if fill is None:
        raise ValueError(
            f"{name!r} does not exist yet and its first step is unlike the others: take one "
            "ordinary step (loss.backward(); optimizer.step()) before running the graph"
        )
    storage = graph.storages[graph.storage_of_value[view.value]]
    device = parameter.device if storage.num_bytes else torch.device("cpu")
    tensor = torch.empty_strided(
        view.shape, view.stride, dtype=dtype_from_name(view.dtype), device=device
    )
    return tensor.fill_(fill)


def _check_all(graph: StepGraph, found: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in found.items():
        view = graph.tensors[name]
        here = (
            dtype_name(tensor.dtype),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
        )
        if here != tuple(view[1:]):
            raise GraphFileError(
                f"{name} is (dtype, shape, stride, offset) {here} and was captured as "
                f"{tuple(view[1:])}: this graph is of another model; capture this one"
            )


def _check_sharing(graph: StepGraph, found: Mapping[str, torch.Tensor]) -> None:
    """Raise unless tensors share a storage in the model where they share one in the graph."""
    captured: dict[int, str] = {}
    real: dict[int, str] = {}
    for name, tensor in found.items():
        first = captured.setdefault(graph.storage_of_value[graph.tensors[name].value], name)
        if real.setdefault(tensor.untyped_storage()._cdata, name) != first:
            raise GraphFileError(
                f"{name} shares its memory with another tensor in the model or in the graph, but "
                "not in both (tied weights): capture this model"
            )
