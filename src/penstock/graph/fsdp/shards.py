"""Shards: parameters of which each rank has a part, as FSDP2 (`fully_shard`) makes them.

A step graph holds this rank's parts, plain tensors: `DTensor._local_tensor`, a view of the padded
flat shard from which FSDP2 gathers. Forms of sharding that a plan cannot reproduce are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.compat.fsdp import parameter_groups_of, precision_of
from penstock.errors import CaptureError

_PLAIN = (torch.Tensor, nn.Parameter)


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is a DTensor, without loading torch's package for these."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "device_mesh")


def local_of(tensor: Any) -> Any:
    """Return the part of a tensor that this rank has; all of it if it is no DTensor."""
    return tensor._local_tensor if is_sharded(tensor) else tensor


def sharded_like(local: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Return this rank's part of state as an optimizer makes it: sharded as its parameter, if that
    is; a number (shape ()) is whole.
    """
    if not is_sharded(parameter) or local.shape != local_of(parameter).shape:
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


@dataclass(frozen=True, eq=False)
class Shard:
    """A parameter of which each rank has some rows.

    Attributes:
        name: Its name in the model, for messages.
        owner: FSDP2's own record of it (`FSDPParam`).
    """

    name: str
    owner: Any

    @property
    def parameter(self) -> Any:
        """The DTensor, also while the model holds the gathered parameter."""
        return self.owner.sharded_param

    @property
    def flat(self) -> torch.Tensor:
        """This rank's rows and their padding, from which FSDP2 gathers."""
        return self.owner._sharded_param_data

    @property
    def places(self) -> list[tuple[nn.Module, str]]:
        """The modules that hold it and its names there; several if it is shared."""
        info = self.owner._module_info
        shared = zip(info.shared_modules, info.shared_param_names, strict=True)
        return [(info.module, info.param_name), *shared]


@dataclass(frozen=True, eq=False)
class ShardGroup:
    """Parameters that one `fully_shard` has made into shards of one group of ranks.

    Attributes:
        state: FSDP2's record of the module (`FSDPState`).
        owner: Its record of the parameters (`FSDPParamGroup`).
        shards: The parameters.
    """

    state: Any
    owner: Any
    shards: tuple[Shard, ...]

    @property
    def group_name(self) -> str:
        """The process group, as torch names it."""
        return self.owner.mesh_info.shard_process_group.group_name

    @property
    def num_ranks(self) -> int:
        """The number of ranks that have a part."""
        return self.owner.mesh_info.shard_process_group.size()

    @property
    def reshards_after_forward(self) -> bool:
        """True if whole parameters are freed after the forward pass, and gathered again."""
        return self.owner._reshard_after_forward


class ShardedModel:
    """The shards of a model, and of a loss that is a module; none if they are not sharded.

    Attributes:
        groups: The parameters that each `fully_shard` has sharded.

    Raises:
        CaptureError: It is sharded in a way that a step graph does not hold; the message names the
            parameter.
    """

    def __init__(self, model: nn.Module, loss: object = None) -> None:
        modules = {"model": model} | ({"loss": loss} if isinstance(loss, nn.Module) else {})
        root = nn.ModuleDict(modules)
        states = _states_in(root)
        names = {id(module): name for name, module in root.named_modules()}
        self.groups = [
            ShardGroup(state, owner, tuple(_shards_of(owner, names)))
            for state in states
            for owner in parameter_groups_of(state)
        ]
        for group in self.groups:
            _check_group(group)
        _check_other_parameters(root, {id(shard.parameter) for shard in self})
        for state in states:
            if state._is_root is None:
                state._lazy_init()  # as the first forward pass would
        self.reshard()

    def __iter__(self) -> Iterator[Shard]:
        return (shard for group in self.groups for shard in group.shards)

    def reshard(self) -> None:
        """Put the shards into the model, also where an evaluation has left whole parameters."""
        for group in self.groups:
            group.owner.reshard()

    def at(self, module: nn.Module, key: str) -> Shard | None:
        """Return the shard that a module holds under a name."""
        if not hasattr(self, "_at"):
            self._at = {
                (id(holder), name): shard for shard in self for holder, name in shard.places
            }
        return self._at.get((id(module), key))

    def locals_of(self, optimizer: torch.optim.Optimizer) -> dict[int, torch.Tensor]:
        """Return this rank's parts of parameters and state, by the identities of the DTensors.

        Raises:
            CaptureError: State is sharded otherwise than its parameter.
        """
        found = {id(shard.parameter): local_of(shard.parameter) for shard in self}
        for parameter, state in optimizer.state.items() if found else ():
            for key, value in state.items():
                if not is_sharded(value):
                    continue
                if value.placements != getattr(parameter, "placements", None):
                    raise CaptureError(
                        f"the optimizer's state {key!r} has the placements {value.placements}, "
                        "other ones than its parameter; use an optimizer whose state is sharded as "
                        "the parameters are"
                    )
                found[id(value)] = local_of(value)
        return found


