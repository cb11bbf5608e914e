"""Dynamic batches compute what running node by node computes, values and gradients."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.batching import DynamicBatcher, TypedGraph
from penstock.batching._meter import measured_peak
from penstock.batching.dynamic import _schedule
from penstock.errors import CapacityError

WIDTH = 6


class Leaf(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.words, self.linear = nn.Embedding(20, width), nn.Linear(width, 2 * width)

    def forward(self, word):
        h, c = self.linear(self.words(word)).chunk(2, 1)
        return h.tanh(), c.tanh()


class Node(nn.Module):
    """Any number of children, each with a gate of its own by its place."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.gates, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, *children):
        h = self.mix(sum((k + 1) * child[0] for k, child in enumerate(children)))
        i, o, f = self.gates(h).chunk(3, 1)
        c = i.sigmoid() * h.tanh() + sum(f.sigmoid() * child[1] for child in children)
        return o.sigmoid() * c.tanh(), c


class Classify(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.linear = nn.Linear(width, 3)

    def forward(self, state, shift):
        return self.linear(state[0]) + shift[:, None]


def cells(width=WIDTH, dtype=torch.float64):
    torch.manual_seed(0)
    made = {"leaf": Leaf(width), "node": Node(width), "class": Classify(width)}
    return {kind: cell.to(dtype) for kind, cell in made.items()}


def random_graph(source, num_nodes, shared=True):
    """Leaves, inner nodes of one to three children, and classifiers of some of them."""
    graph, states = TypedGraph(), []
    for _ in range(num_nodes):
        if len(states) < 2 or source.random() < 0.4:
            states.append(graph.add("leaf", inputs=[source.randrange(20)]))
        else:
            count = source.randint(1, 3)
            children = [source.randrange(len(states)) for _ in range(count)]
            read = [states[k] for k in children]
            if not shared:
                for k in sorted(set(children), reverse=True):
                    states.pop(k)
            states.append(graph.add("node", *read))
        if source.random() < 0.5:
            graph.add("class", states[-1], inputs=[source.random()])
    graph.add("class", states[-1], inputs=[0.0])
    return graph


def one_by_one(made, graph):
    """The output of every node, each cell called for one node."""
    values, seen = [], {}
    for node in range(len(graph)):
        code = int(graph.nodes.types[node])
        kind, num_arguments, _ = graph.signatures[code]
        reads = graph.nodes.flat[graph.nodes.starts[node] : graph.nodes.starts[node + 1]]
        assert len(reads) == num_arguments
        place = seen[code] = seen.get(code, -1) + 1
        inputs = [each[place][None] for each in graph.inputs.get(code, ())]
        values.append(made[kind](*(values[read] for read in reads), *inputs))
    return values


def kinds_of(graph):
    return [graph.signatures[code][0] for code in graph.nodes.types.tolist()]


def losses(graphs, made, batcher):
    """The same loss of all classes and all states, one by one and batched."""
    classes, states = [], []
    for graph in graphs:
        values = one_by_one(made, graph)
        for value, kind in zip(values, kinds_of(graph), strict=True):
            (classes if kind == "class" else states).append(value)
    alone = torch.cat(classes).square().sum() + sum(h.sum() * 2 + c.cos().sum() for h, c in states)
    outputs = batcher(graphs)
    numbers = [kind != "class" for graph in graphs for kind in kinds_of(graph)]
    h, c = outputs.select([node for node, is_state in enumerate(numbers) if is_state])
    together = outputs.of("class").square().sum() + 2 * h.sum() + c.cos().sum()
    return alone, together, outputs


def gradients(loss, made, **options):
    parameters = [each for cell in made.values() for each in cell.parameters()]
    return torch.autograd.grad(loss, parameters, allow_unused=True, **options)


def assert_equal(left, right):
    for mine, theirs in zip(left, right, strict=True):
        if mine is None or theirs is None:
            for each in (mine, theirs):
                assert each is None or not each.any()
        else:
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(2, 30), min_size=1, max_size=5),
    seed=st.integers(0, 10**6),
    shared=st.booleans(),
    max_bytes=st.sampled_from([None, 1 << 20]),
)
def test_values_and_gradients_are_those_of_one_by_one(sizes, seed, shared, max_bytes):
    source = random.Random(seed)
    graphs = [random_graph(source, size, shared) for size in sizes]
    made = cells()
    batcher = DynamicBatcher(made, max_bytes=max_bytes)
    alone, together, outputs = losses(graphs, made, batcher)
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-10)
    expected = gradients(alone, made)
    assert_equal(gradients(together, made, retain_graph=True), expected)
    assert outputs.report.num_batches >= outputs.report.lower_bound
    # Once more over the same graph: nothing is left of the first pass.
    assert_equal(gradients(together, made), expected)


