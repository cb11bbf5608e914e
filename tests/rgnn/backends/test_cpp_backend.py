"""The backend of generated C++, held against the reference and against itself."""

from __future__ import annotations

import gc
import os
import traceback
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

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
from penstock import rgnn
from penstock.codegen import find_compiler
from penstock.errors import BuildError
from penstock.rgnn import REWRITES, edge_softmax, spaces
from penstock.rgnn.backends import resolve
from penstock.rgnn.backends.cpp import _graph_arrays
from penstock.rgnn.lowering import _program

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler"),
]


def compiled(name: str, without: frozenset[str] | tuple[str, ...] = ()):
    return rgnn.compile(LAYERS[name].__wrapped__, without=without, backend="cpp")


def assert_is_reference(function, graph, arguments) -> None:
    expected = results_and_gradients(function.to_torch(), graph, arguments)
    assert_same(results_and_gradients(function, graph, arguments), expected)


@pytest.mark.parametrize("is_canonical", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_layers_are_right(name, is_canonical):
    graph = random_graph(7, 20, is_canonical=is_canonical)
    arguments, function = layer_arguments(name, graph), compiled(name)
    assert torch.autograd.gradcheck(lambda *args: function(graph, *args), arguments)
    assert_is_reference(function, graph, arguments)


@settings(max_examples=10)
@given(recipe=recipes(max_steps=5), graph=graphs(), is_cut=st.booleans(), is_summed=st.booleans())
def test_gradients_of_random_programs_are_right(recipe, graph, is_cut, is_summed):
    function = rgnn.compile(recipe.__call__, backend="cpp")
    arguments = recipe.arguments(graph)
    with pytest.MonkeyPatch.context() as patch:
        if is_summed:
            patch.setattr(_program, "MIN_ROWS_OF_RELATION", 0)
        if is_cut:
            patch.setattr(_graph_arrays, "HUB_ROWS", 3)
            patch.setattr(_graph_arrays, "PIECE_ROWS", 2)
        assert torch.autograd.gradcheck(
            lambda *args: function(graph, *args), arguments, fast_mode=True, atol=1e-5
        )
        assert_is_reference(function, graph, arguments)


@pytest.mark.parametrize("name", ["rgcn", "rgat", "hgt"])
@pytest.mark.parametrize("without", [*REWRITES, "all"])
def test_rewrites_change_nothing(name, without):
    graph = random_graph(is_canonical=True)
    switched_off = REWRITES if without == "all" else (without,)
    assert_is_reference(compiled(name, switched_off), graph, layer_arguments(name, graph))


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("name", LAYERS)
def test_equal_bits_for_any_number_of_threads(name):
    graph = random_graph(300, 8000)
    arguments, function = layer_arguments(name, graph, dim=19), compiled(name)
    runs = []
    for num_threads in (1, 2, 5, 5):
        torch.set_num_threads(num_threads)
        graph = random_graph(300, 8000)  # anew: nothing that is built for it may depend on threads
        runs.append(results_and_gradients(function, graph, arguments))
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))
    assert_same(runs[0], results_and_gradients(LAYERS[name], graph, arguments))


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("dim", [1, 7, 64, 100])
def test_single_precision_is_as_exact_as_torch(dim):
    graph = random_graph(100, 3000)
    arguments = layer_arguments("rgat", graph, dim=dim)
    arguments = tuple((a.detach() / dim**0.5).requires_grad_() for a in arguments)
    singles = tuple(a.detach().float().requires_grad_() for a in arguments)
    expected = results_and_gradients(LAYERS["rgat"], graph, arguments)
    found = results_and_gradients(compiled("rgat"), graph, singles)
    for single, exact in zip(found, expected, strict=True):
        scale = exact.abs().max().item()
        torch.testing.assert_close(single.double(), exact, rtol=0, atol=2e-5 * scale)


@pytest.mark.parametrize("name", LAYERS)
def test_a_graph_without_edges_works(name):
    graph = random_graph(5, 0)
    assert_is_reference(compiled(name), graph, layer_arguments(name, graph))


