"""Results depend neither on torch's default device and dtype, nor on the mode of a call.

`torch.set_default_device("cuda")` is common in programs of GPUs, while much of the library works on
the CPU. The device "meta" stands for it: a tensor on it by accident is an error, or memory that is
not there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock import attention, batching, iomodel, lora, ops, rgnn, spectral, traversal
from penstock.memory import find_machine

Results = list[torch.Tensor]
Case = Callable[[], Callable[[], Results]]


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def gradients_of(result: torch.Tensor, *leaves: torch.Tensor) -> Results:
    return [result.detach(), *torch.autograd.grad(result.square().sum(), leaves)]


def optimizer_of(name: str) -> Case:
    def make() -> Callable[[], Results]:
        table = penstock.unify(drawn(200, 8), requires_grad=True)
        optimizer = getattr(penstock.unified.optim, name)([table], lr=0.1)
        rows, everything = torch.arange(0, 200, 3), torch.arange(200)

        def step() -> Results:
            table[rows].square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return [table.detach()[everything]]

        return step

    return make


@rgnn.compile
def relational_sum(graph: Any, x: Any, weights: Any) -> Any:
    edges = graph.edges
    return graph.sum_to_dst(edges.src(x) @ weights[edges.type])


def make_rgnn() -> Callable[[], Results]:
    ends, types = torch.arange(1000).view(2, 500) * 7 % 100, torch.arange(500) % 7
    x, weights = drawn(100, 16).requires_grad_(), drawn(7, 16, 16).requires_grad_()

    def run() -> Results:
        graph = rgnn.Graph(ends, types, num_nodes=100)
        return gradients_of(relational_sum(graph, x, weights), x, weights)

    return run


def make_layouts() -> Callable[[], Results]:
    q = drawn(1, 2, 256, 32).requires_grad_()

    def run() -> Results:
        layouts = [
            attention.Layout.causal(256),
            attention.Layout.bigbird(256, block=16, random_blocks=2),
            attention.Layout.documents([100, 156]),
            attention.Layout.strided(256, 64),
            attention.Layout.tree([-1, *range(255)]),
            attention.Layout.window(256, 50),
        ]
        masks = [layout.block_mask() for layout in layouts]
        found = [gradients_of(attention.blocksparse(q, q, q, each), q) for each in layouts]
        return [*masks, *(tensor for each in found for tensor in each)]

    return run


def make_lora() -> Callable[[], Results]:
    x, weight = drawn(8, 16).requires_grad_(), drawn(8, 16)
    leaves = [
        each.requires_grad_() for each in (drawn(4, 16), drawn(8, 4), drawn(2, 16), drawn(8, 2))
    ]

    def run() -> Results:
        down, up, other_down, other_up = leaves
        adapters = [
            lora.Adapter(down, up, scaling=2.0, dropout=0.3),
            lora.Adapter(other_down, other_up),
        ]
        rows = lora.AdapterRows.group([0, 1, 0, 1, -1, 1, 0, 0], 2)
        again = lora.linear(x, weight, None, adapters, [0, 0, 1, 1, 1, -1, 0, 1], seed=3)
        return gradients_of(
            again + lora.linear(x, weight, None, adapters, rows, seed=7), x, *leaves
        )

    return run


def make_traversal() -> Callable[[], Results]:
    edges = torch.arange(3000).view(2, 1500) * 11 % 500
    seeds = torch.tensor([17, 400])

    def run() -> Results:
        graph = traversal.CSRGraph.from_edges(edges, 500)
        sampled = traversal.NeighborSampler.from_graph(graph, fanouts=[-1, -1]).sample(seeds)
        found = traversal.khop(graph, seeds, 2)
        return [
            *(found.nodes, found.edge_index, sampled.node_ids, traversal.bfs(graph, seeds)),
            *(traversal.connected_components(graph), traversal.pagerank(graph)),
            graph.reverse().indices[:],
        ]

    return run


def make_spectral() -> Callable[[], Results]:
    weight, rows = drawn(6).double().requires_grad_(), drawn(300, 8)
    matrix = torch.diag(torch.arange(400).double()).to_sparse_csr()

    def run() -> Results:
        curvature = spectral.hessian(lambda: (weight**4).sum(), [weight])
        return [
            spectral.eigs(matrix, 4).values,
            spectral.svds(matrix.to_dense(), 3).s,
            spectral.pca(rows, 3).variances,
            spectral.eigs(curvature, 2).values,
        ]

    return run


def make_products() -> Callable[[], Results]:
    a = torch.eye(8).to_sparse_csr().requires_grad_()
    x = drawn(300, 20).requires_grad_()

    def run() -> Results:
        pattern = ops.product_pattern(a, a)
        product = ops.spgemm(a, a, pattern=pattern)
        return [
            product.values().detach(),
            torch.autograd.grad(product.values().sum(), a)[0].values(),
            *gradients_of(ops.column_reduce(x), x),
        ]

    return run


def make_chain() -> Callable[[], Results]:
    modules = [nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)]
    leaves = [each for module in modules for each in module.parameters()]
    x = drawn(400, 32)

    def run() -> Results:
        return [
            tensor
            for options in ({"chunk_rows": 64}, {"feature_blocks": 4})
            for tensor in gradients_of(iomodel.run_chain(modules, x, **options), *leaves)
        ]

    return run


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(32, 16)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.mix(torch.cat([left, right], 1)))


def make_batcher() -> Callable[[], Results]:
    cells = {"word": nn.Embedding(10, 16), "join": Join()}
    leaves = [each for cell in cells.values() for each in cell.parameters()]
    batcher = batching.DynamicBatcher(cells, max_bytes="100KiB")

    def tree(words: int) -> batching.TypedGraph:
        graph = batching.TypedGraph()
        nodes = [graph.add("word", inputs=[word % 10]) for word in range(words)]
        while len(nodes) > 1:
            nodes = [graph.add("join", nodes[0], nodes[1]), *nodes[2:]]
        return graph

    def run() -> Results:
        return gradients_of(batcher([tree(words) for words in range(1, 20)]).last(), *leaves)

    return run


CASES: dict[str, Case] = {
    "SGD": optimizer_of("SGD"),
    "Adam": optimizer_of("Adam"),
    "Adagrad": optimizer_of("Adagrad"),
    "rgnn": make_rgnn,
    "attention": make_layouts,
    "lora": make_lora,
    "traversal": make_traversal,
    "spectral": make_spectral,
    "ops": make_products,
    "chain": make_chain,
    "batcher": make_batcher,
}


def assert_same(found: Results, expected: Results) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.device == other.device
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_results_do_not_depend_on_defaults(case: str, other_defaults: Callable[[], Any]):
    torch.manual_seed(0)
    expected_run = CASES[case]()
    torch.manual_seed(0)
    run = CASES[case]()
    expected = [expected_run(), expected_run()]
    with other_defaults():
        first = run()
    assert_same(first, expected[0])
    assert_same(run(), expected[1])


BACKWARD_CASES = ("chain", "batcher", "rgnn", "attention", "lora")


@pytest.mark.parametrize("case", BACKWARD_CASES)
def test_a_backward_pass_in_inference_mode(case: str, monkeypatch):
    """As a callback may run one: gradients are those of any backward pass."""
    torch.manual_seed(0)
    run = CASES[case]()
    expected = run()
    grad = torch.autograd.grad

    def differentiate(*args: Any) -> Any:
        with torch.inference_mode():
            return grad(*args)

    monkeypatch.setitem(globals(), "gradients_of", _gradients_by(differentiate))
    assert_same([each.clone() for each in run()], expected)


def _gradients_by(differentiate: Callable[..., Any]) -> Callable[..., Results]:
    def gradients(result: torch.Tensor, *leaves: torch.Tensor) -> Results:
        loss = result.square().sum()
        return [result.detach(), *differentiate(loss, leaves)]

    return gradients


def test_what_is_made_in_inference_mode_trains_later():
    q = drawn(1, 2, 128, 32).requires_grad_()
    a = torch.eye(8).to_sparse_csr().requires_grad_()
    x, down, up = drawn(4, 8).requires_grad_(), drawn(2, 8), drawn(8, 2)
    with torch.inference_mode():
        layout = attention.Layout.causal(128)
        pattern = ops.product_pattern(a, a)
        rows = lora.AdapterRows.group([0, 1, 0, 1], 2)
        moved = layout.to("cpu")
    adapters = [lora.Adapter(down, up), lora.Adapter(down, up)]
    for result in (
        attention.blocksparse(q, q, q, layout),
        attention.blocksparse(q, q, q, moved),
        ops.spgemm(a, a, pattern=pattern).values(),
        lora.linear(x, torch.eye(8), None, adapters, rows, seed=1),
    ):
        result.sum().backward()
    assert q.grad is not None
    assert x.grad is not None


def test_curvature_in_inference_mode():
    weight = drawn(6).double().requires_grad_()
    for operator in (
        spectral.hessian(lambda: (weight**4).sum(), [weight]),
        spectral.fisher(lambda: weight**4, [weight]),
    ):
        expected = spectral.eigs(operator, 2).values
        with torch.inference_mode():
            assert_same([spectral.eigs(operator, 2).values], [expected])


def test_a_machine_is_a_name_a_profile_or_this_one():
    profile = find_machine("h200")
    assert find_machine(profile) is profile
    with pytest.raises(ValueError, match="built-in machines are"):
        find_machine("h2")
    with pytest.raises(TypeError, match="must be a name that"):
        find_machine(2)  # type: ignore[arg-type]
