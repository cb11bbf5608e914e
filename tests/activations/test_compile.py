"""Offloading around compiled models and layers: the same numbers, and nothing compiled again."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.activations import Offload

# Dynamo itself looks at `.grad` of a layer's input, which is no leaf.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

HIDDEN = 64
# fp32, a few layers: fused kernels add in another order than the eager operators.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """No compiled code or count of another test; one thread, as in `test_composition`."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(num_threads)


@pytest.fixture
def everything(store) -> Iterator[Offload]:
    """An Offload that sends out every eligible byte."""
    offload = penstock.offload(store, policy="all", min_bytes="0B")
    yield offload
    gc.collect()
    offload.close()


class Block(nn.Module):
    """Attention and feed-forward: what a layer saves, with views of one storage among it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = x + attended.flatten(-2)
        return x + self.down(nn.functional.gelu(self.up(x)))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(2)])


def train(
    forward: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, num_steps: int = 3
) -> list[torch.Tensor]:
    """The loss and all gradients of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = forward(torch.randn(2, 16, HIDDEN, generator=generator)).square().mean()
        loss.backward()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.step()
    return found


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def compile_whole(model: nn.Module, backend: CompileCounterWithBackend) -> Callable:
    return torch.compile(model, backend=backend, fullgraph=True)


def compile_layers(model: nn.Module, backend: CompileCounterWithBackend) -> Callable:
    for layer in model.children():
        layer.compile(backend=backend, fullgraph=True)
    return model


HOW = {"model": compile_whole, "layers": compile_layers}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A model that was compiled and trained without Penstock, and what that gave."""

    model: nn.Module
    forward: Callable
    backend: CompileCounterWithBackend
    found: list[torch.Tensor]
    num_frames: int

    def begin_again(self) -> None:
        """Give the model its first parameters."""
        self.model.load_state_dict(blocks().state_dict())
        self.model.zero_grad()


@functools.cache
def train_compiled_in_stock(how: str) -> Compiled:
    backend, model = CompileCounterWithBackend("aot_eager"), blocks()
    forward = HOW[how](model, backend)
    return Compiled(model, forward, backend, train(forward, model), backend.frame_count)


@functools.cache
def train_eagerly(num_steps: int) -> list[torch.Tensor]:
    model = blocks()
    return train(model, model, num_steps)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("inside", [False, True], ids=["compiled before", "compiled inside"])
def test_compiled(everything, how, inside):
    """aot_eager runs the compiled graph with eager kernels, so even the bits are the same.

    Compilations and graph breaks are as many as without offloading, wherever the first call is.
    """
    stock = train_compiled_in_stock(how)
    if inside:
        torch._dynamo.reset()
        backend, model = CompileCounterWithBackend("aot_eager"), blocks()
        compiled, num_before = HOW[how](model, backend), 0
    else:
        backend, model, compiled = stock.backend, stock.model, stock.forward
        stock.begin_again()
        compiled(torch.randn(2, 16, HIDDEN)).sum().backward()
        model.zero_grad()
        num_before = backend.frame_count
    counters.clear()

    with everything:
        found = train(compiled, model)
    assert equal(found, stock.found)
    for ours, theirs in zip(found, train_eagerly(3), strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
    assert backend.frame_count - num_before == (stock.num_frames if inside else 0)
    assert not counters["graph_break"]
    assert everything.report().num_steps == 3
    assert everything.report().bytes_read > 0


class Layer(nn.Module):
    """A piece to compile that is compiled quickly."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


def test_graph_breaks_compile_nothing_of_ours(everything):
    """What runs between two compiled pieces saves tensors while Dynamo looks for code to trace."""

    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Layer(), Layer())

    def forward(x: torch.Tensor) -> torch.Tensor:
        for block in model:
            x = block(x)
            positive = x[x > 0]  # its shape depends on data: not in the graph
            x = x * positive.exp().mean().sigmoid()
        return x

    seen = []
    for offloaded in (False, True):
        torch._dynamo.reset()
        counters.clear()
        backend, model = CompileCounterWithBackend("aot_eager"), layers()
        compiled = torch.compile(forward, backend=backend)
        if offloaded:
            with everything:
                found = train(compiled, model)
        else:
            found = train(compiled, model)
        seen.append((found, backend.frame_count, dict(counters["frames"])))
    assert equal(seen[1][0], seen[0][0])
    assert seen[1][1:] == seen[0][1:]
    assert seen[0][1] > 0
    assert seen[0][2]["ok"] < seen[0][2]["total"]  # `forward` itself was given up


def test_enter_and_leave_between_steps(everything):
    """Code compiled in the block runs outside of it, and the other way round, as it is."""
    backend, model = CompileCounterWithBackend("aot_eager"), blocks()
    compiled = torch.compile(model, backend=backend)
    expected = train_eagerly(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    found, saved = [], []
    for step in range(6):
        optimizer.zero_grad()
        x = torch.randn(2, 16, HIDDEN, generator=generator)
        if step % 2:
            with everything:
                loss = compiled(x).square().mean()
        else:
            loss = compiled(x).square().mean()
        loss.backward()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.step()
        saved.append(everything.report().num_saved)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
    assert backend.frame_count == 1
    assert not counters["graph_break"]
    assert saved[0] == 0 < saved[1] == saved[2] < saved[3] == saved[4]


def test_compiled_code_saves_no_parameters(everything):
    """The graph's saved tensors, counted here by storage, without the module's own."""
    model = blocks()
    compiled = torch.compile(model, backend="aot_eager")
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            storages[storage._cdata] = storage
        return tensor

    x = torch.randn(2, 16, HIDDEN)
    compiled(x)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        compiled(x).square().mean()
    with everything:
        compiled(x).square().mean()
    assert everything.report().saved_bytes == sum(s.nbytes() for s in storages.values())


@pytest.mark.parametrize("policy", ["all", "auto"])
def test_inductor(store, policy):
    """The backend that people use, layer by layer, as the documentation advises."""
    expected = train_eagerly(3)
    model = blocks()
    for layer in model:
        layer.compile()
    offload = penstock.offload(store, policy=policy, min_bytes="0B")
    with offload:
        found = train(model, model)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
    report = offload.report()
    # "auto" does not wait: on a busy machine everything may be forwarded before it has left.
    assert report.num_saved > 0 if policy == "auto" else report.bytes_written > 0
    # One for the first layer, whose input needs no gradient, and one for the others.
    assert counters["stats"]["unique_graphs"] == 2
    offload.close()


def test_checkpoint_of_compiled_layers(everything):
    def forward(layers: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            for layer in layers.children():
                x = checkpoint(layer, x, use_reentrant=False)
            return x

        return run

    backend, model = CompileCounterWithBackend("aot_eager"), blocks()
    compile_layers(model, backend)
    expected = train(forward(model), model)
    num_compiled = backend.frame_count
    model = blocks()
    compile_layers(model, backend)
    with everything:
        assert equal(train(forward(model), model), expected)
    assert everything.report().offloaded_bytes > 0
    assert backend.frame_count == num_compiled
