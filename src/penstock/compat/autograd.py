"""Private names of torch's autograd."""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._C import _autograd
from torch.autograd import forward_ad

from penstock.compat.dynamo import mark_constant

current_graph_task_id = torch._C._current_graph_task_id
"""Return the number of the backward pass that this thread is in; -1 outside of one."""

current_node = torch._C._current_autograd_node
"""Return the autograd node that this thread's backward pass is in; None outside of one."""

next_sequence_number = _autograd._get_sequence_nr
"""Return the number that the next autograd node made by this thread gets."""

below_autograd = torch._C._AutoDispatchBelowAutograd
"""Context manager: operators are dispatched below autograd, which then records nothing."""

set_grad_enabled = torch._C._set_grad_enabled
"""Turn gradients on or off on this thread at once, without a context manager's cost."""


@contextlib.contextmanager
def _leave_inference_mode() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def outside_inference_mode() -> contextlib.AbstractContextManager[None]:
    """Return a context for making tensors that outlive it: outside of inference mode.

    Tensors of that mode can be neither written to after it nor saved for a backward pass. Gradients
    stay off.
    """
    if torch.is_inference_mode_enabled():
        return _leave_inference_mode()
    return contextlib.nullcontext()


def outlive_inference(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or a copy of one of inference mode, which autograd could not save."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


def call_after_backward(function: Callable[[], None]) -> None:
    """Have a function called at the end of the backward pass that this thread is in."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def count_node_hooks(parameter: torch.Tensor) -> int:
    """Return how many hooks of Python are on the node that accumulates a leaf's gradient."""
    if parameter.is_inference():  # it has no gradient
        return 0
    count = 0
    with torch.inference_mode(False), torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)
        count += len(handle.hooks_dict_ref() or ()) - 1
        handle.remove()
    return count


def find_leaves(node: Any) -> list[torch.Tensor]:
    """Return the leaves that an autograd node's inputs were computed from."""
    leaves: list[torch.Tensor] = []
    seen: set[Any] = {None}
    waiting = [node]
    while waiting:
        found = waiting.pop()
        if found in seen:
            continue
        seen.add(found)
        if type(found).__name__ == "AccumulateGrad":
            leaves.append(found.variable)
        waiting += [each for each, _ in found.next_functions]
    return leaves


def will_accumulate(leaf: torch.Tensor) -> bool:
    """Return whether the backward pass that this thread is in adds to a leaf's `.grad`.

    It does not for those that `torch.autograd.grad` returns, or `backward(inputs=)` leaves out.
    """
    with torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # as it says of a leaf whose gradient `torch.autograd.grad` returns
        return False


@mark_constant  # compiled code is guarded by both
def is_transformed() -> bool:
    """Return whether a transformation of `torch.func` or a forward-mode derivative is running."""
    return forward_ad._current_level >= 0 or _is_function_transformed()


def _is_function_transformed() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def map_batched(
    function: Callable[[torch.Tensor], Sequence[torch.Tensor]], gradient: torch.Tensor
) -> Sequence[torch.Tensor]:
    """Call a function with a gradient, or with each of several that come as one.

    They do with `is_grads_batched=True`, as `torch.autograd.functional.jacobian` has it for
    `vectorize=True`: in a vmap of autograd's own, which knows no rule of a custom operator.

    Args:
        function: Returns some tensors for one gradient.
        gradient: One gradient, or several.

    Returns:
        The function's tensors, each with those for several gradients as one.
    """
    if not torch._C._functorch.is_legacy_batchedtensor(gradient):
        return function(gradient)
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    found = [function(each) for each in torch._remove_batch_dim(gradient, level, 1, 0)]
    stacked = [torch.stack(each) for each in zip(*found, strict=True)]
    return [torch._add_batch_dim(each, 0, level) for each in stacked]


def has_tangent(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a dual number of the forward-mode derivative that is running."""
    is_running = forward_ad._current_level >= 0
    return is_running and forward_ad.unpack_dual(tensor).tangent is not None


def is_dispatch_watched() -> bool:
    """Return whether a dispatch mode is active, which sees the operators that are called."""
    return torch._C._len_torch_dispatch_stack() > 0


def is_eager(*tensors: torch.Tensor | None) -> bool:
    """Return whether nothing but an operator's result depends on its call being dispatched.

    The dispatcher converts all arguments, which takes a tenth of a millisecond, and autograd as
    `torch.library` registers it flattens lists in half a millisecond.
    """
    if torch.compiler.is_compiling() or is_dispatch_watched() or _is_function_transformed():
        return False
    return all(
        each is None or (type(each) in _PLAIN and not each.is_meta and not each.is_neg())
        for each in tensors
    )


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def set_lazy_bits(tensor: torch.Tensor, *, conjugate: bool, negative: bool) -> None:
    """Have a tensor's memory read as conjugated or negated, as `Tensor.conj()` does without a copy.

    Args:
        tensor: A tensor with neither bit set.
        conjugate: The bit that `Tensor.is_conj()` returns.
        negative: The bit that `Tensor.is_neg()` returns.
    """
    if conjugate:
        torch._C._set_conj(tensor, True)
    if negative:
        torch._C._set_neg(tensor, True)


def outside_saving_hooks() -> contextlib.AbstractContextManager[None]:
    """Return a context that hides tensors that autograd saves from hooks on such tensors.

    Checkpointing counts them, and compares them with those of a second run.
    """
    context: Any = torch.autograd.graph.saved_tensors_hooks(_keep, _keep)
    return context


def _keep(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype of autocast on a type of devices; None where it is off or there is none."""
    if not (_has_autocast(device) and torch.is_autocast_enabled(device)):
        return None
    return torch.get_autocast_dtype(device)


@mark_constant  # torch 2.11 does not trace it
def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)
