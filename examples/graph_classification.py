"""Classify proteins with a GIN, in batches of a fixed count and in batches that fill a byte cap.

    PENSTOCK_DATA=/data python examples/graph_classification.py
    python examples/graph_classification.py --data /data --cap 2MiB --seeds 10

The folder has `batching/tu/PROTEINS/PROTEINS_*.txt`, as TUDataset publishes it. A model of bytes is
fitted to a few measured steps; the cap is then what the worst batch of a fixed count would take, so
that both arms need the same memory, and the capped one takes fewer steps. A picture is saved.
"""

import argparse
import os
import statistics
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from _shared import panels, progress_bar, save, titled
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

from penstock.batching import BalancedBatchSampler, ByteModel, measured_peak, probe_batches
from penstock.tables import report_table
from penstock.units import format_bytes, format_seconds, parse_bytes

HIDDEN, NUM_LAYERS = 32, 4
ARMS = {"fixed count": "#bb5566", "byte cap": "#004488"}


class Graphs:
    """Graphs of a TU data set: nodes with one-hot labels, edges, one class each."""

    def __init__(self, folder, name):
        def read(part):
            text = (folder / f"{name}_{part}.txt").read_text().replace(",", " ")
            return torch.tensor(np.array(text.split(), dtype=np.int64))

        graph_of = read("graph_indicator") - 1
        edges = read("A").view(-1, 2).t() - 1
        labels = read("node_labels")
        classes = read("graph_labels")
        self.y = torch.unique(classes, return_inverse=True)[1]
        self.num_nodes = torch.bincount(graph_of, minlength=len(self.y))
        self.num_edges = torch.bincount(graph_of[edges[0]], minlength=len(self.y))
        x = one_hot(labels - labels.min()).float()
        firsts = torch.cumsum(self.num_nodes, 0) - self.num_nodes
        by_graph = torch.argsort(graph_of[edges[0]], stable=True)
        parts = edges[:, by_graph].split(self.num_edges.tolist(), dim=1)
        self.edges = [part - first for part, first in zip(parts, firsts.tolist(), strict=True)]
        self.x = x.split(self.num_nodes.tolist())

    def batch(self, indices, device):
        """Features, edges, the graph of each node, and the classes of some graphs side by side."""
        counts = self.num_nodes[indices]
        firsts = torch.cumsum(counts, 0) - counts
        shifted = [self.edges[i] + first for i, first in zip(indices, firsts.tolist(), strict=True)]
        parts = (
            torch.cat([self.x[i] for i in indices]),
            torch.cat(shifted, dim=1),
            torch.repeat_interleave(counts),
            self.y[indices],
        )
        return tuple(part.to(device) for part in parts)


class GIN(nn.Module):
    """Sums over neighbours, a perceptron each, and the sums over each graph of all layers."""

    def __init__(self, num_features, num_classes):
        super().__init__()
        widths = [num_features] + [HIDDEN] * NUM_LAYERS
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(w, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU())
            for w in widths[:-1]
        )
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in self.layers)
        self.classify = nn.Linear(HIDDEN * NUM_LAYERS, num_classes)

    def forward(self, x, edges, graph_of, num_graphs):
        pooled = []
        counts = torch.bincount(graph_of, minlength=num_graphs)[:, None]
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
            x = norm(layer(x))
            pooled.append(x.new_zeros(num_graphs, HIDDEN).index_add(0, graph_of, x) / counts)
        return self.classify(torch.cat(pooled, dim=1))


class Trainer:
    """A model, its optimizer, and one training step."""

    def __init__(self, graphs, seed, device):
        torch.manual_seed(seed)
        self.graphs, self.device = graphs, device
        self.model = GIN(graphs.x[0].shape[1], int(graphs.y.max()) + 1).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def step(self, batch, weight=1.0):
        x, edges, graph_of, y = self.graphs.batch(batch, self.device)
        loss = cross_entropy(self.model(x, edges, graph_of, len(batch)), y)
        self.optimizer.zero_grad()
        (weight * loss).backward()
        self.optimizer.step()
        return float(loss.detach())

    @torch.no_grad()
    def evaluate(self, indices):
        """Accuracy and mean loss."""
        x, edges, graph_of, y = self.graphs.batch(indices, self.device)
        logits = self.model(x, edges, graph_of, len(indices))
        return float((logits.argmax(1) == y).float().mean()), float(cross_entropy(logits, y))


class FixedCount:
    """Shuffled batches of a fixed count, as a data loader makes them by default."""

    def __init__(self, num_samples, batch_size, seed):
        self._num_samples, self._batch_size = num_samples, batch_size
        self._random = np.random.default_rng(seed)

    def __iter__(self):
        order = self._random.permutation(self._num_samples)
        for first in range(0, len(order), self._batch_size):
            yield order[first : first + self._batch_size].tolist()


def run(arm, graphs, train, test, options, cap, costs, seed, advance):
    """Train once; what came of it, and the batches of the first epoch."""
    trainer = Trainer(graphs, seed, options.device)
    sampler = FixedCount(len(train), options.batch_size, seed)
    if arm == "byte cap":
        sampler = BalancedBatchSampler(costs, max_bytes=cap, seed=seed)
    curve, steps, first_epoch = [], 0, []
    begin = time.perf_counter()
    for epoch in range(options.epochs):
        weights = iter(lambda: 1.0, None)
        if isinstance(sampler, BalancedBatchSampler):
            sampler.set_epoch(epoch)
            weights = sampler.loss_weights()
        batches = list(sampler)
        for batch, weight in zip(batches, weights, strict=False):
            trainer.step(train[batch].tolist(), weight)
        steps += len(batches)
        first_epoch = first_epoch or batches
        curve.append((*trainer.evaluate(test.tolist()), trainer.evaluate(train.tolist())[1]))
        advance(curve[-1])
    seconds = time.perf_counter() - begin
    return {"curve": curve, "steps": steps, "batches": first_epoch, "seconds": seconds}


