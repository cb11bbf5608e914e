"""The language: what it says, and what it refuses, at the line of the user's that said it."""

from __future__ import annotations

import functools
import inspect
import math
import warnings

import pytest
import torch

from _relational import hgt_body, random_graph, random_tensor, rgat_body, rgcn_body
from penstock import rgnn
from penstock.rgnn import TraceError, combine, concat, dot, edge_mean, edge_softmax

GRAPH = random_graph()
N, E, R, T = GRAPH.num_nodes, GRAPH.num_edges, GRAPH.num_relations, GRAPH.num_node_types
SRC, DST = GRAPH.edge_index
TYPE = GRAPH.edge_type


def x(*shape: int) -> torch.Tensor:
    return random_tensor(*shape).detach()


def run(body, *arguments):
    """A body's result as an ordinary call, checked against the reference."""
    function = rgnn.compile(body)
    result = function(GRAPH, *arguments)
    torch.testing.assert_close(result, function.to_torch()(GRAPH, *arguments))
    return result


def summed(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.zeros(N, *values.shape[1:], dtype=values.dtype).index_add(0, index, values)


def test_the_three_layers_take_at_most_45_lines():
    sources = [inspect.getsource(body) for body in (rgcn_body, rgat_body, hgt_body)]
    assert sum(len(source.strip().splitlines()) for source in sources) <= 45


def test_sources_and_destinations_are_read_and_summed_to():
    values = x(N, 3)
    torch.testing.assert_close(
        run(lambda g, v: g.sum_to_dst(g.edges.src(v)), values), summed(values[SRC], DST)
    )
    torch.testing.assert_close(
        run(lambda g, v: g.sum_to_src(g.edges.dst(v)), values), summed(values[DST], SRC)
    )


def test_edge_tensors_come_and_go_in_the_given_order():
    features = x(E, 3)
    doubled = run(lambda g, f: g.edges(f) * 2, features)
    torch.testing.assert_close(doubled, features * 2)
    torch.testing.assert_close(
        run(lambda g, f: g.sum_to_dst(g.edges(f)), features), summed(features, DST)
    )


def test_typed_weights_are_those_of_the_row():
    values, by_relation, by_type = x(N, 3), x(R, 3, 5), x(T, 3, 5)
    expected = torch.einsum("ek,ekn->en", values[SRC], by_relation[TYPE])
    found = run(lambda g, v, W: g.edges.src(v) @ W[g.edges.type], values, by_relation)
    torch.testing.assert_close(found, expected)
    node_type = GRAPH.index(rgnn.spaces.NODE_TYPE_OF).long()
    expected = torch.einsum("nk,nkm->nm", values, by_type[node_type])
    found = run(lambda g, v, V: g.nodes(v) @ V[g.nodes.type], values, by_type)
    torch.testing.assert_close(found, expected)


def test_heads_of_weights_make_heads_of_values():
    values, weights, attention = x(N, 3), x(R, 2, 3, 5), x(R, 2, 5)

    def body(g, v, W, a):
        return dot(g.edges.src(v) @ W[g.edges.type], a[g.edges.type])

    expected = torch.einsum("ek,ehkn,ehn->eh", values[SRC], weights[TYPE], attention[TYPE])
    torch.testing.assert_close(run(body, values, weights, attention), expected)


def test_heads_split_merge_and_average():
    values = x(N, 6)
    merged = run(lambda g, v: g.nodes(v).heads(2).merge_heads() * 1.0, values)
    torch.testing.assert_close(merged, values)
    total = run(lambda g, v: g.nodes(v).heads(2).sum_heads(), values)
    torch.testing.assert_close(total, values.view(N, 2, 3).sum(1))
    mean = run(lambda g, v: g.nodes(v).heads(2).mean_heads(), values)
    torch.testing.assert_close(mean, values.view(N, 2, 3).mean(1))


def test_a_scalar_per_head_scales_its_vector():
    scalars, vectors = x(E, 2), x(E, 2, 3)
    found = run(lambda g, s, v: g.edges(s) * g.edges(v), scalars, vectors)
    torch.testing.assert_close(found, scalars[:, :, None] * vectors)


def test_bases_combine_before_and_after_indexing():
    values, coefficients, bases = x(N, 3), x(R, 2), x(2, 3, 5)
    weights = torch.einsum("rb,bkn->rkn", coefficients, bases)
    expected = torch.einsum("ek,ekn->en", values[SRC], weights[TYPE])

    def before(g, v, c, B):
        return g.edges.src(v) @ combine(c, B)[g.edges.type]

    def after(g, v, c, B):
        return g.edges.src(v) @ combine(c[g.edges.type], B)

    for body in (before, after):
        torch.testing.assert_close(run(body, values, coefficients, bases), expected)


def test_arithmetic_before_indexing_is_done_once_per_type():
    values, weights = x(N, 3), x(R, 3, 5)

    def body(g, v, W):
        return g.edges.src(v) @ rgnn.tanh(W * 0.5 + W)[g.edges.type]

    expected = torch.einsum("ek,ekn->en", values[SRC], (weights * 1.5).tanh()[TYPE])
    torch.testing.assert_close(run(body, values, weights), expected)
    program = rgnn.compile(body)._trace_call(GRAPH, (values, weights), {})[0].program
    assert {node.space.value for node in program.nodes if node.op == "tanh"} == {"relation"}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda v: v + 2, lambda v: v + 2),
        (lambda v: 2 - v, lambda v: 2 - v),
        (lambda v: v - 2, lambda v: v - 2),
        (lambda v: v / 4, lambda v: v / 4),
        (lambda v: 3 / (v * v + 1), lambda v: 3 / (v * v + 1)),
        (lambda v: -v, lambda v: -v),
        (rgnn.exp, torch.exp),
        (lambda v: rgnn.log(v * v), lambda v: torch.log(v * v)),
        (rgnn.tanh, torch.tanh),
        (rgnn.sigmoid, torch.sigmoid),
        (rgnn.relu, torch.relu),
        (lambda v: rgnn.leaky_relu(v, 0.3), lambda v: torch.nn.functional.leaky_relu(v, 0.3)),
        (lambda v: concat(v, v[1:]), lambda v: torch.cat([v, v[:, 1:]], 1)),
        (lambda v: v[:2], lambda v: v[:, :2]),
    ],
)
def test_elementwise_operators_are_torchs(ours, theirs):
    values = x(N, 3)
    torch.testing.assert_close(run(lambda g, v: ours(g.nodes(v)), values), theirs(values))


