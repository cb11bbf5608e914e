"""Learn the sentiment of every phrase of a sentence with a TreeLSTM, many trees in each kernel.

    PENSTOCK_DATA=/data python examples/treelstm.py
    python examples/treelstm.py --data /data --trees 1000 --epochs 2

The folder has `batching/text/sst_trees.txt`: bracketed trees of the Stanford Sentiment Treebank. No
two trees have the same shape, so node by node every operator would run for one word or phrase. A
`DynamicBatcher` runs all nodes that are ready in one call; a few batches are run node by node as
well, to compare. A picture is saved.
"""

import argparse
import os
import re
import statistics
import time
from pathlib import Path

import torch
from _shared import panels, progress_bar, save, titled
from torch import nn
from torch.nn.functional import cross_entropy

from penstock.batching import BalancedBatchSampler, DynamicBatcher, TypedGraph
from penstock.tables import report_table
from penstock.units import format_seconds

NUM_CLASSES = 5
NUM_COMPARED = 2  # batches that are run node by node as well


def read_tree(line, vocabulary):
    """A tree as a graph of words, phrases and classifiers, and the class of each of the last."""
    tokens = re.findall(r"[()]|[^\s()]+", line)
    graph, labels, stack = TypedGraph(), [], []
    for place, token in enumerate(tokens):
        if token == "(":
            stack.append([])
        elif token == ")":
            label, *children = stack.pop()
            if isinstance(children[0], str):
                word = vocabulary.setdefault(children[0].lower(), len(vocabulary))
                node = graph.add("word", inputs=[word])
            else:
                node = graph.add("phrase", *children)
            graph.add("class", node)
            labels.append(int(label))
            if stack:
                stack[-1].append(node)
        elif tokens[place - 1] != ")":
            stack[-1].append(token)
    return graph, torch.tensor(labels)


class Word(nn.Module):
    """Hidden state and cell state of a leaf."""

    def __init__(self, num_words, hidden):
        super().__init__()
        self.words, self.gates = nn.Embedding(num_words, hidden), nn.Linear(hidden, 3 * hidden)

    def forward(self, word):
        i, o, u = self.gates(self.words(word)).chunk(3, dim=1)
        c = i.sigmoid() * u.tanh()
        return o.sigmoid() * c.tanh(), c


class Phrase(nn.Module):
    """Those of a node with two children, each with a forget gate of its own (Tai et al. 2015)."""

    def __init__(self, hidden):
        super().__init__()
        self.gates = nn.Linear(2 * hidden, 5 * hidden)

    def forward(self, left, right):
        i, o, u, f, g = self.gates(torch.cat([left[0], right[0]], dim=1)).chunk(5, dim=1)
        c = i.sigmoid() * u.tanh() + f.sigmoid() * left[1] + g.sigmoid() * right[1]
        return o.sigmoid() * c.tanh(), c


class Classify(nn.Module):
    """Logits of the sentiment of a word or a phrase."""

    def __init__(self, hidden):
        super().__init__()
        self.dropout, self.linear = nn.Dropout(0.3), nn.Linear(hidden, NUM_CLASSES)

    def forward(self, state):
        return self.linear(self.dropout(state[0]))


def logits_of(batcher, graphs):
    """Logits of all words and phrases, tree by tree."""
    outputs = batcher(graphs)
    return outputs.of("class"), outputs.report


def logits_node_by_node(cells, graph):
    """The same of one tree, each cell called for one node."""
    nodes, values, logits = graph.nodes, [], []
    words = graph.inputs[graph.signatures.index(("word", 0, 1))][0]
    words = iter(words.to(cells["word"].gates.weight.device))
    for node, code in enumerate(nodes.types.tolist()):
        kind = graph.signatures[code][0]
        reads = nodes.flat[nodes.starts[node] : nodes.starts[node + 1]].tolist()
        inputs = [next(words)[None]] if kind == "word" else []
        values.append(cells[kind](*(values[read] for read in reads), *inputs))
        if kind == "class":
            logits.append(values[-1])
    return torch.cat(logits)


@torch.no_grad()
def evaluate(batcher, trees, batch_size):
    """Accuracy of all phrases, and of whole sentences."""
    batcher.eval()
    right = whole = count = 0
    for first in range(0, len(trees), batch_size):
        graphs, labels = zip(*trees[first : first + batch_size], strict=True)
        hits = logits_of(batcher, graphs)[0].argmax(1) == torch.cat(labels)
        ends = torch.tensor([len(each) for each in labels]).cumsum(0) - 1
        right, whole, count = (
            right + int(hits.sum()),
            whole + int(hits[ends].sum()),
            count + len(hits),
        )
    batcher.train()
    return right / count, whole / len(trees)


