"""The hooks in C++ decide as those in Python do, and leave to them what is not common."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch.overrides import TorchFunctionMode

import penstock
from penstock.activations import _hooks
from penstock.activations._chunks import SmallHandle

pytestmark = pytest.mark.skipif(
    _hooks.load_common_saves() is None, reason="the hooks cannot be built here"
)
KIB = 1024


class Subclass(torch.Tensor):
    pass


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape))


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(4)


def changed_twice() -> torch.Tensor:
    return (parameter(4) * 1).detach().add_(1).add_(1)


# By name how to make it, and whether C++ does all of it.
CASES: dict[str, tuple[Callable[[], torch.Tensor], bool]] = {
    "computed": (lambda: parameter(4) * 2, True),
    "conjugate": (lambda: parameter(4).to(torch.complex64).conj(), True),
    "part of what was computed": (lambda: (parameter(16) * 2)[3:5], True),
    "without history": (lambda: torch.ones(4), True),
    "changed twice": (changed_twice, True),
    "parameter": (lambda: parameter(4), True),
    "large parameter": (lambda: parameter(1024, 1024), True),
    "leaf": (lambda: torch.ones(4, requires_grad=True), True),
    "view of a parameter": (lambda: parameter(4, 2).t(), True),
    "large view of a parameter": (lambda: parameter(1024, 1024).t(), True),
    "large": (lambda: torch.ones(1024, 1024), False),
    "empty": (lambda: torch.ones(0), False),
    "empty and computed": (lambda: parameter(0) * 2, False),
    "row of a data set": (lambda: torch.ones(64, 16)[3], True),
    "column of a data set": (lambda: torch.ones(64, 16)[:, 3], True),
    "transposed data": (lambda: torch.ones(4, 2).t(), True),
    "inference tensor": (inference, False),
    "meta": (lambda: torch.ones(4, device="meta"), False),
    "subclass": (lambda: torch.ones(4).as_subclass(Subclass), False),
    "sparse": (lambda: torch.eye(4).to_sparse(), False),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(4), 1, 0, torch.qint8), False),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), False),
    "zeros without memory": (lambda: torch._efficientzerotensor(4), False),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(4)), False),
}


@pytest.fixture(params=[None, "1GiB"], ids=["no budget", "budget"])
def offloads(request, store, monkeypatch):
    """One with the hooks in C++ and one with those in Python, each with a chunk it is filling."""
    ours = penstock.offload(store, device_memory=request.param)
    with monkeypatch.context() as patch:
        patch.setattr(_hooks, "load_common_saves", lambda: None)
        reference = penstock.offload(store, device_memory=request.param)
    assert [each.report().hooks for each in (ours, reference)] == ["C++", "Python"]
    firsts = [hooks_of(each)[0](torch.ones(4)) for each in (ours, reference)]
    yield ours, reference
    del firsts
    for each in (ours, reference):
        each.close()


def hooks_of(offload: penstock.activations.Offload) -> tuple[Any, Any]:
    context = offload._hooks.context()
    return context.pack_hook, context.unpack_hook


def hooks_without_python(offload: penstock.activations.Offload, otherwise: Any) -> tuple[Any, Any]:
    """Hooks of the same `Offload` that call `otherwise` in place of those in Python."""
    library, engine = _hooks.load_common_saves(), offload._engine
    shared = offload._modules.known, engine.small.filling, engine.limits.small_bytes
    return library.penstock_common_saves(_hooks._CLASSES, (otherwise, otherwise, *shared))


def in_python(handle: Any) -> Any:
    """Return what the hooks in Python take in place of a handle of those in C++."""
    return handle.in_python() if type(handle).__name__ == "Kept" else handle


def facts(handle: Any, tensor: torch.Tensor) -> Any:
    """Return a handle's content without the identities of its objects."""
    kept, handle = handle, in_python(handle)
    if type(handle) is tuple:
        alias, version, chunk = handle
    elif isinstance(handle, SmallHandle):
        alias, version, chunk = handle.alias, handle.version, handle.chunk
        assert chunk.living()[-1] is handle
    else:
        return type(handle)
    del kept  # not before: its chunk knows those that live
    counted = chunk and (len(chunk.record.small_keys), chunk.record.small_bytes)
    return type(handle), alias is tensor, alias.requires_grad, alias.grad_fn, version, counted


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_both_decide_alike(name, offloads):
    make, is_common = CASES[name]
    ours, reference = offloads
    tensor, left = make(), []
    handle, expected = (hooks_of(each)[0](tensor) for each in offloads)
    assert facts(handle, tensor) == facts(expected, tensor)
    assert ours._modules.known.keys() == reference._modules.known.keys()
    restored, expected_back = hooks_of(ours)[1](handle), hooks_of(reference)[1](expected)
    assert (restored is tensor) == (expected_back is tensor)
    assert type(restored) is type(expected_back)
    handle = in_python(handle)
    assert type(handle) is not tuple or restored is handle[0]
    assert not isinstance(handle, SmallHandle) or restored is handle.alias

    kept = hooks_of(ours)[0](torch.ones(4))  # a chunk in place of the one that was used
    hooks_without_python(ours, left.append)[0](tensor)
    assert not left if is_common else left[0] is tensor
    del kept


