"""Schedules, held against an independent reading of what a loop nest may do.

The checker executes each kernel as the schedule says: one group of rows after another, one stage
after another, with nothing in memory but what the schedule says is materialised. What is read
before it is there is NaN.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from _relational import LAYERS, graphs, layer_arguments, random_graph, recipes
from penstock import rgnn
from penstock.rgnn import interpreter
from penstock.rgnn.ir import LEAVES, READS
from penstock.rgnn.lowering import Kernel, KernelKind, LoweredProgram, find_fused_outers, lower
from penstock.rgnn.passes import optimize
from penstock.rgnn.spaces import Space

pytestmark = pytest.mark.usefixtures("one_thread")


def lowered_program(function, graph, arguments) -> tuple[LoweredProgram, dict[str, torch.Tensor]]:
    traced, tensors = rgnn.compile(function)._trace_call(graph, arguments, {})
    optimized = optimize(traced.program, graph.counts, wrt=tuple(traced.program.inputs()))
    return lower(optimized), tensors


class Checker:
    """Runs a schedule group by group on a graph."""

    def __init__(
        self, lowered: LoweredProgram, graph: rgnn.Graph, values: list[torch.Tensor]
    ) -> None:
        self.lowered, self.program, self.graph = lowered, lowered.optimized.program, graph
        self.nodes = self.program.nodes
        self.expected = values  # of every node, by the interpreter
        self.memory: dict[int, torch.Tensor] = {
            position: values[position]
            for position, node in enumerate(self.nodes)
            if node.op in LEAVES
        }

    def run(self) -> None:
        for kernel in self.lowered.schedule.kernels:
            local = {
                value: torch.full_like(self.expected[value], torch.nan) for value in kernel.values
            }
            if kernel.kind is KernelKind.TRAVERSAL:
                for rows, group in self.groups(kernel):
                    for stage in kernel.stages:
                        self.run_stage(kernel, stage, rows, group, local)
                    for value in kernel.epilogue:
                        self.run_rowwise(value, torch.tensor([group]), local)
            else:
                (value,) = kernel.values
                local[value] = self.whole(value)
            for value in kernel.values:
                torch.testing.assert_close(local[value], self.expected[value])
                if value in self.lowered.schedule.materialised:
                    self.memory[value] = local[value]
        for output in self.program.outputs:
            torch.testing.assert_close(self.read(output, {}), self.expected[output])

    def groups(self, kernel: Kernel):
        num_rows = self.graph.counts.rows(kernel.space)
        if kernel.grouped_by is None:
            yield torch.arange(num_rows), None
            return
        index = self.graph.index(kernel.grouped_by).long()
        for group in range(self.graph.counts.rows(kernel.grouped_by.into)):
            yield (index == group).nonzero().flatten(), group

    def run_stage(self, kernel, stage, rows, group, local) -> None:
        """One loop over the rows of a group; what it reduces is there when the loop has ended."""
        reductions = [value for value in stage if self.nodes[value].op in ("sum", "softmax")]
        for value in stage:
            if value not in reductions:
                self.run_rowwise(value, rows, local)
        for value in reductions:
            node = self.nodes[value]
            assert node.map == kernel.grouped_by
            operand = self.read(node.operands[0], local)[rows]
            if node.op == "sum":
                local[value][group] = operand.sum(0)
            else:
                local[value][rows] = torch.softmax(operand, 0)

    def run_rowwise(self, value, rows, local) -> None:
        node = self.nodes[value]
        parts = [self.read(operand, local)[rows] for operand in node.operands]
        local[value][rows] = interpreter.ROWWISE[node.op](node, *parts)

    def whole(self, value: int) -> torch.Tensor:
        return interpreter.apply(
            self.nodes[value],
            [self.read(operand, {}) for operand in self.nodes[value].operands],
            self.graph,
        )

    def read(self, position: int, local: dict[int, torch.Tensor]) -> torch.Tensor:
        node = self.nodes[position]
        if node.op == "gather":
            source = self.read(node.operands[0], local)
            return source.index_select(0, self.graph.index(node.map))
        if node.op == "reshape":
            return self.read(node.operands[0], local).reshape(-1, *node.shape)
        if position in find_fused_outers(self.program):
            parts = [self.read(operand, local) for operand in node.operands]
            return interpreter.ROWWISE["outer"](node, *parts)
        return local[position] if position in local else self.memory[position]


def check(function, graph, arguments) -> LoweredProgram:
    lowered, tensors = lowered_program(function, graph, arguments)
    placed = [value for kernel in lowered.schedule.kernels for value in kernel.values]
    fused = find_fused_outers(lowered.optimized.program)
    computed = {
        position
        for position, node in enumerate(lowered.optimized.program.nodes)
        if node.op not in LEAVES | READS and position not in fused
    }
    assert sorted(placed) == sorted(computed)
    assert all(stage for kernel in lowered.schedule.kernels for stage in kernel.stages)
    forward = lowered.schedule.kernels[: lowered.schedule.num_forward]
    assert {v for kernel in forward for v in kernel.values} == computed & lowered.optimized.forward
    values = all_values(lowered, graph, tensors)
    Checker(lowered, graph, values).run()
    return lowered


def all_values(lowered: LoweredProgram, graph: rgnn.Graph, tensors) -> list[torch.Tensor]:
    """Every node's rows, by the interpreter's operators; seeds of gradients are ones."""
    values: list[torch.Tensor] = []
    for node in lowered.optimized.program.nodes:
        if node.op == "input":
            rows = graph.counts.rows(node.space)
            seed = torch.ones(rows, *node.shape, dtype=torch.float64)
            if node["name"] in tensors:
                tensor = tensors[node["name"]].detach()
                seed = interpreter.enter(graph, node.space, tensor)
            values.append(seed)
        elif node.op == "inverse_count":
            values.append(interpreter.inverse_count(graph, node.map, torch.float64))
        else:
            operands = [values[operand] for operand in node.operands]
            values.append(interpreter.apply(node, operands, graph))
    return values


@settings(max_examples=40)
@given(recipe=recipes(), graph=graphs())
def test_schedules_of_random_programs_can_be_run_as_they_are(recipe, graph):
    check(recipe.__call__, graph, recipe.arguments(graph))


@pytest.mark.parametrize("name", LAYERS)
def test_schedules_of_layers_can_be_run_as_they_are(name):
    graph = random_graph()
    check(LAYERS[name].__wrapped__, graph, layer_arguments(name, graph))


def test_attention_is_one_traversal_by_destination():
    graph = random_graph()
    lowered = check(LAYERS["rgat"].__wrapped__, graph, layer_arguments("rgat", graph))
    forward = lowered.schedule.kernels[: lowered.schedule.num_forward]
    (by_destination,) = [k for k in forward if k.grouped_by is not None]
    ops = [lowered.optimized.program.nodes[value].op for value in by_destination.values]
    assert ops == ["add", "leaky_relu", "softmax", "mul", "sum"]
    # The weighted messages, a vector per edge, never reach memory.
    message = by_destination.values[3]
    assert message not in lowered.schedule.materialised


@pytest.mark.parametrize("name", LAYERS)
def test_no_vector_per_edge_is_materialised(name):
    graph = random_graph()
    lowered = check(LAYERS[name].__wrapped__, graph, layer_arguments(name, graph))
    num_axes = 1 if name in ("rgat with heads", "hgt") else 0  # scalars per head
    for value in lowered.schedule.materialised:
        node = lowered.optimized.program.nodes[value]
        assert node.space is not Space.EDGE or len(node.shape) <= num_axes


def test_a_sum_is_read_in_its_own_loop_only_where_it_is_complete():
    def normalised(g, s):
        e = g.edges
        return g.sum_to_dst(e(s) / e.dst(g.sum_to_dst(e(s) * e(s))))

    def two_hops(g, s):
        e = g.edges
        return g.sum_to_dst(e(s) * e.src(g.sum_to_dst(e(s) * e(s))))

    graph = random_graph()
    scores = (torch.rand(graph.num_edges, dtype=torch.float64),)
    num_forward = [
        check(body, graph, scores).schedule.num_forward for body in (normalised, two_hops)
    ]
    # The sum at an edge's own destination is complete when its group's loop has ended; the sum at
    # its source belongs to another group.
    assert num_forward == [1, 2]


def test_what_follows_a_sum_is_computed_in_the_loop_that_finishes_it():
    graph = random_graph()
    lowered = check(LAYERS["rgcn"].__wrapped__, graph, layer_arguments("rgcn", graph))
    ops = [
        [lowered.optimized.program.nodes[value].op for value in kernel.epilogue]
        for kernel in lowered.schedule.kernels
    ]
    # The root's product comes first, so that the sum over neighbours need not wait for it.
    assert ops[: lowered.schedule.num_forward] == [[], [], [], ["add", "add"]]
    assert ["add"] in ops[lowered.schedule.num_forward :]
