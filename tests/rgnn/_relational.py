"""Graphs, layers and random programs that the tests of penstock.rgnn share."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from hypothesis import strategies as st

from penstock import rgnn
from penstock.rgnn import combine, dot, edge_mean, edge_softmax, leaky_relu

DIM = 3
NUM_RELATIONS = 4
NUM_NODE_TYPES = 2


def rgcn_body(g, x, comp, bases, root, bias):
    e, n = g.edges, g.nodes
    z = e.src(x) @ combine(comp, bases)[e.type]
    return g.sum_to_dst(edge_mean(z)) + n(x) @ root + bias


def rgat_body(g, x, W, a_src, a_dst):
    e = g.edges
    z = e.src(x) @ W[e.type]
    s = dot(z, a_src[e.type]) + dot(e.dst(x) @ W[e.type], a_dst[e.type])
    return g.sum_to_dst(edge_softmax(leaky_relu(s, 0.2)) * z)


def hgt_body(g, x, K, Q, V, A, M, p, heads):
    e, n = g.edges, g.nodes
    k, q, v = ((n(x) @ weight[n.type]).heads(heads) for weight in (K, Q, V))
    s = dot(e.src(k) @ A[e.type], e.dst(q)) * p[e.type]
    return g.sum_to_dst(edge_softmax(s) * (e.src(v) @ M[e.type])).merge_heads()


rgcn, rgat, hgt = (rgnn.compile(body, backend="torch") for body in (rgcn_body, rgat_body, hgt_body))


def random_graph(
    num_nodes: int = 12,
    num_edges: int = 60,
    *,
    num_relations: int = NUM_RELATIONS,
    seed: int = 0,
    is_canonical: bool = False,
) -> rgnn.Graph:
    """Edges at random, several of them equal; the last relation has none."""
    generator = torch.Generator().manual_seed(seed)
    node_type = torch.randint(NUM_NODE_TYPES, (num_nodes,), generator=generator)
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=generator)
    edge_type = torch.randint(max(num_relations - 1, 1), (num_edges,), generator=generator)
    if is_canonical:  # the types of the ends are the relation
        edge_type = node_type[edge_index[0]] * NUM_NODE_TYPES + node_type[edge_index[1]]
        num_relations = NUM_NODE_TYPES**2
    return rgnn.Graph(
        edge_index,
        edge_type,
        num_nodes=num_nodes,
        num_relations=num_relations,
        node_type=node_type,
        num_node_types=NUM_NODE_TYPES,
    )


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return made.requires_grad_()


def layer_arguments(name: str, graph: rgnn.Graph, dim: int = DIM) -> tuple[Any, ...]:
    """float64 arguments of one of the three layers, all with gradients."""
    relations, types = graph.num_relations, graph.num_node_types
    shapes: dict[str, list[tuple[int, ...]]] = {
        "rgcn": [(relations, 2), (2, dim, dim), (dim, dim), (dim,)],
        "rgat": [(relations, dim, dim), (relations, dim), (relations, dim)],
        "rgat with heads": [(relations, 2, dim, dim), (relations, 2, dim), (relations, 2, dim)],
        "hgt": [(types, dim, 2 * dim)] * 3 + [(relations, 2, dim, dim)] * 2 + [(relations, 2)],
    }
    shapes["hgt"][3:5] = [(relations, 2, dim, dim)] * 2
    tensors = [
        random_tensor(*shape, seed=seed)
        for seed, shape in enumerate([(graph.num_nodes, dim), *shapes[name]])
    ]
    return (*tensors, 2) if name == "hgt" else tuple(tensors)


LAYERS = {"rgcn": rgcn, "rgat": rgat, "rgat with heads": rgat, "hgt": hgt}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A random program: steps that each make one more vector or scalar of edges from those before.

    Each step is an operator and three numbers that pick its operands.
    """

    steps: tuple[tuple[str, int, int, int], ...]
    heads: bool

    def __call__(self, g, x, f, W, U, C, a, V, w, c):
        e, n = g.edges, g.nodes
        first = e.src(x) @ W[e.type]
        vectors: list[Any] = [e.src(x), e.dst(x), e(f), first]
        if self.heads:
            vectors = [first, e.dst(x) @ U[e.type], e.src(n(x) @ w[n.type])]
        scalars: list[Any] = [dot(vectors[0], a[e.type])]
        nodes: list[Any] = []
        for op, i, j, k in self.steps:
            u, v = vectors[i % len(vectors)], vectors[j % len(vectors)]
            s = scalars[k % len(scalars)]
            if op == "typed":
                vectors.append(u @ (W, U)[k % 2][e.type])
            elif op == "node typed" and not self.heads:
                end = (e.src, e.dst)[k % 2]
                vectors.append(end(n(x) @ V[n.type]) @ U[e.type])
            elif op == "untyped" and not self.heads:
                vectors.append(u @ c)
            elif op == "concat" and not self.heads:
                vectors.append(rgnn.concat(u, v) @ C[e.type])
                scalars.append(dot(rgnn.concat(u, v), rgnn.concat(v, u)))
            elif op == "slice" and not self.heads:
                vectors.append(rgnn.concat(u[1:], v[:1]))
            elif op == "mean":
                vectors.append(edge_mean(u, within=("relation", "destination")[k % 2]))
            elif op == "scale":
                vectors.append(s * u)
            elif op == "arithmetic":
                vectors.append(rgnn.tanh(u * v - u / (v * v + 1.0) + 0.5))
            elif op == "relu":
                vectors.append(leaky_relu(u, 0.1) - rgnn.relu(v))
            elif op == "weight dot":
                scalars.append(dot(u @ U[e.type], a[e.type]))
            elif op == "dot":
                scalars.append(rgnn.sigmoid(dot(u, v)) + s)
            elif op == "softmax":
                within = ("relation", "destination")[i % 2]
                scalars.append(edge_softmax(rgnn.tanh(s), within=within))
            elif op == "log":
                scalars.append(rgnn.log(s * s + 1.0) + 2 / (rgnn.exp(rgnn.tanh(s)) + 1))
            elif op == "reduce":
                summed = (g.sum_to_dst, g.sum_to_src)[k % 2](s * (u @ W[e.type]))
                nodes.append(summed)
                if not self.heads:
                    vectors += [e.src(rgnn.tanh(summed)), e.dst(summed), e.src(summed)]
        results = [g.sum_to_dst(scalars[-1] * vectors[-1]), g.sum_to_src(vectors[-1]), scalars[-1]]
        return tuple(results + nodes)

    def arguments(self, graph: rgnn.Graph) -> tuple[torch.Tensor, ...]:
        """float64 arguments with gradients for each parameter of the program."""
        heads = (2,) if self.heads else ()
        relations, types = graph.num_relations, graph.num_node_types
        typed = (types, *heads, DIM, DIM)
        shapes = {
            "x": (graph.num_nodes, DIM),
            "f": (graph.num_edges, DIM),
            "W": (relations, *heads, DIM, DIM),
            "U": (relations, *heads, DIM, DIM),
            "C": (relations, 2 * DIM, DIM),
            "a": (relations, *heads, DIM),
            "V": (types, DIM, DIM),
            "w": typed,
            "c": (DIM, DIM),
        }
        tensors = (random_tensor(*shape, seed=i) for i, shape in enumerate(shapes.values()))
        return tuple((tensor.detach() * 0.5).requires_grad_() for tensor in tensors)


