"""Entity classification with RGCN: AIFB and MUTAG, whole or in mini-batches.

    python examples/entity_classification.py --dataset aifb
    python examples/entity_classification.py --dataset mutag --mini-batch

To which research group does a person of AIFB belong, and is a molecule of MUTAG mutagenic? The
model and its options are those of Schlichtkrull et al. 2018 (arXiv 1703.06103, sections 2 and 5.1):
two relational convolutions over edges and reverse edges, the first one on nodes without features.
The triples that the labels were made from are taken out of the graph.

`--data` has the folders `rgnn/aifb` and `rgnn/mutag` with the N-Triples and the split, and is
`$PENSTOCK_DATA` by default. Ends with the test accuracy over seeds and a picture of the training.
"""

import argparse
import csv
import dataclasses
import os
import statistics
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.nn.functional import cross_entropy, embedding

from penstock import rgnn
from penstock.tables import report_table
from penstock.traversal import NeighborSampler

HIDDEN, NUM_EPOCHS = 16, 50


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A data set of the paper: its labels, its options, its result."""

    entity: str
    label: str
    leaks: tuple[str, ...]  # predicates that the labels were made from
    num_bases: int | None
    penalty: float  # times the squares of the first layer's embeddings
    paper_accuracy: float


DATASETS = {
    "aifb": Dataset("person", "label_affiliation", ("#employs", "#affiliation"), None, 0.0, 0.958),
    "mutag": Dataset("bond", "label_mutagenic", ("#isMutagenic",), 30, 5e-4, 0.732),
}


@rgnn.compile
def convolve_messages(g, messages, root, bias):
    """Compute a relational convolution of messages that come with the edges."""
    e, n = g.edges, g.nodes
    return g.sum_to_dst(rgnn.edge_mean(e(messages))) + n(root) + bias


class EntityClassifier(nn.Module):
    """Two relational convolutions. Nodes have no features, so in the first one each node has an
    embedding for each relation and one for itself: of its own, or sums of the same bases.
    """

    def __init__(self, num_nodes, num_relations, num_classes, num_bases):
        super().__init__()
        num_tables = num_bases or num_relations + 1
        self.tables = nn.Parameter(torch.empty(num_tables, num_nodes, HIDDEN))
        self.coefficients = None
        if num_bases is not None:
            self.coefficients = nn.Parameter(torch.empty(num_relations + 1, num_bases))
            nn.init.xavier_uniform_(self.coefficients)
        self.bias = nn.Parameter(torch.zeros(HIDDEN))
        bound = (6 / (num_nodes + HIDDEN)) ** 0.5
        nn.init.uniform_(self.tables, -bound, bound)
        self.second = rgnn.RGCNConv(HIDDEN, num_classes, num_relations, num_bases=num_bases)

    def forward(self, graph, node_ids, rows):
        """Return scores of a graph's nodes.

        Args:
            graph: The whole graph or a part of it.
            node_ids: What its nodes are in the whole graph.
            rows: For each edge, `relation * num_nodes + source`, in the whole graph.
        """
        tables = self.tables.flatten(1)
        if self.coefficients is not None:
            tables = self.coefficients @ tables
        tables = tables.view(-1, HIDDEN)
        num_nodes = self.tables.shape[1]
        own = embedding(len(tables) - num_nodes + node_ids, tables)
        h = convolve_messages(graph, embedding(rows, tables), own, self.bias)
        return self.second(torch.relu(h), graph)


@dataclasses.dataclass(frozen=True)
class Task:
    """A graph with labelled nodes."""

    graph: rgnn.Graph
    num_classes: int
    training: tuple[torch.Tensor, torch.Tensor]  # nodes and labels
    test: tuple[torch.Tensor, torch.Tensor]
    num_removed: int


def load(folder, name, dataset, *, validate=False):
    """Load the graph without the triples of the labels, with reverse edges, and the split.

    With `validate` the last fifth of the training nodes takes the place of the test nodes.
    """
    graph = rgnn.Graph.from_triples(folder / f"{name}_stripped.nt.gz")
    names = graph.names
    tells = torch.tensor([r.rstrip(">").endswith(dataset.leaks) for r in names.relations])
    kept = ~tells[graph.edge_type]
    num_removed = int((~kept).sum())
    graph = rgnn.Graph(
        graph.edge_index[:, kept],
        graph.edge_type[kept],
        num_nodes=graph.num_nodes,
        num_relations=graph.num_relations,
    )
    number = {name: node for node, name in enumerate(names.nodes)}
    rows = {}
    for part in ("training", "test"):
        with (folder / f"{part}Set.tsv").open(encoding="utf-8") as file:
            rows[part] = list(csv.DictReader(file, delimiter="\t"))
    if validate:
        first = len(rows["training"]) * 4 // 5
        rows = {"training": rows["training"][:first], "test": rows["training"][first:]}
    labels = sorted({row[dataset.label] for part in rows.values() for row in part})

    def split(part):
        nodes = [number[f"<{row[dataset.entity]}>"] for row in rows[part]]
        return torch.tensor(nodes), torch.tensor(
            [labels.index(r[dataset.label]) for r in rows[part]]
        )

    whole = graph.with_reverse_edges()
    return Task(whole, len(labels), split("training"), split("test"), num_removed)


def whole_graph(task):
    """Return the arguments of the model for the whole graph, and the training nodes."""
    graph, (nodes, labels) = task.graph, task.training
    rows = graph.edge_type * graph.num_nodes + graph.edge_index[0]
    return (graph, torch.arange(graph.num_nodes), rows), nodes, labels


def mini_batches(task, sampler, batch_size, generator):
    """Yield each batch of training nodes with the sampled graph around it, of one size."""
    nodes, labels = task.training
    graph = task.graph
    num_batches = -(-len(nodes) // batch_size)
    for chosen in torch.randperm(len(nodes), generator=generator).tensor_split(num_batches):
        around = sampler.sample(nodes[chosen], generator=generator)
        edge_type = graph.edge_type[around.edge_ids]
        part = rgnn.Graph(
            around.edge_index,
            edge_type,
            num_nodes=len(around.node_ids),
            num_relations=graph.num_relations,
        )
        rows = edge_type * graph.num_nodes + around.node_ids[around.edge_index[0]]
        yield (part, around.node_ids, rows), torch.arange(len(chosen)), labels[chosen]


def train(task, dataset, options, seed, advance):
    """Train; yield the test accuracy and the mean loss after each epoch."""
    torch.manual_seed(seed)
    graph = task.graph
    model = EntityClassifier(
        graph.num_nodes, graph.num_relations, task.num_classes, dataset.num_bases
    )
    others = [p for p in model.parameters() if p is not model.tables]
    tables = {"params": [model.tables], "weight_decay": 2 * dataset.penalty}
    optimizer = torch.optim.Adam([tables, {"params": others}], lr=0.01)
    whole, sampler = whole_graph(task), None
    if options.mini_batch:
        sampler = NeighborSampler.from_edges(
            graph.edge_index, graph.num_nodes, fanouts=options.fanouts
        )
    generator = torch.Generator().manual_seed(seed)
    accuracies, losses = [], []
    for _ in range(options.epochs):
        batches = [whole]
        if sampler is not None:
            batches = mini_batches(task, sampler, options.batch_size, generator)
        sum_loss = 0.0
        for inputs, places, labels in batches:
            loss = cross_entropy(model(*inputs)[places], labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sum_loss += loss.item() * len(labels)
        losses.append(sum_loss / len(task.training[0]))
        accuracies.append(evaluate(model, whole[0], task.test))
        advance(losses[-1], accuracies[-1])
    return accuracies, losses


@torch.no_grad()
def evaluate(model, inputs, test):
    nodes, labels = test
    return float((model(*inputs)[nodes].argmax(1) == labels).float().mean())


def draw(runs, dataset, title, path):
    """Draw accuracy and loss over the epochs: the mean of all seeds, and each of them faintly."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    parts = [("test accuracy", "#4477aa"), ("training loss", "#aa3377")]
    for which, (axis, (label, color)) in enumerate(zip(axes, parts, strict=True)):
        curves = [run[which] for run in runs]
        epochs = range(1, len(curves[0]) + 1)
        for curve in curves:
            axis.plot(epochs, curve, color=color, alpha=0.2, linewidth=0.8)
        mean = [statistics.fmean(values) for values in zip(*curves, strict=True)]
        axis.plot(epochs, mean, color=color, linewidth=2, label=f"mean of {len(runs)} seeds")
        axis.set_xlabel("epoch")
        axis.set_title(label, loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].axhline(dataset.paper_accuracy, color="#444444", linestyle=":", label="RGCN paper")
    axes[0].legend(frameon=False, loc="lower right")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def read_options(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", choices=list(DATASETS), default="aifb")
    parser.add_argument("--data", default=os.environ.get("PENSTOCK_DATA"), help="folder of rgnn/")
    parser.add_argument("--seeds", type=int, default=10, help="how many runs")
    parser.add_argument("--epochs", type=int, default=NUM_EPOCHS)
    parser.add_argument(
        "--validate", action="store_true", help="hold out training nodes instead of the test's"
    )
    parser.add_argument("--mini-batch", action="store_true", help="train on sampled parts")
    parser.add_argument("--batch-size", type=int, default=70, help="training nodes, at most")
    parser.add_argument("--fanouts", type=int, nargs=2, default=[100, 100], help="edges per node")
    parser.add_argument("--figure", default="entity_classification.png")
    options = parser.parse_args(arguments)
    if options.data is None:
        parser.error("--data is missing: the folder that has rgnn/, or set PENSTOCK_DATA")
    return options


def main(arguments=None):
    options = read_options(arguments)
    dataset = DATASETS[options.dataset]
    folder = Path(options.data, "rgnn", options.dataset)
    task = load(folder, options.dataset, dataset, validate=options.validate)
    print(f"{task.num_removed} triples told the labels and were removed")
    print(task.graph.stats())
    runs = []
    columns = (
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as progress:
        for seed in range(options.seeds):
            bar = progress.add_task(f"seed {seed}", total=options.epochs)

            def advance(loss, accuracy, bar=bar, seed=seed):
                said = f"seed {seed}, loss {loss:.4f}, test accuracy {accuracy:.3f}"
                progress.update(bar, advance=1, description=said)

            runs.append(train(task, dataset, options, seed, advance))
    final = [accuracies[-1] for accuracies, _ in runs]
    how = "mini-batches" if options.mini_batch else "full graph"
    mean = statistics.fmean(final)
    rows = [
        ("mean test accuracy", f"{mean:.3f}"),
        ("standard deviation", f"{statistics.pstdev(final):.3f}"),
        ("the paper's", f"{dataset.paper_accuracy:.3f}"),
        ("plans of the first layer", convolve_messages.num_plans),
        ("plans of the second layer", rgnn.layers.rgcn.num_plans),
    ]
    print(report_table(rows, title=f"{options.dataset}, {how}, {options.seeds} seeds"))
    title = f"{options.dataset.upper()}, {how}: test accuracy {mean:.3f}"
    draw(runs, dataset, title, options.figure)
    print(f"the picture is {options.figure}")
    return final, task


if __name__ == "__main__":
    main()
