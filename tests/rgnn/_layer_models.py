"""Models with one relational layer, and a step of each, that tests of composition share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from _relational import random_graph
from penstock import rgnn

DIM, RELATIONS = 8, 4
METADATA = (["a", "b"], [("a", "to", "b"), ("b", "to", "a"), ("a", "by", "a"), ("b", "by", "b")])

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "rgcn": lambda: rgnn.RGCNConv(DIM, DIM, RELATIONS),
    "rgcn with bases": lambda: rgnn.RGCNConv(DIM, DIM, RELATIONS, num_bases=2),
    "rgat": lambda: rgnn.RGATConv(DIM, 4, RELATIONS, heads=2),
    "hgt": lambda: rgnn.HGTConv(DIM, DIM, METADATA, heads=2),
}


class Model(nn.Module):
    """A relational layer between dense operators; called with features and a graph."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(DIM, DIM), layer, nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor, *graph: rgnn.Graph | torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(apply(self.layer, torch.tanh(self.first(x)), *graph)))


def apply(layer: nn.Module, h: torch.Tensor, *graph: rgnn.Graph | torch.Tensor) -> torch.Tensor:
    """A layer on node features; for HGT the first half of the nodes has the first type."""
    if not isinstance(layer, rgnn.HGTConv):
        return layer(h, *graph)
    halves = {"a": h[: len(h) // 2], "b": h[len(h) // 2 :]}
    return torch.cat(list(layer(halves, *graph).values()))


def model_of(name: str) -> Model:
    torch.manual_seed(0)
    return Model(LAYERS[name]()).double()


def graph_of_size(num_nodes: int, num_edges: int, *, seed: int = 0) -> rgnn.Graph:
    return random_graph(num_nodes, num_edges, num_relations=RELATIONS, seed=seed)


def features(num_nodes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_nodes, DIM, generator=generator, dtype=torch.float64)


def step(
    forward: Callable[..., torch.Tensor], model: nn.Module, num_nodes: int, *graph: object
) -> list[torch.Tensor]:
    """The result of a forward with the model's parameters, then all gradients."""
    x = features(num_nodes).requires_grad_()
    result = forward(x, *graph)
    parameters = [x, *model.parameters()]
    gradients = torch.autograd.grad(result.square().sum(), parameters, allow_unused=True)
    return [result.detach(), *(gradient for gradient in gradients if gradient is not None)]
