"""Inputs of which operators look at parts become these parts, with a residency of their own."""

import pytest
import torch
from torch import nn

from _sequence import Recurrent
from penstock.graph import StepGraph, capture, run, split
from penstock.graph.splitting.input_pieces import part_of_input

TIMES, ROWS, WIDTH = 6, 4, 32


class Windows(nn.Module):
    """Views parts of its input that are chosen outside."""

    def __init__(self, look) -> None:
        super().__init__()
        self.look = look
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, sequence):
        return sum((self.scale * part).sum() for part in self.look(sequence))


def trainee(make):
    torch.manual_seed(0)
    model = make()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def batch(seed):
    random = torch.Generator().manual_seed(seed)
    shapes = (TIMES, ROWS, WIDTH), (ROWS, WIDTH)
    return tuple(torch.randn(shape, generator=random) for shape in shapes)


def parts_of(graph: StepGraph) -> list[tuple[str, int, int]]:
    return [part for name in graph.tensors if (part := part_of_input(name))]


def parts_looked_at(look, example, max_bytes=1):
    model, optimizer = trainee(lambda: Windows(look))
    return parts_of(split(capture(model, optimizer, (example,)), max_bytes))


def test_time_steps_become_parts():
    model, optimizer = trainee(lambda: Recurrent(WIDTH))
    graph = capture(model, optimizer, batch(0))
    parts = split(graph, 4096)
    length = ROWS * WIDTH
    assert parts_of(parts) == [("batch.0", i * length, (i + 1) * length) for i in range(TIMES)]
    kept = [storage for storage in parts.storages if storage.name == "batch.0"]
    assert [storage.num_bytes for storage in kept] == [0]
    assert all(storage.persistent for storage in parts.storages if "[" in storage.name)
    assert not parts.consumers[parts.tensors["batch.0"].value]


def test_the_parts_give_the_same_bits():
    losses = []
    for max_bytes in (2**40, 1):
        model, optimizer = trainee(lambda: Recurrent(WIDTH))
        graph = split(capture(model, optimizer, batch(0)), max_bytes)
        assert bool(parts_of(graph)) == (max_bytes == 1)
        losses.append([run(graph, model, optimizer, batch(seed)) for seed in range(3)])
        losses[-1] += [parameter.detach() for parameter in model.parameters()]
    assert all(map(torch.equal, *losses))


def test_parts_that_overlap_are_one_and_unread_ranges_are_none():
    found = parts_looked_at(lambda x: (x[0:32], x[16:48], x[64:96], x[112:128]), torch.ones(160))
    assert found == [("batch.0", 0, 48), ("batch.0", 64, 96), ("batch.0", 112, 128)]


def test_parts_begin_where_vectors_may():
    """Kernels may add in another order where memory is not aligned."""
    found = parts_looked_at(lambda x: (x[20:40], x[41:60], x[64:70]), torch.ones(160))
    assert found == [("batch.0", 16, 60), ("batch.0", 64, 70)]


@pytest.mark.parametrize(
    "look",
    [
        pytest.param(lambda x: (x,), id="looked at whole"),
        pytest.param(lambda x: (x[:, :16], x[:, 16:]), id="columns"),
        pytest.param(lambda x: (x[0], x[1].view(torch.int32)), id="another dtype"),
        pytest.param(lambda x: (x[0].add_(1), x[1]), id="written over"),
    ],
)
def test_other_inputs_stay_whole(look):
    assert parts_looked_at(look, torch.ones(4, 32)) == []


def test_two_tensors_of_one_storage_are_two_inputs():
    model, optimizer = trainee(lambda: Recurrent(WIDTH))
    memory = torch.randn(TIMES + 1, ROWS, WIDTH)
    together = capture(model, optimizer, (memory[:TIMES], memory[TIMES]))
    assert together == capture(model, optimizer, batch(0))


def test_small_inputs_stay_whole():
    model, optimizer = trainee(lambda: Recurrent(WIDTH))
    graph = capture(model, optimizer, batch(0))
    num_bytes = 4 * TIMES * ROWS * WIDTH
    assert parts_of(split(graph, 16 * num_bytes - 1))
    assert not parts_of(split(graph, 16 * num_bytes))


def test_a_batch_that_lies_otherwise_than_the_captured_one():
    """Views of one storage, with an offset, and later tensors of their own."""
    memory = torch.randn(TIMES + 2, ROWS, WIDTH)
    captured, plain = (memory[1:-1], memory[-1]), batch(5)
    for example, given in ((captured, plain), (plain, captured)):
        losses = []
        for is_eager in (True, False):
            model, optimizer = trainee(lambda: Recurrent(WIDTH))
            graph = capture(model, optimizer, example)
            loss = model(*given).detach() if is_eager else run(graph, model, optimizer, given)
            losses.append(loss)
        assert torch.equal(*losses)
