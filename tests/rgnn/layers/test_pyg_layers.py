"""The layers, held against PyG's with the same weights: results, gradients, state dicts."""

from __future__ import annotations

import ast
import functools
import inspect
import pickle
import textwrap

import numpy as np
import pytest
import torch

from _relational import random_graph, random_tensor
from penstock import rgnn

pyg = pytest.importorskip("torch_geometric.nn")
pytestmark = pytest.mark.usefixtures("one_thread")

GRAPH = random_graph()
EDGES, TYPES = GRAPH.edge_index, GRAPH.edge_type
N, R = GRAPH.num_nodes, GRAPH.num_relations


def assert_like(
    ours: torch.nn.Module, theirs: torch.nn.Module, *, has_features: bool = True
) -> None:
    """Equal outputs, and equal gradients of the features and of every parameter."""
    ours, theirs = ours.double(), theirs.double()
    # PyG starts biases at zero, where a missing one would not be seen.
    torch.nn.init.normal_(theirs.bias) if theirs.bias is not None else None
    ours.load_state_dict(theirs.state_dict())
    assert_equally_trained(ours, theirs, random_tensor(N, 6) if has_features else None)


def assert_equally_trained(
    ours: torch.nn.Module, theirs: torch.nn.Module, x: torch.Tensor | None
) -> None:
    results = [layer(x, EDGES, TYPES) for layer in (ours, theirs)]
    torch.testing.assert_close(*results)
    weights = random_tensor(*results[0].shape, seed=1).detach()
    gradients = []
    for layer, result in zip((ours, theirs), results, strict=True):
        if x is not None and x.requires_grad:
            x.grad = None
        (result * weights).sum().backward()
        named = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
        gradients.append(named | ({} if x is None or not x.requires_grad else {"x": x.grad}))
    assert gradients[0]
    assert gradients[0].keys() == gradients[1].keys()
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("aggr", ["mean", "add"])
@pytest.mark.parametrize("decomposition", [{}, {"num_bases": 2}, {"num_blocks": 3}], ids=str)
@pytest.mark.parametrize("parts", [{}, {"root_weight": False, "bias": False}], ids=str)
def test_rgcn_is_pygs(aggr, decomposition, parts):
    options = {"aggr": aggr, **decomposition, **parts}
    assert_like(rgnn.RGCNConv(6, 9, R, **options), pyg.RGCNConv(6, 9, R, **options))


@pytest.mark.parametrize("aggr", ["mean", "add"])
@pytest.mark.parametrize("decomposition", [{}, {"num_bases": 3}], ids=str)
@pytest.mark.parametrize("parts", [{}, {"root_weight": False, "bias": False}], ids=str)
def test_rgcn_without_features_is_pygs(aggr, decomposition, parts):
    options = {"aggr": aggr, **decomposition, **parts}
    layers = [conv(N, 9, R, **options) for conv in (rgnn.RGCNConv, pyg.RGCNConv)]
    assert_like(*layers, has_features=False)
    # 20 entities, of which the graph's nodes are some, one of them twice.
    layers = [conv(20, 9, R, **options).double() for conv in (rgnn.RGCNConv, pyg.RGCNConv)]
    layers[0].load_state_dict(layers[1].state_dict())
    entities = torch.randperm(20)[:N]
    entities[1] = entities[0]
    assert_equally_trained(*layers, entities)
    with torch.no_grad():
        assert torch.equal(layers[0](entities.int(), GRAPH), layers[0](entities, EDGES, TYPES))


@pytest.mark.parametrize("mechanism", ["across-relation", "within-relation"])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_bases": 2},
        {"num_blocks": 2},
        {"concat": False},
        {"bias": False},
        {"attention_mode": "multiplicative-self-attention"},
    ],
    ids=str,
)
def test_rgat_is_pygs(mechanism, heads, options):
    options = {"attention_mechanism": mechanism, "heads": heads, **options}
    assert_like(rgnn.RGATConv(6, 4, R, **options), pyg.RGATConv(6, 4, R, **options))


