"""The Triton backend: its values under the interpreter, its code for GPUs that are not here."""

from __future__ import annotations

import inspect
import itertools
import math
import os
import re
import sys
import threading
import types
import warnings
import weakref
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from _relational import (
    LAYERS,
    NUM_RELATIONS,
    graphs,
    layer_arguments,
    random_graph,
    random_tensor,
    results_and_gradients,
)
from penstock import rgnn
from penstock.errors import PenstockError
from penstock.rgnn import spaces
from triton_tests import compile_well, needs_triton, run_interpreted, run_without

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


@needs_triton
@pytest.mark.slow
def test_values_under_the_interpreter():
    run_interpreted(HERE / "interpreted_triton_backend.py", at_least=30)


@needs_triton
def test_tensors_on_the_cpu_are_refused_with_the_remedy():
    graph = random_graph()
    function = rgnn.compile(LAYERS["rgat"].__wrapped__, backend="triton")
    with pytest.raises(PenstockError, match="the graph is on the CPU: move the graph"):
        function(graph, *layer_arguments("rgat", graph))


def test_nothing_imports_triton_before_a_gpu_is_used():
    code = (
        "import torch, penstock.rgnn as rgnn\n"
        "g = rgnn.Graph(torch.tensor([[0], [1]]), torch.tensor([0]))\n"
        "rgnn.RGCNConv(2, 2, 1)(torch.ones(2, 2), g).sum().backward()\n"
    )
    run_without("penstock.rgnn.backends.triton", code)


# ---------------------------------------------------------------- features of a block


def value_of(index: Any, numbers: dict[Any, int]) -> int:
    """An index as a number."""
    total = index.offset
    for base, times in index.terms:
        if base in numbers:
            number = numbers[base]
        else:
            inner = value_of(base.of, numbers)
            number = inner % base.divisor if base.is_remainder else inner // base.divisor
        total += times * number
    return total


SHAPES = [(24,), (4, 6), (6, 4), (2, 3, 4), (1, 24), (24, 1), (8, 3), (2, 1, 12), (3, 2, 4)]


@needs_triton
@pytest.mark.parametrize("first", SHAPES, ids=str)
def test_a_reshaped_feature_is_the_same_number(first):
    from penstock.rgnn.backends.triton._index import index_row, ravel, reshape_indices

    axes = sorted(set().union(*(index.axes() for index in index_row(first))))
    features = list(itertools.product(*(range(axis.length) for axis in axes)))
    for second, third in itertools.product(SHAPES, repeat=2):
        indices = reshape_indices(reshape_indices(index_row(first), first, second), second, third)
        for place, numbers in enumerate(features):
            by_axis = dict(zip(axes, numbers, strict=True))
            assert value_of(ravel(indices, third), by_axis) == place
            for index, length in zip(indices, third, strict=True):
                low, high = index.bounds()
                assert low <= value_of(index, by_axis) <= min(high, length - 1)


@needs_triton
def test_a_reshape_there_and_back_costs_nothing():
    from penstock.rgnn.backends.triton._index import Axis, index_axis, index_row, ravel, unravel

    feature = index_axis(Axis(0, 24, "feature", None))
    for shape in SHAPES:
        assert ravel(unravel(feature, shape), shape) == feature
    assert unravel(ravel(index_row((4, 6)), (4, 6)), (24,)) == (ravel(index_row((4, 6)), (4, 6)),)


@needs_triton
def test_rows_of_several_shapes_share_the_axes_of_one():
    from penstock.rgnn.backends.triton._index import index_row, refine_shapes, reshape_indices

    assert refine_shapes([(1, 24), (4, 6), (8, 3)]) == (4, 2, 3)
    assert refine_shapes([(), (1, 1)]) == ()
    assert refine_shapes([(4, 6), (6, 4)]) is None
    for first, second in itertools.product(SHAPES, repeat=2):
        layout = refine_shapes([first, second])
        if layout is not None:
            features = index_row(layout)
            seen = reshape_indices(reshape_indices(features, layout, first), first, second)
            assert reshape_indices(seen, second, layout) == features


# -------------------------------------------------------------------- tables of a graph

