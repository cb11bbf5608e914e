"""Private names of torch's dispatcher and of its tensors."""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.utils._python_dispatch
from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_wrapped_tensor
from torch._library.custom_ops import CustomOpDef
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch.library import Library, register_vmap
from torch.utils._mode_utils import no_dispatch as no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

_Function = TypeVar("_Function", bound=Callable[..., Any])

DispatchKey = torch._C.DispatchKey

current_modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack
"""Return the dispatch modes that are on, the innermost last."""

TensorBase = torch._C.TensorBase
"""Base class of `torch.Tensor`, in C++."""

dispatch_keys = torch._C._dispatch_keys
"""Return the set of dispatch keys of a tensor."""

is_functional_tensor = torch._is_functional_tensor
"""Return whether a tensor is a wrapper of functionalisation."""

are_functorch_transforms_active = torch._C._are_functorch_transforms_active
"""Return whether this thread is inside `torch.func.vmap`, `grad` or another such transform."""


def is_differentiated_by_func(tensor: torch.Tensor) -> bool:
    """Return whether `torch.func.grad`, or a transform made of it, follows a tensor."""
    while is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_gradtrackingtensor(tensor) and tensor.requires_grad:
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return False


without_torch_function = torch._C.DisableTorchFunctionSubclass
"""Context manager: subclasses of tensors are treated as plain tensors."""

parse_to = torch._C._nn._parse_to
"""Return device, dtype, non_blocking and memory format of the arguments of `Tensor.to`."""

functions: Any = torch._C._VariableFunctions
"""Functions of `torch` as they are in C++."""

nn_functions: Any = torch._C._nn
"""Functions of `torch.nn.functional` that are in C++."""

num_owners = torch._C._storage_Use_Count
"""Return the number of tensors, and other objects of torch, that share a storage (`_cdata`)."""

storage_from_pointer = torch._C._construct_storage_from_data_pointer
"""Return a storage over memory at (address, device, num_bytes), which it does not own."""

make_subclass = torch.Tensor._make_subclass
"""Return a tensor of a subclass over the memory of another tensor."""

make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
"""Return a tensor of a subclass that has a shape and no memory."""

unchecked_sparse_tensor: Any = torch.ops.aten._sparse_coo_tensor_unsafe.default
"""Return a sparse tensor of indices that are not compared with its shape, without a warning."""

is_in_bad_fork = torch.cuda._is_in_bad_fork
"""Return whether this process was forked from one that had initialised CUDA."""


def give_memory(fake: torch.Tensor, real: torch.Tensor) -> None:
    """Make a fake tensor the real one that is passed, wherever it is held; the other becomes fake.

    As `torch.utils.swap_tensors`, which refuses tensors that weak references know.
    """
    fake.__class__, real.__class__ = real.__class__, fake.__class__
    fake.__dict__, real.__dict__ = real.__dict__, fake.__dict__
    torch._C._swap_tensor_impl(fake, real)


def is_dispatched(value: object) -> bool:
    """Return whether a value is a tensor whose class computes operators, such as a fake one.

    It need not have memory.
    """
    return (
        isinstance(value, torch.Tensor)
        and type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    )


def is_batched(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is many that `torch.autograd.grad(is_grads_batched=True)` made."""
    return dispatch_keys(tensor).has(_BATCHED)


_BATCHED = torch._C._dispatch_key_parse("Batched")


def refuse_batched(name: str, *gradients: torch.Tensor | None) -> None:
    """Refuse gradients of `torch.autograd.grad(is_grads_batched=True)`.

    Torch's own error names neither function nor remedy.

    Raises:
        NotImplementedError: One is of many.
    """
    if any(each is not None and is_batched(each) for each in gradients):
        raise NotImplementedError(
            f"{name} does not take many gradients at once by is_grads_batched=True, as "
            "torch.autograd.functional.jacobian(vectorize=True) passes them: have torch.func.vmap "
            "call torch.autograd.grad, or pass them one by one"
        )


def loop_over_batches(operator: CustomOpDef | OpOverload, lib: Library | None = None) -> None:
    """Have `torch.func.vmap` call an operator for one sample after the other.

    So does torch by itself, but not for operators that take or return lists.

    Args:
        operator: It returns a tensor or a list of tensors.
        lib: What has defined an overload.
    """

    def run(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
        found = [
            operator(*(_select(*each, number) for each in zip(arguments, in_dims, strict=True)))
            for number in range(info.batch_size)
        ]
        if isinstance(found[0], torch.Tensor):
            return torch.stack(found), 0
        results = [torch.stack(each) for each in zip(*found, strict=True)]
        return type(found[0])(results), type(found[0])([0] * len(results))

    register_vmap(operator, run, lib=lib)


def _select(argument: Any, dim: Any, number: int) -> Any:
    """Return an argument of one sample; `dim` is the samples' dimension, or None for no samples."""
    if isinstance(dim, (list, tuple)):
        return [_select(*each, number) for each in zip(argument, dim, strict=True)]
    return argument if dim is None else argument.select(dim, number)


def outside_modes(function: _Function) -> _Function:
    """Make a function run outside of the modes that record or fake operators."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_recorded():
            return function(*args, **kwargs)
        with no_dispatch():
            return function(*args, **kwargs)

    return cast("_Function", run)


def is_recorded() -> bool:
    """Return whether operators are recorded or faked: by make_fx, export, fake tensors or the like.

    Modes that only watch, such as one that counts bytes, do not.
    """
    return any(getattr(mode, "_mode_key", None) is not None for mode in current_modes())