@pytest.mark.parametrize("mechanism", ["across-relation", "within-relation"])
@pytest.mark.parametrize("mode", ["additive", "multiplicative"])
@pytest.mark.parametrize("parts", [{}, {"num_bases": 2}, {"num_blocks": 3}], ids=str)
def test_features_of_edges_attention_weights_and_dropout_are_pygs(mode, mechanism, parts):
    options = {
        **parts,
        "attention_mode": f"{mode}-self-attention",
        "attention_mechanism": mechanism,
        **{"heads": 3, "edge_dim": 2, "dropout": 0.4},
    }
    ours = rgnn.RGATConv(6, 4, R, **options).double()
    theirs = pyg.RGATConv(6, 4, R, **options).double()
    ours.load_state_dict(theirs.state_dict())
    x, edge_attr = random_tensor(N, 6), random_tensor(len(TYPES), 2)
    found = []
    for layer in (ours, theirs):
        torch.manual_seed(0)
        out, (edges, weights) = layer(
            x, EDGES, TYPES, edge_attr, size=(N, N), return_attention_weights=True
        )
        assert torch.equal(edges, EDGES)
        loss = (out * out.detach().cos()).sum() + (weights * weights.detach().sin()).sum()
        trained = {name: p for name, p in layer.named_parameters() if p.requires_grad}
        wrt = {"x": x, "edge_attr": edge_attr, **trained}
        gradients = torch.autograd.grad(loss, list(wrt.values()), allow_unused=True)
        named = {n: g for n, g in zip(wrt, gradients, strict=True) if g is not None}
        found.append({"out": out, "weights": weights} | named)
    assert found[0].keys() == found[1].keys()
    torch.testing.assert_close(*found)
    for layer in (ours, theirs):
        layer.eval()
    torch.testing.assert_close(ours(x, EDGES, TYPES), theirs(x, EDGES, TYPES))
    expected = ours(x, EDGES, TYPES, edge_attr)
    torch.testing.assert_close(expected, theirs(x, EDGES, TYPES, edge_attr))
    assert torch.equal(ours(x, GRAPH, edge_attr=edge_attr), expected)


def test_attention_weights_of_a_graph_come_with_its_edges():
    layer, x = rgnn.RGATConv(6, 4, R), torch.randn(N, 6)
    out, (edges, weights) = layer(x, GRAPH, return_attention_weights=False)
    assert torch.equal(edges, EDGES)
    assert torch.equal(out, layer(x, GRAPH))
    total = torch.zeros(N, 1).index_add(0, EDGES[1], weights)
    torch.testing.assert_close(total, (torch.bincount(EDGES[1], minlength=N) > 0).float()[:, None])


METADATA = (
    ["paper", "author", "field"],
    [("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "has", "field")],
)
SIZES = {"paper": 7, "author": 4, "field": 3}
MANY = {"paper": 60, "author": 30, "field": 20}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("RGCNConv", {"num_relations": R}),
        ("RGCNConv", {"num_relations": R, "num_bases": 2, "root_weight": False}),
        ("RGATConv", {"num_relations": R, "edge_dim": 3}),
        ("RGATConv", {"num_relations": R, "num_bases": 2, "concat": False, "heads": 2}),
        ("HGTConv", {"metadata": (METADATA[0][::-1], METADATA[1][::-1])}),
        ("HGTConv", {"metadata": (METADATA[0], [("field", "z", "paper"), *METADATA[1]])}),
    ],
)
def test_parameters_have_the_order_by_which_optimizers_know_them(name: str, arguments: dict):
    ours, theirs = (getattr(module, name)(6, 4, **arguments) for module in (rgnn, pyg))
    buffers = {buffer for buffer, _ in ours.named_buffers()}  # parameters of PyG's that do nothing
    expected = [(name, p.shape) for name, p in theirs.named_parameters() if name not in buffers]
    assert [(name, p.shape) for name, p in ours.named_parameters()] == expected
    assert buffers == ({"w", "l1", "b1", "l2", "b2"} if name == "RGATConv" else set())