def _states_in(root: nn.Module) -> list[Any]:
    """Return FSDP2's states, outer modules first; one may belong to several modules."""
    modules: list[Any] = [each for each in root.modules() if hasattr(each, "_get_fsdp_state")]
    return list(
        {id(state): state for state in (each._get_fsdp_state() for each in modules)}.values()
    )


def _shards_of(owner: Any, names: Mapping[int, str]) -> Iterator[Shard]:
    for each in owner.fsdp_params:
        module = names.get(id(each._module_info.module), "")
        name = f"{module}.{each._module_info.param_name}".removeprefix("model.")
        yield Shard(name.lstrip("."), each)


def _check_group(group: ShardGroup) -> None:
    for shard in group.shards:
        _check_shard(shard)
    owner, first = group.owner, group.shards[0].name if group.shards else ""
    policies = [precision_of(owner, shard.owner) for shard in group.shards]
    dtypes = {dtype for each in policies for dtype in (each.param_dtype, each.reduce_dtype)}
    for is_wrong, option, remedy in (
        (not owner.reduce_grads, "set_requires_gradient_sync(False)", "accumulate= of capture"),
        (owner.gradient_divide_factor is not None, "set_gradient_divide_factor", "a scaled loss"),
        (owner._all_reduce_hook is not None, "set_all_reduce_hook", "before_step= of capture"),
        (torch.float16 in dtypes, "MixedPrecisionPolicy with float16", "torch.bfloat16"),
    ):
        if is_wrong:
            raise CaptureError(
                f"parameter {first!r} and its group are sharded with {option}, which a step graph "
                f"does not hold; use {remedy} instead"
            )


def _check_shard(shard: Shard) -> None:
    parameter = shard.parameter
    mesh, placements = parameter.device_mesh, parameter.placements
    described = f"parameter {shard.name!r} is sharded as {placements} over {mesh}"
    if mesh.ndim != 1 or not placements[0].is_shard(0):
        raise CaptureError(
            f"{described}; a step graph has parameters sharded by rows over a mesh of one "
            "dimension: use fully_shard(module, mesh=...) with such a mesh, and no other "
            "parallelism beside it"
        )
    if shard.owner.offload_to_cpu:
        raise CaptureError(
            f"{described} with a CPUOffloadPolicy; leave that out, and plan with host_memory= or "
            "store= instead"
        )
    if parameter.grad_dtype is not parameter.dtype:
        raise CaptureError(
            f"{described} with the grad_dtype {parameter.grad_dtype}; leave that out, and reduce "
            "gradients in another dtype with MixedPrecisionPolicy(reduce_dtype=...)"
        )
    local = local_of(parameter)
    if local.is_meta:
        raise CaptureError(
            f"{described} and on the meta device; give it memory first, with "
            "model.to_empty(device=...) and its first numbers"
        )
    if type(local) is not torch.Tensor:
        raise CaptureError(
            f"{described}, each part a {type(local).__name__}, whose operators a capture does not "
            "see; shard ordinary parameters"
        )


def _check_other_parameters(root: nn.Module, known: set[int]) -> None:
    for name, parameter in root.named_parameters():
        if is_sharded(parameter) and id(parameter) not in known:
            raise CaptureError(
                f"parameter {name.removeprefix('model.')!r} is a DTensor with the placements "
                f"{parameter.placements}, and not of fully_shard: what its operators communicate "  # pyright: ignore
                "a step graph does not hold; use fully_shard, or whole parameters"
            )
