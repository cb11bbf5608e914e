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
from penstock.rgnn._backends import _cpp_memory
from penstock.rgnn._backends._cpp_graph import arrays_of
from penstock.rgnn._backends._cpp_memory import ALIGNMENT, Blocks, Lifetime, lodge, pack

LIFETIMES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(0, 1000)), max_size=12
)
MEGABYTE = 2**20


@given(LIFETIMES)
def test_values_alive_together_do_not_overlap(drawn):
    lives = [Lifetime(i, first, first + span, n) for i, (first, span, n) in enumerate(drawn)]
    offsets, arena_bytes = pack(lives)
    assert all(offset % ALIGNMENT == 0 for offset in offsets.values())
    assert all(offsets[life.value] + life.num_bytes <= arena_bytes for life in lives)
    for one, other in itertools.combinations(lives, 2):
        if one.first <= other.last and other.first <= one.last:
            begins = offsets[one.value], offsets[other.value]
            ends = begins[0] + one.num_bytes, begins[1] + other.num_bytes
            assert ends[0] <= begins[1] or ends[1] <= begins[0]


def test_values_that_follow_each_other_share_bytes():
    lives = [Lifetime(i, i, i, 640) for i in range(5)]
    assert pack(lives) == (dict.fromkeys(range(5), 0), 640)


@given(LIFETIMES, LIFETIMES)
def test_who_lodges_with_a_result_is_gone_before_it_and_disturbs_nobody(drawn, results):
    lives = [Lifetime(i, first, first + span, n) for i, (first, span, n) in enumerate(drawn)]
    hosts = {
        100 + i: Lifetime(100 + i, first, first + span, n)
        for i, (first, span, n) in enumerate(results)
    }
    found, rest = lodge(lives, hosts.values())
    assert sorted([*found, *(life.value for life in rest)]) == list(range(len(lives)))
    for life in lives:
        if life.value in found:
            host, begin = found[life.value]
            assert life.last < hosts[host].first
            assert begin % ALIGNMENT == 0
            assert begin + life.num_bytes <= hosts[host].num_bytes
    for one, other in itertools.combinations([life for life in lives if life.value in found], 2):
        (host, begin), (other_host, other_begin) = found[one.value], found[other.value]
        if host == other_host and one.first <= other.last and other.first <= one.last:
            is_before = begin + one.num_bytes <= other_begin
            assert is_before or other_begin + other.num_bytes <= begin


def test_a_value_lodges_with_the_result_that_is_needed_soonest():
    hosts = [Lifetime(10, 5, 9, 640), Lifetime(11, 3, 9, 640)]
    lives = [Lifetime(0, 0, 2, 640), Lifetime(1, 1, 4, 640), Lifetime(2, 2, 4, 64)]
    found, rest = lodge(lives, hosts)
    assert found == {0: (11, 0), 1: (10, 0)}
    assert [life.value for life in rest] == [2]


def test_products_that_are_scaled_row_by_row_are_scaled_in_their_place():
    edges = torch.arange(60_000)
    edge_index = torch.stack([edges % 2000, edges % 1000])
    graph = rgnn.Graph(edge_index, edges // 7500, num_nodes=2000)
    layer = rgnn.RGCNConv(64, 64, 8, root_weight=False, bias=False)
    x = torch.randn(2000, 64, requires_grad=True)
    pair_bytes = graph.counts.num_dst_pairs * 64 * 4
    assert graph.counts.num_dst_pairs == 8000
    h = layer(x, graph)
    blocks = arrays_of(graph).blocks
    assert _num_bytes(blocks) == pair_bytes  # the means, kept for the gradient of weights
    h.sum().backward()
    assert _num_bytes(blocks) == 2 * pair_bytes


def _num_bytes(blocks: Blocks) -> int:
    return sum(len(block.memory) for block in blocks._blocks)


def test_a_block_is_used_again_when_no_tensor_shares_it():
    blocks = Blocks()
    first = blocks.empty((MEGABYTE,), torch.float32)
    address = first.data_ptr()
    view = first[5:]
    del first
    second = blocks.empty((MEGABYTE,), torch.float32)
    assert second.data_ptr() != address  # a view of the first lives
    del view
    third = blocks.empty((2, MEGABYTE // 2), torch.float32)
    assert third.data_ptr() == address
    assert blocks.num_blocks == 2


def test_much_larger_blocks_are_not_wasted_on_small_tensors():
    blocks = Blocks()
    address = blocks.empty((8 * MEGABYTE,), torch.uint8).data_ptr()
    assert blocks.empty((2 * MEGABYTE,), torch.uint8).data_ptr() != address
    assert blocks.empty((7 * MEGABYTE,), torch.uint8).data_ptr() == address


def test_blocks_that_nobody_asks_for_are_let_go():
    blocks = Blocks()
    blocks.empty((8 * MEGABYTE,), torch.uint8)
    for _ in range(70):
        blocks.empty((2 * MEGABYTE,), torch.uint8)
    assert blocks.num_blocks == 2
    blocks.empty((MEGABYTE,), torch.uint8)
    assert blocks.num_blocks == 2  # the idle one has made room for the new one


def test_two_threads_never_get_the_same_block(monkeypatch):
    blocks = Blocks()
    blocks.scratch(4 * MEGABYTE)  # is free, and both threads ask for it
    owners = _cpp_memory._num_owners

    def slowly(tensor: torch.Tensor) -> int:
        found = owners(tensor)
        time.sleep(0.05)  # the other thread looks before this one has taken the block
        return found

    monkeypatch.setattr(_cpp_memory, "_num_owners", slowly)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(blocks.scratch, [3 * MEGABYTE] * 2))
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
    assert arrays_of(graph).blocks.num_blocks > 0
    with ThreadPoolExecutor(2) as pool:
        for place, found in enumerate(pool.map(step, [0, 1] * 6)):
            pairs = zip(found, expected[place % 2], strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)


def test_scratch_memory_of_a_step_is_one_block():
    blocks = Blocks()
    for _ in range(3):
        kept = blocks.empty((3 * MEGABYTE,), torch.uint8)
        blocks.scratch(4 * MEGABYTE)
        address = blocks.scratch(9 * MEGABYTE).data_ptr()
        assert blocks.num_blocks == 2  # the larger one has replaced the smaller one
        del kept
    assert blocks.scratch(4 * MEGABYTE).data_ptr() == address
