"""What `test_triton_backend.py` runs in a process of its own, where Triton interprets its kernels.

The interpreter has to be chosen before Triton is imported, and is wrong to have for other tests.
Everything is in float64, so that a sum in another order is all that may differ from torch.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import triton.language as tl
from hypothesis import given, settings

from _relational import (
    LAYERS,
    NUM_RELATIONS,
    assert_same,
    graphs,
    layer_arguments,
    random_graph,
    random_tensor,
    recipes,
    results_and_gradients,
)
from kernel_bytes.relations import launched_bytes
from penstock import rgnn
from penstock.codegen import count_bytes
from penstock.rgnn import dot, edge_mean, edge_softmax, spaces
from penstock.rgnn.backends.triton import _kernels, _tables
from penstock.rgnn.backends.triton._launch import KernelLaunch
from penstock.rgnn.layers import _hgt, _rgat, _rgcn

assert os.environ.get("TRITON_INTERPRET") == "1", "test_triton_backend.py runs this"

EARLY = {"LIGHT": 1, "MIDDLING": 2, "HEAVY": 4, "PIECE_ROWS": 3, "_MIN_PIECE": 3}
"""Bounds of `_tables` with which small graphs have groups of every kind, and sums of pieces."""

pytestmark = [
    pytest.mark.usefixtures("one_thread", "interpreter_of_triton"),
    # Lanes beyond a row or a group compute numbers that are never read.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture(autouse=True, scope="module")
def compared():
    """Names of the kernels that were launched; bytes of each launch are those of its formula."""
    patch, run, names = pytest.MonkeyPatch(), KernelLaunch.__call__, set()

    def count(launch: KernelLaunch) -> None:
        name = launch.kernel.fn.__name__
        assert count_bytes(lambda: run(launch)) == launched_bytes(launch), name
        names.add(name)

    patch.setattr(KernelLaunch, "__call__", count)
    yield names
    patch.undo()


@pytest.fixture
def cut_early(monkeypatch):
    """Groups are cut early, so that small graphs have groups of every kind."""
    for bound, num_rows in EARLY.items():
        monkeypatch.setattr(_tables, bound, num_rows)


def check(
    function: Any,
    graph: rgnn.Graph,
    arguments: tuple[Any, ...],
    *,
    without: tuple[str, ...] = (),
) -> None:
    """Results and gradients as the torch backend has them."""
    found, expected = (
        results_and_gradients(
            rgnn.compile(function, backend=backend, without=without), graph, arguments
        )
        for backend in ("triton", "torch")
    )
    assert_same(found, expected)


# -------------------------------------------------------------------------- layers


@pytest.mark.parametrize(
    ("name", "is_canonical"), [*((name, False) for name in LAYERS), ("hgt", True)]
)
def test_layers(name, is_canonical):
    """Node types are in no order, nodes are isolated, and one relation has no edge."""
    graph = random_graph(14, 40, is_canonical=is_canonical)
    check(LAYERS[name].__wrapped__, graph, layer_arguments(name, graph))


def rgcn_arguments(
    *weight: int, bases: int | None = None, blocks: int | None = None, mean: bool = True
) -> tuple[Any, ...]:
    """Of `_rgcn.rgcn` on 14 nodes, from 6 features to 6."""
    comp = None if bases is None else random_tensor(NUM_RELATIONS, bases)
    of_nodes = (random_tensor(6, 6, seed=1), random_tensor(6))
    return _rgcn.rgcn, random_tensor(14, 6), random_tensor(*weight), comp, *of_nodes, blocks, mean


def rgat_arguments(
    *weight: int,
    bases: int | None = None,
    blocks: int | None = None,
    concat: bool = True,
    slope: float | None = 0.2,
    within: str = "destination",
) -> tuple[Any, ...]:
    """Of `_rgat.rgat` on 14 nodes, from 6 features to 2 heads of 3."""
    att = None if bases is None else random_tensor(NUM_RELATIONS, bases)
    projections = (random_tensor(6, 2), random_tensor(6, 2, seed=1))
    tensors = (random_tensor(14, 6), random_tensor(*weight), att, *projections)
    return (
        *(_rgat.rgat, *tensors, random_tensor(6 if concat else 3)),
        *(blocks, 2, concat, slope, within),
    )


def hgt_arguments(heads: int) -> tuple[Any, ...]:
    """Of `_hgt.hgt` on 14 nodes, with 6 features."""
    nodes = [random_tensor(14, 6, seed=seed) for seed in range(3)]
    shape = (NUM_RELATIONS, heads, 6 // heads, 6 // heads)
    relations = (random_tensor(*shape), random_tensor(*shape, seed=1))
    return _hgt.hgt, *nodes, *relations, random_tensor(NUM_RELATIONS, heads), heads


OPTIONS = {
    "rgcn": rgcn_arguments(NUM_RELATIONS, 6, 6, mean=False),
    "rgcn with bases": rgcn_arguments(2, 6, 6, bases=2),
    "rgcn with blocks": rgcn_arguments(NUM_RELATIONS, 2, 3, 3, blocks=2),
    "rgat": rgat_arguments(NUM_RELATIONS, 6, 6),
    "rgat with bases": rgat_arguments(2, 6, 6, bases=2, within="relation"),
    "rgat with blocks": rgat_arguments(NUM_RELATIONS, 3, 2, 2, blocks=3, slope=None),
    "rgat with the mean of heads": rgat_arguments(NUM_RELATIONS, 6, 6, concat=False),
    "hgt": hgt_arguments(1),
    "hgt with heads": hgt_arguments(2),
}


@pytest.mark.usefixtures("cut_early")
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_layers_run_in_triton_alone(name, caplog):
    graph = random_graph(14, 40)
    layer, *arguments = OPTIONS[name]
    with caplog.at_level("INFO", logger="penstock"):
        check(layer.__wrapped__, graph, tuple(arguments))
    assert "in torch" not in caplog.text


@pytest.mark.parametrize("name", LAYERS)
def test_a_graph_without_edges(name):
    graph = random_graph(3, 0)
    check(LAYERS[name].__wrapped__, graph, layer_arguments(name, graph))


def test_a_graph_without_nodes():
    nothing = torch.empty(2, 0, dtype=torch.int64)
    graph = rgnn.Graph(nothing, nothing[0], num_nodes=0, num_relations=NUM_RELATIONS)
    check(LAYERS["rgat"].__wrapped__, graph, layer_arguments("rgat", graph))


@pytest.mark.parametrize("name", ["rgcn", "rgat with heads"])
def test_programs_as_they_were_written(name):
    """Without rewrites weights are typed by edge, and more is summed along other maps."""
    graph = random_graph(6, 20)
    function, arguments = LAYERS[name].__wrapped__, layer_arguments(name, graph)
    check(function, graph, arguments, without=rgnn.REWRITES)


# ------------------------------------------------------------------------- degrees


def graph_with_hubs(scale: int = 1) -> rgnn.Graph:
    """Destinations with 0, 1, 3, 20, and `scale` times 10 and 30 edges; sources likewise."""
    degrees = torch.tensor([0, 3, 10 * scale, 0, 20, 30 * scale, 1])
    hubs = torch.repeat_interleave(torch.arange(7), degrees)
    generator = torch.Generator().manual_seed(0)
    others = torch.randint(7, hubs.shape, generator=generator)
    relations = torch.randint(NUM_RELATIONS - 1, hubs.shape, generator=generator)
    return rgnn.Graph(
        torch.stack([others, hubs]), relations, num_nodes=7, num_relations=NUM_RELATIONS
    )


def test_destinations_of_every_degree():
    def body(g, s, x):
        e = g.edges
        weights = edge_softmax(e(s))
        return g.sum_to_dst(weights * e.src(x)), g.sum_to_src(e(s) * e.dst(x)), weights

    graph = graph_with_hubs(100)
    check(body, graph, (random_tensor(graph.num_edges), random_tensor(7, 2)))


@pytest.mark.usefixtures("cut_early")
def test_weights_of_destinations_of_every_degree():
    """They are stored by one more loop, which no sum needs."""

    def body(g, s):
        return edge_softmax(g.edges(s))

    graph = graph_with_hubs()
    check(body, graph, (random_tensor(graph.num_edges, 2),))


@pytest.mark.usefixtures("cut_early")
def test_rows_that_all_go_to_one_weight():
    """The sum over all edges of one relation is made of pieces, and so is that over all."""

    def body(g, x, a, b):
        e = g.edges
        return g.sum_to_dst(e.src(x) * a[e.type] * b)

    graph = graph_with_hubs()
    one_relation = rgnn.Graph(
        graph.edge_index, torch.ones_like(graph.edge_type), num_nodes=7, num_relations=2
    )
    for target in (spaces.EDGE_TYPE, spaces.to_one(spaces.Space.EDGE)):
        _, cut = _tables.sort_groups(one_relation, target)
        assert cut is not None and cut.runs.count > 20
    check(body, one_relation, (random_tensor(7, 2), random_tensor(2, 2), random_tensor(2)))


@pytest.mark.parametrize("width", [1, 70])
def test_many_pieces_come_to_what_the_whole_does(width):
    """A total of 40 pieces is added up in several steps; one group has no second piece."""
    scores = random_tensor(41, 7, width).detach() * 5
    pieces = scores.amax(1), (scores - scores.amax(1, keepdim=True)).exp().sum(1)
    first_pieces = torch.tensor([0, 40, 41], dtype=torch.int32)
    largest, powers, sums = (torch.full((2, width), torch.nan).double() for _ in range(3))
    constants = {"LENGTH": width, "BLOCK_PIECES": 16, "BLOCK_LENGTH": 64}
    grid = (2, (width + 63) // 64)
    _kernels.merge_softmax_pieces[grid](*pieces, largest, powers, first_pieces, **constants)
    of_sums = {"HAS_TARGETS": False, "SUM": tl.float64, **constants}
    _kernels.add_pieces[grid](pieces[1], sums, sums, first_pieces, **of_sums)
    for group, of_group in enumerate((slice(0, 40), slice(40, 41))):
        expected = torch.logsumexp(scores[of_group].flatten(0, 1), 0)
        torch.testing.assert_close(powers[group].log() + largest[group], expected)
        torch.testing.assert_close(sums[group], pieces[1][of_group].sum(0))


# ------------------------------------------------------------------------ programs


@settings(max_examples=8, deadline=None)
@given(recipe=recipes(max_steps=4), graph=graphs())
def test_random_programs(recipe, graph):
    """Groups are cut early, so that small graphs have groups of every kind."""
    with pytest.MonkeyPatch.context() as patch:
        for name, num_rows in EARLY.items():
            patch.setattr(_tables, name, num_rows)
        check(recipe.__call__, graph, recipe.arguments(graph))


def test_operators_on_features_in_other_places():
    """Concatenation, slices and heads of values that are only computed, never in memory."""

    def body(g, x, W):
        e = g.edges
        u, v = rgnn.tanh(e.src(x)), rgnn.exp(e.dst(x))
        joined = rgnn.concat(u[1:], v, u[:2])
        by_head = joined.heads(3)
        return g.sum_to_dst(dot(by_head, by_head)), g.sum_to_src(joined @ W[e.type])

    graph = random_graph(5, 12)
    check(body, graph, (random_tensor(5, 4), random_tensor(NUM_RELATIONS, 9, 2)))


@pytest.mark.parametrize("is_split", [False, True], ids=["in part", "in other axes"])
def test_a_sum_that_its_own_loop_reads_at_other_features(is_split, caplog):
    """Its lanes can be told apart as heads; what is a part of them is left to torch."""

    def body(g, s, x):
        e = g.edges
        total = e.dst(g.sum_to_dst(e(s) * e.src(x)))
        if is_split:
            return g.sum_to_dst(dot(total.heads(2), e.src(x).heads(2)))
        return g.sum_to_dst(dot(total[1:], e.src(x)[1:]))

    graph = random_graph(5, 12)
    with caplog.at_level("INFO", logger="penstock"):
        arguments = (random_tensor(12), random_tensor(5, 6))
        check(body, graph, arguments, without=rgnn.REWRITES)
    assert ("runs in torch: %" in caplog.text) != is_split


def test_what_follows_a_sum_is_computed_in_its_kernel():
    """Of the row of a group, with what is elsewhere: products, concatenation, inverse counts."""

    def body(g, x, y, c):
        e, n = g.edges, g.nodes
        total = g.sum_to_dst(e.src(x))
        joined = rgnn.concat(rgnn.tanh(total), n(y)[:1], total[1:] * n(y)[1:])
        mean = g.sum_to_dst(edge_mean(e.src(x) * e.dst(y)))
        return joined, dot(total.heads(2), total.heads(2)) @ c, mean * n(y) + total

    graph = random_graph(5, 12)
    check(body, graph, (random_tensor(5, 6), random_tensor(5, 6, seed=1), random_tensor(2, 1)))


def test_features_of_no_length():
    graph = random_graph(5, 12)
    function, arguments = LAYERS["rgcn"].__wrapped__, layer_arguments("rgcn", graph, dim=0)
    found = results_and_gradients(rgnn.compile(function, backend="triton"), graph, arguments)
    assert_same(found, results_and_gradients(LAYERS["rgcn"].to_torch(), graph, arguments))


def test_parts_of_no_length():
    def body(g, x, f, W):
        e = g.edges
        z = rgnn.concat(e.src(x)[1:1], e(f), e.dst(x)[2:2])
        return g.sum_to_dst(z) + 1.0, dot(e.src(x)[3:], e.dst(x)[3:]), e.src(x)[:0] @ W[e.type]

    graph = random_graph(4, 12)
    arguments = (random_tensor(4, 3), random_tensor(12, 2), random_tensor(NUM_RELATIONS, 0, 1))
    check(body, graph, arguments)


def test_small_and_large_numbers():
    """tanh keeps its digits near zero; sigmoid and softmax do not overflow."""

    def body(g, s):
        e = g.edges
        return rgnn.tanh(e(s)), rgnn.sigmoid(e(s)), edge_softmax(e(s))

    graph = random_graph(3, 12)
    scores = torch.tensor([1e-9, -1e-4, 0.03, -0.4, 0.51, 3.0, -20.0, 800.0, -800.0, 0, 1.0, -2.0])
    found = rgnn.compile(body, backend="triton")(graph, scores.double())
    expected = rgnn.compile(body, backend="torch")(graph, scores.double())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["rgcn", "rgat"])
def test_narrow_numbers_are_summed_in_float32(name, dtype):
    graph = random_graph()
    arguments = layer_arguments(name, graph)
    narrow = tuple(each.detach().to(dtype).requires_grad_() for each in arguments)
    function = rgnn.compile(LAYERS[name].__wrapped__, backend="triton")
    result = function(graph, *narrow)
    result.sum().backward()
    reference = tuple(each.detach().double().requires_grad_() for each in narrow)
    expected = LAYERS[name](graph, *reference)
    expected.sum().backward()
    # Every value that is written is rounded once; there are about ten on the way.
    bound = 10 * torch.finfo(dtype).eps
    found = [result, *(each.grad for each in narrow)]
    for one, other in zip(found, [expected, *(each.grad for each in reference)], strict=True):
        assert one.dtype == dtype
        scale = other.abs().max()
        assert (one.double() - other).abs().max() <= bound * scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_of_thousands_of_narrow_numbers_do_not_stop_growing(dtype, caplog):
    """In a group that is cut, of a mean and a softmax, and in a kernel that torch runs."""

    def body(g, x):
        e = g.edges
        total = g.sum_to_dst(e.src(x))
        return (
            g.sum_to_dst(edge_mean(e.src(x))),
            g.sum_to_dst(edge_softmax(e.src(x)) * e.src(x)),
            total,
            g.sum_to_dst(dot(e.dst(total)[1:], e.src(x)[1:])),
        )

    degree = 3000
    ends = torch.arange(degree) % 50
    edge_index = torch.stack([ends, torch.zeros_like(ends)])
    graph = rgnn.Graph(edge_index, torch.zeros_like(ends), num_nodes=50, num_relations=1)
    x = torch.full((50, 2), 1 / 64, dtype=dtype)
    function = rgnn.compile(body, backend="triton", without=rgnn.REWRITES)
    with caplog.at_level("INFO", logger="penstock"):
        found = function(graph, x)
    assert "runs in torch" in caplog.text
    exact = rgnn.compile(body, backend="torch")(graph, x.double())
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == dtype
        bound = 3 * torch.finfo(dtype).eps * other.abs().max()
        assert (one.double() - other).abs().max() <= bound


def test_what_is_returned_shares_memory_with_nothing():
    def body(g, x):
        summed = g.sum_to_dst(g.edges.src(x))
        return g.nodes(x), summed, summed, g.nodes(x).heads(2), g.nodes(x).heads(2)

    graph, x = random_graph(), random_tensor(12, 4)
    results = rgnn.compile(body, backend="triton")(graph, x)
    assert len({each.untyped_storage().data_ptr() for each in (x, *results)}) == 6
    check(body, graph, (x,))


# ---------------------------------------------------------------- matrix products


@pytest.mark.parametrize("width", [1, 17, 70])
def test_products_of_any_width(width):
    def body(g, x, W):
        e = g.edges
        return g.sum_to_dst(e.src(x) @ W[e.type])

    graph = random_graph(6, 30)
    check(body, graph, (random_tensor(6, 33), random_tensor(NUM_RELATIONS, 33, width)))


def test_more_rows_than_a_tile_and_a_piece_have():
    def body(g, x, W):
        e = g.edges
        return g.sum_to_dst(e(x) @ W[e.type])

    graph = random_graph(4, 700, num_relations=3)
    check(body, graph, (random_tensor(700, 2), random_tensor(3, 2, 2)))


def test_batch_axes_beside_heads():
    """Each of two heads of a row is multiplied with the same typed weight."""

    def body(g, x, W, c):
        e = g.edges
        by_head = e.src(g.nodes(x).heads(2))
        return g.sum_to_dst((by_head @ W[e.type]) @ c)

    graph = random_graph(6, 20)
    weights = (random_tensor(NUM_RELATIONS, 3, 2), random_tensor(2, 4))
    check(body, graph, (random_tensor(6, 6), *weights))


def test_weights_of_heads_that_are_not_square():
    """A head of the operand is as long as the weight is high, one of the result as it is wide."""

    def body(g, x, W):
        e = g.edges
        return g.sum_to_dst(e.src(g.nodes(x).heads(2)) @ W[e.type]).merge_heads()

    graph = random_graph(6, 20)
    check(body, graph, (random_tensor(6, 6), random_tensor(NUM_RELATIONS, 2, 3, 5)))


def test_each_kind_of_launch_was_compared_with_its_formula(compared):
    """By the tests before; without them, by the layers."""
    for name in LAYERS:
        graph = random_graph(14, 40)
        check(LAYERS[name].__wrapped__, graph, layer_arguments(name, graph))
    fixed = {"segment_gemm", "weight_gradient", "add_pieces"}
    assert fixed <= set(compared) and any(each.startswith("traversal") for each in compared)