def hetero_edges(seed: int = 0, sizes: dict[str, int] = SIZES) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {
        edge_type: torch.stack(
            [
                torch.randint(sizes[end], (15,), generator=generator)
                for end in (edge_type[0], edge_type[2])
            ]
        )
        for edge_type in METADATA[1]
    }


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(
    "in_channels",
    [8, 5, {"paper": 8, "author": 3, "field": 5}, {"field": 8, "paper": 8, "author": 8}],
    ids=str,
)
@pytest.mark.parametrize("sizes", [SIZES, MANY], ids=["few", "many"])
def test_hgt_is_pygs(heads, in_channels, sizes, monkeypatch):
    calls = count_calls(monkeypatch)
    ours = rgnn.HGTConv(in_channels, 8, METADATA, heads=heads).double()
    theirs = pyg.HGTConv(in_channels, 8, METADATA, heads=heads).double()
    for p in theirs.parameters():  # no ones and zeros, which could stand in for each other
        torch.nn.init.normal_(p, std=0.5)
    ours.load_state_dict(theirs.state_dict())
    widths = in_channels if isinstance(in_channels, dict) else dict.fromkeys(sizes, in_channels)
    x = {name: random_tensor(sizes[name], widths[name], seed=i) for i, name in enumerate(sizes)}
    gradients = []
    results = []
    for layer in (ours, theirs):
        result = layer(x, hetero_edges(sizes=sizes))
        results.append(result)
        total = sum((h * h).sum() for h in result.values())
        names, parameters = zip(*layer.named_parameters(), strict=True)
        found = torch.autograd.grad(total, [*x.values(), *parameters], allow_unused=True)
        gradients.append(dict(zip([*x, *names], found, strict=True)))
    assert set(results[0]) == set(results[1]) == {"paper", "field"}
    for name, h in results[0].items():
        torch.testing.assert_close(h, results[1][name])
    for name, gradient in gradients[1].items():
        # PyG has no gradient for what no output reaches; ours may be zeros.
        ours_is = gradients[0][name]
        if gradient is None:
            assert ours_is is None or not ours_is.any()
        else:
            torch.testing.assert_close(ours_is, gradient)
    # With many nodes it is less work to multiply the weights of nodes and relations first.
    is_weights_first = sizes is MANY and len(set(widths.values())) == 1
    if sizes is MANY or in_channels != 5:
        assert calls == ["hgt_of_features" if is_weights_first else "hgt"]


def test_optimizers_leave_priors_of_relations_without_edges_alone():
    """They have no gradient in PyG, and those that have one of zeros decay in AdamW."""
    edges = hetero_edges()
    left_out = next(iter(edges))
    del edges[left_out]
    x = {name: random_tensor(size, 8, seed=i) for i, (name, size) in enumerate(SIZES.items())}
    for module in (rgnn, pyg):
        layer = module.HGTConv(8, 8, METADATA).double()
        sum(h.sum() for h in layer(x, edges).values()).backward()
        without = {name for name, prior in layer.p_rel.items() if prior.grad is None}
        assert without == {"__".join(left_out)}


def count_calls(monkeypatch) -> list[str]:
    """The programs of HGT that are called from now on, by name."""
    calls, module = [], rgnn.layers._hgt

    def call(name, program, *arguments):
        calls.append(name)
        return program(*arguments)

    for name in ("hgt", "hgt_of_features"):
        counted = functools.partial(call, name, getattr(module, name))
        monkeypatch.setattr(module, name, counted)
    return calls


def test_hgt_computes_the_same_in_both_ways(monkeypatch):
    layer = rgnn.HGTConv(8, 8, METADATA, heads=2).double()
    x = {name: random_tensor(size, 8, seed=i) for i, (name, size) in enumerate(SIZES.items())}
    found = []
    for chosen in ((lambda *_: False), (lambda *_: True)):
        monkeypatch.setattr(layer, "_should_multiply_weights_first", chosen)
        total = sum((h * h).sum() for h in layer(x, hetero_edges()).values())
        leaves = [*x.values(), *layer.parameters()]
        found.append(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))
    torch.testing.assert_close(*found)


def test_hgt_should_multiply_weights_first_only_where_that_is_less_work():
    relations = [("a", f"r{n}", "a") for n in range(40)]
    layer = rgnn.HGTConv(8, 8, (["a"], relations), heads=1)

    def chosen(num_nodes: int) -> bool:
        sizes = {"a": num_nodes}
        ends = torch.arange(400) % num_nodes
        graph = rgnn.Graph(
            torch.stack([ends, ends.flip(0)]),
            torch.arange(400) % 40,
            num_nodes=num_nodes,
            num_relations=40,
        )
        return layer._should_multiply_weights_first(graph, sizes)

    assert not chosen(320)  # 40 products of an 8 x 8 matrix, as long as 320 rows
    assert chosen(321)


