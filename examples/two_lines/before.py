"""Who of the Tolokers was banned? GraphSAGE on mini-batches of sampled neighbours.

    python before.py tolokers.npz

The file is that of github.com/yandex-research/heterophilous-graphs. `after.py` is this script with
two lines more, after which the features are a table of Penstock's.
"""

import argparse

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader, NodeLoader
from torch_geometric.nn import GraphSAGE
from torch_geometric.sampler import BaseSampler, SamplerOutput
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

FANOUTS = [10, 5]


class PlainSampler(BaseSampler):
    """Draws neighbours in plain torch, where PyG has no compiled sampler to do it."""

    def __init__(self, data):
        target, order = data.edge_index[1].sort(stable=True)
        self.neighbors = data.edge_index[0, order]
        self.starts = torch.searchsorted(target, torch.arange(data.num_nodes + 1))

    def sample_from_nodes(self, index, **kwargs):
        nodes, rows, columns = index.node, [], []
        last = torch.arange(len(nodes))  # places of the nodes that the last hop has found
        for fanout in FANOUTS:
            starts, ends = self.starts[nodes[last]], self.starts[nodes[last] + 1]
            draws = torch.rand(len(last), fanout) * (ends - starts)[:, None]
            drawn = (ends > starts)[:, None].expand(-1, fanout)
            found = self.neighbors[(starts[:, None] + draws.long())[drawn]]
            columns.append(last[:, None].expand(-1, fanout)[drawn])
            last = torch.arange(len(nodes), len(nodes) + len(found))
            rows.append(last)
            nodes = torch.cat([nodes, found])
        row, column = torch.cat(rows), torch.cat(columns)
        return SamplerOutput(nodes, row, column, None, metadata=(index.input_id, None))

    def sample_from_edges(self, index, neg_sampling=None):
        raise NotImplementedError


def batches(data, nodes, *, shuffle):
    options = {"input_nodes": nodes, "batch_size": 512, "shuffle": shuffle}
    if WITH_PYG_LIB or WITH_TORCH_SPARSE:
        return NeighborLoader(data, FANOUTS, **options)
    return NodeLoader(data, PlainSampler(data), **options)


def roc_auc(scores, labels):
    ranks = scores.argsort().argsort().double() + 1
    num_ones = labels.sum()
    above = ranks[labels == 1].sum() - num_ones * (num_ones + 1) / 2
    return float(above / (num_ones * (len(labels) - num_ones)))


def train(path, *, num_epochs=10):
    """The loss of every step, and the scores of the test nodes."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    file = np.load(path)
    edges = torch.from_numpy(file["edges"]).t()
    labels = torch.from_numpy(file["node_labels"]).float()
    data = Data(
        x=torch.from_numpy(file["node_features"]),
        y=labels,
        edge_index=torch.cat([edges, edges.flip(0)], dim=1),
    )
    training, test = (
        torch.from_numpy(file["train_masks"][0]),
        torch.from_numpy(file["test_masks"][0]),
    )
    model = GraphSAGE(data.num_features, 64, num_layers=2, out_channels=1).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(num_epochs):
        for batch in batches(data, training, shuffle=True):
            batch = batch.to(device)
            logits = model(batch.x, batch.edge_index)[: batch.batch_size, 0]
            loss = binary_cross_entropy_with_logits(logits, batch.y[: batch.batch_size])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    scores = []
    with torch.no_grad():
        for batch in batches(data, test, shuffle=False):
            batch = batch.to(device)
            scores.append(model(batch.x, batch.edge_index)[: batch.batch_size, 0].cpu())
    scores = torch.cat(scores)
    print(f"last loss {losses[-1]:.4f}, ROC AUC {roc_auc(scores, labels[test]):.4f}")
    return losses, scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GraphSAGE on Tolokers")
    parser.add_argument("path", help="tolokers.npz")
    train(parser.parse_args().path)
