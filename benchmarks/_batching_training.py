"""Measured bytes of batches beside the predicted ones, and training below a cap."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch
from torch import nn

from _batching_examples import load_example
from _rows import BenchmarkRow, Limit
from penstock.batching import (
    ByteModel,
    Padded,
    measured_peak,
    probe_batches,
)

NUM_SEEDS, NUM_EPOCHS, BATCH_SIZE = 5, 15, 32
COUNTS = (1, 2, 4, 8, 16, 32, 64, 96)  # the model is fitted to at most 32 samples at once


def gin(data, device):
    """The step of `examples/graph_classification.py`, and the features of its samples."""
    example = load_example("graph_classification")
    graphs = example.Graphs(data / "tu" / "PROTEINS", "PROTEINS")
    trainer = example.Trainer(graphs, 0, device)
    return trainer.step, {"nodes": graphs.num_nodes, "edges": graphs.num_edges}


def transformer(data, device):
    """Two layers over the words of the sentences of the sentiment trees."""
    lines = (data / "text" / "sst_trees.txt").read_text().splitlines()
    lengths = np.array([(line.count("(") + 1) // 2 for line in lines[:2000]])
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
    network = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)
    words = nn.Embedding(1000, 64, device=device)
    optimizer = torch.optim.Adam([*network.parameters(), *words.parameters()])

    def step(batch):
        length = int(lengths[batch].max())
        tokens = torch.zeros(len(batch), length, dtype=torch.long, device=device)
        padding = torch.arange(length) >= torch.as_tensor(lengths[batch])[:, None]
        loss = network(words(tokens), src_key_padding_mask=padding.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step, {"tokens": Padded(lengths), "pairs": Padded(lengths**2)}


def prediction_rows(data, where, device):
    """The largest error over batches that were not measured for the fit, up to three times it."""
    rows = []
    for case, make in {"GIN, PROTEINS": gin, "transformer, SST sentences": transformer}.items():
        step, features = make(data, device)
        begin = time.perf_counter()
        model = ByteModel.fit(step, probe_batches(features), features, device=device)
        seconds = time.perf_counter() - begin
        costs = model.costs(features)
        random = np.random.default_rng(1)
        errors, above = [], []
        for count in COUNTS * 3:
            batch = random.choice(len(costs), count, replace=False).tolist()
            peak = measured_peak(lambda batch=batch, step=step: step(batch), device)[0]
            errors.append(model.predict(batch, features) / peak - 1)
            above.append(costs.of_batch(batch) / peak - 1)
        worst = max(map(abs, errors))
        extra = {
            "errors": [min(errors), max(errors)],
            "margin": model.margin,
            "least_above_measured": min(above),
            "num_batches": len(errors),
        }
        limit = Limit(name="error of the predicted peak", value=0.1, unit="1")
        rows.append(
            BenchmarkRow.of(
                [seconds],
                topic="batching",
                case=f"bytes of {case}",
                arm="penstock",
                limit=limit,
                measured=worst,
                extra=extra,
                **where,
            )
        )
    return rows


def training_rows(data, where, device):
    """Loss and accuracy of a GIN on PROTEINS with a fixed count and below a cap, over seeds."""
    example = load_example("graph_classification")
    graphs = example.Graphs(data / "tu" / "PROTEINS", "PROTEINS")
    order = torch.randperm(len(graphs.y), generator=torch.Generator().manual_seed(0))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    sizes = graphs.num_nodes[train] + graphs.num_edges[train]
    drawn = [example.FixedCount(len(train), BATCH_SIZE, seed) for seed in range(NUM_SEEDS)]
    cap = max(int(sizes[batch].sum()) for batches in drawn for batch in batches)
    options = argparse.Namespace(device=device, batch_size=BATCH_SIZE, epochs=NUM_EPOCHS)
    found: dict[str, Any] = {}
    for arm in example.ARMS:
        runs = []
        for seed in range(NUM_SEEDS):
            run = example.run(arm, graphs, train, test, options, cap, sizes, seed, lambda _: None)
            runs.append(run)
        last = [run["curve"][-1] for run in runs]
        found[arm] = {
            "seconds": [run["seconds"] for run in runs],
            "accuracy": [each[0] for each in last],
            "training_loss": [each[2] for each in last],
            "steps": [run["steps"] for run in runs],
        }
    rows = []
    for quantity in ("accuracy", "training_loss"):
        each = [found[arm][quantity] for arm in example.ARMS]
        spread = max(max(values) - min(values) for values in each)
        apart = abs(statistics.fmean(each[0]) - statistics.fmean(each[1]))
        for arm in example.ARMS:
            extra = {quantity: found[arm][quantity], "steps": found[arm]["steps"]}
            limit = Limit(name="spread of 5 seeds", value=spread, unit="1")
            given = {"limit": limit, "measured": apart} if arm == "byte cap" else {}
            rows.append(
                BenchmarkRow.of(
                    found[arm]["seconds"],
                    topic="batching",
                    case=f"GIN on PROTEINS, {NUM_EPOCHS} epochs, {quantity.replace('_', ' ')}",
                    arm=arm,
                    extra=extra,
                    **given,
                    **where,
                )
            )
    return rows