def test_order_of_selection_is_the_callers_and_graphs_are_found():
    source = random.Random(1)
    graphs = [random_graph(source, 12) for _ in range(3)]
    made = cells()
    outputs = DynamicBatcher(made)(graphs)
    values = [value for graph in graphs for value in one_by_one(made, graph)]
    firsts = outputs.first_nodes.tolist()
    assert firsts == [0, *[sum(map(len, graphs[: k + 1])) for k in range(3)]]
    torch.testing.assert_close(
        outputs.last(), torch.cat([values[end - 1] for end in firsts[1:]]), rtol=1e-10, atol=1e-10
    )
    states = [k for k, v in enumerate(values) if isinstance(v, tuple)]
    source.shuffle(states)
    assert_equal(
        outputs.select(states), [torch.cat([values[k][part] for k in states]) for part in (0, 1)]
    )
    with pytest.raises(ValueError, match="of types with cells that return the same shapes"):
        outputs.select([0, firsts[1] - 1])
    with pytest.raises(ValueError, match="between 0 and"):
        outputs.select([firsts[-1]])
    with pytest.raises(ValueError, match="no node has the type"):
        outputs.of("nothing")


def chain(length):
    graph = TypedGraph()
    inputs = [graph.add("leaf", inputs=[k % 20]) for k in range(length)]
    state = inputs[0]
    for each in inputs[1:]:
        state = graph.add("node", state, each)
    graph.add("class", state, inputs=[0.0])
    return graph


def test_chains_gather_nothing():
    report = DynamicBatcher(cells())([chain(8)] * 5).report
    assert report.gathered_bytes == 0 and report.sliced_bytes > 0
    assert report.num_batches == report.lower_bound == 9
    assert "gathered" in str(report) and report.to_dict()["num_graphs"] == 5


def test_gathered_and_sliced_bytes_are_all_operands():
    graphs = [random_graph(random.Random(2), 40)]
    report = DynamicBatcher(cells())(graphs).report
    num_operands = len(graphs[0].nodes.flat)
    assert report.gathered_bytes + report.sliced_bytes == num_operands * 2 * WIDTH * 8


def test_shapes_that_were_run_before_are_not_planned_again():
    batcher = DynamicBatcher(cells())
    first, second = [chain(4), chain(6)], [chain(4), chain(6)]
    assert not batcher(first).report.was_planned
    assert batcher(second).report.was_planned  # other graphs of the same shapes
    assert not batcher([*second, random_graph(random.Random(0), 9)]).report.was_planned


def test_signatures_that_come_later_are_learned():
    made = cells()
    batcher = DynamicBatcher(made)
    batcher(chain(3))
    source = random.Random(3)
    graphs = [random_graph(source, 20), chain(3)]
    alone, together, _ = losses(graphs, made, batcher)
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-10)


def test_graphs_come_from_arrays():
    made = cells()
    words = torch.tensor([3, 5, 7])
    graph = TypedGraph.from_arrays(
        ["leaf", "leaf", "node", "leaf", "node", "class"],
        [[], [], [0, 1], [], [2, 3], [4]],
        {"leaf": words, "class": [torch.zeros(1, dtype=torch.float64)]},
    )
    torch.testing.assert_close(
        DynamicBatcher(made)(graph).last(), one_by_one(made, graph)[-1], rtol=1e-10, atol=1e-10
    )
    with pytest.raises(ValueError, match="no node can be added"):
        graph.add("leaf", inputs=[1])
    with pytest.raises(ValueError, match=r"inputs of 'leaf' must have one row .* its 1 nodes"):
        TypedGraph.from_arrays(["leaf"], [[]], {"leaf": words})
    with pytest.raises(ValueError, match="one entry per node, 1; got 2"):
        TypedGraph.from_arrays(["leaf"], [[], []])


def test_inputs_are_differentiable():
    vectors = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)

    class Take(nn.Module):
        def forward(self, vector):
            return vector.sin()

    class Add(nn.Module):
        def forward(self, left, right):
            return left * right

    graph = TypedGraph()
    leaves = [graph.add("take", inputs=[vector]) for vector in vectors]
    first = graph.add("add", leaves[3], leaves[1])
    graph.add("add", graph.add("add", first, leaves[0]), leaves[2])
    loss = DynamicBatcher({"take": Take(), "add": Add()})([graph]).last().sum()
    expected = vectors.sin().prod(0).sum()
    assert_equal(torch.autograd.grad(loss, [vectors]), torch.autograd.grad(expected, [vectors]))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own
