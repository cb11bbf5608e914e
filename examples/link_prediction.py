"""Which triples are missing in FB15k-237? An RGCN encoder with a DistMult decoder.

    python examples/link_prediction.py
    python examples/link_prediction.py --mini-batch

As in Schlichtkrull et al. 2018 (arXiv 1703.06103, sections 4 and 5.2), entities are embedded by a
relational convolution with block-diagonal weights, and a triple (s, r, o) is scored by
`sum(e_s * w_r * e_o)`. Messages are passed over edges of which a share is dropped in each step, and
never over the triples that are asked for. Other than there, a triple is not held against sampled
wrong ones but against all entities at once, which needs far fewer steps.

`--mini-batch` passes messages over a sample of the edges only. `--data` has the folder
`rgnn/fb15k-237` and is `$PENSTOCK_DATA` by default. Ends with the mean reciprocal rank and Hits@k
of the test triples, and a picture of the training.
"""

import argparse
import dataclasses
import os
import time
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.nn.functional import cross_entropy, dropout

from penstock import rgnn
from penstock.tables import report_table

COLUMNS = (
    TextColumn("[progress.description]{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
)


@dataclasses.dataclass(frozen=True)
class Triples:
    """Triples (head, relation, tail) of each part, int64 of shape (num_triples, 3)."""

    training: torch.Tensor
    validation: torch.Tensor
    test: torch.Tensor
    num_entities: int
    num_relations: int


def load(folder):
    def read(name):
        graph = rgnn.Graph.from_triples(folder / f"{name}2id.txt")
        head, tail = graph.edge_index
        return torch.stack([head, graph.edge_type, tail], dim=1)

    training, validation, test = (read(name) for name in ("train", "valid", "test"))
    whole = torch.cat([training, validation, test])
    num_entities, num_relations = int(whole[:, [0, 2]].max()) + 1, int(whole[:, 1].max()) + 1
    return Triples(training, validation, test, num_entities, num_relations)


class LinkPredictor(nn.Module):
    """Embeddings of entities by a relational convolution, and of relations for the decoder."""

    def __init__(self, num_entities, num_relations, width, drop):
        super().__init__()
        self.entities = nn.Parameter(torch.randn(num_entities, width) / width**0.5)
        self.relations = nn.Parameter(torch.randn(num_relations, width))
        self.convolution = rgnn.RGCNConv(width, width, 2 * num_relations, num_blocks=width // 5)
        self.drop = drop

    def encode(self, graph):
        """(num_entities, width)."""
        x = dropout(self.entities, self.drop, self.training)
        return self.entities + torch.relu(self.convolution(x, graph))

    def scores(self, h, known, relation):
        """The score of each entity at the other end: (triples, num_entities)."""
        return dropout(h[known] * self.relations[relation], self.drop, self.training) @ h.T

    def loss(self, graph, batch):
        """How unlikely the triples are among those with another entity at either end."""
        h = self.encode(graph)
        head, relation, tail = batch.T
        tails, heads = self.scores(h, head, relation), self.scores(h, tail, relation)
        return (cross_entropy(tails, tail) + cross_entropy(heads, head)) / 2


def message_graph(triples, num_entities, num_relations):
    """The graph of some triples, with reverse edges."""
    return rgnn.Graph.from_triples(
        triples, num_nodes=num_entities, num_relations=num_relations
    ).with_reverse_edges()


class Filter:
    """For a known end and a relation, all entities that make a true triple."""

    def __init__(self, triples, known, asked, num_relations):
        self._num_relations, self._columns = num_relations, (known, asked)
        key = triples[:, known] * num_relations + triples[:, 1]
        self._keys, order = key.sort()
        self._entities = triples[order, asked]

    def true_entities(self, batch):
        """Places (row of the batch, entity)."""
        key = batch[:, self._columns[0]] * self._num_relations + batch[:, 1]
        first = torch.searchsorted(self._keys, key)
        counts = torch.searchsorted(self._keys, key, right=True) - first
        rows = torch.repeat_interleave(torch.arange(len(batch)), counts)
        within = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
        return rows, self._entities[first[rows] + within]


def filtered_ranks(scores, target, true_rows, true_entities):
    """The rank of each row's target among entities that make no other true triple.

    Entities with the target's score count half: the mean of the best and the worst rank.
    """
    own = scores.gather(1, target[:, None])
    scores = scores.index_put((true_rows, true_entities), torch.tensor(-torch.inf))
    scores.scatter_(1, target[:, None], -torch.inf)
    return 1 + (scores > own).sum(1) + (scores == own).sum(1) / 2


@torch.no_grad()
def evaluate(model, triples, asked_for, batch_size=512):
    """Filtered ranks of both ends of some triples."""
    model.eval()
    whole = torch.cat([triples.training, triples.validation, triples.test])
    h = model.encode(message_graph(triples.training, triples.num_entities, triples.num_relations))
    ranks = []
    for known, asked in ((0, 2), (2, 0)):
        filter_ = Filter(whole, known, asked, triples.num_relations)
        for batch in asked_for.split(batch_size):
            scores = model.scores(h, batch[:, known], batch[:, 1])
            ranks.append(filtered_ranks(scores, batch[:, asked], *filter_.true_entities(batch)))
    model.train()
    return torch.cat(ranks)


def metrics(ranks):
    found = {"MRR": float((1 / ranks).mean())}
    return found | {f"Hits@{k}": float((ranks <= k).float().mean()) for k in (1, 3, 10)}


def train(model, triples, options):
    """The loss of each step, and (step, validation MRR) after each epoch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    sample = triples.validation[torch.randperm(len(triples.validation))[:2000]]
    num_training = len(triples.training)
    num_steps = -(-num_training // options.batch_size)
    losses, progress_of_mrr = [], []
    with Progress(*COLUMNS) as progress:
        for epoch in range(options.epochs):
            bar = progress.add_task(f"epoch {epoch + 1}", total=num_steps)
            shuffled = triples.training[torch.randperm(num_training)]
            for begin in range(0, num_training, options.batch_size):
                end = begin + options.batch_size
                others = torch.cat([shuffled[:begin], shuffled[end:]])
                if options.mini_batch:
                    messages = others[torch.randint(len(others), (options.num_edges,))]
                else:
                    messages = others[torch.rand(len(others)) >= options.edge_dropout]
                graph = message_graph(messages, triples.num_entities, triples.num_relations)
                loss = model.loss(graph, shuffled[begin:end])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                said = f"epoch {epoch + 1}, loss {losses[-1]:.3f}"
                progress.update(bar, advance=1, description=said)
            mrr = metrics(evaluate(model, triples, sample))["MRR"]
            progress_of_mrr.append((len(losses), mrr))
            said = f"epoch {epoch + 1}, loss {losses[-1]:.3f}, validation MRR {mrr:.3f}"
            progress.update(bar, description=said)
    return losses, progress_of_mrr


def draw(losses, progress_of_mrr, title, path):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    axes[0].plot(range(1, len(losses) + 1), losses, color="#aa3377", linewidth=1)
    axes[0].set_title("training loss", loc="left", fontsize=10)
    axes[1].plot(*zip(*progress_of_mrr, strict=True), color="#4477aa", marker="o")
    axes[1].set_title("filtered MRR of 2,000 validation triples", loc="left", fontsize=10)
    for axis in axes:
        axis.set_xlabel("step")
        axis.set_xlim(left=0)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def read_options(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default=os.environ.get("PENSTOCK_DATA"), help="folder of rgnn/")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--mini-batch", action="store_true", help="messages over sampled edges")
    parser.add_argument("--num-edges", type=int, default=30_000, help="of a mini-batch")
    parser.add_argument("--edge-dropout", type=float, default=0.4, help="without --mini-batch")
    parser.add_argument("--batch-size", type=int, default=4096, help="triples asked for in a step")
    parser.add_argument("--width", type=int, default=100, help="a multiple of 5")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--figure", default="link_prediction.png")
    options = parser.parse_args(arguments)
    if options.data is None:
        parser.error("--data is missing: the folder that has rgnn/, or set PENSTOCK_DATA")
    return options


def main(arguments=None):
    options = read_options(arguments)
    torch.manual_seed(0)
    triples = load(Path(options.data, "rgnn", "fb15k-237"))
    model = LinkPredictor(
        triples.num_entities, triples.num_relations, options.width, options.dropout
    )
    start = time.perf_counter()
    losses, progress_of_mrr = train(model, triples, options)
    seconds = time.perf_counter() - start
    found = metrics(evaluate(model, triples, triples.test))
    rows = [(name, f"{value:.3f}") for name, value in found.items()]
    rows += [("plans", rgnn.layers.rgcn.num_plans), ("training_seconds", seconds)]
    how = "mini-batches" if options.mini_batch else "full graph"
    print(report_table(rows, title=f"FB15k-237, {how}, both ends, filtered"))
    title = f"FB15k-237, {how}: test MRR {found['MRR']:.3f}, Hits@10 {found['Hits@10']:.3f}"
    draw(losses, progress_of_mrr, title, options.figure)
    print(f"the picture is {options.figure}")
    return found


if __name__ == "__main__":
    main()
