"""Operators on pieces of their operands: ranks train as one process does, whatever views, keywords
and fewer dimensions a step has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from _ranks import needs_gloo

pytest.importorskip("torch.distributed.tensor", reason="this torch was built without distributed")

import _lockstep
import _rank_cases
import penstock
from penstock.graph.bindings import bind_batch, bind_group_tensors, bind_numbers, find_entries
from penstock.graph.fsdp.shards import ShardedModel
from penstock.memory import machine
from penstock.partitioner import check, partition
from penstock.partitioner.axes import find_axes

MACHINE = machine("h100-80gb")
TOLERANCE = 2e-6  # sums of at most a hundred numbers of at most 1, in another order

Forward = Callable[[nn.Module, Any], Tensor]


class Layer(nn.Module):
    """A linear layer, and a function of its result."""

    def __init__(self, forward: Forward, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.function = forward

    def forward(self, *batch: Tensor) -> Tensor:
        first, *others = batch
        return self.function(self.linear, batch if others else first)


class Case(NamedTuple):
    """A function of a linear layer and the batch, and the ways to split it."""

    forward: Forward
    shapes: tuple[tuple[int, ...], ...]
    splits: tuple[tuple[str, int], ...]
    sizes: tuple[int, int] = (8, 8)


ROWS = torch.arange(96.0).view(12, 8) / 96
PLACES = torch.arange(48).view(4, 3, 4) % 6


def write_rows(linear: nn.Module, batch: Tensor) -> Tensor:
    result = linear(batch).clone()
    result[1:3].mul_(3.0)
    return result.tanh()


def convolve(kernel: int, stride: int) -> Forward:
    """A padded convolution whose windows do not overlap."""

    def run(linear: nn.Module, batch: Tensor) -> Tensor:
        weight = linear.weight.view(8, 1, kernel, kernel)  # pyright: ignore
        return functional.conv2d(batch, weight, stride=stride, padding=1)

    return run


def divide_into(linear: nn.Module, batch: Tensor) -> Tensor:
    result = linear(batch)
    norm = torch.div(result.detach(), 2.0, out=torch.empty(12, 8))
    return result * torch.matmul(norm.t(), norm, out=torch.empty(8, 8)).sum(0)


def attend(linear: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    heads = linear(batch[0]).view(4, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
    return functional.scaled_dot_product_attention(*heads, attn_mask=batch[1])


def attend_where(linear: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return attend(linear, (batch[0], batch[1] < 1))


def sort_keys(linear: nn.Module, batch: Tensor) -> Tensor:
    return linear(batch).gather(0, torch.argsort(batch, dim=0, stable=True)) * ROWS


def round_off(linear: nn.Module, batch: Tensor) -> Tensor:
    whole = (batch @ linear.weight.t()).long().float()  # pyright: ignore
    return linear(batch) * whole


MASKS = (4, 2, 6, 6), (4, 1, 6, 6), (1, 2, 6, 6), (6, 6)
CASES = {
    "window": Case(lambda f, x: f(x)[:, 1:5].tanh(), ((8, 8),), (("auto", 2), ("tensor", 2))),
    "rows": Case(lambda f, x: f(x[2:6]), ((8, 8),), (("chop", 2), ("auto", 4))),
    "inplace": Case(write_rows, ((6, 8),), (("greedy", 2),), (8, 48)),
    "gather": Case(lambda f, x: f(x).gather(1, PLACES), ((4, 6, 8),), (("auto", 2),)),
    "stride 3": Case(convolve(3, 3), ((1, 1, 12, 12),), (("batch", 2),), (9, 8)),
    "stride 4": Case(convolve(4, 4), ((1, 1, 8, 8),), (("batch", 2),), (16, 8)),
    "sort": Case(
        lambda f, x: torch.sort(f(x), dim=0, stable=True)[0] * ROWS, ((12, 8),), (("tensor", 2),)
    ),
    "argsort": Case(sort_keys, ((12, 8),), (("chop", 2),)),
    "max": Case(lambda f, x: functional.max_pool2d(f(x), 3, 2, 1), ((8, 8, 8),), (("tensor", 2),)),
    "mean": Case(lambda f, x: functional.avg_pool2d(f(x), 3, 2, 1), ((3, 8, 8),), (("auto", 2),)),
    "adaptive": Case(
        lambda f, x: functional.adaptive_avg_pool2d(f(x), 4), ((3, 8, 8),), (("auto", 2),)
    ),
    "integers": Case(round_off, ((4, 8),), (("greedy", 4),)),
    "out": Case(divide_into, ((12, 8),), (("tensor", 2), ("greedy", 2))),
    "amsgrad": Case(lambda f, x: f(x).tanh(), ((12, 8),), (("fsdp", 2), ("tensor", 2))),
    **{
        f"mask {shape}": Case(attend, ((4, 6, 8), shape), (("auto", 2), ("tensor", 2)), (8, 24))
        for shape in MASKS
    },
    "bools": Case(attend_where, ((4, 6, 8), MASKS[0]), (("auto", 2), ("tensor", 2)), (8, 24)),
    "one sample": Case(
        lambda f, x: functional.cross_entropy(f(x), torch.tensor(3)), ((8,),), (("auto", 2),)
    ),
}


@needs_gloo
@pytest.mark.parametrize(
    ("name", "method", "num_ranks"),
    [(name, *split) for name, case in CASES.items() for split in case.splits],
)
def test_ranks_train_as_one_process_does(name: str, method: str, num_ranks: int):
    case = CASES[name]
    torch.manual_seed(0)
    model = Layer(case.forward, *case.sizes)
    first, *others = (torch.randn(shape) for shape in case.shapes)
    batch = (first, *others) if others else first
    loss, optimizer = _rank_cases.square, _rank_cases.make_optimizer(model)
    if name == "amsgrad":
        optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    graph = penstock.capture(model, optimizer, batch, loss=loss)
    found = partition(graph, devices=num_ranks, machine=MACHINE, method=method, time_limit=0.5)
    check(graph, found)
    entries = find_entries(graph, model, loss, optimizer, ShardedModel(model))
    tensors = bind_batch(graph, batch) | {each.name: each.take(graph) for each in entries}
    tensors |= bind_group_tensors(graph, optimizer)
    numbers = bind_numbers(graph, optimizer)
    output = model(*batch) if isinstance(batch, tuple) else model(batch)
    expected = [loss(output, batch).item()] * num_ranks
    _, losses, errors = _lockstep.run_ranks(graph, found, tensors, numbers)
    assert [each.item() for each in losses] == pytest.approx(expected, rel=TOLERANCE)
    for each in errors:
        for key, error in each.items():
            assert not error.numel() or error.abs().max().item() <= TOLERANCE, key


def test_weights_in_one_buffer_have_no_axes():
    model = nn.Linear(8, 8)
    memory = torch.cat([model.bias.data, model.weight.data.flatten()])
    model.bias.data = memory[:8]
    model.weight.data = memory[8:].view(8, 8)
    graph = penstock.capture(
        model, _rank_cases.make_optimizer(model), torch.randn(8, 8), loss=_rank_cases.square
    )
    weight = next(view for name, view in graph.tensors.items() if name.endswith("weight"))
    assert find_axes(graph).cuts[graph.storage_of_value[weight.value]] == (1,)