def test_cells_may_be_compiled():
    made = cells(dtype=torch.float32)
    compiled = {kind: torch.compile(cell, backend="aot_eager") for kind, cell in made.items()}
    # Batches of several sizes, and nodes of one child and of two: each is compiled.
    graphs = [chain(length) for length in (3, 5, 5)]
    graphs[0].add("class", graphs[0].add("node", 2), inputs=[0.5])
    outputs, expected = DynamicBatcher(compiled)(graphs), DynamicBatcher(made)(graphs)
    torch.testing.assert_close(outputs.of("class"), expected.of("class"))
    mine = gradients(outputs.of("class").sum(), made)
    for left, right in zip(mine, gradients(expected.of("class").sum(), made), strict=True):
        torch.testing.assert_close(left, right)
    batcher = DynamicBatcher(made)
    around = torch.compile(lambda: batcher(graphs).of("class") * 2, backend="eager")
    torch.testing.assert_close(around(), expected.of("class") * 2)


@pytest.mark.parametrize("training", [True, False])
def test_a_budget_holds_and_changes_nothing(training):
    source = random.Random(5)
    graphs = [random_graph(source, 60, shared=False) for _ in range(24)]
    if not training:  # where outputs are little beside what a cell takes
        graphs = [chain(2)] * 300
    made = cells(width=64)
    free = DynamicBatcher(made)
    peaks, results = {}, {}

    def step(batcher):
        def run():
            outputs = batcher(graphs)
            loss = outputs.last().square().sum()
            if training:
                results[batcher.max_bytes] = gradients(loss, made), outputs.report
            else:
                results[batcher.max_bytes] = [loss], outputs.report

        return run

    with torch.set_grad_enabled(training):
        step(free)()
        peaks[None] = measured_peak(step(free))[0]
        for share in (0.9, 0.75) if training else (0.9,):
            limit = int(share * peaks[None])
            small = DynamicBatcher(made, max_bytes=limit)
            peaks[limit] = measured_peak(step(small))[0]
            kept = sum(each.nbytes for each in results[limit][0] if each is not None)
            assert peaks[limit] - kept <= limit
            report = results[limit][1]
            assert report.num_pieces > report.num_batches or report.num_recomputed > 0
            assert (report.num_recomputed > 0) <= training
            assert_equal(results[limit][0], results[None][0])
    with pytest.raises(CapacityError, match=r"at least .* would do, or run fewer graphs at once"):
        with torch.set_grad_enabled(training):
            DynamicBatcher(made, max_bytes="200KiB")(graphs)


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(2, 40), min_size=1, max_size=5), seed=st.integers(0, 10**6))
def test_outputs_that_are_not_kept_change_nothing(sizes, seed):
    source = random.Random(seed)
    graphs = [random_graph(source, size) for size in sizes]
    batcher = DynamicBatcher(cells())
    expected = batcher(graphs).of("class")
    kept = batcher(graphs, keep=["class"])  # while gradients are recorded
    torch.testing.assert_close(kept.of("class"), expected)
    assert kept.of("class").requires_grad
    with torch.no_grad():
        outputs = batcher(graphs, keep=["class"])
        torch.testing.assert_close(outputs.of("class"), expected, rtol=1e-10, atol=1e-10)
        assert outputs.report.output_bytes <= kept.report.output_bytes
    with pytest.raises(ValueError, match=r"types \['leaf'\], whose outputs were not kept"):
        outputs.of("leaf")


@torch.no_grad()
def test_freed_outputs_make_room_below_a_budget():
    made = cells(width=64)
    batcher = DynamicBatcher(made)
    graphs = [chain(60)] * 8
    whole = batcher(graphs)
    outputs = batcher(graphs, keep=["class"])
    # Two states of every chain and its leaves, instead of all.
    assert outputs.report.output_bytes < 0.6 * whole.report.output_bytes
    small = DynamicBatcher(made, max_bytes=int(0.9 * whole.report.output_bytes))
    with pytest.raises(CapacityError):
        small(graphs)
    result = []
    peak, _ = measured_peak(lambda: result.append(small(graphs, keep=["class"]).last()))
    assert small.max_bytes is not None and peak <= small.max_bytes
    torch.testing.assert_close(result[0], whole.last(), rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match=r"keep must name types of \['leaf'.*got \['x'\]"):
        batcher(graphs, keep=["x"])


