"""TreeLSTM steps on sentiment trees: in batches, by depth, as torchfold does, and node by node."""

from __future__ import annotations

import itertools
import time

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from _batching_examples import load_example
from _batching_references import by_depth, fold_step, frame_step
from _rows import BenchmarkRow, Limit
from penstock.batching import BalancedBatchSampler, DynamicBatcher

BATCH_SIZE, HIDDEN, NUM_BATCHES, NUM_ROUNDS = 64, 128, 4, 5
NUM_TREES = 2000


def depth_order(graph):
    """The schedule of TensorFlow Fold, for the engine of Penstock."""
    starts = graph.starts.tolist()
    arguments = [graph.flat[a:b].tolist() for a, b in itertools.pairwise(starts)]
    batches = by_depth(graph.types.tolist(), arguments)
    kinds = np.array([graph.types[batch[0]] for batch in batches])
    return np.concatenate(batches), np.cumsum([0, *map(len, batches)]), kinds


def tree_rows(data, where, device):
    """Times of whole steps, forward and backward, over the same batches in every arm."""
    treelstm = load_example("treelstm")
    torch.manual_seed(0)
    vocabulary: dict[str, int] = {}
    lines = (data / "text" / "sst_trees.txt").read_text().splitlines()
    trees = [treelstm.read_tree(line, vocabulary) for line in lines[:NUM_TREES]]
    cells = {
        "word": treelstm.Word(len(vocabulary), HIDDEN),
        "phrase": treelstm.Phrase(HIDDEN),
        "class": treelstm.Classify(HIDDEN),
    }
    for cell in cells.values():
        cell.to(device).eval()
    batcher, forgetful = DynamicBatcher(cells), DynamicBatcher(cells)
    sampler = BalancedBatchSampler([len(graph) for graph, _ in trees], batch_size=BATCH_SIZE)
    batches = [batch for batch, _ in zip(sampler, range(NUM_BATCHES), strict=False)]
    given = []
    for batch in batches:
        graphs, labels = zip(*(trees[index] for index in batch), strict=True)
        given.append((graphs, torch.cat(labels).to(device)))
    for graphs, _ in given:  # the graphs have been seen, as after an epoch; together they have not
        for graph in graphs:
            batcher(graph)
            forgetful(graph)
    scheduling: list[float] = []
    plan = DynamicBatcher._plan

    def timed_plan(self, *arguments):
        begin = time.perf_counter()
        planned = plan(self, *arguments)
        scheduling.append(time.perf_counter() - begin)
        return planned

    batcher._plan = timed_plan.__get__(batcher)
    forgetful._plan = timed_plan.__get__(forgetful)

    def together(graphs, batcher=batcher):
        return batcher(graphs).of("class")

    def new_composition(graphs):
        forgetful.forget_plans()
        return together(graphs, forgetful)

    arms = {
        "penstock, batches seen before": together,
        "penstock, trees seen before": new_composition,
        "by depth, penstock's engine": lambda g: batcher.run(g, order=depth_order).of("class"),
        "by depth, concatenating": lambda g: fold_step(cells, g, "class"),
        "by depth, states in one tensor": lambda g: frame_step(cells, g, "class"),
        "node by node": lambda g: torch.cat([treelstm.logits_node_by_node(cells, t) for t in g]),
    }
    with torch.no_grad():
        expected = together(given[0][0])
        for arm, run in arms.items():
            torch.testing.assert_close(run(given[0][0]), expected, msg=f"{arm} computes otherwise")
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    planned: dict[str, list[float]] = {arm: [] for arm in arms}
    for round_ in range(NUM_ROUNDS + 1):
        for arm, run in arms.items():
            slow = arm == "node by node"
            for graphs, labels in given[: 1 if slow else None]:
                scheduling.clear()
                seconds_of = timed(run, graphs, labels, batcher, device)
                if round_:  # the first is not measured
                    seconds[arm].append(seconds_of)
                    planned[arm] += scheduling
    rows = []
    ours = float(np.median(seconds["penstock, trees seen before"]))
    for arm, each in seconds.items():
        ratio = float(np.median(each)) / ours
        extra = {
            "over_penstock": ratio,
            "num_nodes": float(np.mean([sum(map(len, g)) for g, _ in given])),
        }
        by_depth_arms = [name for name in arms if name.startswith("by depth")]
        limits = {"node by node": 10.0, **dict.fromkeys(by_depth_arms, 1.5)}
        held = {}
        if arm in limits:
            limit = Limit(name="times penstock's step", value=limits[arm], unit="1")
            held = {"limit": limit, "measured": ratio}
        if planned[arm] and arm.startswith("penstock"):
            share = float(np.median(planned[arm])) / float(np.median(each))
            extra["scheduling_share"] = share
            if arm == "penstock, trees seen before":
                limit = Limit(name="share of scheduling", value=0.05, unit="1")
                held = {"limit": limit, "measured": share}
        case = f"TreeLSTM, SST, batch {BATCH_SIZE}, hidden {HIDDEN}, forward and backward"
        rows.append(
            BenchmarkRow.of(
                each, topic="batching", case=case, arm=arm, extra=extra, **held, **where
            )
        )
    return rows


def timed(run, graphs, labels, batcher, device):
    synchronize = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    synchronize()
    begin = time.perf_counter()
    cross_entropy(run(graphs), labels).backward()
    synchronize()
    seconds = time.perf_counter() - begin
    batcher.zero_grad()
    return seconds
