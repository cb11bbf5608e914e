"""Layer by layer in blocks, a GNN gives for all nodes what it gives for the whole graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import CapacityError, StoreError, StoreUnavailableError
from penstock.traversal import CSRGraph, infer_layers
from penstock.unified import UnifiedTensor, unify

nn = pytest.importorskip("torch_geometric.nn")

NUM_NODES, WIDTH = 300, 8


def make_edges(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, NUM_NODES - 10, (2, 2000), generator=generator)


def make_features(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(NUM_NODES, WIDTH, generator=torch.Generator().manual_seed(1), dtype=dtype)


def make_model(kind: str, flow: str = "source_to_target") -> list[torch.nn.Module]:
    torch.manual_seed(2)
    if kind == "gat":
        first, last = nn.GATConv(WIDTH, 4, heads=2, flow=flow), nn.GATConv(8, 3, flow=flow)
    elif kind == "gin":
        linear = torch.nn.Linear
        first, last = (nn.GINConv(linear(*size), flow=flow) for size in ((WIDTH, 12), (12, 3)))
    else:
        first, last = nn.SAGEConv(WIDTH, 12, flow=flow), nn.SAGEConv(12, 3, flow=flow)
    return [first.eval(), last.eval()]


def run_whole(model: list[Any], features: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model[1](model[0](features, edges).relu(), edges)


def layers_of(model: list[Any]) -> list[Any]:
    return [lambda x, edges: model[0](x, edges).relu(), model[1]]


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("kind", ["sage", "gat", "gin"])
def test_outputs_are_those_of_the_whole_graph(kind: str, flow: Any):
    model, edges, features = make_model(kind, flow), make_edges(), make_features()
    graph = CSRGraph.from_edges(edges, NUM_NODES, flow=flow)
    expected = run_whole(model, features, edges)
    sizes: list[int] = []
    layers = layers_of(model)

    def last(x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return layers[1](x, edge_index)

    found = infer_layers(graph, features, [layers[0], last], max_bytes=40_000)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert len(sizes) > 5 and max(sizes) < NUM_NODES


def test_lists_features_and_rows_in_files(tmp_path: Path):
    model, edges, features = make_model("sage"), make_edges(), make_features()
    graph = CSRGraph.from_edges(edges, NUM_NODES).save(tmp_path / "graph")
    unify(features).save_rows(tmp_path / "features.npy")
    store = tmp_path / "store"
    store.mkdir()
    path = tmp_path / "features.npy"
    found = infer_layers(graph, path, layers_of(model), max_bytes=40_000, store=store)
    assert isinstance(found, UnifiedTensor) and found.report().tier == "file"
    expected = run_whole(model, features, edges)
    torch.testing.assert_close(found[torch.arange(NUM_NODES)], expected, rtol=1e-6, atol=1e-6)
    assert [each.name for each in store.iterdir()] == ["output-0.rows"]


def test_a_call_that_ends_early_leaves_no_result_and_a_result_is_never_replaced(tmp_path: Path):
    graph, calls = CSRGraph.from_edges(make_edges(), NUM_NODES), []

    def layer(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return x * 2

    with pytest.raises(KeyboardInterrupt):
        infer_layers(graph, make_features(), [layer], max_bytes=40_000, store=tmp_path)
    assert not list(tmp_path.iterdir())
    infer_layers(graph, make_features(), (each for each in [layer]), store=tmp_path)
    num_calls = len(calls)
    for store in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(StoreUnavailableError, match=f"store='{store}': expected an existing"):
            infer_layers(graph, make_features(), [layer, layer], store=store)
    assert len(calls) == num_calls


def test_a_result_that_another_call_makes_meanwhile_stays(tmp_path: Path):
    graph, other = CSRGraph.from_edges(make_edges(), NUM_NODES), tmp_path / "output-0.rows"

    def layer(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        other.write_bytes(b"whole")
        return x

    with pytest.raises(StoreError, match="exists"):
        infer_layers(graph, make_features(), [layer], store=tmp_path)
    assert other.read_bytes() == b"whole"


def test_layers_that_see_beyond_the_list_are_refused():
    graph = CSRGraph.from_edges(make_edges(), NUM_NODES)
    conv = nn.GCNConv(WIDTH, 4).eval()
    with pytest.raises(ValueError, match=r"layers\[0\]: its output for a node changes with the li"):
        infer_layers(graph, make_features(), [conv])
    dropout = [make_model("sage")[0], lambda x, _: torch.nn.functional.dropout(x, 0.5)]
    with pytest.raises(ValueError, match=r"layers\[1\]: .* or from call to call"):
        infer_layers(graph, make_features(), dropout)


def make_graphs_with_odd_lists() -> dict[str, tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(3)
    leaves, users = torch.arange(1, 300), torch.arange(400).repeat_interleave(3)
    items = 400 + torch.randint(0, 4, (1200,), generator=generator)
    pairs = {
        "star": torch.stack([leaves, torch.zeros_like(leaves)]),
        "popular items": torch.stack([users, items]),
        "long lists": torch.ones(262, 262).triu(1).nonzero().T,
        "few lists": 9000 + torch.randint(0, 5, (2, 20), generator=generator),
        "first nodes by themselves": torch.cat(
            [torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), 4 + make_edges()], dim=1
        ),
    }
    return {
        name: (torch.cat([each, each.flip(0)], dim=1), int(each.max()) + 1)
        for name, each in pairs.items()
    }


@pytest.mark.parametrize("name", make_graphs_with_odd_lists())
def test_layers_are_told_apart_whatever_the_lists(name: str):
    edges, num_nodes = make_graphs_with_odd_lists()[name]
    graph = CSRGraph.from_edges(edges, num_nodes)
    features = torch.rand(num_nodes, 4, generator=torch.Generator().manual_seed(4))
    layers = [
        nn.GCNConv(4, 3).eval(),
        lambda x, _: torch.nn.functional.dropout(x),
        lambda x, _: torch.nn.functional.batch_norm(x, None, None, training=True),
    ]
    for layer in layers:
        for dtype in (torch.float32, torch.bfloat16):
            layer = layer.to(dtype) if isinstance(layer, torch.nn.Module) else layer
            with pytest.raises(ValueError, match=r"layers\[0\]: its output for a node changes"):
                infer_layers(graph, features.to(dtype), [layer])
    for layer in (nn.SAGEConv(4, 3, aggr="max").eval(), nn.GATConv(4, 3).eval()):
        with torch.no_grad():
            expected = layer(features, edges)
        found = infer_layers(graph, features, [layer], max_bytes="1MiB")
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_rows_that_are_not_finite_stay_as_they_are():
    features = make_features()
    features[::3] = torch.inf
    found = infer_layers(CSRGraph.from_edges(make_edges(), NUM_NODES), features, [lambda x, _: -x])
    assert torch.equal(found, -features)


@pytest.mark.parametrize(
    "layer",
    [
        lambda x, _: x - x.mean(0),
        lambda x, _: x / x.std(),
        lambda x, _: x.softmax(0),
        lambda x, _: torch.nn.functional.batch_norm(x, None, None, training=True),
    ],
)
@pytest.mark.parametrize("edges", [make_edges(), torch.empty(2, 0, dtype=torch.long)])
def test_layers_that_mix_the_rows_of_a_block_are_refused(layer: Any, edges: torch.Tensor):
    graph = CSRGraph.from_edges(edges, NUM_NODES)
    with pytest.raises(ValueError, match=r"layers\[0\]: .* or with the other rows of a block"):
        infer_layers(graph, make_features(), [layer], max_bytes=40_000)


class Counter(torch.nn.Module):
    """A layer that normalises as it is told, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.calls = torch.nn.Buffer(torch.zeros(1))

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        self.calls += not self.norm.training
        return self.norm(x)


