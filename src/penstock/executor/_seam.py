"""The user's tensors where a step begins and ends: parameters, buffers and the optimizer's state.

Each of them looks at the place where its value lies between steps, so nothing has to be handed
back: `state_dict()`, evaluation, checkpoints and changes in place see and make the truth. A value
that lies in several places then has one that the user sees (its home); before a step the others
follow what he did to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.errors import GraphFileError, PenstockError
from penstock.executor._eager_steps import EagerSteps
from penstock.executor._moves import Move, move_all
from penstock.executor._places import Places, Stay
from penstock.executor._room import Room, once
from penstock.graph import Kind, StepGraph, TensorView
from penstock.graph.encoding import dtype_from_name, dtype_name
from penstock.graph.fsdp.shards import Shard, ShardedModel, local_of, sharded_like
from penstock.memory import Tier
from penstock.planner import Plan

_STATE, _GROUPS = "optimizer.state.", "optimizer.param_groups."
_PREFERENCE = (Tier.DEVICE, Tier.HOST, Tier.FILE)


class _Handle(NamedTuple):
    """How the user holds a tensor: `holder()[key]`; loading a state makes new dictionaries.

    Attributes:
        name: What it is called in the graph.
        holder: Returns the dictionary.
        key: Its key there.
        view: How the graph sees it.
        shard: What FSDP2 has of it, if it is a parameter of which ranks have parts.
        owner: The parameter whose state it is; None if it is none.
    """

    name: str
    holder: Callable[[], MutableMapping[str, Any]]
    key: str
    view: TensorView
    shard: Shard | None = None
    owner: torch.Tensor | None = None

    def now(self) -> torch.Tensor | None:
        """The tensor that the user holds; of what ranks share this rank's part."""
        return local_of(self.held())

    def held(self) -> torch.Tensor | None:
        """What the user holds, as he has it."""
        return self.holder().get(self.key)

    def make(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give the user a tensor where he has none; return what he holds then."""
        self.holder()[self.key] = sharded_like(tensor, self.owner)
        return local_of(self.held())

    def flat(self) -> tuple[torch.Tensor, TensorView] | None:
        """The flat shard, with its padding, of which a parameter is a view; None if it has none."""
        if self.shard is None:
            return None
        flat = self.shard.flat
        return flat, self.view._replace(shape=tuple(flat.shape), stride=(1,))


class _Bound(NamedTuple):
    """A tensor of the user's that looks at its home."""

    handle: _Handle
    tensor: torch.Tensor
    address: int


class Seam:
    """Binds a model and an optimizer to the places of a plan.

    Args:
        graph: The step.
        plan: A plan for it.
        places: Where its values are.
        room: Its memory.
        model: The model.
        optimizer: Its optimizer.
        loss: The loss, if it is a module.

    Raises:
        CaptureError: The model is sharded in a way that a graph does not hold.
        GraphFileError: The graph is of another model or optimizer; nothing has been touched.
        ValueError: State is missing of which the graph does not say how it begins.
    """

    def __init__(
        self,
        graph: StepGraph,
        plan: Plan,
        places: Places,
        room: Room,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: object,
    ) -> None:
        self._graph = graph
        self._room = room
        self._model = model
        self._optimizer = optimizer
        self.places_of: dict[int, list[Stay]] = {
            index: _apart(room, _complete_first(plan, places.at_the_seam(index)))
            for index, storage in enumerate(graph.storages)
            if storage.persistent and storage.num_bytes
        }
        self._lasting_inputs = {
            name: storage
            for name, view in graph.tensors.items()
            if (storage := graph.storage_of_value[view.value]) in self.places_of
            and graph.storages[storage].kind is Kind.INPUT
        }
        self._sharded = ShardedModel(model, loss)
        self._handles = _of_modules(graph, model, loss, self._sharded)
        self._handles = [*self._handles, *self._of_state(optimizer)]
        self._bound: list[_Bound] = []
        self._versions: dict[int, list[tuple[torch.Tensor, int]]] = {}
        self._eager_steps = EagerSteps(optimizer)

    def take_over(self) -> None:
        """Move the user's tensors to their homes; each looks at its home from now on.

        They may lie anywhere, also in the places that another plan had for them in this memory.
        """
        of = self._graph.storage_of_value
        tensors = [handle.now() for handle in self._handles]
        moves: dict[int, Move] = {}
        moved = set()
        for index, (handle, tensor) in enumerate(zip(self._handles, tensors, strict=True)):
            if tensor is None or not self._room.shared.hold(tensor.data_ptr()):
                continue
            storage = of[handle.view.value]
            source = self._bytes_around(tensor, handle.view)
            if source is None:
                tensors[index] = tensor.detach().clone()
            elif source.data_ptr() != self._home_bytes(storage, handle.view).data_ptr():
                moves[storage] = Move(source, self._home_bytes(storage, handle.view))
                moved.add(index)
        move_all(list(moves.values()))
        self._bound = [
            self._adopted(handle, None if index in moved else tensor)
            for index, (handle, tensor) in enumerate(zip(self._handles, tensors, strict=True))
        ]
        self.spread_all()

    def spread_all(self) -> None:
        """Bring what is in the homes to all other places; nothing is under way."""
        for storage in self.places_of:
            self.spread(storage)
        self.note_versions()

    def _bytes_around(self, tensor: torch.Tensor, view: TensorView) -> torch.Tensor | None:
        """The storage that a tensor is a view of, if it lies there as the graph has it."""
        if tensor.stride() != view.stride or tensor.shape != view.shape:
            return None
        address = tensor.data_ptr() - view.offset * tensor.element_size()
        num_bytes = self._graph.num_bytes(view.value)
        for block in self._room.blocks():
            begin = address - block.tensor.data_ptr()
            if 0 <= begin <= block.tensor.numel() - num_bytes:
                return block.bytes_at(begin, num_bytes)
        return None

    def take_up_changes(self, settle: Callable[[], None]) -> set[int]:
        """See what the user did between two steps: tensors changed in place, or replaced.

        Args:
            settle: Waits for transfers that are under way; called before anything is written.

        Returns:
            The storages that he has replaced, or changed where they lie in several places.
        """
        changed: set[int] = set()
        self.reshard()
        for index, (handle, tensor, address) in enumerate(self._bound):
            if handle.now() is tensor and tensor.data_ptr() == address:
                continue
            if not changed:
                settle()
            self._check_home(handle)
            self._bound[index] = self._adopted(handle, handle.now())
            changed.add(self._graph.storage_of_value[handle.view.value])
        stepped = self._eager_steps.any()
        for storage, versions in self._versions.items():
            if stepped or any(tensor._version != version for tensor, version in versions):
                if not changed:
                    settle()
                changed.add(storage)
        for storage in changed:
            self.spread(storage)
        return changed

    def reshard(self) -> None:
        """Let a sharded model hold its shards, as between steps; of others nothing happens."""
        self._sharded.reshard()

    def give(self, inputs: Mapping[str, torch.Tensor], settle: Callable[[], None]) -> set[int]:
        """Bring inputs that may lie below the device, parts of a batch, to all their places.

        Args:
            inputs: By their names in the graph, those of `given_by_caller` among them.
            settle: Waits for transfers that are under way; called where these inputs may be among
                them.

        Returns:
            The storages that have been written.
        """
        if self._lasting_inputs:
            settle()
        for name, storage in self._lasting_inputs.items():
            for stay in self.places_of[storage]:
                place = self._room.view_of(stay, self._graph.tensors[name])
                copy_elements(inputs[name], place)
                self._room.put_away(place)
        return set(self._lasting_inputs.values())

    def spread(self, storage: int) -> None:
        """Bring what is in a storage's home to its other places."""
        stays = self.places_of.get(storage, [])
        if len(stays) < 2:
            return
        num_bytes = self._graph.storages[storage].num_bytes
        home = self._room.bytes_of(stays[0], num_bytes)
        for stay in stays[1:]:
            self._room.bytes_of(stay, num_bytes).copy_(home)

    def give_back(self) -> None:
        """Give the user's tensors memory of their own again, but for those that had none before."""
        fresh: dict[int, torch.UntypedStorage] = {}
        for handle, tensor, address in self._bound:
            if handle.now() is not tensor or tensor.data_ptr() != address:
                continue
            storage = self._graph.storage_of_value[handle.view.value]
            if self._is_born(handle):
                continue
            if storage not in fresh:
                home = self._home_bytes(storage, handle.view)
                where = self._room.device if self._graph.storages[storage].num_bytes else "cpu"
                fresh[storage] = home.to(where, copy=True).untyped_storage()
            view = handle.view
            tensor.data = _seen_in(fresh[storage], view, tensor)
            if flat := handle.flat():
                flat[0].data = _seen_in(fresh[storage], flat[1], tensor)
        self.let_go()

    def let_go(self) -> None:
        """Look at the user's tensors no more."""
        self._bound = []
        self._eager_steps.stop()

    def _is_born(self, handle: _Handle) -> bool:
        """Whether a tensor has never been anywhere else; nor has the state of such a model."""
        born = self._room.shared.born
        return self._name_of(handle) in born or (bool(born) and handle.name.startswith(_STATE))

    def _name_of(self, handle: _Handle) -> str:
        return self._graph.storages[self._graph.storage_of_value[handle.view.value]].name

    def settled(self, changed: set[int]) -> Iterator[tuple[Stay, int]]:
        """Places where nothing arrives any more: homes, and all places of what was changed."""
        for storage, stays in self.places_of.items():
            for stay in stays if storage in changed else stays[:1]:
                yield stay, self._graph.storages[storage].num_bytes

    def names_of(self, storage: int) -> list[str]:
        """What the user calls a storage."""
        of = self._graph.storage_of_value
        return [each.name for each in self._handles if of[each.view.value] == storage]

    def _home_bytes(self, storage: int, view: TensorView) -> torch.Tensor:
        num_bytes = self._graph.storages[storage].num_bytes
        if num_bytes:
            return self._room.bytes_of(self.places_of[storage][0], num_bytes)
        loose = self._room.loose(view)
        return torch.empty(0, dtype=torch.uint8).set_(loose.untyped_storage())

    def _home(self, view: TensorView) -> torch.Tensor:
        if not self._graph.num_bytes(view.value):
            return self._room.loose(view)
        stays = self.places_of[self._graph.storage_of_value[view.value]]
        return self._room.view_of(stays[0], view)

    def _adopted(self, handle: _Handle, content: torch.Tensor | None) -> _Bound:
        """Let a tensor of the user's look at its home.

        Args:
            handle: How he holds it.
            content: What goes there; None if that is there already, or nothing exists yet.
        """
        home = self._home(handle.view)
        tensor = handle.now()
        if tensor is None:
            once(home).fill_(initial_fill(self._graph, handle.name))
            tensor = handle.make(home.detach())
            self._room.put_away(tensor)
            return _Bound(handle, tensor, tensor.data_ptr())
        _check(handle.name, handle.view, tensor)
        if tensor.is_meta:
            tensor = _materialized(handle, tensor, home)
            self._room.put_away(home)
            self._room.shared.born.add(self._name_of(handle))
        elif content is not None and content.data_ptr() != home.data_ptr():
            copy_elements(content, home)
            self._room.put_away(home)
        if tensor.data_ptr() != home.data_ptr() or not home.numel():
            tensor.data = home.detach()
        if flat := handle.flat():
            flat[0].data = self._home(flat[1])
        return _Bound(handle, tensor, tensor.data_ptr())

    def _check_home(self, handle: _Handle) -> None:
        """Refuse what has moved the memory away under all that look at it."""
        view = handle.view
        if not self._graph.num_bytes(view.value) or 0 in view.shape:
            return
        home = self._home_bytes(self._graph.storage_of_value[view.value], view)
        offset = view.offset * dtype_from_name(view.dtype).itemsize
        if self._home(view).data_ptr() != home.data_ptr() + offset:
            raise PenstockError(
                f"the memory of {handle.name} has been moved (share_memory(), or a queue to "
                "another process), which a plan's addresses do not survive: pass copies to other "
                "processes (tensor.clone()), and bind the plan again"
            )

    def note_versions(self) -> None:
        """What has been changed up to now was not the user; after a step, which changes much."""
        self._versions = {}
        for handle, tensor, _ in self._bound:
            storage = self._graph.storage_of_value[handle.view.value]
            if len(self.places_of.get(storage, [])) > 1:
                seen = self._versions.setdefault(storage, [])
                seen.append((tensor, tensor._version))
                whole = handle.held()  # torch counts apart what is done to a DTensor
                if whole is not None and whole is not tensor:
                    seen.append((whole, whole._version))

    def _of_state(self, optimizer: torch.optim.Optimizer) -> Iterator[_Handle]:
        """Handles of the optimizer's state; what is missing has to be known to begin somehow."""
        parameters: dict[str, torch.Tensor] = {}
        for handle in self._handles:
            name = handle.name.removeprefix("model.")
            parameters.setdefault(name, handle.holder()[handle.key])
        found = []
        for name, view in self._graph.tensors.items():
            storage = self._graph.storages[self._graph.storage_of_value[view.value]]
            if name.startswith(_GROUPS) and storage.kind is not Kind.SCALAR and storage.persistent:
                index, key = name.removeprefix(_GROUPS).split(".", 1)
                group = int(index)
                yield _Handle(name, lambda group=group: optimizer.param_groups[group], key, view)
            if not name.startswith(_STATE):
                continue
            owner, key = name.removeprefix(_STATE).rsplit(".", 1)
            if owner not in parameters:
                raise GraphFileError(
                    f"the graph has {name!r}, and the model no {owner!r}: this graph is of another "
                    "model; capture this one"
                )
            parameter = parameters[owner]
            state = optimizer.state.get(parameter, {})
            if key not in state:
                initial_fill(self._graph, name)
            else:
                _check(name, view, local_of(state[key]))
            found.append((name, parameter, key, view))
        # Only now, as everything is right, may dictionaries of state come into being.
        for name, parameter, key, view in found:
            # Loading a state also makes a new `optimizer.state`.
            state = lambda parameter=parameter: optimizer.state[parameter]  # noqa: E731
            yield _Handle(name, state, key, view, owner=parameter)


def copy_elements(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a tensor to a place of its shape, whose elements may be one (`expand`)."""
    place = once(target)
    place.copy_(source.detach().as_strided(place.shape, source.stride()))


def _materialized(handle: _Handle, tensor: torch.Tensor, home: torch.Tensor) -> torch.Tensor:
    """Let a tensor of the meta device look at its home; it stays the same object.

    Until it has its first numbers it is NaN: whoever forgets them notices.
    """
    once(home).fill_(torch.nan if tensor.is_floating_point() else 0)
    if isinstance(tensor, nn.Parameter):
        real: torch.Tensor = nn.Parameter(home.detach(), requires_grad=tensor.requires_grad)
    else:
        real = home.detach()
    vars(real).update(vars(tensor))
    torch.utils.swap_tensors(tensor, real)
    return tensor


def initial_fill(graph: StepGraph, name: str) -> float:
    """The number that state begins with that does not exist yet."""
    fill = graph.metadata.get("initial_state", {}).get(name)
    if fill is None:
        raise ValueError(
            f"{name!r} does not exist yet and its first step is unlike the others: take one "
            "ordinary step (loss.backward(); optimizer.step()) before binding the plan"
        )
    return fill


def given_by_caller(
    graph: StepGraph, places: Places, room: Room
) -> list[tuple[str, TensorView, torch.Tensor]]:
    """Where the step's operators look for what the caller gives: batch, and numbers in tensors.

    Returns:
        Names in the graph, their views, and the places into which they are copied; without those
        that no operator needs.
    """
    found = []
    for name, view in graph.tensors.items():
        storage = graph.storages[graph.storage_of_value[view.value]]
        if storage.persistent or storage.kind is Kind.SCALAR:
            continue
        if not storage.num_bytes:
            if graph.consumers[view.value]:  # none of an input whose parts have storages
                found.append((name, view, room.loose(view)))
            continue
        for stay in places.stays[view.value]:
            if stay.tier is Tier.DEVICE and stay.start == 0 and stay.transfer is None:
                found.append((name, view, room.view_of(stay, view)))
    return found


def _complete_first(plan: Plan, stays: list[Stay]) -> list[Stay]:
    """The places of a storage, first its home: one into which nothing is moving just then, and
    rather one that lasts.
    """
    num_positions = len(plan.order)

    def arrives_later(stay: Stay) -> bool:
        if stay.transfer is None or not stay.steps_ago:
            return False
        return plan.transfers[stay.transfer].end >= num_positions

    return sorted(
        stays, key=lambda stay: (arrives_later(stay), stay.end == 0, _PREFERENCE.index(stay.tier))
    )


def _apart(room: Room, stays: list[Stay]) -> list[Stay]:
    """Of stays in one place the first: what ends one step there and begins the next has two."""
    places = {(stay.tier, room.offset(stay.tier, stay.place)): stay for stay in reversed(stays)}
    return [stay for stay in stays if stay in places.values()]


def _holder(
    holder: MutableMapping[str, Any], key: str, shard: Shard | None
) -> MutableMapping[str, Any]:
    """Who holds a parameter: the module, or FSDP2 while the module may hold a gathered one."""
    return holder if shard is None else {key: shard.parameter}


def _seen_in(storage: torch.UntypedStorage, view: TensorView, like: torch.Tensor) -> torch.Tensor:
    """What a view shows in a storage."""
    seen = torch.empty(0, dtype=like.dtype, device=storage.device)
    return seen.set_(storage, view.offset, view.shape, view.stride)  # pyright: ignore


def _of_modules(
    graph: StepGraph, model: nn.Module, loss: object, sharded: ShardedModel
) -> list[_Handle]:
    """Handles of parameters and buffers, checked against the graph."""
    handles = []
    for prefix, root in (("model", model), ("loss", loss)):
        if not isinstance(root, nn.Module):
            continue
        for path, module in root.named_modules(prefix=prefix, remove_duplicate=False):
            for holder in (module._parameters, module._buffers):
                for key, tensor in holder.items():
                    if tensor is None:
                        continue
                    shard = sharded.at(module, key) if holder is module._parameters else None
                    whose = functools.partial(_holder, holder, key, shard)
                    handles.append((f"{path}.{key}", whose, key, shard))
    found = {name for name, *_ in handles}
    wanted = {name for name in graph.tensors if name.startswith(("model.", "loss."))}
    for name in sorted(wanted ^ found):
        whose = "the graph" if name in wanted else "the model"
        raise GraphFileError(
            f"only {whose} has a tensor {name!r}: this graph is of another model; capture this one"
        )
    made = [
        _Handle(name, holder, key, graph.tensors[name], shard)
        for name, holder, key, shard in handles
    ]
    for handle in made:
        _check(handle.name, handle.view, local_of(handle.holder()[handle.key]))
    _check_sharing(graph, made)
    return made


def _check(name: str, view: TensorView, tensor: torch.Tensor) -> None:
    here = (dtype_name(tensor.dtype), tuple(tensor.shape))
    if here != (view.dtype, view.shape):
        raise GraphFileError(
            f"{name} is {here[0]} of shape {here[1]} and was captured as {view.dtype} of shape "
            f"{view.shape}: this graph is of another model; capture this one"
        )


def _check_sharing(graph: StepGraph, handles: list[_Handle]) -> None:
    """Tensors share memory in the model where they share it in the graph."""
    of_storage: dict[int, int] = {}
    of_address: dict[int, int] = {}
    for handle in handles:
        name, view, tensor = handle.name, handle.view, local_of(handle.holder()[handle.key])
        if not tensor.numel():
            continue
        begin = tensor.data_ptr() - view.offset * tensor.element_size()
        if tensor.is_meta:  # it has no address
            begin = -tensor.untyped_storage()._cdata
        storage = graph.storage_of_value[view.value]
        if (
            of_storage.setdefault(storage, begin) != begin
            or of_address.setdefault(begin, storage) != storage
        ):
            raise GraphFileError(
                f"{name} shares its memory with another tensor in the model or in the graph, but "
                "not in both (tied weights): capture this model"
            )
