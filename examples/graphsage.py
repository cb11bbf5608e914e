"""GraphSAGE on a graph whose features take twice the memory that they may: from RAM or from a file.

    python examples/graphsage.py tolokers.npz
    python examples/graphsage.py tolokers.npz --where file --store /mnt/nvme

Who of the workers of a crowdsourcing platform was banned? The graph is Tolokers (the file of
github.com/yandex-research/heterophilous-graphs): 11,758 nodes, 519,000 edges, 10 features. It is
real, but small, so it is tiled: copies of the whole graph side by side, and each node's features
repeated up to `--width`, until the table takes twice the `--budget`. The copies share no edge and
have the same training and test nodes, so the metric means what it means on one copy.

Without a GPU the budget is one of RAM. Ends with the metric, and a picture of where the time went.
"""

import argparse
import contextlib
import math
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

from penstock import unified
from penstock.integrations.pyg import NeighborLoader
from penstock.tables import report_table
from penstock.units import format_bytes, parse_bytes

HIDDEN, BLOCK_ROWS = 64, 8192


def tiled(path, *, width, budget_bytes, table_path, cache_bytes):
    """Return the tiled graph, the table of its features, and the training and test nodes."""
    file = np.load(path)
    edges, features = (torch.from_numpy(file[name]) for name in ("edges", "node_features"))
    edges = torch.cat([edges, edges.flip(1)]).t()
    num_nodes = len(features)
    num_copies = math.ceil(2 * budget_bytes / (num_nodes * width * 4))
    starts = torch.arange(num_copies) * num_nodes
    table = unified.empty((num_copies * num_nodes, width), path=table_path)
    wide = features.repeat(1, math.ceil(width / features.shape[1]))[:, :width]
    for start in range(0, len(table), BLOCK_ROWS):  # never more of it in memory than a block
        rows = torch.arange(start, min(start + BLOCK_ROWS, len(table)))
        table[rows] = wide[rows % num_nodes]
    if table_path is not None:
        table = unified.unify(table_path, cache=cache_bytes)
    data = Data(
        x=table,
        y=torch.from_numpy(file["node_labels"]).float().repeat(num_copies),
        edge_index=torch.cat([edges + start for start in starts], dim=1),
    )
    training = torch.from_numpy(file["train_masks"][0]).repeat(num_copies)
    test = torch.from_numpy(file["test_masks"][0]).nonzero().flatten()  # of the first copy
    return data, table, training, test


def roc_auc(scores, labels):
    """Return the probability that a banned worker outscores another; ties count half."""
    _, places, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[places].double()
    num_ones = labels.sum().double()
    above = ranks[labels == 1].sum() - num_ones * (num_ones + 1) / 2
    return float(above / (num_ones * (len(labels) - num_ones)))