def test_hgt_projects_nodes_first_where_a_graphs_relations_begin_elsewhere():
    """Each node has the projection of its own type, whatever the relation says."""
    names, relations = ["a", "b"], [("a", "to", "b"), ("b", "to", "a")]
    layer = rgnn.HGTConv(8, 8, (names, relations))
    x = dict(zip(names, torch.randn(400, 8).split([150, 250]), strict=True))
    for first in (149, 150):  # the last node of a, and the first of b
        edge_index = torch.stack([torch.tensor([first, 399]), torch.tensor([399, 0])])
        graph = rgnn.Graph(edge_index, torch.arange(2), num_nodes=400)
        is_chosen = layer._should_multiply_weights_first(graph, {"a": 150, "b": 250})
        assert is_chosen == (first == 149)
        linear = layer.kqv_lin.lins["a" if first < 150 else "b"]
        value = linear(torch.cat(list(x.values()))[first])[16:] @ layer.v_rel.weight[0]
        out = layer.out_lin("b", torch.nn.functional.gelu(value))
        gate = layer.skip["b"].sigmoid()
        torch.testing.assert_close(layer(x, graph)["b"][-1], gate * out + (1 - gate) * x["b"][-1])


def test_a_graph_does_as_well_as_its_tensors():
    layer = rgnn.RGCNConv(6, 4, R)
    x = torch.randn(N, 6)
    assert torch.equal(layer(x, GRAPH), layer(x, EDGES, TYPES))


def test_hetero_data_as_a_graph_does_as_well_as_its_edges():
    data = pytest.importorskip("torch_geometric.data").HeteroData()
    for name, length in SIZES.items():
        data[name].num_nodes = length
    for edge_type, edge_index in hetero_edges().items():
        data[edge_type].edge_index = edge_index
    layer = rgnn.HGTConv(5, 8, data.metadata(), heads=2)
    x = {name: torch.randn(length, 5) for name, length in SIZES.items()}
    with_graph = layer(x, rgnn.Graph.from_pyg(data))
    for name, h in layer(x, hetero_edges()).items():
        assert torch.equal(h, with_graph[name])


def test_tensors_that_do_not_count_changes_make_a_new_graph_each_time():
    layer = rgnn.RGCNConv(6, 4, R)
    x = torch.randn(N, 6)
    with torch.inference_mode():
        edge_index = EDGES.clone()
        first = layer(x, edge_index, TYPES)
        edge_index[:, 0] = (edge_index[:, 0] + 1) % N
        assert not torch.equal(layer(x, edge_index, TYPES), first)
    torch.testing.assert_close(first, layer(x, EDGES, TYPES).detach())


