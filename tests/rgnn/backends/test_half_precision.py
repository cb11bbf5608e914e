"""bfloat16 and float16: every sum is kept in float32 and rounded once, on every backend.

Added up in bfloat16, 10,000 ones come to 256, and a mean over 10,000 edges to 0.03 of the mean.
"""

from __future__ import annotations

import pytest
import torch

from _relational import results_and_gradients
from penstock import rgnn
from penstock.rgnn import edge_mean, edge_softmax

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.bfloat16, torch.float16]
DEGREE = 10_000
NUM_NODES = 100
ROUNDINGS = 4
"""Of a result: of each argument, of what was kept, and of the result itself, with one to spare."""


def hub(degree: int = DEGREE) -> rgnn.Graph:
    """Two relations; node 0 has `degree` incoming edges and node 1 as many outgoing ones."""
    ends = torch.arange(degree) % (NUM_NODES - 2) + 2
    edge_index = torch.cat(
        [
            torch.stack([ends, torch.zeros_like(ends)]),
            torch.stack([torch.ones_like(ends), ends]),
        ],
        dim=1,
    )
    edge_type = torch.arange(2).repeat_interleave(degree)
    return rgnn.Graph(edge_index, edge_type, num_nodes=NUM_NODES, num_relations=2)


def body(g, x, W, b):
    e = g.edges
    z = e.src(x) @ W[e.type] + b
    return (
        g.sum_to_dst(e.src(x)),
        g.sum_to_src(e.dst(x)),
        g.sum_to_dst(edge_mean(z)),
        g.sum_to_dst(edge_mean(z, within="destination")),
        g.sum_to_dst(edge_softmax(e.src(x)) * z),
    )


def arguments(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Positive features, so that sums grow, small enough for float16's range."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((NUM_NODES, 4), (2, 4, 4), (4,))
    drawn = (torch.rand(*shape, generator=generator) / 2 + 0.25 for shape in shapes)
    return tuple((each / 8).to(dtype).requires_grad_() for each in drawn)


def assert_near(found: list[torch.Tensor], exact: list[torch.Tensor], dtype: torch.dtype) -> None:
    bound = ROUNDINGS * torch.finfo(dtype).eps
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == dtype
        assert other.isfinite().all()
        assert (one.double() - other).abs().max() <= bound * other.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["cpp", "torch", "reference"])
def test_sums_means_and_softmax_of_ten_thousand_edges_and_their_gradients(backend, dtype):
    graph, narrow = hub(), arguments(dtype)
    if backend == "reference":
        function = rgnn.compile(body).to_torch()
    else:
        function = rgnn.compile(body, backend=backend)
    wide = tuple(each.detach().double().requires_grad_() for each in narrow)
    exact = results_and_gradients(rgnn.compile(body).to_torch(), graph, wide)
    assert_near(results_and_gradients(function, graph, narrow), exact, dtype)


def test_more_rows_than_float16_can_count():
    """65,520 is infinite in float16, and the share of each of so many rows is not exact."""
    graph = hub(66_000)
    x = torch.ones(NUM_NODES, 1, dtype=torch.float16)
    eps = torch.finfo(torch.float16).eps
    for backend in ("cpp", "torch"):
        mean = rgnn.compile(lambda g, x: g.sum_to_dst(edge_mean(g.edges.src(x))), backend=backend)
        assert abs(mean(graph, x)[0].item() - 1) <= eps
        assert abs(mean.to_torch()(graph, x)[0].item() - 1) <= eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("degree", [100, 300, 1000, 3000, 10_000])
@pytest.mark.parametrize("name", ["RGCNConv", "RGATConv"])
def test_layers_are_as_near_to_float64_as_pygs(name, degree, dtype):
    pyg = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(degree)
    graph = hub(degree)
    theirs = getattr(pyg, name)(4, 4, 2).double()
    ours = getattr(rgnn, name)(4, 4, 2).double()
    x = torch.randn(NUM_NODES, 4).to(dtype)
    for parameter in theirs.parameters():  # what both dtypes hold
        parameter.data = parameter.data.to(dtype).double()
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        exact = theirs(x.double(), graph.edge_index, graph.edge_type)
        of_pyg = theirs.to(dtype)(x, graph.edge_index, graph.edge_type).double()
        found = ours.to(dtype)(x, graph.edge_index, graph.edge_type).double()
    scale = exact.abs().max()
    error, of_pyg = ((each - exact).abs().max() / scale for each in (found, of_pyg))
    assert error <= max(of_pyg, 2 * torch.finfo(dtype).eps)


def test_the_report_counts_the_bytes_of_what_is_computed():
    graph = hub(10)
    narrow, single = (arguments(dtype) for dtype in (torch.bfloat16, torch.float32))
    function = rgnn.compile(body, backend="cpp")
    found, expected = (function.explain(graph, *each) for each in (narrow, single))
    assert found.backend == "cpp"
    assert found.materialised_bytes == expected.materialised_bytes