def test_a_graph_without_nodes_works():
    graph = rgnn.Graph(torch.empty(2, 0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    x, weight = torch.ones(0, 3, requires_grad=True), torch.ones(0, 3, 3, requires_grad=True)
    function = rgnn.compile(lambda g, x, W: g.sum_to_dst(g.edges.src(x) @ W[g.edges.type]))
    assert function(graph, x, weight).shape == (0, 3)


@pytest.mark.parametrize("name", ["rgcn", "rgat with heads"])
def test_wide_indices_do_what_narrow_ones_do(name, monkeypatch):
    graph = random_graph()
    arguments, function = layer_arguments(name, graph), compiled(name)
    narrow = results_and_gradients(function, graph, arguments)
    monkeypatch.setattr(_graph_arrays, "_INT32_MAX", 10)
    wide = results_and_gradients(function, random_graph(), arguments)
    assert all(torch.equal(a, b) for a, b in zip(narrow, wide, strict=True))


def test_arguments_need_not_be_contiguous():
    graph = random_graph()
    x, comp, bases, root, bias = layer_arguments("rgcn", graph)
    strided = (
        torch.cat([x, x], 1).detach()[:, 3:].requires_grad_(),
        comp.detach().T.contiguous().T.requires_grad_(),
        bases.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(),
        root.detach().T.contiguous().T.requires_grad_(),
        bias[:1].detach().expand(3).requires_grad_(),
    )
    assert not any(tensor.is_contiguous() for tensor in strided)
    assert_is_reference(compiled("rgcn"), graph, strided)
    # The gradient that a sum passes back is one number, seen many times.
    torch.autograd.grad(compiled("rgcn")(graph, *strided).sum(), strided)


def test_softmax_treats_extreme_scores_as_torch_does():
    @rgnn.compile(backend="cpp")
    def attended(g, s, v):
        e = g.edges
        return rgnn.edge_softmax(e(s)), g.sum_to_dst(rgnn.edge_softmax(e(s)) * e(v))

    graph = rgnn.Graph(
        torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1], [0, 0, 0, 1, 1, 2, 3, 3]]),
        torch.zeros(8, dtype=torch.int64),
        num_nodes=6,
    )
    inf = torch.inf
    scores = torch.tensor([1e30, -1e30, 1e30, -inf, 2.0, -inf, torch.nan, 1.0])
    values = torch.arange(16.0).reshape(8, 2)
    found = attended(graph, scores, values)
    for one, other in zip(found, attended.to_torch()(graph, scores, values), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
    assert not found[1][4:].any()  # nodes without edges


def test_what_is_returned_has_memory_of_its_own():
    @rgnn.compile(backend="cpp")
    def several(g, x, f):
        summed = g.sum_to_dst(g.edges.src(x))
        return summed, summed, g.nodes(x), g.edges.src(x), g.edges(f)

    graph = random_graph()
    x, f = random_tensor(12, 3), random_tensor(60, 3)
    found = several(graph, x, f)
    assert len({tensor.data_ptr() for tensor in (*found, x, f)}) == 7
    assert_is_reference(several, graph, (x, f))


@pytest.fixture
def small_hubs(monkeypatch) -> None:
    """Groups are cut early, and into pieces of which the last one is shorter."""
    monkeypatch.setattr(_graph_arrays, "HUB_ROWS", 6)
    monkeypatch.setattr(_graph_arrays, "PIECE_ROWS", 4)


@pytest.mark.parametrize("name", LAYERS)
def test_groups_that_are_cut_come_to_the_same(name, small_hubs):
    graph = random_graph(6, 60)
    sizes = graph.group_sizes(spaces.EDGE_DST)
    assert sizes.max() > 9 and sizes.min() <= 6
    assert_is_reference(compiled(name), graph, layer_arguments(name, graph))


def test_programs_with_groups_that_are_cut(small_hubs):
    """Stages that read softmax weights and sums of earlier ones, sums to sources, epilogues."""

    def body(g, s, x):
        e = g.edges
        weights = edge_softmax(e(s))
        mean = g.sum_to_dst(weights * e.src(x))
        spread = rgnn.tanh(e.src(x) - e.dst(mean))
        within = edge_softmax(rgnn.dot(spread, spread), within="relation")
        return weights, g.sum_to_dst(spread * spread) + 1.0, g.sum_to_src(within * spread), within

    graph = random_graph(5, 70)
    arguments = (random_tensor(70), random_tensor(5, 3))
    assert_is_reference(rgnn.compile(body, backend="cpp"), graph, arguments)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("name", ["rgcn", "rgat"])
def test_a_star_has_equal_bits_for_any_number_of_threads(name):
    """Half of 40,000 edges end in one node: their sums are those of pieces."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(500, (2, 40_000), generator=generator)
    ends[1, ::2] = 7
    relations = torch.randint(NUM_RELATIONS, (40_000,), generator=generator)
    graph = rgnn.Graph(ends, relations, num_nodes=500, num_relations=NUM_RELATIONS)
    assert _graph_arrays.find_arrays(graph).hubs(spaces.EDGE_DST).tolist() == [7]
    function, arguments = compiled(name), layer_arguments(name, graph, dim=8)
    runs = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        runs.append(results_and_gradients(function, graph, arguments))
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))
    expected = results_and_gradients(LAYERS[name], graph, arguments)  # in torch
    for one, other in zip(runs[0], expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize("name", ["rgat", "hgt"])
def test_what_a_step_kept_is_gone_with_it_and_its_memory_used_again(name):
    graph = random_graph(3000, 30_000)
    arguments, function = layer_arguments(name, graph, dim=24), compiled(name)
    results_and_gradients(function, graph, arguments)
    buffers = _graph_arrays.find_arrays(graph).buffers
    gc.disable()  # nothing may wait for the garbage collector
    try:
        num_buffers = len(buffers._buffers)
        results_and_gradients(function, graph, arguments)
        assert len(buffers._buffers) == num_buffers > 0
        held = function(graph, *arguments)
        assert not all(buffer.is_free() for buffer in buffers._buffers)
        del held
        assert all(buffer.is_free() for buffer in buffers._buffers)
    finally:
        gc.enable()


class _Peak(TorchDispatchMode):
    """The most bytes that storages made under it have had at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if address in self._known or not num_bytes:
            return
        self._known.add(address)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._release, address, num_bytes)

    def _release(self, address: int, num_bytes: int) -> None:
        self._known.discard(address)
        self.live_bytes -= num_bytes