def clock(device):
    """Return the seconds once all work of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def train(model, loader, device, *, num_epochs):
    """The seconds of each part of the training."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seconds = {"transfer": 0.0, "train": 0.0}
    text = TextColumn("[progress.description]{task.description}")
    with Progress(text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as progress:
        for epoch in range(num_epochs):
            task = progress.add_task(f"epoch {epoch + 1}", total=len(loader))
            sum_loss = 0.0
            for number, batch in enumerate(loader):
                start = clock(device)
                batch = batch.to(device)
                there = clock(device)
                logits = model(batch.x, batch.edge_index)[: batch.batch_size, 0]
                loss = binary_cross_entropy_with_logits(logits, batch.y[: batch.batch_size])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                sum_loss += loss.item()
                seconds["transfer"] += there - start
                seconds["train"] += clock(device) - there
                mean = sum_loss / (number + 1)
                progress.update(task, advance=1, description=f"epoch {epoch + 1}, loss {mean:.4f}")
    return seconds


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    scores, labels = [], []
    for batch in loader:
        batch = batch.to(device)
        scores.append(model(batch.x, batch.edge_index)[: batch.batch_size, 0].cpu())
        labels.append(batch.y[: batch.batch_size].cpu())
    return roc_auc(torch.cat(scores), torch.cat(labels))


def draw(rows, title, path):
    """Draw a bar for each thread: the times of its parts."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    colors = {
        "sample": "#4477aa",
        "gather": "#aa3377",
        "transfer": "#ee9922",
        "train": "#228833",
        "wait": "#dddddd",
        "other": "#aaaaaa",
    }
    figure, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
    for thread, parts in rows.items():
        left, total = 0.0, sum(parts.values())
        for name, seconds in parts.items():
            axes.barh(thread, seconds, left=left, color=colors[name], edgecolor="white")
            if seconds > 0.08 * total:  # where there is room for it
                ink = "black" if name == "wait" else "white"
                where = left + seconds / 2, thread
                axes.text(*where, f"{seconds:.1f} s", ha="center", va="center", color=ink)
            left += seconds
    handles = [Patch(color=color, label=name) for name, color in colors.items()]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    axes.invert_yaxis()
    axes.margins(x=0)
    axes.set_xlabel("seconds")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def read_options(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", help="tolokers.npz")
    parser.add_argument("--where", choices=["memory", "file"], default="memory")
    parser.add_argument("--store", help="directory for the table, where it is in a file")
    parser.add_argument("--budget", default="128MiB", help="the features take twice that")
    parser.add_argument("--width", type=int, default=512, help="floats per node")
    parser.add_argument("--fanouts", type=int, nargs="+", default=[10, 5])
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--figure", default="graphsage.png", help="where the picture goes")
    options = parser.parse_args(arguments)
    if (options.where == "file") != (options.store is not None):
        parser.error("--where file needs --store DIR, a directory on a local disk; memory has none")
    return options


def run(options, table_path):
    """Train and evaluate; return the metric, the times of both threads, and the report."""
    budget_bytes = parse_bytes(options.budget, name="--budget")
    device = torch.device(options.device)
    data, table, training, test = tiled(
        options.path,
        width=options.width,
        budget_bytes=budget_bytes,
        table_path=table_path,
        cache_bytes=budget_bytes // 2,
    )
    size = format_bytes(table.numel() * table.element_size())
    where = f"{size} of features in {'a file' if table_path else 'host memory'}"
    print(
        f"{data.num_nodes:,} nodes, {data.num_edges:,} edges; {where}, "
        f"the budget is {format_bytes(budget_bytes)}"
    )
    batches = {"batch_size": options.batch_size}
    loader = NeighborLoader(data, options.fanouts, input_nodes=training, shuffle=True, **batches)
    model = GraphSAGE(options.width, HIDDEN, num_layers=len(options.fanouts), out_channels=1)
    model = model.to(device)
    start = time.perf_counter()
    seconds = train(model, loader, device, num_epochs=options.epochs)
    wall_seconds = time.perf_counter() - start
    report = loader.report()
    test_loader = NeighborLoader(data, neighbor_sampler=loader.graph, input_nodes=test, **batches)
    metric = evaluate(model, test_loader, device)
    next_batch = {"sample": report.sample_seconds, "gather": report.gather_seconds}
    training_parts = {**seconds, "wait": report.wait_seconds}
    rows = {
        "next batch": {**next_batch, "wait": wall_seconds - sum(next_batch.values())},
        "training": {**training_parts, "other": wall_seconds - sum(training_parts.values())},
    }
    title = (
        f"Two threads over {options.epochs} epochs on {device.type.upper()}: {where}, "
        f"budget {format_bytes(budget_bytes)}"
    )
    draw(rows, title, options.figure)
    return metric, rows, table.report()


def main(arguments=None):
    options = read_options(arguments)
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        table_path = None
        if options.store is not None:
            folder = tempfile.TemporaryDirectory(prefix="penstock-graphsage-", dir=options.store)
            table_path = Path(stack.enter_context(folder), "features")
        metric, rows, report = run(options, table_path)
    print(report)
    for thread, parts in rows.items():
        shown = [(f"{name}_seconds", value) for name, value in parts.items()]
        print(report_table([*shown, ("total_seconds", sum(parts.values()))], title=thread))
    print(f"test ROC AUC {metric:.4f}; the picture is {options.figure}")
    return metric, rows, report


if __name__ == "__main__":
    main()
