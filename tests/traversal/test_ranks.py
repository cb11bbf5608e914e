"""Graphs over ranks: results are those of one process, and what is sent is the cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from _graph_ranks import make_graphs, run_algorithms, run_ranks, seeds_of
from penstock.traversal import CSRGraph, RankGraph, khop
from penstock.traversal._send_lists import SendLists
from penstock.unified import UnifiedTensor, unify

if not (distributed.is_available() and distributed.is_gloo_available()):
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

PAGERANK_TOLERANCE = 1e-12  # sums of at most 400 numbers of at most 1, in another order


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks("all", request.param, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def whole() -> dict[str, dict[str, Any]]:
    return {name: run_algorithms(graph, 0, graph) for name, graph in make_graphs().items()}


def count_cut(graph: CSRGraph, owner: Tensor) -> list[int]:
    """Nodes of other ranks in the lists of each rank, each once; counted from the edges."""
    lists = torch.arange(graph.num_nodes).repeat_interleave(graph.indptr.diff())
    pairs = torch.stack([owner[lists], graph.indices.long()])
    pairs = pairs[:, owner[pairs[1]] != pairs[0]].unique(dim=1)
    return torch.bincount(pairs[0], minlength=int(owner.max()) + 1).tolist()


def test_results_are_those_of_one_process(ranks: list[Any], whole: dict[str, dict[str, Any]]):
    cases = [case for case in ranks[0] if isinstance(case, tuple)]
    assert len(cases) == 10
    for case in cases:
        nodes = torch.cat([results[case]["nodes"] for results in ranks])
        assert torch.equal(nodes.sort().values, torch.arange(len(nodes))), case
        for rank, results in enumerate(ranks):
            found, one = results[case], whole[case[0]]
            own = found["nodes"]
            for name in ("bfs", "components"):
                assert torch.equal(found[name], one[name][own]), (case, rank, name)
            difference = (found["pagerank"] - one["pagerank"][own]).abs()
            assert not (difference > PAGERANK_TOLERANCE).any(), (case, rank)
            graph = make_graphs()[case[0]]
            closure = khop(graph, seeds_of(graph, rank), 2)
            expected = closure.nodes, closure.edge_index, closure.seed_positions
            for ours, theirs in zip(found["khop"], expected, strict=True):
                assert torch.equal(ours, theirs), (case, rank)
            assert found["khop size"] == closure.size.num_nodes
            for name in ("layers", "layers of own rows"):
                torch.testing.assert_close(found[name], one["layers"][own], rtol=1e-12, atol=1e-12)
            assert torch.equal(found["gathered"], one["components"])


def test_what_is_sent_is_the_cut(ranks: list[Any]):
    for (name, split), found in _cases(ranks):
        graph = make_graphs()[name]
        owner = torch.empty(graph.num_nodes, dtype=torch.int64)
        for rank, each in enumerate(found):
            owner[each["nodes"]] = rank
        if split == "contiguous":
            assert torch.equal(owner, torch.arange(len(owner)) * len(ranks) // len(owner))
        if split == "table":
            assert torch.equal(owner, torch.arange(len(owner)) * 7 % len(ranks))
        cut = count_cut(graph, owner)
        cut += [0] * (len(ranks) - len(cut))
        reports = [each["report"] for each in found]
        assert [each["num_halo"] for each in reports] == cut, (name, split)
        halo_ids = sum(each["sent_bytes"].get("halo ids", 0) for each in reports)
        assert halo_ids == 4 * sum(cut)
        for kind in ("halo ids again", "component ids"):  # once, however many calls there are
            assert sum(each["sent_bytes"].get(kind, 0) for each in reports) == 4 * sum(cut), kind
        if name == "grid":  # all of it is reached: each node of the cut is told of once
            assert sum(each["num_messages"]["bfs"] for each in reports) == sum(cut)
            assert sum(each["sent_bytes"]["bfs"] for each in reports) == 4 * sum(cut)
        told = sum(each["num_messages"].get("pagerank", 0) for each in reports)
        sent = sum(each["sent_bytes"].get("pagerank", 0) for each in reports)
        assert sent == 8 * told and (told % sum(cut) == 0 if sum(cut) else told == 0)
        # Of features that all ranks have nothing is sent: one layer's rows, of 5 float64, twice.
        rows = sum(each["num_messages"].get("rows of layers", 0) for each in reports)
        row_bytes = sum(each["sent_bytes"].get("rows of layers", 0) for each in reports)
        assert (rows, row_bytes) == (2 * sum(cut), 2 * sum(cut) * 5 * 8)
        own = sum(each["sent_bytes"].get("rows of features", 0) for each in reports)
        assert own == sum(cut) * 6 * 8


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_lists_of_what_is_sent(share: float):
    generator = torch.Generator().manual_seed(0)
    num_own = 3 * 2**13 + 17
    chosen = [torch.rand(num_own, generator=generator) < each for each in (share, 0.5, share)]
    positions = [each.nonzero().flatten() for each in chosen]
    counts = [len(each) for each in positions]
    lists = SendLists(torch.cat(positions).int(), counts, num_own)
    assert lists.num_bytes <= sum(min(4 * count, num_own / 8 + 2000) for count in counts)
    for rank, expected in enumerate(positions):
        ends = (0, 1, 2**13 - 1, 2**13, 2**13 + 1, len(expected) // 2, len(expected))
        for begin in ends:
            for end in (each for each in ends if begin <= each <= len(expected)):
                assert torch.equal(lists.read(rank, begin, end), expected[begin:end])
        places = torch.randint(0, max(len(expected), 1), (9,), generator=generator).sort().values
        places = places[: len(expected)].int()
        assert torch.equal(lists.select(rank, places), expected[places.long()])


def test_clusters_and_balance(ranks: list[Any]):
    by_split = dict(_cases(ranks))
    cuts = {
        split: sum(each["report"]["num_halo"] for each in by_split["grid", split])
        for split in ("random", "cluster", "contiguous")
    }
    assert cuts["contiguous"] == 2 * 20 * (len(ranks) - 1)
    assert cuts["cluster"] < 0.5 * cuts["random"]
    for split in ("random", "cluster", "contiguous"):
        edges = [each["report"]["num_edges"] for each in by_split["grid", split]]
        assert max(edges) < 1.5 * sum(edges) / len(edges)


def test_lists_and_rows_in_files(ranks: list[Any], whole: dict[str, dict[str, Any]]):
    for results in ranks:
        found = results["files"]
        expected = whole["grid"]["layers"][found["nodes"]]
        torch.testing.assert_close(found["layers"], expected, rtol=1e-12, atol=1e-12)
        assert len(found["left"]) == 1 and found["left"][0].startswith("output-")


def test_ranks_that_disagree_raise_the_same(tmp_path: Path):
    for rank, messages in enumerate(run_ranks("errors", 2, tmp_path)):
        assert "ValueError: graph: ranks were given different graphs" in messages["graphs"]
        assert "different graphs, splits or seeds" in messages["splits"]
        assert messages["hops"].startswith(f"ValueError: hops={1 + rank}: ranks were given 1 to 2")
        assert "CapacityError: max_bytes: the lists of a closure take" in messages["room"]
        assert ("rank 1 (max_bytes=2000)" in messages["room"]) == (rank == 1)
        assert "no ids of edges" in messages["ids"]
        assert "ValueError: layers[0]: its output for a node changes" in messages["layers"]
        assert "ValueError: graph: ranks were given different graphs" in messages["lists"]
        assert "damping, tol, max_iterations: ranks were given different" in messages["numbers"]
        assert "values: ranks have rows of different shapes or dtypes" in messages["values"]
        assert messages["values"].endswith("torch.float64" if rank else "torch.int64")
        assert "values: ranks have rows of different shapes" in messages["values of rows"]
        assert messages["counts of layers"].endswith(
            f"different numbers of them; this one {1 + rank}"
        )
        assert "features: ranks have rows of different widths" in messages["features"]
        assert "features: expected rows of all nodes on all ranks" in messages["own features"]
        assert "layers: ranks have rows of different widths or dtypes" in messages["outputs"]
        assert messages["budgets"] == "nothing"


def test_others_see_that_a_rank_has_died(tmp_path: Path):
    (message,) = run_ranks("death", 2, tmp_path, ended=1)
    assert message.startswith("RankError: rank 0 of 2: an exchange")
    assert "another rank has ended" in message


def test_a_group_of_one_process_is_the_whole_graph():
    graph = make_graphs()["dense"]
    part = RankGraph(graph)
    assert torch.equal(part.nodes, torch.arange(320)) and part.num_halo == 0
    found, one = run_algorithms(part, 0, graph), run_algorithms(graph, 0, graph)
    for name in ("bfs", "components", "pagerank", "layers"):
        assert torch.equal(found[name], one[name])
    assert torch.equal(found["khop"][1], one["khop"][1])
    assert part.report().num_messages == {} and part.num_bytes == 0


@pytest.mark.parametrize(
    ("split", "error", "message"),
    [
        ("metis", ValueError, "split='metis': expected one of"),
        (3, TypeError, "split: expected a name or a tensor of owners, got int"),
        (torch.zeros(3), TypeError, "split: expected integers"),
        (torch.zeros(3, dtype=torch.int64), ValueError, r"split: expected shape \(320,\)"),
        (torch.full((320,), 1), ValueError, "split: names rank 1, but there are 1 ranks"),
    ],
)
def test_wrong_splits_are_named(split: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        RankGraph(make_graphs()["dense"], split=split)


def test_wrong_graphs_and_values_are_named():
    with pytest.raises(TypeError, match="graph: expected a CSRGraph, got Tensor"):
        RankGraph(torch.zeros(3))  # type: ignore[arg-type]
    part = RankGraph(make_graphs()["grid"])
    with pytest.raises(ValueError, match="values: expected one for each of the rank's 400 nodes"):
        part.gather(torch.zeros(3))
    with pytest.raises(TypeError, match="values: expected a tensor or a table, got list"):
        part.gather([1] * 400)  # type: ignore[arg-type]


def test_a_process_that_is_not_in_the_group_is_told_so():
    outside: Any = distributed.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(ValueError, match="group: this process is none of its ranks"):
        RankGraph(make_graphs()["tiny"], group=outside)


def test_seeds_may_be_a_part_of_others():
    graph = make_graphs()["grid"]
    seeds = torch.arange(40)[1::4]
    found = khop(RankGraph(graph), seeds, 1)
    assert torch.equal(found.nodes, khop(graph, seeds, 1).nodes)


def test_rows_of_tables_are_gathered(tmp_path: Path):
    rows, part = torch.randn(400, 2), RankGraph(make_graphs()["grid"])
    for table in (unify(rows), unify(rows).save_rows(tmp_path / "rows")):
        found = part.gather(table)
        assert torch.equal(found, rows) and not isinstance(found, UnifiedTensor)


def _cases(ranks: list[Any]) -> list[tuple[tuple[str, str], list[Any]]]:
    return [
        (case, [results[case] for results in ranks]) for case in ranks[0] if isinstance(case, tuple)
    ]
