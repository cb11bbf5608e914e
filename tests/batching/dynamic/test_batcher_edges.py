"""Dynamic batches at their edges: budgets, autocast, masks, copies, complex cells, equal names."""

from __future__ import annotations

import copy
import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from penstock.batching import DynamicBatcher, TypedGraph
from penstock.batching._meter import measured_peak
from penstock.errors import CapacityError

MIB = 1 << 20


class Mean(nn.Module):
    """Takes as much as its input is long, and returns little."""

    def __init__(self, width=64):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x).tanh().mean(1)


class Mix(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.linear = nn.Linear(2 * width, width)

    def forward(self, left, right):
        return torch.tanh(self.linear(torch.cat([left, right], dim=1)))


def forest(num_nodes, length, width=64, dtype=torch.float32, requires_grad=False):
    """Leaves, whose inputs are the caller's one tensor, and joins of neighbours."""
    inputs = torch.randn(num_nodes, length, width, dtype=dtype, requires_grad=requires_grad)
    types, arguments = ["leaf"] * num_nodes, [[] for _ in range(num_nodes)]
    for node in range(0, num_nodes - 1, 2):
        types.append("join")
        arguments.append([node, node + 1])
    return TypedGraph.from_arrays(types, arguments, {"leaf": inputs})


def peak_of(batcher, graphs):
    """Bytes at the peak of a step beyond the inputs and the gradients of parameters."""
    batcher.zero_grad()

    def step():
        batcher(graphs).of("join").sum().backward()

    peak, _ = measured_peak(step)
    return peak - sum(each.grad.nbytes for each in batcher.parameters())


@pytest.mark.parametrize(
    "changes",
    ["longer inputs", "doubles", "several graphs", "rows", "gradients of inputs", "training mode"],
)
def test_a_budget_holds_from_the_first_run_on_whatever_changes(changes):
    limit = 3 * MIB
    dropped = nn.Sequential(Mean(), nn.Dropout(0.5)).eval()
    cells = {"leaf": dropped if changes == "training mode" else Mean(), "join": Mix()}
    batcher = DynamicBatcher(cells, max_bytes=limit)
    assert peak_of(batcher, forest(8, 2)) <= limit
    if changes == "doubles":
        batcher.double()
        graphs = forest(32, 512 // 4, dtype=torch.float64)
    elif changes == "several graphs":  # whose inputs have to be copied
        graphs = [forest(8, 64) for _ in range(8)]
    elif changes == "rows":
        graphs = TypedGraph()
        leaves = [graphs.add("leaf", inputs=[torch.randn(64, 64)]) for _ in range(48)]
        for left, right in zip(leaves[::2], leaves[1::2], strict=True):
            graphs.add("join", left, right)
    elif changes == "gradients of inputs":
        graphs = forest(40, 64, requires_grad=True)
    elif changes == "training mode":
        batcher.train()
        graphs = forest(64, 128)
    else:
        graphs = forest(64, 512)
    assert peak_of(batcher, graphs) <= limit
    report = batcher(graphs).report
    assert report.num_pieces > report.num_batches or report.num_recomputed


def test_copies_of_inputs_that_exceed_a_budget_are_refused():
    batcher = DynamicBatcher({"leaf": Mean(), "join": Mix()}, max_bytes=3 * MIB)
    whole = forest(64, 512)
    batcher(whole)  # is read where it is
    with pytest.raises(CapacityError, match="run fewer graphs at once"):
        batcher([whole, forest(2, 512)])


def test_measuring_a_cell_leaves_nothing_behind():
    """Three runs for new shapes, none for known ones; buffers and random numbers stay."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.calls, self.fails = 0, False

        def forward(self, x):
            self.calls += 1
            self.seen += len(x)
            random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002
            if self.fails:
                raise RuntimeError("as told")
            return x * 2

    def graph(width):
        return TypedGraph.from_arrays(["leaf"] * 5, [[]] * 5, {"leaf": torch.ones(5, width)})

    cell = Counting()
    batcher = DynamicBatcher({"leaf": cell}, max_bytes=MIB)
    batcher(graph(4))
    assert (cell.calls, int(cell.seen)) == (3 + 1, 5)
    batcher(graph(4))
    assert (cell.calls, int(cell.seen)) == (3 + 2, 10)
    free = DynamicBatcher({"leaf": cell})
    numbers = []
    for each in (free, DynamicBatcher({"leaf": cell}, max_bytes=MIB)):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
        each(graph(4))
        numbers.append((random.random(), np.random.rand(), float(torch.rand(1))))  # noqa: NPY002
    assert numbers[0] == numbers[1]
    seen, cell.fails = int(cell.seen), True
    with pytest.raises(RuntimeError, match="as told"):
        batcher(graph(7))  # while it is measured
    assert int(cell.seen) == seen


@pytest.mark.parametrize("form", ["node by node", "whole", "parts", "array"])
def test_inputs_of_a_reused_graph_are_read_in_each_run(form):
    values = torch.arange(4.0).requires_grad_()
    array = np.arange(4.0)
    if form == "node by node":
        graph = TypedGraph()
        for k in range(4):
            graph.add("leaf", inputs=[values[k]])
    elif form == "array":
        graph = TypedGraph()
        for k in range(4):
            graph.add("leaf", inputs=[array[k : k + 1]])
    elif form == "whole":
        graph = TypedGraph.from_arrays(["leaf"] * 4, [[]] * 4, {"leaf": values})
    else:  # nodes of one type with two signatures
        graph = TypedGraph.from_arrays(
            ["leaf", "leaf", "leaf", "leaf"], [[], [], [0], [1]], {"leaf": values}
        )

    class Double(nn.Module):
        def forward(self, *arguments):
            return 2 * arguments[-1]

    batcher = DynamicBatcher({"leaf": Double()})
    for step in range(3):
        result = batcher(graph).of("leaf")
        assert result.flatten().tolist() == [2.0 * (k + step) for k in range(4)]
        if form != "array":
            (gradient,) = torch.autograd.grad(result.sum(), values)
            assert gradient.tolist() == [2.0] * 4
        with torch.no_grad():
            values.add_(1)
        array += 1


def test_numbers_of_python_become_the_default_type():
    class Copy(nn.Module):
        def forward(self, *inputs):
            return inputs

    graph = TypedGraph()
    graph.add("x", inputs=[0.5, [0.5, 1.5], 3, True, np.float64(2)])
    dtypes = [each.dtype for each in DynamicBatcher({"x": Copy()})(graph).last()]
    single, double = torch.float32, torch.float64
    assert dtypes == [single, single, torch.int64, torch.bool, double]


@pytest.mark.parametrize("number_first", [False, True])
def test_numbers_among_tensors_leave_these_their_gradients(number_first):
    factor = torch.tensor(2.0, requires_grad=True)
    graph = TypedGraph()
    for value in (1.5, factor, 3) if number_first else (factor, 1.5, 3):
        graph.add("x", inputs=[value])
    found = DynamicBatcher({"x": nn.Identity()})(graph).of("x")
    assert sorted(found.tolist()) == [1.5, 2, 3]
    found.square().sum().backward()
    assert factor.grad == 4


@pytest.mark.parametrize("max_bytes", [None, "256KiB"])
def test_gradients_that_cells_pass_on_as_they_are_reach_rows_in_any_order(max_bytes):
    """A sum's terms have the gradient of their sum, which lies in the pool that it is added to."""

    class Add(nn.Module):
        def forward(self, left, right):
            return left + right

    batcher = DynamicBatcher({"leaf": nn.Embedding(3, 64), "add": Add()}, max_bytes=max_bytes)
    graph = TypedGraph()
    leaves = [graph.add("leaf", inputs=[word]) for word in range(3)]
    sums = [graph.add("add", leaves[0], leaves[1]), graph.add("add", leaves[2], leaves[0])]
    graph.add("add", graph.add("add", sums[0], leaves[1]), graph.add("add", sums[1], sums[0]))
    batcher([graph, graph]).last().sum().backward()
    gradient = next(batcher.parameters()).grad
    assert gradient.tolist() == [[6.0] * 64, [6.0] * 64, [2.0] * 64]


@pytest.mark.parametrize("max_bytes", [None, "256KiB"])
def test_autocast_computes_what_it_does_node_by_node(max_bytes):
    """An embedding returns float32 and a linear layer bfloat16, both read by the same cell."""
    torch.manual_seed(0)
    cells = {"word": nn.Embedding(10, 64), "join": Mix(), "class": nn.Linear(64, 3)}
    batcher = DynamicBatcher(cells, max_bytes=max_bytes)
    graph = TypedGraph()
    nodes = [graph.add("word", inputs=[k % 10]) for k in range(40)]
    expected = []
    with torch.autocast("cpu", torch.bfloat16):
        values = [cells["word"](torch.tensor([k % 10])) for k in range(40)]
        while len(nodes) > 1:
            nodes.append(graph.add("join", nodes[0], nodes[1]))
            values.append(cells["join"](values[0], values[1]))
            nodes, values = nodes[2:], values[2:]
            graph.add("class", nodes[-1])
            expected.append(cells["class"](values[-1]))
        outputs = batcher(graph).of("class")
        assert outputs.dtype == torch.bfloat16
        torch.testing.assert_close(outputs, torch.cat(expected), rtol=2e-2, atol=2e-2)
    parameters = list(batcher.parameters())
    mine = torch.autograd.grad(outputs.float().square().sum(), parameters)
    theirs = torch.autograd.grad(torch.cat(expected).float().square().sum(), parameters)
    for left, right in zip(mine, theirs, strict=True):
        assert left.dtype == torch.float32
        assert (left - right).norm() <= 2e-2 * right.norm()


@pytest.mark.parametrize("training", [True, False])
def test_a_budget_holds_under_autocast(training):
    def run():
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(training):
            outputs = batcher(graph).of("join")
        if training:
            outputs.sum().backward()

    batcher = DynamicBatcher({"leaf": Mean(), "join": Mix()}, max_bytes="2MiB")
    for length in (2, 512):
        graph = forest(64, length)
        batcher.zero_grad()
        peak, _ = measured_peak(run)
        grown = sum(each.grad.nbytes for each in batcher.parameters()) if training else 0
        assert peak - grown <= 2 * MIB


def test_nodes_are_selected_by_numbers_or_by_a_mask():
    graph = TypedGraph.from_arrays(["x"] * 5, [[]] * 5, {"x": torch.arange(5.0)})
    outputs = DynamicBatcher({"x": nn.Identity()})(graph)
    mask = [True, False, False, True, False]
    for chosen in (mask, np.array(mask), torch.tensor(mask), [0, 3], torch.tensor([0, 3])):
        assert outputs.select(chosen).tolist() == [0.0, 3.0]
    with pytest.raises(TypeError, match="whole numbers or a mask; got numbers of type float64"):
        outputs.select([0.7, 1.9])
    with pytest.raises(ValueError, match="one truth value for each of the 5 nodes"):
        outputs.select([True, False])
    with pytest.raises(ValueError, match="one or more numbers"):
        outputs.select([False] * 5)


@pytest.mark.parametrize(
    "copied", [lambda each: pickle.loads(pickle.dumps(each)), copy.deepcopy], ids=["pickle", "copy"]
)
def test_a_batcher_that_has_run_can_be_copied(copied):
    batcher = DynamicBatcher({"leaf": Mean(), "join": Mix()}, max_bytes=3 * MIB)
    graph = forest(6, 3)
    expected = batcher(graph).of("join")
    other = copied(batcher)
    torch.testing.assert_close(other(copied(graph)).of("join"), expected)
    assert other.max_bytes == 3 * MIB and not other(forest(4, 3)).report.was_planned


@pytest.mark.parametrize("max_bytes", [None, "16KiB"])
def test_complex_cells_have_gradients(max_bytes):
    class Turn(nn.Module):
        def __init__(self):
            super().__init__()
            self.by = nn.Parameter(torch.randn(8, dtype=torch.complex128))

        def forward(self, x, *rest):
            return x * self.by + sum(rest)

    torch.manual_seed(0)
    cell = Turn()
    x = torch.randn(2, 8, dtype=torch.complex128, requires_grad=True)
    graph = TypedGraph()
    first, second = graph.add("x", inputs=[x[0]]), graph.add("x", inputs=[x[1]])
    graph.add("x", graph.add("x", first, second), second)
    loss = DynamicBatcher({"x": cell}, max_bytes=max_bytes)(graph).last().abs().square().sum()
    expected = cell(cell(cell(x[0]), cell(x[1])), cell(x[1])).abs().square().sum()
    wanted = [x, cell.by]
    for mine, theirs in zip(
        torch.autograd.grad(loss, wanted), torch.autograd.grad(expected, wanted), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_types_are_told_apart_by_what_they_are_not_by_their_text():
    class Kind:
        def __repr__(self):
            return "kind"

    class Add(nn.Module):
        def forward(self, left, right):
            return left + right

    leaf, up, add = Kind(), Kind(), Kind()
    batcher = DynamicBatcher({leaf: nn.Identity(), up: nn.Identity(), add: Add()})
    one, other = TypedGraph(), TypedGraph()
    for graph, last in ((one, up), (other, leaf)):
        first = graph.add(leaf, inputs=[1.0])
        graph.add(last, first) if last is up else graph.add(last, inputs=[5.0])
    assert batcher(one).last().tolist() == [1.0]
    assert batcher(other).last().tolist() == [5.0]
    swapped = TypedGraph()
    swapped.add(up, inputs=[2.0])
    straight = TypedGraph()
    straight.add(leaf, inputs=[3.0])
    assert batcher(swapped).of(up).tolist() == [2.0]
    assert batcher(straight).of(leaf).tolist() == [3.0]


def test_runs_of_several_threads_keep_their_budgets_apart():
    torch.manual_seed(0)
    cells = {"leaf": Mean(), **{f"step {i}": nn.Linear(64, 64) for i in range(6)}}
    batcher = DynamicBatcher(cells, max_bytes=4 * MIB)

    def chains(number: int) -> list[TypedGraph]:
        graphs = []
        for chain in range(20):
            graph = TypedGraph()
            node = graph.add("leaf", inputs=[torch.full((50, 64), float(number + chain))])
            for step in range(12):
                node = graph.add(f"step {number + step % 3}", node)
            graphs.append(graph)
        return graphs

    def run(number: int) -> tuple[torch.Tensor, int]:
        outputs = batcher(chains(number))
        return outputs.last().detach(), outputs.report.num_pieces

    expected = [run(number) for number in range(4)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(run, [0, 1, 2, 3] * 10))
    for number, (values, num_pieces) in enumerate(found):
        assert num_pieces == expected[number % 4][1]
        assert torch.equal(values, expected[number % 4][0])


def pairs_of_words(num_pairs=6):
    graph = TypedGraph()
    words = [graph.add("word", inputs=[word % 5]) for word in range(2 * num_pairs)]
    for left, right in zip(words[::2], words[1::2], strict=True):
        graph.add("join", left, right)
    return graph


class Adding(nn.Module):
    """Adds in place of its first operand, as a slice of the words or a copy of them."""

    def forward(self, left, right):
        return left.add_(right)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_cells_that_change_operands_in_place_are_refused(mode):
    batcher = DynamicBatcher({"word": nn.Embedding(5, 4), "join": Adding()})
    with mode(), pytest.raises(RuntimeError, match="modified") as caught:
        batcher(pairs_of_words())
    assert "have the cell clone() it" in caught.value.__notes__[1]
    doubling = DynamicBatcher({"word": nn.Hardtanh(inplace=True)})
    numbers = TypedGraph.from_arrays(["word"] * 3, [[]] * 3, {"word": torch.arange(3.0)})
    with mode(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        doubling(numbers)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_results_may_be_changed_in_place(mode):
    batcher = DynamicBatcher({"word": nn.Embedding(5, 64), "join": Mix()})
    with mode():
        outputs = batcher(pairs_of_words())
        for nodes in (range(12, 18), [3, 1, 7]):  # a slice, and rows that are gathered
            before = outputs.select(nodes).clone()
            changed = outputs.select(nodes).mul_(2)
            torch.testing.assert_close(outputs.select(nodes), before)
            torch.testing.assert_close(changed, 2 * before)
    if mode is torch.enable_grad:
        weight = batcher.get_parameter("_cells.0.weight")
        ours = torch.autograd.grad(outputs.of("join").mul_(2).sum(), weight)
        theirs = torch.autograd.grad(2 * batcher(pairs_of_words()).of("join").sum(), weight)
        torch.testing.assert_close(ours, theirs)


def test_a_graph_that_ran_in_inference_mode_can_be_trained():
    batcher, graph = DynamicBatcher({"word": nn.Embedding(5, 4)}), TypedGraph()
    for word in range(5):  # numbers that are kept, and read as they lie
        graph.add("word", inputs=[word])
    with torch.inference_mode():
        batcher(graph)
    batcher(graph).of("word").sum().backward()
    assert torch.equal(batcher.get_parameter("_cells.0.weight").grad, torch.ones(5, 4))


def test_a_loss_keeps_no_outputs_after_its_backward_pass():
    batcher = DynamicBatcher({"word": nn.Embedding(5, 64), "join": Mix()})

    def step():
        loss = batcher(pairs_of_words()).of("join").sum()
        loss.backward()
        batcher.zero_grad()
        return loss

    _, kept = measured_peak(step)
    assert kept < 256  # the outputs take 4608 bytes


def test_cells_that_change_their_buffers_are_not_recomputed():
    """They would change them twice, and compute otherwise the second time."""

    class Counting(Mean):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += len(x)
            return super().forward(x)

    graphs = forest(64, 512)
    free = DynamicBatcher({"leaf": Mean(), "join": Mix()}, max_bytes=3 * MIB)
    assert free(graphs).report.num_recomputed
    batcher = DynamicBatcher({"leaf": Counting(), "join": Mix()}, max_bytes=3 * MIB)
    with pytest.raises(CapacityError, match=r"type 'leaf' recomputed .* changes its buffers"):
        batcher(graphs)
    with torch.no_grad():
        batcher(graphs)
    norm = nn.Sequential(nn.Flatten(1), nn.BatchNorm1d(16))
    batcher = DynamicBatcher({"leaf": norm, "join": Mix()}, max_bytes=3 * MIB)
    with pytest.raises(ValueError, match="more than 1 value") as caught:
        batcher(forest(4, 4, width=4))
    assert "raised for one node alone" in caught.value.__notes__[0]


def test_transformations_are_refused():
    batcher = DynamicBatcher({"word": nn.Embedding(5, 64), "join": Mix()})
    graph = pairs_of_words()

    def loss(parameters):
        return torch.func.functional_call(batcher, parameters, (graph,)).of("join").sum()

    with pytest.raises(RuntimeError, match="does not reach into a DynamicBatcher"):
        torch.func.grad(loss)(dict(batcher.named_parameters()))


def test_many_gradients_at_once_are_refused():
    batcher = DynamicBatcher({"word": nn.Embedding(5, 64), "join": Mix()})
    found, weights = batcher(pairs_of_words()).of("join"), list(batcher.parameters())

    def differentiate(gradient):
        return torch.autograd.grad(found, weights, gradient)

    many = torch.ones(2, *found.shape)
    with pytest.raises(RuntimeError, match="take one gradient at a time"):
        torch.func.vmap(differentiate)(many)
    with pytest.raises(RuntimeError, match="take one gradient at a time"):
        torch.autograd.grad(found, weights, many, is_grads_batched=True)


@pytest.mark.parametrize("is_one_graph", [True, False])
def test_inputs_that_do_not_fit_together_are_named(is_one_graph):
    graphs = [TypedGraph(), TypedGraph()]
    for width, graph in enumerate([graphs[0]] * 2 if is_one_graph else graphs):
        graph.add("word", inputs=[torch.zeros(width + 1)])
    with pytest.raises(RuntimeError) as caught:
        DynamicBatcher({"word": nn.Identity()})(graphs)
    assert caught.value.__notes__ == ["raised where inputs of nodes of type 'word' are joined"]