MAPS = [
    *(
        spaces.EDGE_SRC,
        spaces.EDGE_DST,
        spaces.EDGE_TYPE,
        spaces.EDGE_SRC_PAIR,
        spaces.EDGE_DST_PAIR,
    ),
    *(spaces.SRC_PAIR_SRC, spaces.SRC_PAIR_TYPE, spaces.DST_PAIR_TYPE, spaces.NODE_TYPE_OF),
    *(spaces.to_one(spaces.Space.EDGE), spaces.to_one(spaces.Space.NODE)),
]


@needs_triton
@given(graph=graphs(), row_map=st.sampled_from(MAPS))
def test_every_row_is_in_one_group_and_in_one_tile(graph, row_map):
    from penstock.rgnn.backends.triton import _tables

    expected = graph.index(row_map).tolist()
    order = _tables.compose_index(graph, (), row_map)
    slots = range(len(expected)) if order is None else order.tolist()
    buckets, giants = _tables.sort_groups(graph, row_map)
    assert giants is None
    found = {}
    groups = []
    for bucket in buckets:
        groups += bucket.groups.tolist()
        runs = zip(bucket.groups, bucket.begins, bucket.ends, strict=True)
        for group, begin, end in runs:
            found |= {slots[slot]: int(group) for slot in range(int(begin), int(end))}
    assert [found.get(row) for row in range(len(expected))] == expected
    assert sorted(groups) == list(range(graph.counts.rows(row_map.into)))
    if row_map in (spaces.EDGE_SRC, spaces.EDGE_DST, spaces.EDGE_SRC_PAIR, spaces.SRC_PAIR_SRC):
        return  # rows are not multiplied by those
    by_type = _tables.compose_index(graph, (), _tables.find_type_order(graph, row_map))
    tiles = _tables.cut_tiles(graph, (row_map,), batch=2, block_rows=4)
    found = {}
    for kind, begin, end in zip(tiles.targets, tiles.begins, tiles.ends, strict=True):
        assert 0 < end - begin <= 4
        for place in range(int(begin), int(end)):
            row = place // 2 if by_type is None else int(by_type[place // 2])
            found[row, place % 2] = int(kind)
    assert found == {(row, half): kind for row, kind in enumerate(expected) for half in (0, 1)}


@needs_triton
@pytest.mark.parametrize("num_edges", [2048, 2049, 5000])
def test_a_group_that_is_too_long_is_cut(num_edges):
    from penstock.rgnn.backends.triton import _tables

    ends = torch.tensor([[0, 1], [1, 2]])[:, [0] * num_edges + [1]]
    graph = rgnn.Graph(ends, torch.zeros(num_edges + 1, dtype=torch.int64))
    buckets, giants = _tables.sort_groups(graph, spaces.EDGE_DST)
    groups = sorted(torch.cat([bucket.groups for bucket in buckets]).tolist())
    if num_edges == 2048:
        assert giants is None and groups == [0, 1, 2]
        return
    assert giants is not None and giants.groups.tolist() == [1] and groups == [0, 2]
    assert not giants.runs.targets.any()
    lengths = (giants.pieces.ends - giants.pieces.begins).tolist()
    assert sum(lengths) == num_edges and max(lengths) == _tables.PIECE_ROWS
    assert giants.runs.first_runs.tolist() == [0, math.ceil(num_edges / _tables.PIECE_ROWS)]
    assert set(giants.pieces.groups.tolist()) == {1}


@needs_triton
@given(graph=graphs())
def test_tables_of_a_graph_go_with_it(graph):
    from penstock.rgnn.backends.triton import _tables

    assert _tables.compose_index(graph, (spaces.EDGE_SRC,)) is graph.index(spaces.EDGE_SRC)
    tiles = _tables.cut_tiles(graph, (spaces.EDGE_TYPE,), batch=1, block_rows=4)
    assert _tables.cut_tiles(graph, (spaces.EDGE_TYPE,), batch=1, block_rows=4) is tiles
    copy = rgnn.Graph(graph.edge_index, graph.edge_type, num_nodes=graph.num_nodes)
    table = _tables.cut_tiles(copy, (spaces.EDGE_TYPE,), batch=1, block_rows=4).begins
    watched = weakref.ref(table)
    del table
    assert watched() is not None
    del copy
    assert watched() is None


# ------------------------------------------------------------------- generated source


