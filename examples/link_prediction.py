"""Link prediction in FB15k-237: an RGCN encoder with a DistMult decoder.

    python examples/link_prediction.py
    python examples/link_prediction.py --mini-batch
    python examples/link_prediction.py --decoder-only

As in Schlichtkrull et al. 2018 (arXiv 1703.06103, sections 4 and 5.2), entities are embedded by a
relational convolution with block-diagonal weights, and a triple (s, r, o) is scored by
`sum(e_s * w_r * e_o)`. Messages are passed over edges of which a share is dropped in each step, and
never over the triples that are asked for. Other than there, a step asks a set of questions, such as
(s, r, ?), for all their answers at once, each held against the same few thousand other entities:
that needs far fewer steps.

`--mini-batch` passes messages over a sample of the edges only; `--decoder-only` passes none, which
is DistMult, and what the messages have to be better than. `--data` has the folder `rgnn/fb15k-237`
and is `$PENSTOCK_DATA` by default. Takes minutes on a CPU; ends with the mean reciprocal rank and
Hits@k of the test triples, and a picture of the training.
"""

import argparse
import dataclasses
import os
import time
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.nn.functional import dropout

from penstock import rgnn
from penstock.tables import report_table

NUM_BLOCKS = 4
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


class Questions:
    """Each known end of a triple with its relation, and all entities that answer it."""

    def __init__(self, triples, known, asked, num_relations):
        self._num_relations, self._known = num_relations, known
        self._keys, self.of_triples = self._key(triples).unique(return_inverse=True)
        counts = self.of_triples.bincount(minlength=len(self._keys))
        self._first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        self._answers = triples[self.of_triples.argsort(), asked]

    def __len__(self):
        return len(self._keys)

    def numbers(self, triples):
        """Return the question that each triple answers; another triple must have asked it."""
        return torch.searchsorted(self._keys, self._key(triples))

    def ends_and_relations(self, numbers):
        key = self._keys[numbers]
        return key // self._num_relations, key % self._num_relations

    def answers(self, numbers):
        """Return all pairs (place among the numbers, entity)."""
        counts = self._first[numbers + 1] - self._first[numbers]
        places = torch.repeat_interleave(torch.arange(len(numbers)), counts)
        within = torch.arange(len(places)) - (counts.cumsum(0) - counts)[places]
        return places, self._answers[self._first[numbers][places] + within]

    def _key(self, triples):
        return triples[:, self._known] * self._num_relations + triples[:, 1]


def questions_about(triples, num_relations):
    """Return the questions for tails, and for heads."""
    return [Questions(triples, known, asked, num_relations) for known, asked in ((0, 2), (2, 0))]


class LinkPredictor(nn.Module):
    """Embeddings of entities by a relational convolution, and of relations for the decoder."""

    def __init__(self, num_entities, num_relations, width, drop, *, has_encoder=True):
        super().__init__()
        self.entities = nn.Parameter(torch.randn(num_entities, width) / width**0.5)
        self.relations = nn.Parameter(torch.randn(num_relations, width))
        self.convolution, self.drop = None, drop
        if has_encoder:
            self.convolution = rgnn.RGCNConv(width, width, 2 * num_relations, num_blocks=NUM_BLOCKS)

    def encode(self, graph):
        """Return the embeddings of all entities, (num_entities, width)."""
        if self.convolution is None:
            return self.entities
        x = dropout(self.entities, self.drop, self.training)
        return self.entities + torch.relu(self.convolution(x, graph))

    def asked(self, h, questions, numbers):
        """Return the factors of an answer's embedding: (questions, width)."""
        known, relation = questions.ends_and_relations(numbers)
        return dropout(h[known] * self.relations[relation], self.drop, self.training)

    def loss(self, h, questions, numbers, others):
        """Return the sum of the losses of the answers among other entities, and their number."""
        asked = self.asked(h, questions, numbers)
        places, answers = questions.answers(numbers)
        of_others = (asked @ h[others].T).logsumexp(1)
        own = (asked[places] * h[answers]).sum(1)
        return (torch.logaddexp(of_others[places], own) - own).sum(), len(places)


def message_graph(triples, num_entities, num_relations):
    """Return the graph of some triples, with reverse edges."""
    return rgnn.Graph.from_triples(
        triples, num_nodes=num_entities, num_relations=num_relations
    ).with_reverse_edges()