@pytest.mark.parametrize("training", [True, False])
def test_layers_that_change_their_buffers_are_refused_and_left_as_they_were(training: bool):
    graph, layer = CSRGraph.from_edges(make_edges(), NUM_NODES), Counter().train(training)
    before = {name: each.clone() for name, each in layer.named_buffers()}
    message = "or with the other rows" if training else "it changes its buffers"
    with pytest.raises(ValueError, match=rf"layers\[0\]: .*{message}"):
        infer_layers(graph, make_features(), [layer])
    torch.testing.assert_close(dict(layer.named_buffers()), before, rtol=0, atol=0)


def test_a_list_beyond_the_budget_is_named():
    edges = torch.stack([torch.arange(NUM_NODES), torch.full((NUM_NODES,), 5)])
    graph = CSRGraph.from_edges(edges, NUM_NODES)
    with pytest.raises(CapacityError, match="max_bytes: the 300 neighbours of node 5 alone take"):
        infer_layers(graph, make_features(), make_model("sage"), max_bytes=20_000)


@pytest.mark.parametrize(
    ("features", "layers", "error", "message"),
    [
        (torch.zeros(3, 2), None, ValueError, r"features: expected shape \(300, width\), got"),
        (torch.zeros(NUM_NODES, 2).long(), None, TypeError, "features: expected floats"),
        ([1.0], None, TypeError, "features: expected a tensor, a table or the path"),
        (torch.zeros(NUM_NODES, 2), [], ValueError, "layers: expected at least one"),
        (torch.zeros(NUM_NODES, 2), make_model, TypeError, "layers: expected a sequence of functi"),
        (torch.zeros(NUM_NODES, 2), [4], TypeError, r"layers\[0\]: expected a function of .* int"),
        (torch.zeros(NUM_NODES, 2), [lambda x, e: x.sum()], ValueError, r"layers\[0\]: expected a"),
    ],
)
def test_wrong_features_and_layers_are_named(
    features: Any, layers: Any, error: type[Exception], message: str
):
    graph = CSRGraph.from_edges(make_edges(), NUM_NODES)
    with pytest.raises(error, match=message):
        infer_layers(graph, features, make_model("sage") if layers is None else layers)


def test_a_graph_without_nodes_has_rows_of_the_layers_width(tmp_path: Path):
    layers = layers_of(make_model("sage"))
    for store in (None, tmp_path):
        found = infer_layers(CSRGraph([0], []), torch.empty(0, WIDTH), layers, store=store)
        assert found.shape == (0, 3) and found.dtype == torch.float32


def test_half_precision_and_nodes_without_edges():
    graph = CSRGraph([0] * 6, [])
    features = torch.randn(5, 4).bfloat16()
    assert torch.equal(infer_layers(graph, features, [lambda x, _: 2 * x]), 2 * features)