def launches_of(name: str, graph: rgnn.Graph, dtype: torch.dtype, dim: int = 16) -> list[Any]:
    import rgnn_kernels

    arguments = tuple(
        each.detach().to(dtype).requires_grad_() if isinstance(each, torch.Tensor) else each
        for each in layer_arguments(name, graph, dim=dim)
    )
    return rgnn_kernels.launches_of(LAYERS[name], graph, *arguments)


@needs_triton
def test_a_call_waits_for_no_device_once_its_tables_are_there(monkeypatch):
    import rgnn_kernels

    graph = random_graph(30, 200)
    arguments = layer_arguments("rgat", graph)
    num_launches = len(rgnn_kernels.launches_of(LAYERS["rgat"], graph, *arguments))

    def refuse(*args: Any) -> None:
        raise AssertionError("this waits for the device")

    waiting = ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero")
    for name in waiting:
        monkeypatch.setattr(torch.Tensor, name, refuse)
    assert len(rgnn_kernels.launches_of(LAYERS["rgat"], graph, *arguments)) == num_launches


@needs_triton
def test_the_source_says_what_it_was_made_from_and_executes_no_name():
    from penstock.rgnn.backends.triton import _source
    from penstock.rgnn.lowering import lower
    from penstock.rgnn.passes import optimize

    def body(g, ä, weight):
        return g.sum_to_dst(g.edges.src(ä) * g.edges(weight))

    graph = random_graph()
    traced, tensors = rgnn.compile(body)._trace_call(
        graph, (random_tensor(12, 3), random_tensor(60)), {}
    )
    optimized = optimize(traced.program, graph.counts, wrt=tuple(tensors))
    text = _source.write_source(lower(optimized)).text
    header = text.split('"""')[1]
    assert all(f"%{at} = " in header for at in range(len(optimized.program.nodes)))
    assert text.count('"""') == 2 and text.isascii()
    compile(text, "source", "exec")
    assert not set(_source._escape('"""\\')) & set('"\\')


@needs_triton
def test_lanes_before_and_beyond_a_row_are_masked():
    """Reading there may be reading what is not memory, on the first and on the last row."""
    from penstock.rgnn.backends.triton import _source
    from penstock.rgnn.lowering import lower
    from penstock.rgnn.passes import optimize

    def body(g, x):
        u = g.nodes(x)
        return rgnn.concat(rgnn.concat(u, u[:2]), u[3:])

    graph = random_graph()
    traced, _ = rgnn.compile(body)._trace_call(graph, (random_tensor(12, 5),), {})
    text = _source.write_source(lower(optimize(traced.program, graph.counts))).text
    bounds = [
        re.findall(r"\(feature\[None, :\]([^()]*)\)", line.partition("mask=")[2])
        for line in text.splitlines()
        if "tl.load(v0" in line
    ]
    # Of 5 + 2 + 2 features each is read from the same row of 5.
    assert bounds == [[" < 5"], [" - 5 >= 0", " - 5 < 5"], [" - 4 >= 0", " - 4 < 5"]]


@needs_triton
@pytest.mark.parametrize(
    ("target", "dtype", "num_nodes"),
    [("sm_90", torch.float32, 150), ("gfx942", torch.bfloat16, 2)],
    ids=str,
)
def test_kernels_of_a_layer_compile_without_spills_or_atomics(target, dtype, num_nodes):
    """Of 150 nodes with few edges, and of 2 with so many that each has a program of its own."""
    import rgnn_kernels

    graph = random_graph(num_nodes, 1500)
    launches = rgnn_kernels.unique_launches(launches_of("rgat", graph, dtype))
    # Products, traversals with and without groups, and the addition of pieces.
    assert len({name.split(",")[0].rstrip("0123456789") for name in launches}) == 4
    for name, launch in launches.items():
        _, resources = compile_well(launch, target)
        assert 0 < resources.registers <= 255, name


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_use_matrix_instructions_where_they_may(dtype):
    import rgnn_kernels
    from _kernel_resources import compile_launch

    graph = random_graph(30, 200)

    def instructions() -> bool:
        found = rgnn_kernels.unique_launches(launches_of("rgat", graph, dtype, dim=64))
        launch = next(each for name, each in found.items() if name.startswith("segment_gemm"))
        return bool(re.search(r"\b(wgmma|mma\.sync)", compile_launch(launch, "sm_90").asm["ptx"]))

    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert instructions() == (dtype != torch.float32)
        torch.set_float32_matmul_precision("high")
        assert instructions()
    finally:
        torch.set_float32_matmul_precision(precision)


