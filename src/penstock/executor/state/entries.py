"""State entries: the dictionaries of model and optimizer that hold a step's tensors.

They are checked against the graph, so that a graph of another model is refused before anything
moves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.errors import GraphFileError
from penstock.graph import Kind, StepGraph, TensorView
from penstock.graph.encoding import dtype_name
from penstock.graph.fsdp.shards import Shard, ShardedModel, local_of, sharded_like

STATE_PREFIX = "optimizer.state."
_GROUPS_PREFIX = "optimizer.param_groups."


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
    entries = _find_module_entries(graph, model, loss, sharded)
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
            "ordinary step (loss.backward(); optimizer.step()) before binding the plan"
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
) -> list[StateEntry]:
    """Return the entries of parameters and buffers."""
    found = []
    for prefix, root in (("model", model), ("loss", loss)):
        if not isinstance(root, nn.Module):
            continue
        for path, module in root.named_modules(prefix=prefix, remove_duplicate=False):
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    if tensor is None:
                        continue
                    shard = sharded.at(module, key) if tensors is module._parameters else None
                    holder = functools.partial(_holder_of, tensors, key, shard)
                    found.append((f"{path}.{key}", holder, key, shard))
    names = {name for name, *_ in found}
    captured = {name for name in graph.tensors if name.startswith(("model.", "loss."))}
    for name in sorted(captured ^ names):
        only = "the graph" if name in captured else "the model"
        raise GraphFileError(
            f"only {only} has a tensor {name!r}: this graph is of another model; capture this one"
        )
    entries = [
        StateEntry(name, holder, key, graph.tensors[name], shard)
        for name, holder, key, shard in found
    ]
    for entry in entries:
        check_form(entry.name, entry.view, local_of(entry.holder()[entry.key]))
    _check_sharing(graph, entries)
    return entries


def _holder_of(
    tensors: MutableMapping[str, Any], key: str, shard: Shard | None
) -> MutableMapping[str, Any]:
    """Return the dictionary that holds a parameter; FSDP2's while the module holds a whole one."""
    return tensors if shard is None else {key: shard.parameter}


def _find_optimizer_entries(
    graph: StepGraph, module_entries: list[StateEntry], optimizer: torch.optim.Optimizer
) -> Iterator[StateEntry]:
    """Yield the entries of groups and state; missing state must have an initial number."""
    parameters: dict[str, torch.Tensor] = {}
    for entry in module_entries:
        name = entry.name.removeprefix("model.")
        parameters.setdefault(name, entry.holder()[entry.key])
    found = []
    for name, view in graph.tensors.items():
        storage = graph.storages[graph.storage_of_value[view.value]]
        if (
            name.startswith(_GROUPS_PREFIX)
            and storage.kind is not Kind.SCALAR
            and storage.persistent
        ):
            index, key = name.removeprefix(_GROUPS_PREFIX).split(".", 1)
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
        state = optimizer.state.get(parameter, {})
        if key not in state:
            find_initial_fill(graph, name)
        else:
            check_form(name, view, local_of(state[key]))
        found.append((name, parameter, key, view))
    # Reading `optimizer.state[parameter]` makes an empty dictionary: only now, as all is right.
    for name, parameter, key, view in found:
        # Loading a state also makes a new `optimizer.state`.
        state = lambda parameter=parameter: optimizer.state[parameter]  # noqa: E731
        yield StateEntry(name, state, key, view, owner=parameter)


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
