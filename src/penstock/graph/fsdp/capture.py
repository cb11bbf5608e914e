"""FSDP2's collectives as operators of a step graph.

While a step is captured, FSDP2's hooks call what is here in the place of what gathers and frees
storages. A module's forward pass begins with an operator that gathers each parameter from the
shards; that parameter's gradient is a reduce-scatter. What autograd saves of a whole parameter is
only how to gather it again where FSDP2 would have given it up in between. So whole parameters are
values that live as long as somebody reads them, and a plan frees them as any other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from penstock.errors import CaptureError
from penstock.graph.capturing.fake_tensors import StandIns
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


class _Form(NamedTuple):
    """What a parameter is gathered from and to.

    Attributes:
        group: Name of the process group.
        num_ranks: Its size.
        size: Shape of the whole parameter.
        dtype: What it is cast to before it is gathered; None: nothing.
        reduce_dtype: What its gradient is cast to before it is reduced; None: nothing.
    """

    group: str
    num_ranks: int
    size: torch.Size
    dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None


class _Saved(NamedTuple):
    """What is kept of a tensor that autograd saves: a view of a parameter that is given up."""

    whole: _Whole
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Whole:
    """A parameter gathered for one forward pass of its module.

    Args:
        rows: What stands for this rank's part.
        shard: The same, flat and with its padding.
        form: How it is gathered.
    """

    def __init__(self, rows: torch.Tensor, shard: torch.Tensor, form: _Form) -> None:
        self._rows = rows
        self._shard = shard
        self._form = form
        self._again: torch.Tensor | None = None

    def first(self) -> Any:
        """Gather it and return it as its module holds it."""
        return _Gathered.apply(self._rows, _gathered(self._shard, self._form), self._form)

    def flat_again(self) -> torch.Tensor:
        """Return all of it, flat, gathered once more for the backward pass."""
        if self._again is None:
            self._again = _gathered(self._shard, self._form)
        return self._again

    def again(self) -> Any:
        """Return it as its module holds it, gathered once more for the backward pass."""
        return _Gathered.apply(self._rows, self.flat_again(), self._form)


class _Gathered(torch.autograd.Function):
    """The whole parameter of this rank's rows; backward, these rows of the mean gradient."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, full: torch.Tensor, form: _Form) -> torch.Tensor:
        ctx.form, ctx.shape, ctx.dtype = form, rows.shape, rows.dtype
        ctx.num_padded = full.numel() // form.num_ranks
        return full[: form.size.numel()].view(form.size)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        form: _Form = ctx.form
        if form.reduce_dtype is not None:
            grad = grad.to(form.reduce_dtype)
        num_elements = form.num_ranks * ctx.num_padded
        if num_elements == grad.numel():
            full = grad.contiguous().view(-1)
        else:
            full = grad.new_zeros(num_elements)
            full[: grad.numel()].view(form.size).copy_(grad)
        shard = grad.new_empty(ctx.num_padded)
        reduce_scatter_mean_(shard, full, form.group)
        shard = shard.to(ctx.dtype)
        return shard[: ctx.shape.numel()].view(ctx.shape), None, None


def _gathered(shard: torch.Tensor, form: _Form) -> torch.Tensor:
    """Return all ranks' shards one after the other, flat and with their padding."""
    with torch.no_grad():
        if form.dtype is not None:
            shard = shard.to(form.dtype)
        full = shard.new_empty(form.num_ranks * shard.numel())
        all_gather_shards_(full, shard, form.group)
    return full