def test_layers_can_be_pickled_after_use():
    layer = rgnn.RGATConv(6, 4, R)
    x = torch.randn(N, 6)
    result = layer(x, EDGES, TYPES)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x, EDGES, TYPES), result)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rgnn.RGCNConv(6, 4, 2, aggr="max"), "aggr must be"),
        (lambda: rgnn.RGCNConv(6, 4, 2, num_bases=2, num_blocks=2), "exclude each other"),
        (lambda: rgnn.RGCNConv(6, 4, 2, num_blocks=4), "must be multiples of num_blocks 4"),
        (lambda: rgnn.RGCNConv(6, 4, 2, num_blocks=0), "num_blocks is 0, but must be at least 1"),
        (lambda: rgnn.RGATConv(6, 4, 2, heads=0), "heads is 0, but must be at least 1"),
        (lambda: rgnn.HGTConv(6, 4, METADATA, heads=0), "heads is 0, but must be at least 1"),
        (lambda: rgnn.RGATConv(6, 4, 2, attention_mechanism="x"), "attention_mechanism must be"),
        (lambda: rgnn.RGATConv(6, 4, 2, dropout=1.5), "dropout must be a probability"),
        (lambda: rgnn.RGATConv(6, 4, 2, dim=2), "dim=2 is not supported"),
        (
            lambda: rgnn.RGCNConv(6, 4, 2, flow="target_to_source"),
            r"flow='target_to_source' is not supported .* pass edge_index.flip\(0\)",
        ),
        (lambda: rgnn.HGTConv(6, 4, METADATA, aggr="max"), "aggr='max' is not supported by HGT"),
        (lambda: rgnn.RGATConv(6, 4, 2, mod="scaled"), "mod='scaled' is not supported"),
        (lambda: rgnn.RGATConv(6, 4, 2, attention_mode="x"), "attention_mode must be"),
        (lambda: rgnn.RGATConv(6, 4, 2, num_blocks=5), "must be multiples of num_blocks 5"),
        (lambda: rgnn.HGTConv(6, 5, METADATA, heads=2), "must be a multiple of heads 2"),
    ],
)
def test_wrong_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_options_of_message_passing_may_be_given_at_their_defaults():
    options = {"flow": "source_to_target", "node_dim": 0, "decomposed_layers": 1}
    rgnn.RGCNConv(6, 4, 2, **options)
    rgnn.RGATConv(6, 4, 2, aggr="add", **options)
    rgnn.HGTConv(6, 4, METADATA, **options)
    whole = np.int64(2)
    assert rgnn.RGATConv(6, 4, R, heads=whole)(torch.ones(N, 6), GRAPH).shape == (N, 8)
    with pytest.raises(TypeError, match=r"heads is 2.0 of type float, but must be a whole number"):
        rgnn.RGATConv(6, 4, 2, heads=2.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="RGATConv got an unexpected keyword argument 'droput'"):
        rgnn.RGATConv(6, 4, 2, droput=0.5)
    with pytest.raises(TypeError, match=r"in_channels of RGCNConv .* got \(6, 4\). Put two sets"):
        rgnn.RGCNConv((6, 4), 4, 2)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"edge_attr": torch.ones(len(TYPES), 3)}, "make the layer with edge_dim=3"),
        ({"size": (N, N + 1)}, r"size is \(12, 13\), and x and the graph are of one set"),
    ],
)
def test_what_an_attention_layer_was_not_made_for_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        rgnn.RGATConv(6, 4, R)(torch.randn(N, 6), GRAPH, **options)


def test_features_of_other_edges_are_refused():
    layer = rgnn.RGATConv(6, 4, R, edge_dim=2)
    with pytest.raises(ValueError, match=rf"edge_attr must have shape \({len(TYPES)}, 2\)"):
        layer(torch.randn(N, 6), GRAPH, edge_attr=torch.ones(R, 2))


def test_wrong_graphs_are_refused():
    layer, x = rgnn.RGCNConv(6, 4, R + 1), torch.randn(N, 6)
    with pytest.raises(ValueError, match=f"the graph has {R} relations and the layer {R + 1}"):
        layer(x, GRAPH)
    with pytest.raises(ValueError, match="give num_bases instead of num_blocks"):
        rgnn.RGCNConv(N, 4, R, num_blocks=2)(None, GRAPH)
    with pytest.raises(ValueError, match=f"the graph has {N} nodes, but .* in_channels=6"):
        rgnn.RGCNConv(6, 4, R)(None, GRAPH)
    with pytest.raises(ValueError, match=r"x holds 6, but .* in_channels=6 entities"):
        rgnn.RGCNConv(6, 4, R)(torch.full((N,), 6), GRAPH)
    with pytest.raises(ValueError, match=rf"x of integers must have shape \({N},\)"):
        rgnn.RGCNConv(6, 4, R)(torch.zeros(N, 6, dtype=torch.int64), GRAPH)
    with pytest.raises(TypeError, match=r"x, .* must hold integers; got torch.bool"):
        rgnn.RGCNConv(6, 4, R)(torch.zeros(N, dtype=torch.bool), GRAPH)
    with pytest.raises(TypeError, match="edge_type is missing"):
        layer(x, EDGES)
    with pytest.raises(TypeError, match="leave it out"):
        layer(x, GRAPH, TYPES)
    hgt, features = rgnn.HGTConv(5, 8, METADATA), {n: torch.randn(s, 5) for n, s in SIZES.items()}
    with pytest.raises(ValueError, match="metadata has not"):
        hgt(features, {("author", "knows", "author"): EDGES[:, :0]})
    with pytest.raises(ValueError, match=r"'paper'\)\] holds 7, and there are 7 nodes of"):
        hgt(features, {("author", "writes", "paper"): torch.tensor([[0], [7]])})
    with pytest.raises(ValueError, match="x_dict 14 nodes and the layer 3 relations"):
        hgt(features, GRAPH)