@pytest.mark.parametrize("within", ["destination", "relation"])
def test_softmax_sums_to_one_within_its_group_however_large_the_scores(within):
    scores = x(E, 2) * 1e4  # exp of these overflows
    weights = run(lambda g, s: edge_softmax(g.edges(s), within=within), scores)
    groups = DST if within == "destination" else DST * R + TYPE
    for group in groups.unique():
        of_group = groups == group
        expected = torch.softmax(scores[of_group], 0)
        torch.testing.assert_close(weights[of_group], expected)


@pytest.mark.parametrize("within", ["destination", "relation"])
def test_mean_divides_by_the_size_of_the_group(within):
    ones = torch.ones(E, dtype=torch.float64)
    shares = run(lambda g, v: edge_mean(g.edges(v), within=within), ones)
    groups = DST if within == "destination" else DST * R + TYPE
    sizes = torch.tensor([(groups == group).sum() for group in groups])
    torch.testing.assert_close(shares, 1 / sizes.double())


def test_constants_may_be_branched_on():
    @rgnn.compile
    def scaled(g, v, mode, factor=None):
        result = g.nodes(v)
        if mode == "double":
            result = result * 2
        return result if factor is None else result * factor

    values = x(N, 3)
    torch.testing.assert_close(scaled(GRAPH, values, "double"), values * 2)
    torch.testing.assert_close(scaled(GRAPH, values, mode="plain"), values)
    torch.testing.assert_close(scaled(GRAPH, values, "plain", 3), values * 3)
    torch.testing.assert_close(scaled(GRAPH, values, "plain", 1), values)
    with pytest.raises(TraceError, match="mul of bool True"):  # not what was traced for 1
        scaled(GRAPH, values, "plain", True)


