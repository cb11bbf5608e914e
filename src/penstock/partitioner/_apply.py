"""Execution of a partition: DTensors for what lasts, and each rank's own step on their pieces.

Parameters, buffers and the optimizer's state become DTensors with the partition's placements, which
`full_tensor()` knows. The step itself is each rank's own step graph, whose collectives are those
that the partition says: what DTensor would choose operator by operator is another plan, and has no
strategy for many operators.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, cast

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from penstock.compat.placements import GATHERS_STRIDED
from penstock.errors import GraphFileError, PenstockError, PlanError, stacklevel_of_user
from penstock.graph.bindings import (
    StateEntry,
    bind_batch,
    bind_group_tensors,
    bind_numbers,
    find_entries,
)
from penstock.graph.capturing.step_program import StepProgram
from penstock.graph.encoding import dtype_from_name
from penstock.graph.fsdp.collectives import as_rank_error
from penstock.graph.fsdp.shards import ShardedModel, is_sharded, local_of
from penstock.graph.guards import Guards
from penstock.graph.reference import ReferenceRun
from penstock.graph.step_graph import StepGraph
from penstock.graph.verification import verify_again
from penstock.memory import Ledger, Tier
from penstock.partitioner._layout import cut_tensor, torch_placements
from penstock.partitioner._mesh import PARTIAL, REPLICATED, Placement
from penstock.partitioner._partition import Partition
from penstock.partitioner._rank import RankStep, write_rank
from penstock.partitioner._rank_builder import RankExchange
from penstock.partitioner._rank_numbers import RankNumbers, share_numbers
from penstock.partitioner.axes import find_axes


def apply(
    partition: Partition,
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    graph: StepGraph,
    optimizer: torch.optim.Optimizer,
    loss: object = None,
) -> PartitionedStep:
    """Put a partition into effect: distribute model and optimizer, and return this rank's step.

    Called by every rank, as torchrun starts them. Parameters and buffers, and the optimizer's
    state, become DTensors. What rank 0 has of them counts, also where it has no state yet, as do
    the numbers of its optimizer's groups. The groups hold the new parameters.

    Example:
        >>> mesh = init_device_mesh("cpu", found.mesh)  # doctest: +SKIP
        >>> step = penstock.partitioner.apply(  # doctest: +SKIP
        ...     found, model, mesh, graph=graph, optimizer=optimizer
        ... )
        >>> for batch in batches:  # doctest: +SKIP
        ...     loss = step(batch)

    Args:
        partition: A partition of the step of this model and optimizer.
        model: The model, whole on every rank; unmodified but for its parameters.
        mesh: Ranks, in the levels of the partition: `init_device_mesh("cuda", partition.mesh)`.
        graph: The step that was partitioned.
        optimizer: Its optimizer; state that does not exist yet is made, in pieces.
        loss: The loss, as given to `penstock.capture`, if it is a module with parameters or
            buffers, or reads Python numbers that may change.

    Returns:
        The step: `loss = step(batch)`, with the batch of all ranks together on each of them.

    Raises:
        ValueError: The mesh has other levels than the partition, or the rank is not in it.
        PlanError: The partition is for another graph (rule `"graph"`), or an operator cannot run
            on pieces, or a tensor rest in them: the message names it (`"operator"`,
            `"placement"`). Nothing has been distributed.
        GraphFileError: The graph is of another model or optimizer, or ranks have captured it with
            other numbers of the optimizer's groups.
    """
    sizes = tuple(mesh.mesh.shape)
    coordinates = mesh.get_coordinate()
    if sizes != partition.mesh or coordinates is None:
        place = "is not in it" if coordinates is None else f"has {sizes}"
        raise ValueError(
            f"the partition is for a mesh of {partition.mesh} ranks and this rank's mesh {place}: "
            f"pass init_device_mesh(device, {partition.mesh}), on {partition.devices} ranks"
        )
    names = tuple(mesh.get_group(level).group_name for level in range(len(sizes)))
    rank = write_rank(graph, partition, tuple(coordinates), names)
    distribution = _Distribution(graph, partition, rank, mesh)
    entries = find_entries(graph, model, loss, optimizer, ShardedModel(nn.Module()))
    placed = {each.name: distribution.placements(each.name) for each in entries}
    program = StepProgram(model, None, cast(Any, loss))
    Guards(graph, program, optimizer).check()
    distribution.run(entries, placed, optimizer, share_numbers(graph, entries, optimizer))
    if any(each.random for each in graph.operators):
        _share_random_state()
    entries = find_entries(rank.graph, model, loss, optimizer, ShardedModel(nn.Module()))
    guards = Guards(graph, program, optimizer)
    return PartitionedStep(partition, rank, distribution, entries, optimizer, guards, program)


class PartitionedStep:
    """This rank's part of a training step over several devices; `apply` makes it.

    Attributes:
        partition: The partition.
        graph: This rank's step graph.
        exchanges: Its collectives, with the bytes that this rank receives.
        ledger: Account of the bytes that this rank holds while a step runs, all on the device tier:
            its pieces, and copies for collectives and operators.
    """

    def __init__(
        self,
        partition: Partition,
        rank: RankStep,
        distribution: _Distribution,
        entries: list[StateEntry],
        optimizer: torch.optim.Optimizer,
        guards: Guards,
        program: StepProgram,
    ) -> None:
        self.partition = partition
        self.graph = rank.graph
        self.exchanges: tuple[RankExchange, ...] = rank.exchanges
        self.ledger = Ledger()
        self._distribution = distribution
        self._entries = entries
        self._optimizer = optimizer
        self._guards = guards
        self._program = program

    @property
    def peak_device_bytes(self) -> int:
        """The most bytes that this rank held in a step, by its ledger; 0 before the first."""
        return self.ledger.peak(Tier.DEVICE)

    @property
    def exchanged_bytes(self) -> int:
        """Bytes that this rank receives in a step."""
        return sum(each.num_bytes for each in self.exchanges)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint of the run needs, by names that no partition changes.

        For `torch.distributed.checkpoint`, which loads it on any number of ranks:

            dcp.save({"step": step}, checkpoint_id=path)
            dcp.load({"step": step}, checkpoint_id=path)  # of another partition, too

        Parameters, buffers and the optimizer's state are DTensors. One of which a rank has several
        pieces, as of a projection of queries, keys and values in one that is split by heads, torch
        does not save in pieces: it is gathered, and whole on every rank.

        Raises:
            PenstockError: There is one of these, and torch is too old to gather it (2.11).
        """
        state: dict[str, Any] = {}
        for entry in self._entries:
            tensor = entry.get_whole()
            assert tensor is not None, "distribution has made all state"
            tensor = tensor.detach()
            if isinstance(tensor, DTensor) and not _is_in_one_piece(tensor):
                _require_gathering(entry.name)
                tensor = tensor.full_tensor()
            state[entry.name] = tensor
        for index, group in enumerate(self._optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    state[f"optimizer.param_groups.{index}.{key}"] = value
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, perhaps on another number of ranks.

        Raises:
            GraphFileError: It is of another model or optimizer.
        """
        missing = sorted(self.state_dict().keys() ^ state.keys())
        if missing:
            raise GraphFileError(
                f"{missing[0]!r} is only in one of this step and the checkpoint, which is of "
                "another model or optimizer"
            )
        with torch.no_grad():
            for entry in self._entries:
                own, given = entry.get(), local_of(state[entry.name])
                assert own is not None
                if own.is_set_to(given):  # loaded in place
                    continue
                if not is_sharded(state[entry.name]):
                    given = self._distribution.cut(entry.name, given)
                own.copy_(given)
        for index, group in enumerate(self._optimizer.param_groups):
            for key in group.keys() - {"params"}:
                group[key] = state[f"optimizer.param_groups.{index}.{key}"]

    def cut_batch(self, batch: Any) -> dict[str, torch.Tensor]:
        """Return this rank's parts of the tensors of a batch, by their names in the step.

        Raises:
            ValueError: The batch has another form than the captured one.
        """
        whole = bind_batch(self._distribution.graph, batch)
        return {name: self._distribution.cut(name, each) for name, each in whole.items()}

    def check_numbers(self, changed: list[str], program: StepProgram) -> None:
        """Compare a program, some of whose Python numbers have changed, with the captured step.

        Args:
            changed: Names of these numbers; without any nothing is compared.
            program: The program with a batch of all ranks.

        Raises:
            CaptureError: It is another step now.
        """
        graph = self._distribution.graph
        if not changed:
            return
        if graph.captured is None or (graph.captured.has_loss and program.loss is None):
            warnings.warn(
                f"{', '.join(changed[:3])} changed since the step was captured, and steps go on as "
                "captured, without a check: the graph was not captured in this process, or apply "
                "was not given the loss=",
                stacklevel=stacklevel_of_user(),
            )
            return
        with self._distribution.hold_whole_shapes(self._entries):
            verify_again(graph, program)

    def __call__(self, batch: Any) -> torch.Tensor:
        """Train on a batch, which is that of all ranks together; return its loss.

        Raises:
            ValueError: The batch has another form than the captured one.
            GraphFileError: Model or optimizer are not as they were captured.
            CaptureError: A Python number has changed, and with it what the program does.
            RankError: A collective has failed, as when another rank has ended.
        """
        self.check_numbers(self._guards.check(), self._program._replace(batch=batch))
        self._guards.accept_numbers()
        tensors = self.cut_batch(batch)
        tensors |= {each.name: each.take(self.graph) for each in self._entries}
        tensors |= bind_group_tensors(self.graph, self._optimizer)
        numbers = bind_numbers(self.graph, self._optimizer)
        try:
            return ReferenceRun(self.graph, tensors, numbers, self.ledger).run()
        except RuntimeError as error:
            failure = as_rank_error(error)
            if failure is None:
                raise
            raise failure from error


def _is_in_one_piece(tensor: DTensor) -> bool:
    return all(each.is_replicate() or type(each) is Shard for each in tensor.placements)


def _require_gathering(name: str) -> None:
    if not GATHERS_STRIDED:
        raise PenstockError(
            f"{name} has several pieces on a rank, which DTensor in torch {torch.__version__} does "
            "not gather: save with a later torch, or partition with another method="
        )


class _Distribution:
    """The pieces of a model's and an optimizer's tensors."""

    def __init__(
        self, graph: StepGraph, partition: Partition, rank: RankStep, mesh: DeviceMesh
    ) -> None:
        self.graph = graph
        self.rank = rank
        self.mesh = mesh
        self.sizes = partition.mesh
        self.cuts = find_axes(graph).cuts
        self._strides = partition.placements
        coordinates = mesh.get_coordinate()
        assert coordinates is not None
        self.coordinates = tuple(coordinates)

    def storage(self, name: str) -> int:
        """Return the storage of a tensor of the step."""
        return self.graph.storage_of_value[self.graph.tensors[name].value]

    def placement(self, name: str) -> Placement:
        """Return the placement of a tensor, by axes of its storage."""
        cuts = self.cuts[self.storage(name)]
        return tuple(
            cuts.index(stride) if stride > 0 else PARTIAL if stride else REPLICATED
            for stride in self._strides[self.storage(name)]
        )

    def placements(self, name: str) -> tuple[Any, ...]:
        """Return it in DTensor's words."""
        cuts, view = self.cuts[self.storage(name)], self.graph.tensors[name]
        found = torch_placements(name, view, cuts, self.placement(name), self.sizes)
        if sum(not (each.is_replicate() or type(each) is Shard) for each in found) > 1:
            self._check_gathering(name, found)
        return found

    def _check_gathering(self, name: str, placements: tuple[Any, ...]) -> None:
        """Refuse what DTensor would gather in a wrong order: some shards that are strided twice."""
        view = self.graph.tensors[name]
        whole = torch.arange(prod(view.shape), device=self.mesh.device_type).view(view.shape)
        made = self._wrap(name, self.cut(name, whole), placements)
        if not (GATHERS_STRIDED and torch.equal(made.full_tensor(), whole)):
            raise PlanError(
                f"{name} is split at rest within a dimension at several levels, {placements}, "
                "which DTensor does not put together again; partition with another method=, or "
                "over another number of devices",
                rule="placement",
            )

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole tensor."""
        if not self.graph.num_bytes(self.graph.tensors[name].value):
            return tensor
        view, part = self.graph.tensors[name], self.rank.graph.tensors[name]
        cuts, placement = self.cuts[self.storage(name)], self.placement(name)
        return cut_tensor(tensor, view, part, cuts, placement, self.sizes, self.coordinates)

    def run(
        self,
        entries: list[StateEntry],
        placements: dict[str, tuple[Any, ...]],
        optimizer: torch.optim.Optimizer,
        first: RankNumbers,
    ) -> None:
        """Put DTensors, and the numbers of rank 0, into model and optimizer."""
        made: dict[int, DTensor] = {}
        replaced: dict[int, nn.Parameter] = {}
        new_state: dict[nn.Parameter, dict[str, Any]] = {}
        for entry in entries:
            old, storage = entry.get_whole(), self.storage(entry.name)
            if entry.owner is not None:
                new = self._state(entry, placements[entry.name], first)
                owner = replaced.get(id(entry.owner), entry.owner)
                new_state.setdefault(owner, {})[entry.key] = new  # pyright: ignore
                continue
            assert old is not None
            if entry.name in first.counts:
                old.detach().copy_(first.counts[entry.name])
                continue
            if storage not in made or made[storage].shape != old.shape:
                made[storage] = self._distribute(entry.name, old, placements[entry.name])
            new = made[storage]
            if isinstance(old, nn.Parameter):
                new = replaced.setdefault(
                    id(old), nn.Parameter(new, requires_grad=old.requires_grad)
                )
            entry.holder()[entry.key] = new
        for group in optimizer.param_groups:
            group["params"] = [replaced.get(id(each), each) for each in group["params"]]
        rest = {
            replaced.get(id(parameter), parameter): dict(state)
            for parameter, state in optimizer.state.items()
        }
        optimizer.state.clear()
        for parameter, state in (*rest.items(), *new_state.items()):
            optimizer.state.setdefault(parameter, {}).update(state)

    @contextlib.contextmanager
    def hold_whole_shapes(self, entries: list[StateEntry]) -> Iterator[None]:
        """Let modules hold whole tensors of the meta device in the place of DTensors."""
        held = [(each, each.get_whole()) for each in entries if each.owner is None]
        made: dict[int, torch.Tensor] = {}  # a parameter may have several names
        try:
            for entry, tensor in held:
                if not isinstance(tensor, DTensor):
                    continue
                if id(tensor) not in made:
                    view = self.graph.tensors[entry.name]
                    whole = torch.empty_strided(
                        view.shape, view.stride, dtype=tensor.dtype, device="meta"
                    )
                    if isinstance(tensor, nn.Parameter):
                        whole = nn.Parameter(whole, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = whole
                entry.holder()[entry.key] = made[id(tensor)]
            yield
        finally:
            for entry, tensor in held:
                entry.holder()[entry.key] = tensor

    def _distribute(self, name: str, tensor: torch.Tensor, placements: tuple[Any, ...]) -> DTensor:
        """Return a tensor of the user's as a DTensor: what rank 0 has counts."""
        if is_sharded(tensor):
            tensor = tensor.full_tensor()  # pyright: ignore
        whole = tensor.detach()
        distributed.broadcast(whole, src=int(self.mesh.mesh.flatten()[0]))
        return self._wrap(name, self.cut(name, whole), placements)

    def _wrap(self, name: str, local: torch.Tensor, placements: tuple[Any, ...]) -> DTensor:
        view = self.graph.tensors[name]
        return DTensor.from_local(
            local,
            self.mesh,
            placements,
            run_check=False,
            shape=torch.Size(view.shape),
            stride=view.stride,
        )

    def _state(
        self, entry: StateEntry, placements: tuple[Any, ...], first: RankNumbers
    ) -> torch.Tensor:
        """Return state in its placement; state that rank 0 does not have is made in pieces."""
        name = entry.name
        is_number = not self.graph.num_bytes(self.graph.tensors[name].value)
        if name in first.fills:
            made = self._allocate(self.rank.graph, entry).fill_(first.fills[name])
            return made if is_number else self._wrap(name, made, placements)
        old = entry.get_whole()
        old = self._allocate(self.graph, entry) if old is None else old
        if is_number:
            return old.copy_(first.counts[name])
        return self._distribute(name, old, placements)

    def _allocate(self, graph: StepGraph, entry: StateEntry) -> torch.Tensor:
        """Return an empty tensor for state, whole or this rank's piece as a graph has it."""
        view = graph.tensors[entry.name]
        is_number = not graph.num_bytes(view.value)
        device = torch.device("cpu") if is_number else entry.owner.device  # pyright: ignore
        dtype = dtype_from_name(view.dtype)
        return torch.empty_strided(view.shape, view.stride, dtype=dtype, device=device)


def _share_random_state() -> None:
    """Give all ranks the random numbers of rank 0: each draws those of all, and keeps its own."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    distributed.broadcast_object_list(states, src=0)
    torch.set_rng_state(states[0])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states[1])
