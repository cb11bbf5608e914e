"""The memory of generated programs: nothing overlaps, nothing is held for long."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import given
from hypothesis import strategies as st

from _relational import random_graph
from penstock import rgnn
from penstock.rgnn.backends.cpp import _memory
from penstock.rgnn.backends.cpp._graph_arrays import find_arrays
from penstock.rgnn.backends.cpp._memory import ALIGNMENT, ArenaValue, BufferPool, assign_offsets

LIFETIMES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(0, 1000)), max_size=12
)
MEGABYTE = 2**20


@given(LIFETIMES)
def test_values_alive_together_do_not_overlap(drawn):
    values = [ArenaValue(i, first, first + span, n) for i, (first, span, n) in enumerate(drawn)]
    places, arena_bytes = assign_offsets(values)
    assert all(host is None for host, _ in places.values())
    offsets = {value: offset for value, (_, offset) in places.items()}
    assert all(offset % ALIGNMENT == 0 for offset in offsets.values())
    assert all(offsets[value.value] + value.num_bytes <= arena_bytes for value in values)
    for one, other in itertools.combinations(values, 2):
        if one.first <= other.last and other.first <= one.last:
            begins = offsets[one.value], offsets[other.value]
            ends = begins[0] + one.num_bytes, begins[1] + other.num_bytes
            assert ends[0] <= begins[1] or ends[1] <= begins[0]


def test_values_that_follow_each_other_share_bytes():
    values = [ArenaValue(i, i, i, 640) for i in range(5)]
    assert assign_offsets(values) == (dict.fromkeys(range(5), (None, 0)), 640)


@given(LIFETIMES, LIFETIMES)
def test_values_in_a_result_are_dead_before_it_and_overlap_no_other(drawn, results):
    values = [ArenaValue(i, first, first + span, n) for i, (first, span, n) in enumerate(drawn)]
    hosts = {
        100 + i: ArenaValue(100 + i, first, first + span, n)
        for i, (first, span, n) in enumerate(results)
    }
    places, _ = assign_offsets(values, hosts.values())
    assert sorted(places) == list(range(len(values)))
    found = {value: (host, begin) for value, (host, begin) in places.items() if host is not None}
    for value in values:
        if value.value in found:
            host, begin = found[value.value]
            assert value.last < hosts[host].first
            assert begin % ALIGNMENT == 0
            assert begin + value.num_bytes <= hosts[host].num_bytes
    for one, other in itertools.combinations(
        [value for value in values if value.value in found], 2
    ):
        (host, begin), (other_host, other_begin) = found[one.value], found[other.value]
        if host == other_host and one.first <= other.last and other.first <= one.last:
            is_before = begin + one.num_bytes <= other_begin
            assert is_before or other_begin + other.num_bytes <= begin


def test_a_value_lodges_with_the_result_that_is_needed_soonest():
    hosts = [ArenaValue(10, 5, 9, 640), ArenaValue(11, 3, 9, 640)]
    values = [ArenaValue(0, 0, 2, 640), ArenaValue(1, 1, 4, 640), ArenaValue(2, 2, 4, 64)]
    places, _ = assign_offsets(values, hosts)
    assert places == {0: (11, 0), 1: (10, 0), 2: (None, 0)}


def test_products_that_are_scaled_row_by_row_are_scaled_in_their_place():
    edges = torch.arange(60_000)
    edge_index = torch.stack([edges % 2000, edges % 1000])
    graph = rgnn.Graph(edge_index, edges // 7500, num_nodes=2000)
    layer = rgnn.RGCNConv(64, 64, 8, root_weight=False, bias=False)
    x = torch.randn(2000, 64, requires_grad=True)
    pair_bytes = graph.counts.num_dst_pairs * 64 * 4
    assert graph.counts.num_dst_pairs == 8000
    h = layer(x, graph)
    buffers = find_arrays(graph).buffers
    assert _num_bytes(buffers) == pair_bytes  # the means, kept for the gradient of weights
    h.sum().backward()
    assert _num_bytes(buffers) == 2 * pair_bytes


def _num_bytes(buffers: BufferPool) -> int:
    return sum(len(buffer.memory) for buffer in buffers._buffers)


def test_a_block_is_used_again_when_no_tensor_shares_it():
    buffers = BufferPool()
    first = buffers.empty((MEGABYTE,), torch.float32)
    address = first.data_ptr()
    view = first[5:]
    del first
    second = buffers.empty((MEGABYTE,), torch.float32)
    assert second.data_ptr() != address  # a view of the first values
    del view
    third = buffers.empty((2, MEGABYTE // 2), torch.float32)
    assert third.data_ptr() == address
    assert len(buffers._buffers) == 2


def test_much_larger_blocks_are_not_wasted_on_small_tensors():
    buffers = BufferPool()
    address = buffers.empty((8 * MEGABYTE,), torch.uint8).data_ptr()
    assert buffers.empty((2 * MEGABYTE,), torch.uint8).data_ptr() != address
    assert buffers.empty((7 * MEGABYTE,), torch.uint8).data_ptr() == address


def test_buffers_that_are_not_used_are_freed():
    buffers = BufferPool()
    buffers.empty((8 * MEGABYTE,), torch.uint8)
    for _ in range(70):
        buffers.empty((2 * MEGABYTE,), torch.uint8)
    assert len(buffers._buffers) == 2
    buffers.empty((MEGABYTE,), torch.uint8)
    assert len(buffers._buffers) == 2  # the idle one has made room for the new one


def test_two_threads_never_get_the_same_block(monkeypatch):
    buffers = BufferPool()
    buffers.scratch(4 * MEGABYTE)  # is free, and both threads ask for it
    owners = _memory._count_owners

    def slowly(tensor: torch.Tensor) -> int:
        found = owners(tensor)
        time.sleep(0.05)  # the other thread looks before this one has taken the block
        return found

    monkeypatch.setattr(_memory, "_count_owners", slowly)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(buffers.scratch, [3 * MEGABYTE] * 2))
    assert found[0].data_ptr() != found[1].data_ptr()


def test_layers_of_two_threads_on_one_graph_do_not_disturb_each_other():
    """Their scratch memory is of the graph; arenas and kept values are above what is pooled."""
    graph = random_graph(3000, 8_000)
    torch.manual_seed(0)
    layers = [rgnn.RGATConv(64, 64, 4), rgnn.RGCNConv(64, 64, 4)]
    features = torch.randn(2, 3000, 64)

    def step(which: int) -> list[torch.Tensor]:
        x = features[which].clone().requires_grad_()
        layer = layers[which]
        h = layer(x, graph)
        return [h.detach(), *torch.autograd.grad(h.square().sum(), [x, *layer.parameters()])]

    expected = [step(0), step(1)]
    assert len(find_arrays(graph).buffers._buffers) > 0
    with ThreadPoolExecutor(2) as pool:
        for place, found in enumerate(pool.map(step, [0, 1] * 4)):
            pairs = zip(found, expected[place % 2], strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)


def test_scratch_memory_of_a_step_is_one_block():
    buffers = BufferPool()
    for _ in range(3):
        kept = buffers.empty((3 * MEGABYTE,), torch.uint8)
        buffers.scratch(4 * MEGABYTE)
        address = buffers.scratch(9 * MEGABYTE).data_ptr()
        assert len(buffers._buffers) == 2  # the larger one has replaced the smaller one
        del kept
    assert buffers.scratch(4 * MEGABYTE).data_ptr() == address
