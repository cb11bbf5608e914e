"""Real tensors and numbers for the names of a step graph, checked against the graph.

A graph is data about one model, one optimizer and batches of one shape. Its execution begins with
the tensors that are found here; an error names the first one that does not fit, before anything
moves. Tensors of model and optimizer are entries of their dictionaries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from penstock.errors import GraphFileError
from penstock.graph.batches import constants_in, describe_calls, is_full_mask, tensors_in
from penstock.graph.encoding import dtype_from_name, dtype_name, evaluate
from penstock.graph.fsdp.shards import Shard, ShardedModel, local_of, sharded_like
from penstock.graph.splitting.input_pieces import part_of_input
from penstock.graph.step_graph import Kind, StepGraph, TensorView, views_in

STATE_PREFIX = "optimizer.state."
_GROUPS, _BATCH = "optimizer.param_groups.", "batch"
SCHEDULED = ("lr", "momentum", "weight_decay", "betas")  # numbers that schedulers change
_CONSTANTS = (bool, int, float, str, type(None))
_NO_CONSTANTS = ("param_groups", "state", "defaults")  # attributes of all optimizers
_MAX_ITEMS, _MAX_DEPTH = 256, 4  # of containers among hyper-parameters


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
    _check_calls(graph, batch)
    for name, tensor in found.items():
        view = graph.tensors[name]
        _check_tensor(name, tensor, view)
        if _has_other_order(tensor, view):
            raise ValueError(
                f"{name} has strides {tensor.stride()} and was captured with {view.stride}, its "
                "dimensions in another order in memory, for which PyTorch runs other kernels with "
                "other roundings; pass it as captured (.contiguous(), memory_format=), or plan for "
                "such a batch too (extra_batches=[batch])"
            )
        if name in graph.metadata.get("full_masks", ()) and not is_full_mask(tensor):
            raise ValueError(
                f"{name} masks tokens, and that of the captured batch masked none: Transformers "
                "runs other kernels then, with other roundings in half precision; plan for such a "
                "batch too (extra_batches=[batch]), or pass one that masks some as the first of "
                "its shape"
            )
        if tensor.stride() != view.stride or tensor.storage_offset() != view.offset:
            found[name] = _lay_out(name, tensor, view)
    return add_input_parts(graph, found)


def _check_tensor(name: str, tensor: torch.Tensor, view: TensorView) -> None:
    """Raise unless a tensor of the batch has numbers, and the captured one's form."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        what = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
        raise ValueError(f"{name} is {what}; pass a dense tensor with numbers (to_dense())")
    if (dtype_name(tensor.dtype), tuple(tensor.shape)) != (view.dtype, view.shape):
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} and was captured as "
            f"{view.dtype} of shape {view.shape}; pad to that shape, or capture this one"
        )


def _lay_out(name: str, tensor: torch.Tensor, view: TensorView) -> torch.Tensor:
    """Return a tensor of the batch with the strides of the captured one.

    Raises:
        ValueError: Elements shared memory in the captured one, and are different numbers here.
    """
    memory = torch.empty(view.end, dtype=tensor.dtype, device=tensor.device)
    found = memory.as_strided(view.shape, view.stride, view.offset)
    once = tensor  # each element of memory
    for dim, stride in enumerate(view.stride):
        once = once[(slice(None),) * dim + (slice(1),)] if stride == 0 else once
    # Of other elements that share memory the latest is kept.
    memory.as_strided(once.shape, view.stride, view.offset).copy_(once)
    shares = once.shape != tensor.shape or view.end < view.offset + tensor.numel()
    if shares and not _has_numbers(found, tensor):
        raise ValueError(
            f"{name} was captured with the strides {view.stride}, by which elements share memory, "
            "as expanded tensors do, and they are different numbers now: capture with a batch "
            "whose tensors are .contiguous()"
        )
    return found


