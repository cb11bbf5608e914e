"""Capture of FSDP2's collectives as operators of a step graph.

While a step is captured, FSDP2's hooks call `FsdpCapture` in the place of the functions that gather
and free storages. A module's forward pass begins with an operator that gathers each parameter from
the shards; that parameter's gradient is a reduce-scatter. Where FSDP2 would have freed a whole
parameter before the backward pass, autograd saves only a recipe to gather it again. So whole
parameters are values that live until their last use, and a plan frees them as any other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from penstock.compat.fsdp import reduce_dtype_of
from penstock.errors import CaptureError
from penstock.graph.capturing.fake_tensors import FakeTensors
from penstock.graph.capturing.recorder import Draft, Recorder
from penstock.graph.capturing.schemas import schema_of
from penstock.graph.encoding import OWN_TARGETS, resolve
from penstock.graph.fsdp.collectives import (
    all_gather_shards_,
    max_over_ranks_,
    reduce_scatter_mean_,
    sum_over_ranks_,
)
from penstock.graph.fsdp.shards import Shard, ShardedModel, ShardGroup
from penstock.graph.step_graph import Phase

# Element by element, as those that torch marks so.
_ELEMENTWISE = ("aten.copy_.", "aten._to_copy.", "aten.fill_.", "aten.zero_.", "aten.masked_fill_.")
_LISTS, _NORMS = ("aten._foreach_", "aten._fused_"), ("aten._foreach_norm.", "aten._foreach_max.")


class _WholeParameter:
    """A parameter gathered for one forward pass of its module.

    Attributes:
        group: The ranks that have a part.
        owner: FSDP2's record of it: its shape, and the dtypes in which it is gathered and its
            gradient reduced (None: their own).
    """

    def __init__(self, group: ShardGroup, shard: Shard, fakes: FakeTensors) -> None:
        self.group, self.owner = group, shard.owner
        self._rows = fakes.of(shard.parameter, shard.name)
        self._flat = fakes.of(shard.flat, shard.name)
        self._again: torch.Tensor | None = None

    def gather(self) -> Any:
        """Return it as its module holds it."""
        return _GatherShards.apply(self._rows, self._all_gather(), self)

    def gather_flat_again(self) -> torch.Tensor:
        """Return all of it, flat, gathered once more for the backward pass."""
        if self._again is None:
            self._again = self._all_gather()
        return self._again

    def gather_again(self) -> Any:
        """Return it as its module holds it, gathered once more for the backward pass."""
        return _GatherShards.apply(self._rows, self.gather_flat_again(), self)

    @torch.no_grad()
    def _all_gather(self) -> torch.Tensor:
        """Return all ranks' shards one after the other, flat and with their padding."""
        dtype = self.owner.param_dtype
        shard = self._flat if dtype is None else self._flat.to(dtype)
        full = shard.new_empty(self.group.num_ranks * shard.numel())
        all_gather_shards_(full, shard, self.group.group_name)
        return full