def test_zeros_of_both_signs_are_two_numbers():
    values = torch.ones(N, 1)
    inverse = rgnn.compile(lambda g, v, zero: 1 / (g.nodes(v) * zero), backend="torch")
    both = rgnn.compile(
        lambda g, v: (1 / (g.nodes(v) * 0.0), 1 / (g.nodes(v) * -0.0)), backend="torch"
    )
    for found in ([inverse(GRAPH, values, zero) for zero in (0.0, -0.0)], both(GRAPH, values)):
        assert [each[0].item() for each in found] == [math.inf, -math.inf]


def test_tuples_come_back_as_tuples():
    values = x(N, 3)
    (one,) = rgnn.compile(lambda g, v: (g.nodes(v),))(GRAPH, values)
    torch.testing.assert_close(one, values)
    both = rgnn.compile(lambda g, v: (g.nodes(v), g.edges.src(v)))(GRAPH, values)
    torch.testing.assert_close(both[1], values[SRC])


REFUSED = {
    "branch": (lambda g, v: 2 * v if g.nodes(v) > 0 else v, "branch depends on a tensor's values"),
    "float": (lambda g, v: math.sqrt(g.nodes(v)), "no plain number"),
    "loop": (lambda g, v: list(g.nodes(v)), "cannot be iterated over"),
    "length": (lambda g, v: len(g.nodes(v)), "has no length"),
    "torch": (lambda g, v: torch.relu(g.nodes(v)), "torch's relu does not work on traced"),
    "method": (lambda g, v: g.nodes(v).softmax(0), "has no 'softmax'"),
    "assignment": (lambda g, v: g.nodes(v).__setitem__(0, 1), "values are immutable"),
    "closure": (lambda g, v: g.nodes(v) + torch.ones(3), "passed to it as arguments"),
    "mixed rows": (lambda g, v: g.nodes(v) + g.edges.src(v), "edges and nodes"),
    "sum of nodes": (lambda g, v: g.sum_to_dst(g.nodes(v)), "sum_to_dst needs a value of edges"),
    "two spaces": (lambda g, v: g.nodes(v) @ v, "argument 'v' is used with rows of"),
    "index": (lambda g, v: v[0], "indexed with 0"),
    "feature index": (lambda g, v: g.nodes(v)[1], "only a range of features"),
    "edge matrix": (
        lambda g, v: g.edges.src(v) @ (g.edges.src(v).heads(3) * g.edges.dst(v).heads(3)),
        "@ needs a weight on its right",
    ),
    "unindexed": (lambda g, v: v @ v, "say which rows the left side has"),
    "heads": (lambda g, v: g.nodes(v).heads(2), "do not split into 2 heads"),
    "half a head": (lambda g, v: g.nodes(v).heads(1.5), "num_heads is 1.5 of type float"),
    "coefficients": (lambda g, v: g.nodes(v) * combine(2.0, v), "needs coefficients that are"),
    "nothing": (lambda g, v: concat(), "concat needs values"),
    "merge": (lambda g, v: g.nodes(v).merge_heads(), "have no heads to merge"),
    "mean": (lambda g, v: g.nodes(v).mean_heads(), "have no heads to add up"),
    "within": (lambda g, v: edge_mean(g.edges.src(v), within="node"), "within must be one of"),
    "zero": (lambda g, v: g.nodes(v) / 0, "division by zero"),
    "functional": (
        lambda g, v: torch.nn.functional.softmax(g.nodes(v), -1),
        "torch's softmax does",
    ),
    "dropout": (lambda g, v: torch.nn.functional.dropout(g.nodes(v)), "torch's dropout does not"),
    "norm": (lambda g, v: torch.nn.functional.layer_norm(g.nodes(v), (3,)), "torch's layer_norm"),
    "power": (lambda g, v: g.nodes(v) ** 2, r"have no power; write v \* v"),
    "remainder": (lambda g, v: 5 % g.nodes(v), r"have the operators \+ - \* / @"),
    "absolute": (lambda g, v: abs(g.nodes(v)), r"write relu\(v\) \+ relu\(-v\)"),
    "of the graph": (
        lambda g, v: g.max_to_dst(v),
        r"no 'max_to_dst'; it has edges, nodes, sum_to_d",
    ),
    "of the edges": (
        lambda g, v: g.edges.source(v),
        r"g.edges has no 'source'; it has g.edges.src",
    ),
    "of the nodes": (lambda g, v: g.nodes.src(v), "g.nodes has no 'src'; it has g.nodes.type"),
    "types": (lambda g, v: v[g.edges.type + 1], "nothing can be computed with g.edges.type"),
    "type of a type": (lambda g, v: v[g.nodes.type > 0], "computed with g.nodes.type"),
    "graph": (lambda g, v: len(g), "nothing can be computed with the graph"),
    "argument": (
        lambda g, v: g.sum_to_dst(v),
        r"got argument 'v'; say which rows it has: g.edges.src\(v\) or g.edges\(v\)",
    ),
    "edges": (lambda g, v: v[g.edges], r"indexed with g.edges; .*v\[g.edges.type\]"),
    "end": (lambda g, v: v[g.edges.src], r"indexed with 'g.edges.src'; .*g.edges.src\(v\)"),
    "operand": (lambda g, v: g.nodes(v) + "one", "passed to it as arguments"),
    "returned": (lambda g, v: {"a": g.nodes(v)}, r"must return values .* it returns dict"),
    "python's": (lambda g, v: g.nodes(v) @ math.floor("a"), "must be real number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled_is_refused_at_the_users_line(name):
    body, message = REFUSED[name]
    with pytest.raises(TraceError, match=message) as caught:
        rgnn.compile(body)(GRAPH, x(N, 3))
    line = caught.value.line
    first = body.__code__.co_firstlineno
    assert line.file == __file__
    assert first <= line.number <= first + 2
    assert (
        line.text
        == inspect.getsource(inspect.getmodule(body)).splitlines()[line.number - 1].strip()
    )
    assert str(caught.value).endswith(f"\n{line}")
    assert str(line).startswith(f"{__file__}:{line.number}, in ")


@pytest.mark.parametrize(
    ("body", "shape", "message"),
    [
        (lambda g, v, w: g.nodes(v) @ w, (4, 5), r"@ of rows of shapes \[3\] and \[4, 5\]"),
        (lambda g, v, w: g.nodes(v) + w, (2,), r"shapes \[3\] and \[2\] do not line up"),
        (lambda g, v, w: dot(g.nodes(v), w), (2,), "dot needs two vectors of one length"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_at_the_users_line(body, shape, message):
    with pytest.raises(TraceError, match=message) as caught:
        rgnn.compile(body)(GRAPH, x(N, 3), x(*shape))
    assert caught.value.line.number == body.__code__.co_firstlineno


def test_errors_of_the_users_own_keep_their_type_and_show_the_line():
    def check_width(v):
        raise ValueError(f"width {v.shape[0]}")

    def body(g, v):
        return check_width(g.nodes(v))

    with pytest.raises(ValueError, match="width 3") as caught:
        rgnn.compile(body)(GRAPH, x(N, 3))
    (note,) = caught.value.__notes__
    assert 'raise ValueError(f"width {v.shape[0]}")' in note


def test_no_heads_are_refused_at_the_users_line():
    with pytest.raises(ValueError, match="num_heads is 0, but must be at least 1") as caught:
        rgnn.compile(lambda g, v: g.nodes(v).heads(0))(GRAPH, x(N, 3))
    assert ".heads(0)" in caught.value.__notes__[0]


def test_parameters_may_be_positional_or_named_alone():
    @rgnn.compile
    def scaled(g, v, /, s=2.0, *, t=1.0):
        return g.nodes(v) * s * t

    values = x(N, 3)
    torch.testing.assert_close(scaled(GRAPH, values), 2 * values)
    torch.testing.assert_close(scaled(GRAPH, values, 3.0, t=2.0), 6 * values)


def test_types_that_do_not_occur_are_asked_for_by_name():
    graph = rgnn.Graph(torch.tensor([[0], [1]]), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"V is used with .*; give Graph num_node_types="):
        rgnn.compile(lambda g, v, V: g.nodes(v) * V[g.nodes.type])(graph, x(2, 3), x(4, 3))


def test_a_weight_of_each_relation_that_is_not_indexed_is_warned_of():
    function = rgnn.compile(lambda g, v, W: g.sum_to_dst(g.edges.src(v) @ W))
    with pytest.warns(UserWarning, match=r"W has 4 matrices.* W\[g.edges.type\]"):
        assert function(GRAPH, x(N, 3), x(R, 3, 2)).shape == (N, R, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(GRAPH, x(N, 3), x(R + 1, 3, 2))
        meant = rgnn.compile(lambda g, v, W: g.sum_to_dst(g.edges.src(v).heads(1) @ W))
        meant(GRAPH, x(N, 3), x(R, 3, 2))


IDENTITY = rgnn.compile(lambda g, v: g.nodes(v))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.zeros(2), x(N, 3)), TypeError, "must be a penstock.rgnn.Graph; got Tensor"),
        ((GRAPH, x(N + 1, 3)), ValueError, rf"v is used with one row for each node.*{N}"),
        ((GRAPH, x(N, 3).int()), ValueError, "v must be floating-point; it has dtype torch.int32"),
        ((GRAPH, {}), TypeError, "v must be a tensor, a number, a string or None; got dict"),
        ((GRAPH, x(N, 3).to("meta")), ValueError, "v is on meta and the graph on cpu"),
        ((GRAPH,), TypeError, "missing a required argument: 'v'"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, error, message):
    with pytest.raises(error, match=message):
        IDENTITY(*arguments)


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match=r"backend is 'cuda'; the backends are \['auto', 'torch'"):
        rgnn.compile(lambda g, v: g.nodes(v), backend="cuda")


@pytest.mark.parametrize("given", [torch.nn.Linear(2, 2), functools.partial(len), IDENTITY, "f"])
def test_what_is_no_plain_function_is_refused(given):
    with pytest.raises(TypeError, match=f"plain Python function, got {type(given).__name__}"):
        rgnn.compile(given)


def test_mixed_dtypes_are_refused():
    function = rgnn.compile(lambda g, v, w: g.nodes(v) + w)
    with pytest.raises(ValueError, match=r"w has dtype torch.float32 and v torch.float64"):
        function(GRAPH, x(N, 3), x(3).float())


def test_a_result_that_is_no_value_is_refused():
    with pytest.raises(TypeError, match="must return values of nodes or edges"):
        rgnn.compile(lambda g, v: 3)(GRAPH, x(N, 3))


def test_a_compiled_method_is_refused():
    class Layer:
        @rgnn.compile
        def forward(g, v):
            return g.nodes(v)

    with pytest.raises(TypeError, match="compiled as a method"):
        Layer().forward  # noqa: B018


@pytest.mark.parametrize("backend", ["cpp", "torch", "reference"])
def test_relu_of_infinite_and_negative_numbers_and_its_gradient_are_torchs(backend):
    """Not a product with 0: that is NaN for -inf, -0.0 for -1, and NaN for a gradient of inf."""

    def run(body, v):
        function = rgnn.compile(body, backend="cpp" if backend == "reference" else backend)
        return (function.to_torch() if backend == "reference" else function)(GRAPH, v)

    inf, nan = float("inf"), float("nan")
    values = torch.tensor([[-inf, -1.0, 0.0, 2.0, inf, nan]] * N).double().requires_grad_()
    found, expected = run(lambda g, v: rgnn.relu(g.nodes(v)), values), torch.relu(values)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    inverse = run(lambda g, v: 1 / rgnn.relu(g.nodes(v)), values.detach())
    assert inverse[0, :3].tolist() == [inf] * 3
    weights = torch.tensor([[1.0, inf, nan, inf, 1.0, 1.0]] * N).double()
    gradients = [torch.autograd.grad(one, values, weights)[0] for one in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=0, equal_nan=True)