@pytest.mark.parametrize("name", LAYERS)
def test_a_step_takes_as_many_bytes_as_its_rows_say(name):
    # Many edges, few pairs, so that what is stored per edge or per pair is nearly all of it.
    graph = random_graph(60, 20_000, num_relations=33)
    arguments = layer_arguments(name, graph, dim=8)
    peaks = []
    for without in ((), REWRITES):
        function = compiled(name, without)
        results_and_gradients(function, graph, arguments)  # the graph's indices are built here
        _graph_arrays.find_arrays(graph).buffers.clear()
        with _Peak() as peak:
            results_and_gradients(function, graph, arguments)
        peaks.append(peak.peak_bytes)
    counts = graph.counts
    chosen = min(counts.num_src_pairs, counts.num_dst_pairs)
    assert chosen < 0.15 * counts.num_edges
    assert peaks[0] <= (chosen / counts.num_edges + 0.1) * peaks[1]


def test_graphs_of_other_sizes_share_a_library(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    function = compiled("rgat")
    for num_edges in (400, 4000):
        graph = random_graph(40, num_edges)
        function(graph, *layer_arguments("rgat", graph))
    assert len(list(tmp_path.glob("libraries/*.so"))) == 1


def test_the_source_says_what_it_computes_and_holds_no_name_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))

    @rgnn.compile(backend="cpp")
    def program_of_the_user(g, tensor_of_the_user, matrix_of_the_user):
        z = g.edges.src(tensor_of_the_user) @ matrix_of_the_user[g.edges.type]
        return g.sum_to_dst(rgnn.tanh(z))

    program_of_the_user(random_graph(), random_tensor(12, 3), random_tensor(4, 3, 5))
    (path,) = tmp_path.glob("libraries/*.cpp")
    text = path.read_text()
    header = text[: text.index("#include")]
    for line in ("// 0. segment GEMM over", " = sum(%", "grouped by dst"):
        assert line in header
    assert "user" not in text.replace("the user", "")


