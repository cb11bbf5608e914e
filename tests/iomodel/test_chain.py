"""Plans of chains: as good as all ways to cut them, by another search; and what they choose."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.iomodel import ChainOperator, chain
from penstock.iomodel._chain import SegmentCosts, _ChainGraph
from penstock.memory import CacheProfile, LinkProfile, machine

MIB = 2**20


def processor(memory: float = 10.0):
    def rate(gigabytes: float) -> LinkProfile:
        return LinkProfile(gigabytes * 1e9, (gigabytes * 1e9,) * 2, 1)

    gpu = machine("h100-80gb")
    assert gpu.compute is not None
    return dataclasses.replace(
        gpu,
        device="cpu",
        caches=(
            CacheProfile(name="L1", capacity_bytes=32 * 1024, line_bytes=64, rate=rate(200)),
            CacheProfile(name="L2", capacity_bytes=MIB, line_bytes=64, rate=rate(100)),
        ),
        memory_rates=(rate(memory), rate(2 * memory)),
        compute=dataclasses.replace(gpu.compute, flops_per_second={"float32": 1e11}),
    )


def brute_force(graph: _ChainGraph, costs: SegmentCosts) -> int:
    """The least cost over all sets of values that are spilled, each chunk tried."""
    edges = [(a, b) for b, reads in enumerate(graph.reads) for a in reads if a >= 0]
    best, known = None, {}
    for spilled in itertools.product((False, True), repeat=len(edges)):
        parts = list(range(len(graph.operators)))
        for (a, b), is_spilled in zip(edges, spilled, strict=True):
            if not is_spilled:
                old, new = parts[b], parts[a]
                parts = [new if part == old else part for part in parts]
        between = {
            (parts[a], parts[b])
            for (a, b), is_spilled in zip(edges, spilled, strict=True)
            if is_spilled
        }
        if any(a == b for a, b in between) or has_circle(between):
            continue
        sets = [
            sum(1 << at for at, each in enumerate(parts) if each == part) for part in set(parts)
        ]
        known |= {each: cheapest(graph, costs, each) for each in sets if each not in known}
        cost = sum(known[each] for each in sets)
        best = cost if best is None else min(best, cost)
    assert best is not None
    return best


def cheapest(graph: _ChainGraph, costs: SegmentCosts, chosen: int) -> int:
    powers = [2**n for n in range(12)] if chosen & (chosen - 1) else []
    shapes = [(rows, 1) for rows in (*(n for n in powers if n < graph.rows), graph.rows)]
    if runs_in_blocks(graph, chosen):
        first = (chosen & -chosen).bit_length() - 1
        shapes += [(graph.rows, n) for n in powers[1:] if n * 4096 <= graph.row_bytes(first)]
    return min(costs.price(costs.evaluate(chosen, *shape))[0] for shape in shapes)


def runs_in_blocks(graph: _ChainGraph, chosen: int) -> bool:
    """Product, functions of each element, product, each read by the next one alone."""
    numbers = [at for at in range(len(graph.operators)) if chosen >> at & 1]
    text = "".join(graph.operators[at].features[0] for at in numbers)
    is_line = all(
        graph.reads[b] == (a,) and graph.readers[a] == (b,) for a, b in itertools.pairwise(numbers)
    )
    return bool(re.fullmatch("pe*p", text)) and is_line and len(graph.reads[numbers[0]]) == 1


def has_circle(edges: set[tuple[int, int]]) -> bool:
    while edges:
        targets = {b for _, b in edges}
        left = {(a, b) for a, b in edges if a in targets}
        if left == edges:
            return True
        edges = left
    return False


@st.composite
def graphs(draw, most: int, *, branches: bool):
    operators = []
    for number in range(draw(st.integers(1, most))):
        before = st.integers(-1, number - 1)
        inputs = draw(st.sets(before, min_size=1, max_size=2)) if branches else {number - 1}
        operators.append(
            ChainOperator(
                name=f"op{number}",
                row_bytes=draw(st.sampled_from([64, 1024, 32768])),
                inputs=tuple(sorted(inputs)),
                weight_bytes=draw(st.sampled_from([0, 4096, 2 * MIB])),
                row_operations=draw(st.sampled_from([0, 1000, 10**6])),
                can_fuse=draw(st.booleans()),
                features=draw(st.sampled_from(["mixed", "each", "product"])),
                again_row_seconds=draw(st.sampled_from([0.0, 1e-5])),
            )
        )
    new = draw(st.sampled_from([(None, None), (1e9, 40e9)]))  # rates: of values over 31 MiB
    return operators, draw(st.sampled_from([1, 50, 1000, 8000])), new


def compare(operators, rows, new=(None, None)):
    rates = dict(zip(("new_bytes_per_second", "chunk_new_bytes_per_second"), new, strict=True))
    plan = chain(operators, rows, processor(), input_row_bytes=256, **rates)
    graph = _ChainGraph(tuple(operators), rows, 256)
    assert plan.cost == brute_force(graph, SegmentCosts(graph, processor(), 1, new))
    ran = [at for segment in plan.segments for at in segment.operators]
    assert sorted(ran) == list(range(len(operators)))
    assert plan.predicted_seconds > 0


@settings(max_examples=15, deadline=None)
@given(case=graphs(10, branches=False))
def test_a_chain_is_cut_as_well_as_by_brute_force(case):
    compare(*case)


@settings(max_examples=25, deadline=None)
@given(case=graphs(6, branches=True))
def test_a_graph_is_cut_as_well_as_by_brute_force(case):
    compare(*case)


def test_a_graph_of_eight_operators_is_cut_as_well_as_by_brute_force():
    reads = [(-1,), (0,), (0, 1), (2,), (2, 3), (4,), (0, 5), (6,)]
    operators = [
        ChainOperator(name=str(n), row_bytes=1024 << n % 4, inputs=of, weight_bytes=n * 4096)
        for n, of in enumerate(reads)
    ]
    compare(operators, 1000)


def elementwise(count: int, **options) -> list[ChainOperator]:
    return [ChainOperator(name=f"f{n}", row_bytes=4096, **options) for n in range(count)]


def test_elementwise_operators_stream_through_the_nearest_cache():
    plan = chain(elementwise(5), 4096, processor(), input_row_bytes=4096)
    (segment,) = plan.segments
    assert segment.level in ("L1", "L2") and segment.live_bytes <= MIB
    assert plan.predicted_seconds < 0.35 * plan.unchunked_seconds
    assert plan.edges[-1, 0] == "spill" and plan.edges[0, 1] == "stream"
    assert "rows at a time" in str(plan)


def test_what_can_be_fused_is():
    plan = chain(elementwise(3, can_fuse=True), 4096, processor(), input_row_bytes=4096)
    assert {plan.edges[0, 1], plan.edges[1, 2]} == {"fuse"}


def test_large_weights_are_not_read_again_for_small_chunks():
    """Chunks that are long enough for arithmetic to hide the weights."""
    layers = [
        ChainOperator(
            name=f"linear{n}", row_bytes=16384, weight_bytes=64 * MIB, row_operations=2**25
        )
        for n in range(2)
    ]
    (segment,) = chain(layers, 4096, processor(), input_row_bytes=16384).segments
    weights, arithmetic = 64 * MIB / 10e9, segment.chunk_rows * 2**25 / 1e11
    assert 2 * weights < arithmetic and segment.chunk_rows < 4096


def test_a_value_that_is_read_later_too_is_spilled():
    operators = [
        ChainOperator(name="a", row_bytes=4096, inputs=(-1,)),
        ChainOperator(name="b", row_bytes=4096, inputs=(0,)),
        ChainOperator(name="c", row_bytes=4096, inputs=(0, 1)),
    ]
    (segment,) = chain(operators, 4096, processor(), input_row_bytes=4096).segments
    assert segment.spilled_bytes == 0 and segment.operators == (0, 1, 2)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: chain([], 4, processor(), input_row_bytes=4), "operators is 0"),
        (lambda: chain(elementwise(2), 0, processor(), input_row_bytes=4), "rows is 0"),
        (
            lambda: chain(elementwise(2, inputs=(1,)), 4, processor(), input_row_bytes=4),
            "operator 0 reads",
        ),
        (
            lambda: chain(elementwise(25, inputs=(-1,)), 4, processor(), input_row_bytes=4),
            "25 operators with branches",
        ),
        (
            lambda: chain(
                elementwise(2), 4, dataclasses.replace(processor(), compute=None),
                input_row_bytes=4,
            ),
            "no rates",
        ),
        (lambda: chain(elementwise(2), 4, processor(), input_row_bytes=4, num_threads=0),
         "num_threads is 0"),
        (lambda: chain(elementwise(2), 4, processor(), input_row_bytes=4, new_bytes_per_second=-1),
         "new_bytes_per_second is -1"),
        (lambda: elementwise(1, weight_bytes=-4096), "weight_bytes is -4096"),
        (lambda: elementwise(1, row_seconds=float("nan")), "row_seconds is nan"),
        (lambda: elementwise(1, features="foo"), "features is 'foo'; pass one of mixed, each"),
    ],
)  # fmt: skip
def test_wrong_chains_are_named(call, text):
    with pytest.raises(ValueError, match=text):
        call()