class Gathering:
    """Captures a sharded model's forward and backward passes; of others it does nothing.

    Args:
        model: Its shards.
        stand_ins: What stands for them; inside the model already.
        recorder: What writes the step down.
    """

    def __init__(self, model: ShardedModel, stand_ins: StandIns, recorder: Recorder) -> None:
        self._model = model
        self._stand_ins = stand_ins
        self._recorder = recorder
        self._whole: dict[int, _Whole] = {}  # by storage, of what is given up after the forward
        self._kept: list[torch.Tensor] = []  # so that no other storage gets such an identity
        self._last: dict[Shard, _Whole] = {}
        self._in_place: dict[int, ShardGroup] = {}
        self._gradients: dict[int, str] = {}  # names by block
        self._own: set[int] = set()  # drafts that may look at shards

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Take the place of FSDP2's gathering and freeing."""
        if not self._model.groups:
            yield
            return
        with contextlib.ExitStack() as stack:
            for group in self._model.groups:
                stack.enter_context(self._instead_of_hooks(group))
            hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            stack.enter_context(hooks)
            before = torch_modules.register_module_forward_pre_hook(self._before_again)
            stack.callback(before.remove)
            after = torch_modules.register_module_forward_hook(self._after_again, always_call=True)
            stack.callback(after.remove)
            yield

    @contextlib.contextmanager
    def _instead_of_hooks(self, group: ShardGroup) -> Iterator[None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            self._gather(group)
            return args, kwargs

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            if group.reshards_after_forward:
                self._give_up(group)
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
        """Give up what has been kept until here, and note the gradients."""
        for group in list(self._in_place.values()):
            self._give_up(group)
        for shard in self._model:
            gradient = self._rows_of(shard).grad
            if gradient is not None:
                self._gradients[self._block(gradient)] = f"{shard.name}.grad"

    # Forward.

    def _gather(self, group: ShardGroup) -> None:
        if id(group) in self._in_place:
            return
        for shard in group.shards:
            self._put(shard, self._rows_of(shard), self._gathered_for_forward(group, shard))
        self._in_place[id(group)] = group

    def _give_up(self, group: ShardGroup) -> None:
        if self._in_place.pop(id(group), None) is None:
            return
        for shard in group.shards:
            module, key = shard.places[0]
            self._put(shard, module._parameters[key], self._rows_of(shard))

    def _gathered_for_forward(self, group: ShardGroup, shard: Shard) -> torch.Tensor:
        flat = self._stand_ins.of(shard.flat, shard.name)
        owner = shard.owner
        form = _Form(
            group.group_name,
            group.num_ranks,
            owner._orig_size,
            owner.param_dtype,
            owner.reduce_dtype,
        )
        whole = _Whole(self._rows_of(shard), flat, form)
        with self._allowed():
            parameter = whole.first()
        if group.reshards_after_forward:
            self._last[shard] = self._whole[parameter.untyped_storage()._cdata] = whole
            self._kept.append(parameter)
        return parameter

    def _rows_of(self, shard: Shard) -> torch.Tensor:
        return self._stand_ins.of(shard.parameter, shard.name)

    def _put(self, shard: Shard, old: Any, new: Any) -> None:
        for module, key in shard.places:
            module._parameters[key] = new
            for name, value in module.__dict__.items():
                # As the flat list of weights that recurrent layers keep.
                if type(value) is list and any(item is old for item in value):
                    module.__dict__[name] = [new if item is old else item for item in value]

    # Activation checkpoints run parts of a module again in the backward pass.

    def _before_again(self, module: nn.Module, args: Any) -> None:
        if self._recorder.phase is not Phase.BACKWARD:
            return
        for key, tensor in module._parameters.items():
            shard = self._model.at(module, key)
            if shard in self._last and tensor is self._rows_of(shard):
                with self._allowed():
                    module._parameters[key] = self._last[shard].again()

    def _after_again(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._recorder.phase is not Phase.BACKWARD:
            return
        for key in module._parameters:
            shard = self._model.at(module, key)
            if shard in self._last and not self._is_in_place(shard):
                module._parameters[key] = self._rows_of(shard)  # pyright: ignore

    def _is_in_place(self, shard: Shard) -> bool:
        return any(shard in group.shards for group in self._in_place.values())

    # What autograd saves.

    def _pack(self, tensor: torch.Tensor) -> Any:
        whole = self._whole.get(tensor.untyped_storage()._cdata)
        if whole is None:
            return tensor, tensor._version
        return _Saved(whole, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, _Saved):
            with self._allowed():
                full = saved.whole.flat_again()
            return full.as_strided(saved.shape, saved.stride, saved.offset)
        tensor, version = saved
        if tensor._version != version:  # autograd does not look where there are hooks
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that backward needs has been changed in "
                "place; change a copy of it"
            )
        return tensor

    # Clipping.

    @contextlib.contextmanager
    def norms_over_ranks(self) -> Iterator[None]:
        """Let torch's norm of gradients, which clipping asks for, be that of all ranks' shards."""
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
        """Calculate the norm of the norms of all gradients, as DTensors do it."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        power = float(norm_type)
        if not tensors:
            return torch.tensor(0.0)
        names = {
            id(gradient): group.group_name
            for group in self._model.groups
            for shard in group.shards
            if (gradient := self._rows_of(shard).grad) is not None
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
        with self._allowed():
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

    # What must not look at one rank's part only.

    @contextlib.contextmanager
    def _allowed(self) -> Iterator[None]:
        """Let what is written down look at shards: it knows that they are parts."""
        start = len(self._recorder.drafts)
        yield
        self._own.update(range(start, len(self._recorder.drafts)))

    def check(self, states: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> None:
        """Raise if something has taken this rank's part of a tensor for all of it.

        Args:
            states: Yields the optimizer's state by name: stand-ins.

        Raises:
            CaptureError: An operator outside of FSDP2's modules reads a shard, or one mixes the
                elements of a sharded parameter, gradient or state.
        """
        if not self._model.groups:
            return
        rows = {shard.name: self._rows_of(shard) for shard in self._model}
        parts = {self._block(each): name for name, each in rows.items()}
        later = dict(self._gradients)
        shapes = {name: each.shape for name, each in rows.items()}
        for name, state in states():
            owner = name.removeprefix("optimizer.state.").rpartition(".")[0]
            if state.dim() and state.shape == shapes.get(owner):
                later[self._block(state)] = name
        for number, draft in enumerate(self._recorder.drafts):
            if draft.phase is Phase.OPTIMIZER:
                parts |= later
                later = {}
            if number not in self._own:
                self._check_draft(draft, parts)

    def _check_draft(self, draft: Draft, parts: dict[int, str]) -> None:
        of = self._recorder.block_of_value
        read = [of[value] for value in (*draft.reads, *(old for old, _ in draft.mutates))]
        name = next((parts[block] for block in read if block in parts), None)
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
                "part; what works in before_step and in an optimizer is arithmetic element by "
                "element, and torch.nn.utils.clip_grad_norm_ and get_total_norm, which know of all "
                "ranks (FSDP2 has averaged the gradients already)"
            )
        for value in (*draft.creates, *(new for _, new in draft.mutates)):
            parts.setdefault(of[value], name)

    def _block(self, tensor: torch.Tensor) -> int:
        return self._recorder.block_of_value[self._recorder.view(tensor).value]


def _is_elementwise(target: str) -> bool:
    if target in OWN_TARGETS or target.startswith(_ELEMENTWISE):
        return True
    if target.startswith(_LISTS):
        return not target.startswith(_NORMS)
    return schema_of(resolve(target)).pointwise