def compare(batcher, cells, batches, trees):
    """Seconds of a step together and node by node, forward and backward."""
    seconds = {"together": [], "node by node": []}
    for batch in batches:
        graphs, labels = zip(*(trees[index] for index in batch), strict=True)
        labels = torch.cat(labels)
        for how, run in (
            ("together", lambda graphs=graphs: logits_of(batcher, graphs)[0]),
            (
                "node by node",
                lambda g=graphs: torch.cat([logits_node_by_node(cells, t) for t in g]),
            ),
        ):
            begin = time.perf_counter()
            cross_entropy(run(), labels).backward()
            seconds[how].append(time.perf_counter() - begin)
            batcher.zero_grad()
    return {how: statistics.median(each) for how, each in seconds.items()}


def draw(losses, scores, seconds, num_batches, path):
    """Loss and accuracy over the training, and what a step takes."""
    figure, axes = panels(3, width=11, height=3.2)
    step = max(len(losses) // 100, 1)
    means = [statistics.fmean(losses[k : k + step]) for k in range(0, len(losses), step)]
    axes[0].plot(range(0, len(losses), step), means, color="#004488", lw=1.6)
    axes[0].set(xlabel="step")
    titled(axes[0], "training loss of all phrases")
    epochs = range(1, len(scores) + 1)
    for part, (name, color) in enumerate((("phrases", "#004488"), ("sentences", "#bb5566"))):
        axes[1].plot(epochs, [each[part] for each in scores], "o-", ms=4, color=color, label=name)
    axes[1].set(xlabel="epoch", xticks=list(epochs))
    titled(axes[1], "test accuracy, five classes")
    axes[1].legend(frameon=False)
    bars = axes[2].barh(list(seconds), [1e3 * each for each in seconds.values()], color="#ddaa33")
    axes[2].bar_label(bars, [format_seconds(each) for each in seconds.values()], padding=3)
    axes[2].set(xlim=(0, 1.25e3 * max(seconds.values())), xlabel="ms")
    titled(axes[2], f"a step: {num_batches} calls of cells")
    save(figure, path)


def read_options(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", default=os.environ.get("PENSTOCK_DATA"), help="has batching/text/"
    )
    parser.add_argument("--trees", type=int, help="use only so many")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--max-bytes", help="budget of a step, such as 64MiB")
    parser.add_argument("--figure", default="treelstm.png")
    options = parser.parse_args(arguments)
    if options.data is None:
        parser.error("--data is missing: the folder that has batching/, or set PENSTOCK_DATA")
    return options


def main(arguments=None):
    options = read_options(arguments)
    torch.manual_seed(0)
    lines = Path(options.data, "batching", "text", "sst_trees.txt").read_text().splitlines()
    vocabulary = {}
    trees = [read_tree(line, vocabulary) for line in lines[: options.trees]]
    order = torch.randperm(len(trees)).tolist()
    test = [trees[index] for index in order[: len(trees) // 10]]
    trees = [trees[index] for index in order[len(trees) // 10 :]]
    cells = {
        "word": Word(len(vocabulary), options.hidden),
        "phrase": Phrase(options.hidden),
        "class": Classify(options.hidden),
    }
    batcher = DynamicBatcher(cells, max_bytes=options.max_bytes)
    optimizer = torch.optim.Adam(batcher.parameters(), lr=1e-3)
    sampler = BalancedBatchSampler(
        [len(graph) for graph, _ in trees], batch_size=options.batch_size
    )
    print(f"{len(trees)} trees to learn from, {len(test)} to test, {len(vocabulary)} words")
    losses, scores, reports = [], [], []
    with progress_bar() as progress:
        bar = progress.add_task("begin", total=options.epochs * len(sampler))
        for epoch in range(options.epochs):
            for batch in sampler:
                graphs, labels = zip(*(trees[index] for index in batch), strict=True)
                logits, report = logits_of(batcher, graphs)
                loss = cross_entropy(logits, torch.cat(labels))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                reports.append(report)
                said = f"epoch {epoch + 1}, loss {losses[-1]:.3f}"
                if scores:
                    said += f", sentences {scores[-1][1]:.3f}"
                progress.update(bar, advance=1, description=said)
            scores.append(evaluate(batcher, test, options.batch_size))
    batches = [batch for batch, _ in zip(sampler, range(NUM_COMPARED), strict=False)]
    seconds = compare(batcher, cells, batches, trees)
    print(report_table(reports[-1], title="the last step"))
    rows = [
        ("test accuracy of phrases", f"{scores[-1][0]:.3f}"),
        ("test accuracy of sentences", f"{scores[-1][1]:.3f}"),
        ("loss of the last 20 steps", f"{statistics.fmean(losses[-20:]):.3f}"),
        ("a step together", format_seconds(seconds["together"])),
        ("node by node", format_seconds(seconds["node by node"])),
        ("faster", f"{seconds['node by node'] / seconds['together']:.1f} times"),
    ]
    print(report_table(rows, title=f"TreeLSTM, hidden {options.hidden}"))
    draw(losses, scores, seconds, reports[-1].num_batches, options.figure)
    return scores, seconds, reports


if __name__ == "__main__":
    main()