def test_storages_are_counted_once_and_chunks_have_an_end(offloads):
    wholes, kept = [torch.ones(20 * KIB // 4) for _ in range(4)], []
    for whole in wholes:
        for offload in offloads:
            pack = hooks_of(offload)[0]
            kept.append([facts(pack(part), part) for part in (whole, whole[:], whole)])
    assert kept[0::2] == kept[1::2]
    counts = [[each[-1] for each in parts] for parts in kept[0::2]]
    assert counts[0] == [(2, 16 + 20 * KIB)] * 3 and counts[3] == [(1, 20 * KIB)] * 3
    assert len({offload.report().num_saved for offload in offloads}) == 1


def test_an_address_of_a_module_that_is_gone_means_nothing(offloads):
    tensor = torch.ones(4)
    handles = []
    for offload in offloads:
        gone = weakref.ref(torch.ones(4).untyped_storage())
        assert gone() is None
        offload._modules.known[tensor.untyped_storage()._cdata] = gone
        handles.append(hooks_of(offload)[0](tensor))
    found = [facts(handle, tensor) for handle in handles]
    assert found[0] == found[1] and found[0][-1] == (2, 32)


@pytest.mark.parametrize("when", ["before its chunk is used", "afterwards"])
def test_a_change_in_place_is_left_to_python_to_report(when, offloads):
    for offload in offloads:
        pack, unpack = hooks_of(offload)
        tensor, other = parameter(4) * 2, parameter(4) * 2
        handles = pack(tensor), pack(other)
        if when == "afterwards":
            assert unpack(handles[1]).equal(other)
        tensor.detach().add_(1)
        with pytest.raises(RuntimeError, match="version 1; expected version 0"):
            unpack(handles[0])
        assert unpack(handles[1]).equal(other)


def test_the_first_use_of_a_chunk_and_the_next_save_are_left_to_python(offloads):
    left: list[Any] = []
    tensor = torch.ones(4)
    handle = hooks_of(offloads[0])[0](tensor)
    pack, unpack = hooks_without_python(offloads[0], left.append)
    unpack(handle)
    assert facts(left.pop(), tensor) == facts(handle, tensor)
    assert hooks_of(offloads[0])[1](handle) is unpack(handle) is tensor
    pack(tensor)
    assert left.pop() is tensor


def test_what_functorch_wraps_is_left_to_python(offloads):
    left: list[torch.Tensor] = []
    pack, _ = hooks_without_python(offloads[0], left.append)

    def cube(x: torch.Tensor) -> torch.Tensor:
        pack(x)
        return (x**3).sum()

    torch.func.vmap(torch.func.grad(cube))(torch.ones(2, 4))
    assert len(left) == 1


class Raises(TorchFunctionMode):
    """Every attribute of a tensor is asked for in vain."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self._error = error

    def __torch_function__(self, function, types, args=(), kwargs=None):
        raise self._error


def test_an_interrupt_is_raised_and_an_error_is_left_to_python(offloads):
    left: list[Any] = []
    pack, _ = hooks_without_python(offloads[0], left.append)
    tensor = torch.ones(4)
    with pytest.raises(KeyboardInterrupt), Raises(KeyboardInterrupt):
        pack(tensor)
    assert left == []
    with Raises(ValueError):
        pack(tensor)
    assert left.pop() is tensor


def test_restoring_a_tensor_calls_nothing_of_it(offloads):
    pack, unpack = hooks_of(offloads[0])
    for _ in range(32):  # the first ones confirm where the implementation is
        tensor = torch.ones(4)
        handle = pack(tensor)
        assert unpack(handle) is tensor
    with Raises(AssertionError):
        assert unpack(handle) is tensor
    with Raises(AssertionError), pytest.raises(AssertionError):
        unpack(pack(tensor))


def test_what_is_kept_of_a_result_shares_its_version_and_no_graph(offloads):
    pack, unpack = hooks_of(offloads[0])
    result = torch.ones(4, requires_grad=True) * 2
    handle = pack(result)
    restored = unpack(handle)
    assert restored is not result and restored.grad_fn is None and not restored.requires_grad
    assert restored.data_ptr() == result.data_ptr()
    result.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        unpack(handle)


def test_a_tensor_that_only_its_handle_keeps_is_the_same_object(offloads):
    for offload in offloads:
        pack, unpack = hooks_of(offload)
        tensor = torch.ones(4)
        tensor.name_of_user, weak = "kept", weakref.ref(tensor)
        handle = pack(tensor)
        del tensor
        gc.collect()
        restored = unpack(handle)
        assert restored.name_of_user == "kept" and weak() is restored


def test_a_forked_child_notes_nothing(store):
    offload = penstock.offload(store)
    pack, _ = hooks_of(offload)
    tensor = torch.ones(4)
    first = pack(tensor)
    assert in_python(first)[2] is not None
    offload._engine.disown()
    assert in_python(pack(tensor))[2] is None
    offload._engine.disowned = False  # this process is none
    del first
    offload.close()


@pytest.mark.filterwarnings("default:Dynamo:UserWarning")  # of others than ours
def test_compiled_autograd_is_not_warned_of_them(store, recwarn):
    def gradient() -> torch.Tensor:
        x = torch.linspace(-1, 1, 16).requires_grad_()
        return torch.autograd.grad((x * 2).sin().mul(x).sum(), x)[0]

    expected = gradient()
    offload = penstock.offload(store)
    with offload, compiled_autograd._enable(torch.compile(backend="eager")):
        assert torch.equal(gradient(), expected)
    assert not [each for each in recwarn if "penstock" in str(each.message)]
    offload.close()


def test_hooks_are_collected(store):
    offload = penstock.offload(store)
    hooks = weakref.ref(offload._hooks)
    offload.close()
    del offload
    gc.collect()
    assert hooks() is None


def test_without_a_compiler_python_does_it_and_says_so(store, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(_hooks, "load_common_saves", _hooks.load_common_saves.__wrapped__)
    with caplog.at_level(logging.INFO, logger="penstock"):
        offload = penstock.offload(store)
    assert "small saved tensors are kept by Python: the C++ compiler" in caplog.text
    assert offload.report().hooks == "Python"
    x = torch.ones(4, requires_grad=True)
    with offload:
        x.sin().sum().backward()
    assert torch.equal(x.grad, torch.ones(4).cos())
    offload.close()
