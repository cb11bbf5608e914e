"""torch's private names are in `penstock.compat` only, and do what is said of them there."""

from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from package_sources import Source, read_package
from penstock.compat import autograd, dispatch, dynamo, fake_tensors, optimizers


def private_names(statement: str) -> list[str]:
    return Source(Path("penstock/graph/_x.py"), statement).private_names


def test_private_names_of_torch_are_in_one_place():
    wrong = {
        str(source.path): source.private_names
        for source in read_package()
        if source.path.parts[1] != "compat" and source.private_names
    }
    assert wrong == {}


@pytest.mark.parametrize(
    "source",
    ["import torch._dynamo", "from torch._C import _autograd", "from torch import _C",
     "torch._C._set_conj(x, True)", "def f():\n    return torch.cuda._is_in_bad_fork()"],
)  # fmt: skip
def test_every_way_to_use_one_is_seen(source):
    assert private_names(source)


@pytest.mark.parametrize(
    "source", ["import torch.nn", "x = torch.cuda.device", "self._torch._C", "x._torch"]
)
def test_public_names_are_none(source):
    assert private_names(source) == []


def test_hooks_around_all_optimizers():
    hook = print
    assert hook not in optimizers.global_step_hooks()
    handles = [
        register_optimizer_step_pre_hook(hook),
        register_optimizer_step_post_hook(hook),
    ]
    assert optimizers.global_step_hooks().count(hook) == 2
    for each in handles:
        each.remove()
    assert hook not in optimizers.global_step_hooks()


def test_backward_passes_have_numbers():
    seen = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append((autograd.current_graph_task_id(), autograd.current_node()))
            return gradient

    before = autograd.next_sequence_number()
    y = Watch.apply(torch.ones(2, requires_grad=True))
    assert autograd.next_sequence_number() == before + 1
    y.sum().backward()
    ((number, node),) = seen
    assert number >= 0 and node is y.grad_fn
    assert autograd.current_graph_task_id() == -1 and autograd.current_node() is None


def test_nothing_is_recorded_below_autograd():
    x = torch.ones(2, requires_grad=True)
    with autograd.below_autograd():
        assert (x * 2).grad_fn is None
    autograd.set_grad_enabled(False)
    assert not torch.is_grad_enabled()
    autograd.set_grad_enabled(True)
    assert (x * 2).grad_fn is not None


def test_lazy_bits():
    x = torch.ones(2, dtype=torch.complex64)
    autograd.set_lazy_bits(x, conjugate=True, negative=False)
    assert x.is_conj() and not x.is_neg()
    autograd.set_lazy_bits(x, conjugate=False, negative=True)
    assert x.is_conj() and x.is_neg()


def test_tensors_and_their_keys():
    x = torch.ones(2)
    assert dispatch.dispatch_keys(x).has(dispatch.DispatchKey.CPU)
    assert isinstance(x, dispatch.TensorBase)
    storage = x.untyped_storage()
    alone = dispatch.num_owners(storage._cdata)
    view = x[1:]
    assert dispatch.num_owners(storage._cdata) == alone + 1 and view.numel() == 1
    assert not dispatch.is_functional_tensor(x)
    assert dispatch.parse_to("cpu", torch.float64)[:2] == (torch.device("cpu"), torch.float64)
    storage = dispatch.storage_from_pointer(x.data_ptr(), x.device, 8)
    assert torch.empty(0).set_(storage, 0, (2,), (1,)).tolist() == [1.0, 1.0]
    assert not dispatch.are_functorch_transforms_active()
    torch.func.vmap(lambda y: _seen_by_functorch(y))(x)


def _seen_by_functorch(x: torch.Tensor) -> torch.Tensor:
    assert dispatch.are_functorch_transforms_active()
    assert dispatch.is_functorch_wrapped_tensor(x)
    return x


def test_fake_tensors_have_a_form():
    with fake_tensors.FakeTensorMode():
        assert isinstance(torch.ones(2), fake_tensors.FakeTensor)


def test_frames_can_be_kept_from_dynamo():
    def function(x: torch.Tensor) -> torch.Tensor:
        return x

    assert dynamo.skip_frames(function)


def test_a_constant_is_marked_as_torch_does():
    def ours() -> bool:
        return True

    def theirs() -> bool:
        return True

    assert dynamo.mark_constant(ours) is ours
    torch.compiler.assume_constant_result(theirs)
    assert vars(ours) == vars(theirs) != {}


def _add_two(x: torch.Tensor) -> torch.Tensor:
    return _add_one(_add_one(x))


def _add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_what_runs_uncompiled_breaks_the_graph_and_says_why():
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> object:
        graphs.append([node.name for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    add = dynamo.run_uncompiled(reason="it is a test")(_add_two)

    def function(x: torch.Tensor) -> torch.Tensor:
        return add(x * 2) - 3

    compiled = torch.compile(function, backend=keep)
    assert compiled(torch.ones(3)).tolist() == [1.0] * 3
    assert graphs == [["mul"], ["sub"]]  # neither it nor what it calls
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="reason: it is a test"):
        torch.compile(function, backend=keep, fullgraph=True)(torch.ones(3))
