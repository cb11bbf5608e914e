"""The largest batches that a GPU's memory holds: of a fixed count, and below a cap of bytes."""

from __future__ import annotations

import time

import torch

from _batching_examples import load_example
from _rows import BenchmarkRow
from penstock.batching import BalancedBatchSampler, ByteModel, probe_batches

MEMORY_BYTES = 1 << 30
COUNTS = (32, 64, 128, 256, 512, 1024, 2048)


def frontier_rows(data, where, device):
    """Steps of an epoch with the largest fixed count that survives, and with a cap, on PROTEINS."""
    example = load_example("graph_classification")
    example.HIDDEN = 512  # so that the data set does not fit at once
    total = torch.cuda.get_device_properties(device).total_memory
    with torch.cuda.device(device):
        torch.cuda.set_per_process_memory_fraction(MEMORY_BYTES / total)
    graphs = example.Graphs(data / "tu" / "PROTEINS", "PROTEINS")
    count = len(graphs.y)
    trainer = example.Trainer(graphs, 0, device)
    features = {"nodes": graphs.num_nodes, "edges": graphs.num_edges}
    probes = probe_batches(features, max_samples=32)
    model = ByteModel.fit(trainer.step, probes, features, device=device)
    before = torch.cuda.memory_allocated(device)

    def epoch(batches):
        torch.cuda.reset_peak_memory_stats(device)
        begin = time.perf_counter()
        try:
            for batch in batches:
                trainer.step(batch)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            return None
        torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    found = {}
    for batch_size in COUNTS:
        arms = {
            "random": list(example.FixedCount(count, batch_size, 0)),
            "penstock, fixed count": list(
                BalancedBatchSampler(model.costs(features).summed_bytes, batch_size=batch_size)
            ),
        }
        for arm, batches in arms.items():
            seconds = epoch(batches)
            if seconds is not None:
                peak = torch.cuda.max_memory_allocated(device)
                found[arm] = (seconds, batch_size, len(batches), peak)
    # What the allocator cannot use because of fragmentation is not a batch's.
    cap = int(0.92 * (MEMORY_BYTES - before))
    batches = list(BalancedBatchSampler(model.costs(features), max_bytes=cap))
    seconds = epoch(batches)
    if seconds is not None:
        peak = torch.cuda.max_memory_allocated(device)
        found["penstock, cap"] = (seconds, None, len(batches), peak)
    case = "GIN on PROTEINS, hidden 512, 1 GiB: the largest that fits"
    return [
        BenchmarkRow.of(
            [seconds],
            topic="batching",
            case=case,
            arm=arm,
            peak_bytes={"device": peak},
            extra={"batch_size": batch_size, "steps": steps, "cap": cap},
            **where,
        )
        for arm, (seconds, batch_size, steps, peak) in found.items()
    ]