def test_hgt_without_edges():
    x = {name: torch.randn(length, 5) for name, length in SIZES.items()}
    assert rgnn.HGTConv(5, 8, (list(SIZES), []))(x, {}) == {}
    ours, theirs = rgnn.HGTConv(5, 8, METADATA), pyg.HGTConv(5, 8, METADATA)
    ours.load_state_dict(theirs.state_dict())
    empty = dict.fromkeys(METADATA[1], EDGES[:, :0])
    for edges in ({}, empty):
        for name, h in ours(x, edges).items():
            torch.testing.assert_close(h, theirs(x, empty)[name])


def test_hgt_of_one_node_type_makes_no_copy_of_the_projections(monkeypatch):
    layer = rgnn.HGTConv(5, 8, (["a"], [("a", "to", "a")]))
    edges = torch.tensor([[0, 1], [1, 2]])
    expected = layer({"a": torch.ones(3, 5)}, {("a", "to", "a"): edges})
    graph = rgnn.Graph(edges, torch.zeros(2, dtype=torch.int64), num_nodes=3)
    sizes = []
    cat = torch.cat
    monkeypatch.setattr(
        torch, "cat", lambda parts, *a, **k: sizes.append(parts[0].shape) or cat(parts, *a, **k)
    )
    assert torch.equal(layer({"a": torch.ones(3, 5)}, graph)["a"], expected["a"])
    assert (1, 1) in sizes and (3, 24) not in sizes  # what is joined are the relations' factors


def test_attention_scores_need_no_projection_of_the_destinations():
    layer = rgnn.RGATConv(6, 4, R, heads=2)
    x = torch.randn(N, 6)
    graph = random_graph(40, 2000)
    plan = rgnn.layers._rgat.rgat.explain(
        graph, x[:1].expand(40, 6), layer.weight, None, layer.q, layer.k, None, None, 2, True, 0.2,
        "destination",
    )  # fmt: skip
    reordered = [d for d in plan.decisions if d.rewrite == "reorder"]
    assert sorted(d.applied for d in reordered) == [False, True]
    (rejected,) = [d for d in reordered if not d.applied]
    assert "needed elsewhere" in rejected.reason


def test_the_three_layers_are_at_most_45_lines_of_the_language():
    num_lines = 0
    for function in (rgnn.layers.rgcn, rgnn.layers.rgat, rgnn.layers.hgt):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function.__wrapped__))).body
        assert isinstance(definition, ast.FunctionDef)
        begin = definition.lineno - len(definition.decorator_list)
        doc = definition.body[0]
        assert definition.end_lineno is not None and doc.end_lineno is not None
        num_lines += definition.end_lineno - begin + 1 - (doc.end_lineno - doc.lineno + 1)
    assert num_lines <= 45


def test_layers_with_other_metadata_do_not_share_a_graph_of_the_same_edges():
    edges = hetero_edges()
    x = {name: torch.randn(length, 5) for name, length in SIZES.items()}
    names, edge_types = METADATA
    for order in (edge_types, edge_types[::-1], [*edge_types, ("field", "of", "paper")]):
        ours, theirs = (conv(5, 8, (names, order)) for conv in (rgnn.HGTConv, pyg.HGTConv))
        ours.load_state_dict(theirs.state_dict())
        # PyG takes the dictionary's order for that of its weights.
        expected = theirs(
            x, {edge_type: edges[edge_type] for edge_type in order if edge_type in edges}
        )
        for name, h in ours(x, edges).items():
            torch.testing.assert_close(h, expected[name])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[0.0]], EDGES, TYPES), "x must be one tensor with a row for each node; got list"),
        ((torch.randn(N, 6), EDGES.tolist(), TYPES), "edge_index must be a tensor of integers"),
        ((torch.randn(N, 6), EDGES.float(), TYPES), "edge_index must hold integers"),
    ],
)
def test_what_is_no_tensor_is_refused_by_name(arguments, message):
    for layer in (rgnn.RGCNConv(6, 4, R), rgnn.RGATConv(6, 4, R)):
        with pytest.raises(TypeError, match=message):
            layer(*arguments)


def test_features_of_each_node_type_are_asked_for():
    with pytest.raises(ValueError, match=r"x_dict has no .'field'., which metadata"):
        rgnn.HGTConv(5, 8, METADATA)({"paper": EDGES, "author": EDGES}, hetero_edges())