def test_without_a_compiler_torch_computes_or_the_error_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "/no/such/compiler")
    rgnn.backends._find_fastest.cache_clear()
    graph = random_graph()
    arguments = layer_arguments("rgat", graph)
    with pytest.raises(BuildError, match="/no/such/compiler"):
        compiled("rgat")(graph, *arguments)
    fallback = rgnn.compile(LAYERS["rgat"].__wrapped__)
    assert torch.equal(fallback(graph, *arguments), LAYERS["rgat"](graph, *arguments))
    assert fallback.explain(graph, *arguments).backend == "torch"
    rgnn.backends._find_fastest.cache_clear()


def test_without_a_cache_directory_torch_computes_as_without_a_compiler(
    tmp_path, monkeypatch, caplog
):
    occupied = tmp_path / "file"
    occupied.touch()
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(occupied))
    rgnn.backends._find_fastest.cache_clear()
    graph = random_graph()
    arguments = layer_arguments("rgat", graph)
    fallback = rgnn.compile(LAYERS["rgat"].__wrapped__)
    with caplog.at_level("INFO", logger="penstock"):
        for _ in range(2):
            assert torch.equal(fallback(graph, *arguments), LAYERS["rgat"](graph, *arguments))
    assert caplog.text.count("in the backend 'torch': the cache directory") == 1
    assert fallback.explain(graph, *arguments).backend == "torch"
    with pytest.raises(BuildError, match="PENSTOCK_CACHE_DIR"):
        compiled("rgat")(graph, *arguments)
    rgnn.backends._find_fastest.cache_clear()


def test_the_fastest_backend_is_chosen_by_device():
    assert resolve("auto", "cpu") == "cpp"
    assert resolve("auto", "meta") == "torch"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_that_start_together_build_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    graph = random_graph()
    arguments = layer_arguments("rgcn", graph)
    expected = LAYERS["rgcn"](graph, *arguments).detach()
    children = []
    for _ in range(8):
        child = os.fork()
        if child == 0:
            try:
                found = compiled("rgcn")(graph, *arguments).detach()
                torch.testing.assert_close(found, expected)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
    assert len(list(Path(tmp_path).glob("libraries/*.so"))) == 1


@pytest.mark.parametrize("width", [4096, 4097, 1_060_000])
def test_rows_wider_than_a_stack(width):
    """Of sums, softmax and what is computed for a row, and their gradients if that is quick."""

    def body(g, x, s):
        e = g.edges
        weights = rgnn.edge_softmax(e.src(x))
        return g.sum_to_dst(weights * e.src(x)), g.sum_to_dst(rgnn.concat(e(s), e.src(x))[1:])

    graph = rgnn.Graph(torch.tensor([[0, 1, 0], [1, 1, 0]]), torch.zeros(3, dtype=torch.long))
    generator = torch.Generator().manual_seed(0)
    x, s = (torch.rand(*n, generator=generator).double() for n in ((2, width), (3, 1)))
    functions = [rgnn.compile(body, backend=backend) for backend in ("cpp", "torch")]
    if width > 5000:
        assert_same(*([*function(graph, x, s)] for function in functions))
        return
    arguments = (x.requires_grad_(), s.requires_grad_())
    assert_same(*(results_and_gradients(each, graph, arguments) for each in functions))


def test_products_wider_than_a_stack():
    graph = random_graph(40, 600)
    arguments = (random_tensor(40, 2), random_tensor(NUM_RELATIONS, 2, 4100))
    body = lambda g, x, W: g.sum_to_dst(g.edges.src(x) @ W[g.edges.type])  # noqa: E731
    found = results_and_gradients(rgnn.compile(body, backend="cpp"), graph, arguments)
    assert_same(found, results_and_gradients(rgnn.compile(body, backend="torch"), graph, arguments))