def projected_sum(g, x, W):
    """Products, sums, gradients of weights in pieces."""
    return g.sum_to_dst(g.edges.src(x) @ W[g.edges.type])


def scaled_sum(g, x, s):
    """Traversals alone."""
    return g.sum_to_dst(g.edges(s) * g.edges.src(x))


class AbsentGpu:
    """What Triton asks of a driver when it compiles."""

    def get_current_device(self) -> int:
        return 99

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def test_a_kernel_whose_source_cannot_be_parsed_beside_others_is_left_to_its_launch():
    pytest.importorskip("triton")
    from penstock.rgnn.backends.triton._launch import compile_together

    class Kernel:
        device_caches: ClassVar[dict[int, Any]] = {}

        def __hash__(self) -> int:  # as Triton's, which parses
            raise SystemError("AST constructor recursion depth mismatch")

    launches = [types.SimpleNamespace(kernel=Kernel(), compile=lambda: done.append(1))] * 2
    done: list[int] = []
    compile_together(lambda compile_one: [compile_one(launch) for launch in launches])
    assert len(done) == 2


@needs_triton
@pytest.mark.parametrize(
    ("num_faults", "body", "shape"),
    [(0, projected_sum, (NUM_RELATIONS, 16, 16)), (1, scaled_sum, (200, 1))],
)
def test_a_first_call_compiles_all_its_kernels_at_the_same_time(
    num_faults, body, shape, tmp_path, monkeypatch
):
    import triton
    from triton import knobs
    from triton.runtime import driver

    import rgnn_kernels
    from penstock.rgnn.backends.triton import TritonBackend

    threads, compiled, faults, several = set(), [], [], threading.Event()
    compile_kernel = triton.compiler.compile

    def compile_here(*args: Any, **options: Any) -> Any:
        if len(faults) >= num_faults:
            threads.add(threading.get_ident())
            if len(threads) > 1 or threads == {threading.main_thread().ident}:
                several.set()
            elif (os.cpu_count() or 1) > 1:
                several.wait(20)  # or one thread may be faster than the next one begins
        try:
            if len(faults) < num_faults:
                raise SystemError("AST constructor recursion depth mismatch")
            return compile_kernel(*args, **options)
        except SystemError as error:  # Python 3.11 may do so by itself
            faults.append(error)
            raise

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.compiler, "compile", compile_here)
    monkeypatch.setattr(driver, "_active", AbsentGpu())
    # What was compiled for one device is not there for the next.
    monkeypatch.setattr(AbsentGpu, "get_current_device", lambda _: 99 + num_faults)
    monkeypatch.setattr(
        knobs.runtime, "jit_post_compile_hook", lambda **said: compiled.append(said["repr"])
    )

    run = TritonBackend.run

    def compile_and_record(self: TritonBackend, invocation: Any, launch: Any) -> Any:
        with monkeypatch.context() as context:
            context.setattr(TritonBackend, "run", run)
            self.compile_once(invocation)
        return run(self, invocation, launch)

    monkeypatch.setattr(TritonBackend, "run", compile_and_record)
    arguments = (random_tensor(*each).detach().float() for each in ((30, 16), shape))
    launches = rgnn_kernels.launches_of(
        rgnn.compile(body), random_graph(30, 200), *(each.requires_grad_() for each in arguments)
    )
    num_compiled, main_thread = len(compiled), threading.get_ident()
    assert threads and main_thread not in threads
    for launch in launches:  # finds all of them compiled but those that failed
        launch.compile()
    # Before 3.12 Python may also fail to parse where this test does not see it.
    most_unseen = 0 if sys.version_info >= (3, 12) else 2
    num_unseen = len(compiled) - num_compiled - len(faults)
    assert 0 <= num_unseen <= most_unseen
    assert len({launch.kernel for launch in launches}) <= len(compiled)
    assert (main_thread in threads) == bool(faults or num_unseen)
    assert len(threads) > 1 or os.cpu_count() == 1


# ------------------------------------------------------------------------ real devices