def filtered_ranks(scores, target, true_rows, true_entities):
    """Return the rank of each row's target among entities that make no other true triple.

    Entities with the target's score count half: the mean of the best and the worst rank.
    """
    own = scores.gather(1, target[:, None])
    scores = scores.index_put((true_rows, true_entities), torch.tensor(-torch.inf))
    scores.scatter_(1, target[:, None], -torch.inf)
    return 1 + (scores > own).sum(1) + (scores == own).sum(1) / 2


@torch.no_grad()
def evaluate(model, triples, asked_for, batch_size=512):
    """Return filtered ranks of both ends of some triples."""
    model.eval()
    whole = torch.cat([triples.training, triples.validation, triples.test])
    h = model.encode(message_graph(triples.training, triples.num_entities, triples.num_relations))
    ranks = []
    for questions, asked in zip(questions_about(whole, triples.num_relations), (2, 0), strict=True):
        for batch in asked_for.split(batch_size):
            numbers = questions.numbers(batch)
            scores = model.asked(h, questions, numbers) @ h.T
            ranks.append(filtered_ranks(scores, batch[:, asked], *questions.answers(numbers)))
    model.train()
    return torch.cat(ranks)


def metrics(ranks):
    found = {"MRR": float((1 / ranks).mean())}
    return found | {f"Hits@{k}": float((ranks <= k).float().mean()) for k in (1, 3, 10)}


def messages_without(triples, questions, numbers, options):
    """Return triples that answer none of the questions: a share of them, or a sample."""
    kept = torch.ones(len(triples), dtype=torch.bool)
    for each, asked in zip(questions, numbers, strict=True):
        is_asked = torch.zeros(len(each), dtype=torch.bool)
        is_asked[asked] = True
        kept &= ~is_asked[each.of_triples]
    if not options.mini_batch:
        return triples[kept & (torch.rand(len(triples)) >= options.edge_dropout)]
    others = triples[kept]
    return others[torch.randint(len(others), (options.num_edges,))]


def train(model, triples, options):
    """Train; return the loss of each step, and (step, validation MRR) after each epoch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    sample = triples.validation[torch.randperm(len(triples.validation))[:2000]]
    questions = questions_about(triples.training, triples.num_relations)
    num_steps = -(-sum(map(len, questions)) // options.batch_size)
    losses, progress_of_mrr = [], []
    with Progress(*COLUMNS) as progress:
        for epoch in range(options.epochs):
            bar = progress.add_task(f"epoch {epoch + 1}", total=num_steps)
            shuffled = [torch.randperm(len(each)).tensor_split(num_steps) for each in questions]
            for numbers in zip(*shuffled, strict=True):
                messages = messages_without(triples.training, questions, numbers, options)
                h = model.encode(
                    message_graph(messages, triples.num_entities, triples.num_relations)
                )
                others = torch.randperm(triples.num_entities)[: options.num_others]
                parts = [
                    model.loss(h, each, asked, others)
                    for each, asked in zip(questions, numbers, strict=True)
                ]
                loss = torch.stack([part for part, _ in parts]).sum()
                loss = loss / sum(count for _, count in parts)
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
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--mini-batch", action="store_true", help="messages over sampled edges")
    parser.add_argument("--num-edges", type=int, default=30_000, help="of a mini-batch")
    parser.add_argument("--edge-dropout", type=float, default=0.4, help="without --mini-batch")
    parser.add_argument("--decoder-only", action="store_true", help="DistMult, without messages")
    parser.add_argument("--batch-size", type=int, default=4096, help="questions of a step")
    parser.add_argument("--num-others", type=int, default=4000, help="entities held against each")
    parser.add_argument("--width", type=int, default=100, help="a multiple of 4")
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
        triples.num_entities,
        triples.num_relations,
        options.width,
        options.dropout,
        has_encoder=not options.decoder_only,
    )
    start = time.perf_counter()
    losses, progress_of_mrr = train(model, triples, options)
    seconds = time.perf_counter() - start
    found = metrics(evaluate(model, triples, triples.test))
    rows = [(name, f"{value:.3f}") for name, value in found.items()]
    rows += [("plans", rgnn.layers.rgcn.num_plans), ("training_seconds", seconds)]
    how = "mini-batches" if options.mini_batch else "full graph"
    how = "DistMult" if options.decoder_only else how
    print(report_table(rows, title=f"FB15k-237, {how}, both ends, filtered"))
    title = f"FB15k-237, {how}: test MRR {found['MRR']:.3f}, Hits@10 {found['Hits@10']:.3f}"
    draw(losses, progress_of_mrr, title, options.figure)
    print(f"the picture is {options.figure}")
    return found


if __name__ == "__main__":
    main()