_STEPS = (
    "typed",
    "node typed",
    "untyped",
    "concat",
    "slice",
    "mean",
    "scale",
    "arithmetic",
    "relu",
    "weight dot",
    "dot",
    "softmax",
    "log",
    "reduce",
)


@st.composite
def recipes(draw, max_steps: int = 6) -> Recipe:
    pick = st.integers(0, 5)
    steps = draw(st.lists(st.tuples(st.sampled_from(_STEPS), pick, pick, pick), max_size=max_steps))
    return Recipe(tuple(steps), draw(st.booleans()))


@st.composite
def graphs(draw) -> rgnn.Graph:
    return random_graph(
        draw(st.integers(1, 9)),
        draw(st.integers(0, 24)),
        seed=draw(st.integers(0, 99)),
        is_canonical=draw(st.booleans()),
    )


def results_and_gradients(
    function: Any, graph: rgnn.Graph, arguments: tuple[Any, ...]
) -> list[torch.Tensor]:
    """What a function returns, then the gradient of each tensor argument of a weighted sum."""
    results = function(graph, *arguments)
    results = results if isinstance(results, tuple) else (results,)
    weights = [random_tensor(*r.shape, seed=100 + i).detach() for i, r in enumerate(results)]
    total = sum((r * weight).sum() for r, weight in zip(results, weights, strict=True))
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    gradients = torch.autograd.grad(total, tensors, allow_unused=True, materialize_grads=True)
    return [*results, *gradients]


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    """Equal up to the order of float64 sums; torch's own comparison says where they are not."""
    assert len(left) == len(right)
    tolerance = {"rtol": 1e-9, "atol": 1e-10}
    for one, other in zip(left, right, strict=True):
        is_alike = one.shape == other.shape and one.dtype is other.dtype
        if not (is_alike and torch.allclose(one, other, **tolerance)):
            torch.testing.assert_close(one, other, **tolerance)