def test_numpy_plans_where_there_is_no_compiler(monkeypatch):
    source = random.Random(6)
    graphs = [random_graph(source, 30) for _ in range(3)]
    made = cells()
    expected = DynamicBatcher(made)(graphs)
    assert expected.report.planned_by == "C++"
    monkeypatch.setattr(_schedule, "load_library", lambda: None)
    alone, together, outputs = losses(graphs, made, DynamicBatcher(made))
    assert outputs.report.planned_by == "NumPy"
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-10)
    assert_equal(gradients(together, made), gradients(alone, made))
    with torch.no_grad():
        kept = DynamicBatcher(made)(graphs, keep=["class"])
    torch.testing.assert_close(kept.of("class"), expected.of("class"), rtol=1e-10, atol=1e-10)


def test_what_cannot_run_is_refused():
    made = cells()

    class Pair(nn.Module):
        def forward(self, left, right):
            return left[0] + right[0]

    batcher = DynamicBatcher({**made, "pair": Pair()})
    with pytest.raises(ValueError, match=r"no cell for nodes of type 'x'; cells has \['leaf'"):
        batcher(TypedGraph.from_arrays(["x"], [[]], {"x": torch.zeros(1)}))
    with pytest.raises(ValueError, match=r"'pair' has 1 arguments and 0 inputs, but its cell"):
        batcher(TypedGraph.from_arrays(["leaf", "pair"], [[], [0]], {"leaf": torch.tensor([1])}))
    with pytest.raises(ValueError, match="neither arguments nor inputs"):
        batcher(TypedGraph.from_arrays(["leaf"], [[]]))
    with pytest.raises(ValueError, match="graphs is empty"):
        batcher([])
    with pytest.raises(TypeError, match=r"graphs\[0\] must be a TypedGraph; got 1"):
        batcher([1])
    with pytest.raises(ValueError, match="cells is empty"):
        DynamicBatcher({})
    with pytest.raises(TypeError, match=r"cells\['f'\] must be a torch.nn.Module"):
        DynamicBatcher({"f": torch.sin})
    graph = TypedGraph()
    with pytest.raises(ValueError, match="node 0 reads 0"):
        graph.add("node", 0)
    graph.add("leaf", inputs=[1])
    for nodes in ([0, 0], 0.0, "0"):
        with pytest.raises(TypeError, match=r"numbers of nodes; got .*as add\(kind, \*nodes\)"):
            graph.add("node", nodes)
    for inputs in (torch.ones(3), 5, "word"):
        with pytest.raises(TypeError, match="inputs must be a list with an entry for each operand"):
            graph.add("leaf", inputs=inputs)
    assert len(graph) == 1


def test_errors_of_cells_have_a_note_of_their_type():
    graph = TypedGraph()
    for word in (3, 11):
        graph.add("leaf", inputs=[word])
    with pytest.raises(IndexError) as error:
        DynamicBatcher({"leaf": nn.Embedding(10, 4)})(graph)
    assert error.value.__notes__ == ["raised by the cell of 'leaf' for 2 of its nodes"]


def test_cells_that_are_read_alike_have_to_return_alike():
    class Wide(nn.Module):
        def forward(self, word):
            return torch.ones(len(word), WIDTH + 1), torch.ones(len(word), WIDTH)

    class Alone(Wide):
        def forward(self, word):
            return torch.ones(len(word), WIDTH)

    class Flat(Wide):
        def forward(self, word):
            return torch.ones(WIDTH), torch.ones(WIDTH)

    for cell, message in (
        (Wide(), r"cell of 'other' returns .*they must return the same"),
        (Alone(), "returns a tensor, but cells"),
        (Flat(), "one row for each of its 2 nodes"),
    ):
        made = {**cells(dtype=torch.float32), "other": cell}
        graph = TypedGraph()
        first = graph.add("leaf", inputs=[1])
        graph.add("node", graph.add("node", first, first), graph.add("other", inputs=[2]))
        graph.add("node", graph.add("other", inputs=[2]), first)
        with pytest.raises(ValueError, match=message):
            DynamicBatcher(made)(graph)


def test_a_graph_without_nodes_adds_nothing():
    made = cells()
    outputs = DynamicBatcher(made)([TypedGraph(), chain(3), TypedGraph()])
    assert outputs.first_nodes.tolist() == [0, 0, 6, 6]
    with pytest.raises(ValueError, match="a graph without nodes"):
        outputs.last()
    assert DynamicBatcher(made)([TypedGraph()]).report.num_batches == 0


def test_double_backward_is_refused():
    outputs = DynamicBatcher(made := cells())(chain(3)).last()
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        gradients(outputs.square().sum(), made, create_graph=True)