def _has_numbers(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors hold the same numbers; a NaN is the same as another."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _has_other_order(tensor: torch.Tensor, view: TensorView) -> bool:
    """Return whether the dimensions of images are in another order in memory than captured, as with
    `torch.channels_last`, for which convolutions run other kernels. Of integers, and of expanded
    tensors, order does not matter.
    """
    is_real = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    dims = [dim for dim, length in enumerate(view.shape) if length > 1]
    is_expanded = any(0 in (tensor.stride(dim), view.stride[dim]) for dim in dims)
    if not is_real or len(view.shape) < 4 or is_expanded:
        return False
    orders = (sorted(dims, key=lambda dim: -each[dim]) for each in (tensor.stride(), view.stride))
    return next(orders) != next(orders)


def add_input_parts(graph: StepGraph, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a batch's tensors with the parts that a graph of split operators has of them."""
    for name in graph.tensors:
        if part := part_of_input(name):
            whole, begin, end = part
            tensors[name] = tensors[whole].as_strided((end - begin,), (1,), begin)
    return tensors


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


def _check_calls(graph: StepGraph, batch: Any) -> None:
    """Raise if the model would be called with the batch in another way than at the capture."""
    captured = graph.metadata.get("calls", {})
    for name, now in describe_calls(batch, None if _BATCH in captured else len(captured)).items():
        if now != (then := captured.get(name, now)):
            raise ValueError(
                f"{name} is passed as {now}, and the step was captured as {then}: pass "
                "tuple(batch) for model(*batch), a mapping for model(**batch), and list(batch) or "
                "what it was for model(batch)"
            )


def bind_numbers(graph: StepGraph, optimizer: torch.optim.Optimizer) -> dict[int, float]:
    """Return the hyper-parameters of this step, by value.

    Raises:
        GraphFileError: One has changed that the graph holds as a constant, or compares otherwise.
    """
    numbers = {}
    for name, view in graph.tensors.items():
        if name.startswith(_GROUPS) and graph.storage(view.value).kind is Kind.SCALAR:
            number = _group_entry(optimizer, name)
            if (problem := describe_rounding(name, number)) is not None:
                raise GraphFileError(problem)
            numbers[view.value] = float(number)
    found = hyper_parameters_of(optimizer)
    for name, constant in graph.metadata.get("hyper_parameters", {}).items():
        if name not in found:
            raise _make_missing_error(name)
        now = found[name]
        if now != constant and repr(now) != repr(constant):  # a NaN is unlike itself
            raise GraphFileError(
                f"{name} is {now!r} and was {constant!r} at the capture: capture again"
            )
    _check_guards(graph, numbers)
    return numbers


def hyper_parameters_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what an optimizer's step may read beside tensors and what schedulers change, by name:
    numbers, strings and None in its groups and in its attributes without an underscore.
    """
    found: dict[str, Any] = {}
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params" and key not in SCHEDULED:
                _add_constants(found, f"{_GROUPS}{index}.{key}", value)
    for key, value in vars(optimizer).items():
        if key[0] != "_" and key not in _NO_CONSTANTS:
            _add_constants(found, f"optimizer.{key}", value)
    return found


def _add_constants(found: dict[str, Any], name: str, value: Any, depth: int = _MAX_DEPTH) -> None:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, _CONSTANTS):
        found[name] = value
    elif isinstance(value, dict | list | tuple) and depth and len(value) <= _MAX_ITEMS:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _add_constants(found, f"{name}.{key}", item, depth - 1)


def describe_rounding(name: str, number: object) -> str | None:
    """Describe a number with which an optimizer calculates otherwise than with Python's floats;
    None if it is none.
    """
    if not isinstance(number, np.floating) or isinstance(number, float):
        return None
    return (
        f"{name} is {number!r}, and what an optimizer calculates with it is rounded to "
        f"{number.dtype}, where planned steps calculate with Python's floats: pass float(...)"
    )


def bind_group_tensors(
    graph: StepGraph, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Return the hyper-parameters that are tensors, by their names."""
    entries = {
        name: _group_entry(optimizer, name) for name in graph.tensors if name.startswith(_GROUPS)
    }
    return {name: entry for name, entry in entries.items() if isinstance(entry, torch.Tensor)}


def _check_guards(graph: StepGraph, numbers: dict[int, float]) -> None:
    """Raise if a comparison that the optimizer made has another outcome now."""
    for expression, outcome in graph.guards:
        if bool(evaluate(expression, lambda view: numbers[view.value])) != outcome:
            names = {view: name for name, view in graph.tensors.items()}
            now = ", ".join(
                f"{names.get(view, 'a number')} is {numbers[view.value]!r}"
                for view in dict.fromkeys(views_in(expression))
            )
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
        raise _make_missing_error(name) from error
    return value


def _make_missing_error(name: str) -> GraphFileError:
    return GraphFileError(
        f"the optimizer has no {name!r}: the graph is of another optimizer; capture again"
    )


class StateEntry(NamedTuple):
    """A tensor of the user's at `holder()[key]`; loading a state makes new dictionaries.

    Attributes:
        name: Its name in the graph.
        holder: Returns the dictionary.
        key: Its key there.
        view: Its view in the graph.
        shard: Its shard, if it is a parameter that FSDP2 has sharded.
        owner: The parameter whose state it is; None if it is no state.
    """

    name: str
    holder: Callable[[], MutableMapping[str, Any]]
    key: str
    view: TensorView
    shard: Shard | None = None
    owner: torch.Tensor | None = None

    def get(self) -> torch.Tensor | None:
        """Return the tensor; of a DTensor this rank's part."""
        return local_of(self.get_whole())

    def get_whole(self) -> torch.Tensor | None:
        """Return the tensor or the DTensor that the dictionary holds."""
        return self.holder().get(self.key)

    def set(self, tensor: torch.Tensor) -> torch.Tensor:
        """Put a tensor into the dictionary; return what `get` returns then."""
        self.holder()[self.key] = sharded_like(tensor, self.owner)
        return local_of(self.get_whole())

    def take(self, graph: StepGraph) -> torch.Tensor:
        """Return what `get` returns, laid out as in a graph; make state that does not exist.

        Raises:
            GraphFileError: It is laid out otherwise.
        """
        view, tensor = self.view, self.get()
        if tensor is None:
            assert self.owner is not None
            device = self.owner.device if graph.num_bytes(view.value) else torch.device("cpu")
            dtype = dtype_from_name(view.dtype)
            made = torch.empty_strided(view.shape, view.stride, dtype=dtype, device=device)
            return self.set(made.fill_(find_initial_fill(graph, self.name)))
        if (tensor.stride(), tensor.storage_offset()) != (view.stride, view.offset):
            raise GraphFileError(
                f"{self.name} has strides {tensor.stride()} and offset {tensor.storage_offset()} "
                f"and was captured with {view.stride} and {view.offset}: this graph is of another "
                "model; capture this one"
            )
        return tensor

    def get_flat_shard(self) -> tuple[torch.Tensor, TensorView] | None:
        """Return the flat shard, with its padding, that a sharded parameter is a view of."""
        if self.shard is None:
            return None
        flat = self.shard.flat
        return flat, self.view._replace(shape=tuple(flat.shape), stride=(1,))


def find_entries(
    graph: StepGraph,
    model: nn.Module,
    loss: object,
    optimizer: torch.optim.Optimizer,
    sharded: ShardedModel,
) -> list[StateEntry]:
    """Return the entries of a model, its loss and its optimizer.

    Raises:
        GraphFileError: The graph is of another model or optimizer; nothing has been touched.
        ValueError: State is missing and the graph does not say how it begins.
    """
    entries = list(_find_module_entries(graph, model, loss, sharded))
    for entry in entries:
        check_form(entry.name, entry.view, local_of(entry.holder()[entry.key]))
    _check_sharing(graph, entries)
    return [*entries, *_find_optimizer_entries(graph, entries, optimizer)]


def find_initial_fill(graph: StepGraph, name: str) -> float:
    """Return the number that fills state which does not exist yet.

    Raises:
        ValueError: The graph has none.
    """
    fill = graph.metadata.get("initial_state", {}).get(name)
    if fill is None:
        raise ValueError(
            f"{name!r} does not exist yet and its first step is unlike the others: take one "
            "ordinary step (loss.backward(); optimizer.step()) before"
        )
    return fill


def check_form(name: str, view: TensorView, tensor: torch.Tensor) -> None:
    """Refuse a tensor of another dtype or shape than the graph's."""
    here = (dtype_name(tensor.dtype), tuple(tensor.shape))
    if here != (view.dtype, view.shape):
        raise GraphFileError(
            f"{name} is {here[0]} of shape {here[1]} and was captured as {view.dtype} of shape "
            f"{view.shape}: this graph is of another model; capture this one"
        )


def _find_module_entries(
    graph: StepGraph, model: nn.Module, loss: object, sharded: ShardedModel
) -> Iterator[StateEntry]:
    """Yield the entries of parameters and buffers."""
    found = {}
    for prefix, root in (("model", model), ("loss", loss)):
        if not isinstance(root, nn.Module):
            continue
        for path, module in root.named_modules(prefix=prefix, remove_duplicate=False):
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    if tensor is None:
                        continue
                    shard = sharded.at(module, key) if tensors is module._parameters else None
                    found[f"{path}.{key}"] = tensors, key, shard
    captured = {name for name in graph.tensors if name.startswith(("model.", "loss."))}
    for name in sorted(captured ^ found.keys()):
        only = "the graph" if name in captured else "the model"
        raise GraphFileError(
            f"only {only} has a tensor {name!r}: this graph is of another model; capture this one"
        )
    for name, (tensors, key, shard) in found.items():
        # FSDP2 has a shard also while the module holds the whole parameter.
        holder = lambda tensors=tensors, key=key, shard=shard: (  # noqa: E731
            tensors if shard is None else {key: shard.parameter}
        )
        yield StateEntry(name, holder, key, graph.tensors[name], shard)


def _find_optimizer_entries(
    graph: StepGraph, module_entries: list[StateEntry], optimizer: torch.optim.Optimizer
) -> Iterator[StateEntry]:
    """Yield the entries of groups and state; missing state must have an initial number."""
    parameters: dict[str, torch.Tensor] = {}
    for entry in module_entries:
        parameters.setdefault(entry.name.removeprefix("model."), entry.holder()[entry.key])
    for name, view in graph.tensors.items():
        if name.startswith(_GROUPS) and graph.storage(view.value).persistent:
            index, key = name.removeprefix(_GROUPS).split(".", 1)
            group = int(index)
            yield StateEntry(name, lambda group=group: optimizer.param_groups[group], key, view)
        if not name.startswith(STATE_PREFIX):
            continue
        owner, key = name.removeprefix(STATE_PREFIX).rsplit(".", 1)
        if owner not in parameters:
            raise GraphFileError(
                f"the graph has {name!r}, and the model no {owner!r}: this graph is of another "
                "model; capture this one"
            )
        parameter = parameters[owner]
        # Loading a state makes a new `optimizer.state`; reading its item makes a dictionary there.
        state = optimizer.state.get(parameter, {})
        if key not in state:
            find_initial_fill(graph, name)
        else:
            check_form(name, view, local_of(state[key]))
        holder = lambda parameter=parameter: optimizer.state[parameter]  # noqa: E731
        yield StateEntry(name, holder, key, view, owner=parameter)


def _check_sharing(graph: StepGraph, entries: list[StateEntry]) -> None:
    """Refuse tensors that share memory in the model and not in the graph, or the reverse."""
    address_of_storage: dict[int, int] = {}
    storage_of_address: dict[int, int] = {}
    for entry in entries:
        name, view, tensor = entry.name, entry.view, local_of(entry.holder()[entry.key])
        if not tensor.numel():
            continue
        begin = tensor.data_ptr() - view.offset * tensor.element_size()
        if tensor.is_meta:  # it has no address
            begin = -tensor.untyped_storage()._cdata
        storage = graph.storage_of_value[view.value]
        if (
            address_of_storage.setdefault(storage, begin) != begin
            or storage_of_address.setdefault(begin, storage) != storage
        ):
            raise GraphFileError(
                f"{name} shares its memory with another tensor in the model or in the graph, but "
                "not in both (tied weights): capture this model"
            )
