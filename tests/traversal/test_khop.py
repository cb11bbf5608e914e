"""Closures: those of SciPy and PyG from every tier, by every path, in predicted bytes."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batching import measured_peak
from penstock.errors import CapacityError
from penstock.traversal import Closure, CSRGraph, _native, count_khop, khop, khop_costs, split_khop
from penstock.unified import unify

PATHS = ["C++", "torch"]


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """Each way in which closures are found."""
    use(request.param, monkeypatch)
    return request.param


def use(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "torch":
        monkeypatch.setattr(_native, "is_available", lambda: False)
    elif not _native.is_available():
        pytest.skip("there is no compiler")


def random_edges(num_nodes: int, num_edges: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, num_nodes, (2, num_edges), generator=generator)


@st.composite
def graphs(draw) -> tuple[int, torch.Tensor]:
    """Few nodes with many edges, and many nodes with few, where numbers lie in a table."""
    num_nodes = draw(st.one_of(st.integers(1, 12), st.integers(200, 400)))
    node = st.integers(0, num_nodes - 1)
    pairs = draw(st.lists(st.tuples(node, node), max_size=40))
    return num_nodes, torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T


def assert_is_closure(found: Closure, edges: torch.Tensor, levels: np.ndarray, seeds: list[int]):
    """Compare with hops to each node, which are infinite where there is no way."""
    nodes, size = found.nodes, found.size
    hops = len(size.num_nodes) - 1
    inside = [np.flatnonzero(levels <= hop) for hop in range(hops + 1)]
    assert size.num_nodes == tuple(map(len, inside))
    # Seeds as they were given first, then each hop in rising order.
    order = [*dict.fromkeys(seeds)]
    for before, now in itertools.pairwise(inside):
        order += sorted(set(now.tolist()) - set(before.tolist()))
    assert nodes.tolist() == order
    assert nodes[found.seed_positions].tolist() == seeds
    among = torch.from_numpy(np.isin(edges.numpy(), inside[-1])).all(0)
    assert size.num_edges == found.edge_index.shape[1] == int(among.sum())
    expected = sorted(edges[:, among].T.tolist())
    assert sorted(nodes[found.edge_index].T.tolist()) == expected
    assert found.edge_ids is not None
    assert torch.equal(edges[:, found.edge_ids], nodes[found.edge_index])
    assert len(found.edge_ids.unique()) == size.num_edges
    assert size.predicted_bytes == found.num_bytes


@settings(max_examples=60)
@given(
    graphs(),
    st.integers(0, 4),
    st.sampled_from(["source_to_target", "target_to_source"]),
    st.sampled_from(PATHS),
    st.booleans(),
    st.data(),
)
def test_closures_are_those_of_scipy(graph_edges, hops, flow, path, pulls, data):
    csgraph = pytest.importorskip("scipy.sparse.csgraph", reason="penstock[dev] installs SciPy")
    sparse = pytest.importorskip("scipy.sparse")
    num_nodes, edges = graph_edges
    seeds = data.draw(st.lists(st.integers(0, num_nodes - 1), max_size=8))
    graph = CSRGraph.from_edges(edges, num_nodes, flow=flow, edge_ids=True)
    # csgraph goes from row to column; messages go against the search.
    rows, columns = edges if flow == "target_to_source" else edges.flip(0)
    ones = np.ones(edges.shape[1])
    matrix = sparse.csr_array((ones, (rows.numpy(), columns.numpy())), (num_nodes, num_nodes))
    levels = np.full(num_nodes, np.inf)
    if seeds:
        levels = csgraph.dijkstra(matrix, indices=seeds, unweighted=True).min(0)
    reverse = graph.reverse() if pulls else None
    with pytest.MonkeyPatch.context() as patch:
        use(path, patch)
        given_seeds = torch.tensor(seeds, dtype=torch.int64)
        found = khop(graph, given_seeds, hops, edge_ids=True, reverse=reverse)
        assert_is_closure(found, edges, levels, seeds)
        counted = count_khop(graph, given_seeds, hops, edge_ids=True, reverse=reverse)
        assert counted == found.size


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("hops", [0, 1, 3])
def test_closures_are_those_of_pyg(path, flow, hops):
    utils = pytest.importorskip("torch_geometric.utils", reason="penstock[pyg] installs it")
    edges = random_edges(300, 700)
    seeds = torch.tensor([7, 250, 3])
    found = khop(
        CSRGraph.from_edges(edges, 300, flow=flow, edge_ids=True), seeds, hops, edge_ids=True
    )
    nodes, edge_index, positions, mask = utils.k_hop_subgraph(
        seeds, hops, edges, num_nodes=300, flow=flow, relabel_nodes=True
    )
    assert torch.equal(found.nodes.sort().values, nodes)
    assert torch.equal(found.edge_ids.sort().values, mask.nonzero().flatten())
    order = found.edge_ids.argsort()
    assert torch.equal(found.nodes[found.edge_index[:, order]], nodes[edge_index])
    assert torch.equal(found.nodes[found.seed_positions], nodes[positions])


@pytest.mark.parametrize("wide", [False, True])
def test_closures_from_every_tier_are_the_same(path, tmp_path, wide):
    edges = random_edges(500, 4000)
    graph = CSRGraph.from_edges(edges, 500, edge_ids=True)
    if wide:
        graph = CSRGraph(graph.indptr.long(), graph.indices.long(), edge_ids=graph.edge_ids.long())
    seeds = torch.tensor([4, 99, 4, 17], dtype=torch.int32)
    expected = khop(graph, seeds, 2, edge_ids=True)
    in_files = graph.save(tmp_path)
    in_host = CSRGraph(*(unify(each) for each in (graph.indptr, graph.indices)))
    mixed = CSRGraph(graph.indptr, in_files.indices, edge_ids=in_files.edge_ids)
    in_host.edge_ids = graph.edge_ids
    for other in (in_files, in_host, mixed):
        found = khop(other, seeds, 2, edge_ids=True)
        for name in ("nodes", "edge_index", "seed_positions", "edge_ids"):
            assert torch.equal(getattr(found, name), getattr(expected, name))
    # Of the file, only lists of the closure's nodes are read: once for nodes, twice for edges.
    report = in_files.indices.report()
    size = expected.size
    assert sum(size.frontier_edges) < size.num_edges < graph.num_edges
    _, degrees = graph.read_lists(expected.nodes)
    assert report.num_rows_gathered <= 3 * 2 * int(degrees.sum())


def test_long_lists_are_read_in_blocks(path, tmp_path, monkeypatch):
    """A block begins and ends within the list of a node."""
    for name in ("_blocks", "_khop", "_search"):
        module = __import__(f"penstock.traversal.{name}", fromlist=["BLOCK_ENTRIES"])
        if hasattr(module, "BLOCK_ENTRIES"):
            monkeypatch.setattr(module, "BLOCK_ENTRIES", 7)
    edges = torch.cat(
        [random_edges(60, 90), torch.stack([torch.arange(60), torch.full((60,), 5)])], 1
    )
    graph = CSRGraph.from_edges(edges, 60)
    expected = khop(graph, torch.tensor([3, 30]), 3, edge_ids=True)
    found = khop(graph.save(tmp_path), torch.tensor([3, 30]), 3, edge_ids=True)
    assert torch.equal(found.edge_index, expected.edge_index)
    assert torch.equal(found.edge_ids, expected.edge_ids)
    mine = found.nodes[found.edge_index].T.tolist()
    inside = torch.isin(edges, found.nodes).all(0)
    assert sorted(mine) == sorted(edges[:, inside].T.tolist())


# ------------------------------------------------------------------ bytes


@settings(max_examples=40)
@given(graphs(), st.integers(0, 3), st.booleans(), st.data())
def test_peaks_are_predicted_exactly(graph_edges, hops, edge_ids, data):
    """Every storage that torch allocates during the call is counted, and so are its frees."""
    if not _native.is_available():
        pytest.skip("torch's operators take temporaries, which are bounded and not counted")
    num_nodes, edges = graph_edges
    seeds = torch.tensor(data.draw(st.lists(st.integers(0, num_nodes - 1), min_size=1, max_size=8)))
    graph = CSRGraph.from_edges(edges, num_nodes)
    size = count_khop(graph, seeds, hops, edge_ids=edge_ids)
    peak, left = measured_peak(lambda: khop(graph, seeds, hops, edge_ids=edge_ids))
    assert (peak, left) == (size.peak_bytes, size.predicted_bytes)


@pytest.mark.parametrize("tier", ["memory", "file"])
def test_peaks_are_bounded_where_torch_reads_blocks(path, tier, tmp_path):
    graph = CSRGraph.from_edges(random_edges(20_000, 200_000), 20_000, edge_ids=True)
    graph = graph.save(tmp_path) if tier == "file" else graph
    seeds = torch.arange(0, 20_000, 2000)
    size = count_khop(graph, seeds, 3, edge_ids=True)
    # The copy that a table in a file makes of itself once it was read enough is the table's.
    with_tables = graph.num_bytes if tier == "file" else 0
    peak, left = measured_peak(lambda: khop(graph, seeds, 3, edge_ids=True))
    assert size.predicted_bytes <= left <= size.predicted_bytes + with_tables
    assert size.predicted_bytes < peak <= size.peak_bytes + with_tables


@functools.cache
def sparse_graph() -> CSRGraph:
    """A graph most of whose nodes have no edge."""
    return CSRGraph.from_edges(random_edges(300, 500), 400_000)


@given(st.integers(0, 3), st.lists(st.integers(0, 299), min_size=1, max_size=6, unique=True))
@settings(max_examples=30)
def test_buffers_of_a_search_are_just_enough(hops, seeds):
    """What a search holds beside the closure follows its frontier's edges, not the graph."""
    if not _native.is_available():
        pytest.skip("numbers by torch lie in an array")
    size = count_khop(sparse_graph(), torch.tensor(seeds), hops)
    # 16 bytes a number, with room for each edge of the widest frontier, and counts of edges.
    widest = max([0, *size.frontier_edges])
    workspace = size.peak_bytes - size.predicted_bytes
    assert workspace <= 16 * (size.num_nodes[-1] + widest) + 8 * (size.num_nodes[-1] // 256 + 2)
    assert workspace < 4 * sparse_graph().num_nodes / 8


def test_a_budget_is_kept_to_the_byte(path):
    graph = CSRGraph.from_edges(random_edges(3000, 30_000), 3000)
    seeds = torch.arange(0, 3000, 300)
    size = count_khop(graph, seeds, 2)
    found = khop(graph, seeds, 2, max_bytes=size.peak_bytes)
    assert found.size == size and found.seeds == slice(0, 10)
    with pytest.raises(CapacityError, match=rf"closure of 10 seeds needs {size.peak_bytes} bytes"):
        khop(graph, seeds, 2, max_bytes=size.peak_bytes - 1)
    with pytest.raises(
        CapacityError, match=r"max_bytes='1KiB': .* split the seeds with split_khop"
    ):
        khop(graph, seeds, 2, max_bytes="1KiB")


@settings(max_examples=25)
@given(st.integers(1, 3), st.floats(0.0, 1.0), st.sampled_from(PATHS), st.data())
def test_seeds_are_split_within_a_budget(hops, share, path, data):
    edges = random_edges(200, 500, data.draw(st.integers(0, 5)))
    seeds = torch.tensor(data.draw(st.lists(st.integers(0, 199), min_size=1, max_size=12)))
    graph = CSRGraph.from_edges(edges, 200)
    with pytest.MonkeyPatch.context() as patch:
        use(path, patch)
        each = [count_khop(graph, seed[None], hops).peak_bytes for seed in seeds]
        whole = count_khop(graph, seeds, hops).peak_bytes
        budget = max(each) + int(share * (whole - max(each)))
        parts = list(split_khop(graph, seeds, hops, max_bytes=budget))
        assert torch.equal(torch.cat([seeds[part.seeds] for part in parts]), seeds)
        for part in parts:
            assert part.size.peak_bytes <= budget
            alone = khop(graph, seeds[part.seeds], hops)
            assert torch.equal(part.nodes, alone.nodes)
            assert torch.equal(part.edge_index, alone.edge_index)
        # The least budget of the call is that of its worst seed; the error names it.
        worst = int(np.argmax(each))
        says = rf"seeds\[{worst}\], node {int(seeds[worst])}, alone needs {max(each)} bytes"
        with pytest.raises(CapacityError, match=says):
            list(split_khop(graph, seeds, hops, max_bytes=max(each) - 1))


def test_parts_are_measured_within_a_budget():
    if not _native.is_available():
        pytest.skip("torch's operators take temporaries, which are bounded and not counted")
    graph = CSRGraph.from_edges(random_edges(5000, 40_000), 5000)
    seeds = torch.arange(0, 5000, 50)
    budget = 100_000

    def visit() -> int:
        num_parts = 0
        for part in split_khop(graph, seeds, 2, max_bytes=budget):
            num_parts += len(part.nodes) > 0
            del part  # or it would be there while the next one is made
        return num_parts

    peak, left = measured_peak(visit)
    assert visit() > 3 and 0.5 * budget < peak <= budget and left == 0


# ------------------------------------------------------------------ direction


def test_pulling_looks_at_fewer_edges():
    if not _native.is_available():
        pytest.skip("a search by torch pushes")
    graph = CSRGraph.from_edges(random_edges(3000, 60_000), 3000)
    seeds = torch.tensor([0])
    pushed = count_khop(graph, seeds, 6)
    pulled = count_khop(graph, seeds, 6, reverse=graph.reverse())
    assert pulled.num_nodes == pushed.num_nodes and pulled.num_edges == pushed.num_edges
    assert any(pulled.pulled) and not any(pushed.pulled)
    assert pushed.touched_edges == pushed.frontier_edges == pulled.frontier_edges
    assert sum(pulled.touched_edges) < sum(pushed.touched_edges) / 4


def test_wrong_reverses_are_refused(tmp_path):
    graph, seeds = CSRGraph.from_edges(random_edges(30, 60), 30), torch.tensor([1])
    with pytest.raises(ValueError, match=r"reverse: expected .* as graph\.reverse\(\) gives them"):
        khop(graph, seeds, 1, reverse=graph)
    other = CSRGraph.from_edges(random_edges(30, 61), 30).reverse()
    with pytest.raises(ValueError, match="reverse: expected the edges of the graph"):
        khop(graph, seeds, 1, reverse=other)
    shifted = CSRGraph.from_edges(random_edges(30, 60).roll(1, 1), 30).reverse()
    assert count_khop(graph, seeds, 1, reverse=shifted).num_edges  # the same in another order
    saved = graph.save(tmp_path / "graph")
    for each in (graph, saved):
        wrong = CSRGraph.from_edges(random_edges(30, 60, seed=1), 30).reverse()
        with pytest.raises(ValueError, match="reverse: expected the edges of the graph"):
            khop(each, seeds, 1, reverse=wrong)
        turned = CSRGraph(graph.indptr, graph.indices, flow="target_to_source")
        with pytest.raises(ValueError, match="reverse: expected the edges of the graph"):
            khop(each, seeds, 1, reverse=turned)
    with pytest.raises(ValueError, match="reverse: expected lists in memory"):
        khop(graph, seeds, 1, reverse=graph.reverse().save(tmp_path))
    with pytest.raises(TypeError, match="reverse: expected a CSRGraph, got bool"):
        khop(graph, seeds, 1, reverse=True)


# ------------------------------------------------------------------ wrong input


def test_wrong_arguments_are_refused(path):
    graph = CSRGraph([0, 1, 2, 2], [1, 0])
    with pytest.raises(IndexError, match=r"seeds\[1\] is 3, but the graph has 3 nodes"):
        khop(graph, torch.tensor([0, 3]), 1)
    with pytest.raises(IndexError, match=r"seeds\[0\] is -1"):
        khop(graph, torch.tensor([-1]), 1)
    with pytest.raises(TypeError, match=r"expected a tensor of integers, got torch\.float32"):
        khop(graph, torch.tensor([float("nan")]), 1)
    with pytest.raises(ValueError, match=r"seeds: expected shape \(n,\), got \(1, 1\)"):
        khop(graph, torch.tensor([[0]]), 1)
    for hops, error in ((-1, ValueError), (1.5, TypeError), (None, TypeError)):
        with pytest.raises(error, match=rf"hops is {hops}"):
            khop(graph, torch.tensor([0]), hops)
    with pytest.raises(TypeError, match="graph: expected a CSRGraph, got list"):
        khop([0], torch.tensor([0]), 1)
    with pytest.raises(ValueError, match="max_bytes must be a whole number"):
        khop(graph, torch.tensor([0]), 1, max_bytes=-5)
    with pytest.raises(TypeError, match=r"max_bytes: expected bytes, .*, got None"):
        split_khop(graph, torch.tensor([0]), 1, max_bytes=None)
    with pytest.raises(IndexError, match=r"seeds\[0\] is 9"):
        split_khop(graph, torch.tensor([9]), 1, max_bytes=100)


def test_seeds_without_neighbours_are_alone(path):
    """Seeds in different components, one without an edge, none at all."""
    graph = CSRGraph([0, 1, 2, 2, 3], [1, 0, 3])
    found = khop(graph, torch.tensor([2, 3, 0]), 5)
    assert found.nodes.tolist() == [2, 3, 0, 1]
    assert found.edge_index.tolist() == [[1, 3, 2], [1, 2, 3]]
    assert found.size.num_nodes == (3, 4, 4, 4, 4, 4)
    nothing = khop(graph, torch.tensor([], dtype=torch.int64), 2)
    assert nothing.nodes.tolist() == [] and nothing.edge_index.shape == (2, 0)
    empty = khop(CSRGraph([0], []), torch.tensor([], dtype=torch.int64), 1)
    assert empty.size.num_nodes == (0, 0)
    assert list(split_khop(graph, torch.tensor([], dtype=torch.int64), 2, max_bytes=0)) == []


def test_damage_is_noticed_where_it_is_met(path, tmp_path):
    def saved(name: str, indptr: list[int], indices: list[int]) -> CSRGraph:
        folder = Path(tmp_path, name)
        folder.mkdir()
        np.save(folder / "indptr.npy", np.array(indptr))
        np.save(folder / "indices.npy", np.array(indices))
        return CSRGraph(folder / "indptr.npy", folder / "indices.npy")

    falling = saved("falling", [0, 3, 1, 3], [0, 1, 2])
    with pytest.raises(ValueError, match="indptr: goes from 3 to 1 at node 1"):
        khop(falling, torch.tensor([1]), 1)
    beyond = saved("beyond", [0, 1, 2, 3], [1, 0, 7])
    assert khop(beyond, torch.tensor([0]), 2).nodes.tolist() == [0, 1]
    for hops in (0, 1):
        with pytest.raises(ValueError, match=r"indices\[2\] is 7, but the graph has 3 nodes"):
            khop(beyond, torch.tensor([2]), hops)
    changed = CSRGraph(torch.tensor([0, 1, 2, 3]), torch.tensor([1, 0, 2]))
    changed.indices[2] = -4
    with pytest.raises(ValueError, match=r"indices\[2\] is -4, but the graph has 3 nodes"):
        khop(changed, torch.tensor([2]), 0)
    changed.indices[2] = 2
    changed.indptr[2] = 9
    for hops, says in ((0, "indptr"), (1, "indptr: .* node 1")):
        with pytest.raises(ValueError, match=says):
            khop(changed, torch.tensor([1]), hops)
    with pytest.raises(ValueError, match="indptr"):
        khop_costs(changed, torch.tensor([1]), 0)


@pytest.mark.gpu
def test_seeds_on_a_gpu_are_searched_there(tmp_path):
    graph = CSRGraph.from_edges(random_edges(300, 2000), 300, edge_ids=True)
    seeds = torch.tensor([4, 17, 4])
    expected = khop(graph, seeds, 2, edge_ids=True)
    for each in (graph, graph.save(tmp_path), CSRGraph(unify(graph.indptr), unify(graph.indices))):
        found = khop(each, seeds.cuda(), 2, edge_ids=True)
        assert found.edge_index.is_cuda
        assert torch.equal(found.nodes.cpu(), expected.nodes)
        assert torch.equal(found.edge_index.cpu(), expected.edge_index)