def mean_of_seeds(values):
    """The mean and, of more than one, the standard deviation."""
    mean = f"{statistics.fmean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.pstdev(values):.3f}"


def draw(runs, peaks, cap, path):
    """Measured bytes of each batch of an epoch, and accuracy over the epochs."""
    figure, (left, right) = panels(2, width=9.5, height=3.4)
    for arm, color in ARMS.items():
        bytes_of = sorted((peak / 2**20 for peak in peaks[arm]), reverse=True)
        label = f"{arm}: {len(bytes_of)} steps"
        left.plot(range(1, len(bytes_of) + 1), bytes_of, "o-", ms=3, lw=1, color=color, label=label)
    left.axhline(cap / 2**20, color="#444444", ls=":", lw=1.2, label="the cap")
    left.set(xlabel="batch of an epoch, largest first", ylim=(0, None))
    titled(left, "measured peak of a step, MiB")
    for arm, color in ARMS.items():
        curves = np.array([[point[0] for point in each["curve"]] for each in runs[arm]])
        epochs = np.arange(1, curves.shape[1] + 1)
        right.plot(epochs, curves.mean(0), color=color, lw=2, label=arm)
        if len(curves) > 1:
            right.fill_between(epochs, curves.min(0), curves.max(0), color=color, alpha=0.15, lw=0)
    right.set(xlabel="epoch", ylim=(0, 1))
    num_seeds = len(runs["byte cap"])
    of_seeds = f"mean and range of {num_seeds} seeds" if num_seeds > 1 else "one seed"
    titled(right, f"test accuracy, {of_seeds}")
    for axis in (left, right):
        axis.xaxis.get_major_locator().set_params(integer=True)
    for axis in (left, right):
        axis.legend(frameon=False, loc="lower left" if axis is left else "lower right")
    save(figure, path)


def read_options(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default=os.environ.get("PENSTOCK_DATA"), help="has batching/tu/")
    parser.add_argument("--dataset", default="PROTEINS")
    parser.add_argument("--batch-size", type=int, default=32, help="of the fixed count")
    parser.add_argument("--cap", help="such as 2MiB; by default the worst batch of a fixed count")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--figure", default="graph_classification.png")
    options = parser.parse_args(arguments)
    if options.data is None:
        parser.error("--data is missing: the folder that has batching/, or set PENSTOCK_DATA")
    return options


def main(arguments=None):
    options = read_options(arguments)
    graphs = Graphs(Path(options.data, "batching", "tu", options.dataset), options.dataset)
    order = torch.randperm(len(graphs.y), generator=torch.Generator().manual_seed(0))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    features = {"nodes": graphs.num_nodes[train], "edges": graphs.num_edges[train]}
    probed = Trainer(graphs, 0, options.device)
    model = ByteModel.fit(
        lambda batch: probed.step(train[batch].tolist()),
        probe_batches(features, max_samples=2 * options.batch_size),
        features,
        device=options.device,
    )
    print(model)
    costs = model.costs(features)
    drawn = [FixedCount(len(train), options.batch_size, seed) for seed in range(options.seeds)]
    worst = max(costs.of_batch(batch) for sampler in drawn for batch in sampler)
    cap = worst if options.cap is None else parse_bytes(options.cap, name="--cap")
    runs = {arm: [] for arm in ARMS}
    with progress_bar() as progress:
        for arm in ARMS:
            bar = progress.add_task(arm, total=options.epochs * options.seeds)
            for seed in range(options.seeds):

                def advance(point, bar=bar, arm=arm, seed=seed):
                    said = f"{arm:11}, seed {seed}, test accuracy {point[0]:.3f}"
                    progress.update(bar, advance=1, description=said)

                runs[arm].append(run(arm, graphs, train, test, options, cap, costs, seed, advance))
    peaks = {arm: [] for arm in ARMS}
    for arm in ARMS:
        measured = Trainer(graphs, 0, options.device)
        batches = runs[arm][0]["batches"]
        measured.step(train[batches[0]].tolist())  # the optimizer makes its states
        for batch in batches:
            chosen = train[batch].tolist()
            peaks[arm].append(measured_peak(partial(measured.step, chosen), options.device)[0])
    for arm, each in runs.items():
        last = [[point[part] for point in one["curve"]][-1] for one in each for part in (0, 1, 2)]
        rows = [
            ("steps of an epoch", len(each[0]["batches"])),
            ("largest measured peak", format_bytes(max(peaks[arm]))),
            ("mean measured peak", format_bytes(int(statistics.fmean(peaks[arm])))),
            ("seconds of a run", format_seconds(statistics.median(e["seconds"] for e in each))),
            ("test accuracy", mean_of_seeds(last[::3])),
            ("test loss", mean_of_seeds(last[1::3])),
            ("training loss", mean_of_seeds(last[2::3])),
        ]
        if arm == "byte cap":
            rows.insert(1, ("cap", format_bytes(cap)))
        seeds = f"{options.seeds} seeds" if options.seeds > 1 else "one seed"
        print(report_table(rows, title=f"{arm}, {options.dataset}, {seeds}"))
    draw(runs, peaks, cap, options.figure)
    return runs, peaks, cap


if __name__ == "__main__":
    main()