class _GatherShards(torch.autograd.Function):
    """The whole parameter of this rank's rows; backward: these rows of the mean gradient."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, full: torch.Tensor, whole: _WholeParameter
    ) -> torch.Tensor:
        ctx.whole, ctx.shape, ctx.dtype = whole, rows.shape, rows.dtype
        ctx.num_padded = full.numel() // whole.group.num_ranks
        size = whole.owner._orig_size
        return full[: size.numel()].view(size)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), whole = grads, ctx.whole
        grad = grad.to(reduce_dtype_of(whole.owner) or grad.dtype)
        num_elements = whole.group.num_ranks * ctx.num_padded
        if num_elements == grad.numel():
            full = grad.contiguous().view(-1)
        else:
            full = grad.new_zeros(num_elements)
            full[: grad.numel()].view(whole.owner._orig_size).copy_(grad)
        shard = grad.new_empty(ctx.num_padded)
        reduce_scatter_mean_(shard, full, whole.group.group_name)
        shard = shard.to(ctx.dtype)
        return shard[: ctx.shape.numel()].view(ctx.shape), None, None


class FsdpCapture:
    """Captures a sharded model's forward and backward passes; does nothing for other models."""

    def __init__(self, model: ShardedModel, fakes: FakeTensors, recorder: Recorder) -> None:
        self._model = model
        self._fakes = fakes
        self._recorder = recorder
        self._wholes: dict[int, _WholeParameter] = {}  # by storage, if resharded after forward
        self._kept_alive: list[torch.Tensor] = []  # so that no other storage gets their identities
        self._last_gathered: dict[Shard, _WholeParameter] = {}
        self._gathered_groups: list[ShardGroup] = []
        self._gradients: dict[int, str] = {}  # names by storage
        self._shard_readers: set[int] = set()  # drafts that treat shards as parts

    @contextlib.contextmanager
    def replace_hooks(self) -> Iterator[None]:
        """Replace FSDP2's gathering and freeing in the block."""
        if not self._model.groups:
            yield
            return
        with contextlib.ExitStack() as stack:
            for group in self._model.groups:
                stack.enter_context(self._replace_group_hooks(group))
            hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            stack.enter_context(hooks)
            for handle in (
                torch_modules.register_module_forward_pre_hook(self._gather_for_recomputation),
                torch_modules.register_module_forward_hook(
                    self._reshard_after_recomputation, always_call=True
                ),
            ):
                stack.callback(handle.remove)
            yield

    @contextlib.contextmanager
    def _replace_group_hooks(self, group: ShardGroup) -> Iterator[None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            self._gather(group)
            return args, kwargs

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            if group.reshards_after_forward:
                self._reshard(group)
            return output

        def nothing(*args: Any, **kwargs: Any) -> None:
            pass

        state, training_state = group.state, group.state._training_state
        instead = {"pre_forward": enter, "post_forward": leave}
        try:
            with (
                mock.patch.multiple(group.owner, **instead, unshard=nothing, reshard=nothing),
                mock.patch.object(state, "_register_pre_backward_hook", lambda output: output),
            ):
                yield
        finally:  # also where the forward pass has ended with an error
            state._training_state = training_state
            state._state_ctx.iter_forward_root = None
            state._modules_to_run_forward.clear()

    def after_backward(self) -> None:
        """Reshard the groups that are still whole, and note the gradients."""
        for group in [*self._gathered_groups]:
            self._reshard(group)
        for shard in self._model:
            gradient = self._fake_of(shard).grad
            if gradient is not None:
                self._gradients[self._index_of(gradient)] = f"{shard.name}.grad"

    # Forward.

    def _gather(self, group: ShardGroup) -> None:
        if group in self._gathered_groups:
            return
        for shard in group.shards:
            self._set_parameter(shard, self._fake_of(shard), self._gather_shard(group, shard))
        self._gathered_groups.append(group)

    def _reshard(self, group: ShardGroup) -> None:
        if group not in self._gathered_groups:
            return
        self._gathered_groups.remove(group)
        for shard in group.shards:
            module, key = shard.places[0]
            self._set_parameter(shard, module._parameters[key], self._fake_of(shard))

    def _gather_shard(self, group: ShardGroup, shard: Shard) -> torch.Tensor:
        whole = _WholeParameter(group, shard, self._fakes)
        with self._mark_shard_readers():
            parameter = whole.gather()
        if group.reshards_after_forward:
            self._last_gathered[shard] = self._wholes[parameter.untyped_storage()._cdata] = whole
            self._kept_alive.append(parameter)
        return parameter

    def _fake_of(self, shard: Shard) -> torch.Tensor:
        return self._fakes.of(shard.parameter, shard.name)

    def _set_parameter(self, shard: Shard, old: Any, new: Any) -> None:
        for module, key in shard.places:
            module._parameters[key] = new
            for name, value in module.__dict__.items():
                # As the flat list of weights that recurrent layers keep.
                if type(value) is list and any(item is old for item in value):
                    module.__dict__[name] = [new if item is old else item for item in value]

    # Activation checkpoints run parts of a module again in the backward pass.

    def _gather_for_recomputation(self, module: nn.Module, args: Any) -> None:
        if self._recorder.phase is not Phase.BACKWARD:
            return
        for key, tensor in module._parameters.items():
            shard = self._model.at(module, key)
            if shard in self._last_gathered and tensor is self._fake_of(shard):
                with self._mark_shard_readers():
                    module._parameters[key] = self._last_gathered[shard].gather_again()

    def _reshard_after_recomputation(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._recorder.phase is not Phase.BACKWARD:
            return
        gathered = {shard for group in self._gathered_groups for shard in group.shards}
        for key in module._parameters:
            shard = self._model.at(module, key)
            if shard in self._last_gathered and shard not in gathered:
                module._parameters[key] = self._fake_of(shard)  # pyright: ignore

    # Saved tensors.

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Save the view of a parameter that is gathered again; of other tensors the version."""
        whole = self._wholes.get(tensor.untyped_storage()._cdata)
        if whole is None:
            return tensor, tensor._version
        return whole, (tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: Any) -> torch.Tensor:
        tensor, form = saved
        if isinstance(tensor, _WholeParameter):
            with self._mark_shard_readers():
                return tensor.gather_flat_again().as_strided(*form)
        if tensor._version != form:  # autograd does not compare where there are hooks
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that backward needs has been changed in "
                "place; change a copy of it"
            )
        return tensor

    # Clipping.

    @contextlib.contextmanager
    def replace_norms(self) -> Iterator[None]:
        """Replace torch's norm of gradients, which clipping uses, by that of all ranks' shards."""
        if not self._model.groups:
            yield
            return
        norm = self._total_norm
        with (
            mock.patch.object(nn.utils.clip_grad, "_get_total_norm", norm),
            mock.patch.object(nn.utils, "get_total_norm", norm),
        ):
            yield

    @torch.no_grad()
    def _total_norm(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Return the norm of the norms of all gradients, as DTensors do it."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        power = float(norm_type)
        if not tensors:
            return torch.tensor(0.0, device=torch.get_default_device())  # as torch does
        names = {
            id(gradient): group.group_name
            for group in self._model.groups
            for shard in group.shards
            if (gradient := self._fake_of(shard).grad) is not None
        }
        norms: list[Any] = [
            None if id(each) in names else torch.linalg.vector_norm(each, power) for each in tensors
        ]
        for name in dict.fromkeys(names.values()):
            indices = [i for i, each in enumerate(tensors) if names.get(id(each)) == name]
            found = self._norms_of_shards([tensors[i] for i in indices], power, name)
            for index, value in zip(indices, found, strict=True):
                norms[index] = value
        total = torch.linalg.vector_norm(torch.stack(norms), power)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(f"the total norm of order {power} of the gradients is not finite")
        return total

    def _norms_of_shards(
        self, gradients: list[torch.Tensor], power: float, group: str
    ) -> Sequence[torch.Tensor]:
        """Return the norms of whole gradients, of which the ranks of a group have parts."""
        if not gradients:
            return ()
        with self._mark_shard_readers():
            norms = torch.stack(
                [
                    torch.linalg.vector_norm(each, power) if each.numel() else each.new_zeros(())
                    for each in gradients
                ]
            )
            if power == float("inf"):
                max_over_ranks_(norms, group)
                return norms.unbind()
            if power <= 0:
                raise CaptureError(
                    f"norm_type={power}: gradients that are sharded over ranks have norms of "
                    "positive orders, inf among them"
                )
            norms = norms**power
            sum_over_ranks_(norms, group)
            return (norms ** (1 / power)).unbind()

    # Checks that no operator takes this rank's part for the whole.

    @contextlib.contextmanager
    def _mark_shard_readers(self) -> Iterator[None]:
        """Mark the operators recorded in the block: they treat shards as parts."""
        start = len(self._recorder.drafts)
        yield
        self._shard_readers.update(range(start, len(self._recorder.drafts)))

    def check(self, states: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> None:
        """Raise if an operator has taken this rank's part of a tensor for all of it; `states`
        yields the fake tensors of the optimizer's state with their names.

        Raises:
            CaptureError: An operator outside of FSDP2's modules reads a shard, or one mixes the
                elements of a sharded parameter, gradient or state.
        """
        if not self._model.groups:
            return
        rows = {shard.name: self._fake_of(shard) for shard in self._model}
        parts = {self._index_of(each): name for name, each in rows.items()}
        later = dict(self._gradients)
        shapes = {name: each.shape for name, each in rows.items()}
        for name, state in states():
            owner = name.removeprefix("optimizer.state.").rpartition(".")[0]
            if state.dim() and state.shape == shapes.get(owner):
                later[self._index_of(state)] = name
        for number, draft in enumerate(self._recorder.drafts):
            if draft.phase is Phase.OPTIMIZER:
                parts |= later
                later = {}
            if number not in self._shard_readers:
                self._check_draft(draft, parts)

    def _check_draft(self, draft: Draft, parts: dict[int, str]) -> None:
        of = self._recorder.storages.storage_of_value
        read = [of[value] for value in draft.needs]
        name = next((parts[storage] for storage in read if storage in parts), None)
        if name is None:
            return
        if draft.phase is not Phase.OPTIMIZER:
            raise CaptureError(
                f"{draft.target} reads {name!r}, of which this rank has only a part, outside of "
                "the forward pass of the module that fully_shard was called with; use parameters "
                "within their modules"
            )
        if not _is_elementwise(draft.target):
            raise CaptureError(
                f"{draft.target} mixes the elements of {name!r}, of which this rank has only a "
                "part; before_step and the optimizer may do arithmetic element by element, and "
                "call torch.nn.utils.clip_grad_norm_ and get_total_norm, which count all ranks "
                "(FSDP2 has averaged the gradients already)"
            )
        for value in draft.makes:
            parts.setdefault(of[value], name)

    def _index_of(self, tensor: torch.Tensor) -> int:
        return self._recorder.storages.index_of(tensor)


def _is_elementwise(target: str) -> bool:
    if target in OWN_TARGETS or target.startswith(_ELEMENTWISE):
        return True
    if target.startswith(_LISTS):
        return not target.startswith(_NORMS)
    return schema_of(resolve(target)).pointwise