@pytest.fixture(scope="module")
def large_graph() -> rgnn.Graph:
    """Hubs beside isolated nodes, 300,000 edges of 50 relations, most of them small."""
    generator = torch.Generator().manual_seed(0)
    num_nodes, num_edges = 20_000, 300_000
    weights = torch.arange(1, num_nodes + 1).double().reciprocal()
    hubs = torch.multinomial(weights, num_edges, replacement=True, generator=generator)
    others = torch.randint(num_nodes, (num_edges,), generator=generator)
    of_relation = torch.arange(1, 51).double().reciprocal()
    relations = torch.multinomial(of_relation, num_edges, replacement=True, generator=generator)
    return rgnn.Graph(torch.stack([others, hubs]), relations, num_nodes=num_nodes, num_relations=50)


# As a fraction of the largest number of a tensor: each value on the way is rounded once.
TOLERANCES = {
    torch.float64: 1e-11,
    torch.float32: 2e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 8e-2,
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_on_a_gpu(name, dtype, large_graph):
    graph = large_graph.to("cuda")
    arguments, exact = large_arguments(name, large_graph, dtype)
    function = rgnn.compile(LAYERS[name].__wrapped__, backend="triton")
    runs = [on_gpu(function, graph, arguments) for _ in range(3)]
    expected = on_gpu(rgnn.compile(LAYERS[name].__wrapped__, backend="torch"), graph, exact)
    for run in runs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(runs[0], run, strict=True))
    # Where rounding changes the sign of an attention score, its leaky ReLU has another slope: of
    # 300,000 edges some hundred in half precision, each with a gradient that is far off.
    has_kinks = "rgat" in name and dtype.itemsize == 2
    for one, other in zip(runs[0], expected, strict=True):
        error, size = (one.double() - other).flatten(), other.flatten()
        of = torch.linalg.vector_norm if has_kinks else lambda each: each.abs().max()
        tolerance = 3e-2 if has_kinks and dtype == torch.float16 else TOLERANCES[dtype]
        assert of(error) <= tolerance * of(size).clamp(min=1e-30)


def large_arguments(
    name: str, graph: rgnn.Graph, dtype: torch.dtype
) -> tuple[list[Any], list[Any]]:
    """Arguments of a layer on the GPU, in a dtype and in float64; all values are about one."""
    narrow, exact = [], []
    for place, each in enumerate(layer_arguments(name, graph, dim=64)):
        if isinstance(each, torch.Tensor):
            rounded = (each.detach() * (1.0 if place == 0 else 0.125)).to(dtype).cuda()
            narrow.append(rounded.requires_grad_())
            exact.append(rounded.detach().double().requires_grad_())
        else:
            narrow.append(each)
            exact.append(each)
    return narrow, exact


def on_gpu(function: Any, graph: rgnn.Graph, arguments: list[Any]) -> list[torch.Tensor]:
    """A result and the gradients of its weighted sum, scaled so that float16 holds them."""
    result = function(graph, *arguments)
    weight = random_tensor(*result.shape, seed=9).detach().to(result) / 100
    tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
    return [result, *torch.autograd.grad([result], tensors, [weight])]


@pytest.mark.gpu
def test_auto_takes_triton_on_a_gpu_and_does_not_synchronise(large_graph):
    graph = large_graph.to("cuda")
    arguments, _ = large_arguments("rgat", large_graph, torch.float32)
    function = rgnn.compile(LAYERS["rgat"].__wrapped__)
    function(graph, *arguments).sum().backward()
    from penstock.rgnn.backends.triton import _tables

    build = inspect.unwrap(_tables.cut_tiles)
    assert any(key[0] is build for key in graph.__dict__["_built"])
    with warnings.catch_warnings():  # it is no finished feature of torch
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        function(graph, *arguments).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_small_programs_on_a_gpu():
    graph = random_graph(14, 40)
    for name, layer in LAYERS.items():
        arguments = layer_arguments(name, graph)
        moved = tuple(
            each.detach().cuda().requires_grad_() if isinstance(each, torch.Tensor) else each
            for each in arguments
        )
        function = rgnn.compile(layer.__wrapped__, backend="triton")
        result = function(graph.to("cuda"), *moved)
        expected = results_and_gradients(layer, graph, arguments)[0]
        torch.testing.assert_close(result.cpu(), expected, rtol=1e-9, atol=1e-10)
