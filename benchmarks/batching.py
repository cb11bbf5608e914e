"""Batches that fit, schedules of few kernels, and trees in batches, against what else there is.

    PENSTOCK_DATA=/data python benchmarks/batching.py                  # everything
    python benchmarks/batching.py --data /data --part schedules
    python benchmarks/batching.py --data /data --part figure           # from the rows
    python benchmarks/batching.py --data /data --device cuda           # and the memory frontier

Part `batches` makes batches of real sizes: the largest batch of a fixed count, and the steps below
a cap. Part `schedules` counts batches of operators on ED-Batch's published graphs. Part `trees`
times TreeLSTM steps. Part `bytes` holds predicted peaks against measured ones, part `training`
what capped training comes to against that with a fixed count. With a GPU, part `frontier` finds the
largest count that does not run out of memory. On a CPU the times of `batches` and `schedules` are
seconds of the processor: a shared machine does not count; `trees` wants a quiet one. The data are
those of the examples, and of `batching/typed_graphs/`.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from _batching_figure import draw
from _batching_frontier import frontier_rows
from _batching_references import (
    Simulation,
    by_depth,
    first_fit_decreasing,
    learned_automaton,
    nugraph_batches,
    ratio_rule,
)
from _batching_training import prediction_rows, training_rows
from _batching_trees import tree_rows
from _rows import BenchmarkRow, Limit, announce, argument_parser, environment, write_rows
from penstock.batching import BalancedBatchSampler, schedule

TOPIC = "batching"
PARTS = ("batches", "schedules", "trees", "bytes", "training", "frontier", "figure")
NUM_SHUFFLES = 20
MANY_SAMPLES = 1_000_000
# Gain over random batches that issue 7 asks for, by data set and count.
BATCH_SIZES = {"PROTEINS": (32, 0.33), "SST": (32, 0.17), "NCI109": (64, 0.11), "DHFR": (32, 0.07)}


def sizes_of(data, name):
    """Nodes and edges of each graph, or nodes of each tree."""
    if name == "SST":
        lines = (data / "text" / "sst_trees.txt").read_text().splitlines()
        return np.array([line.count("(") for line in lines])
    folder = data / "tu" / name
    graph_of = np.loadtxt(folder / f"{name}_graph_indicator.txt", dtype=int) - 1
    text = (folder / f"{name}_A.txt").read_text().replace(",", " ")
    sources = np.array(text.split(), dtype=int)[::2] - 1
    nodes = np.bincount(graph_of)
    return nodes + np.bincount(graph_of[sources], minlength=len(nodes))


def cut(order, batch_size):
    return [order[k : k + batch_size] for k in range(0, len(order), batch_size)]


def grouped_by_length(sizes, batch_size, seed):
    """Transformers' `group_by_length`."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    generator = torch.Generator().manual_seed(seed)
    lengths = sizes.tolist()
    sampler = LengthGroupedSampler(batch_size, lengths=lengths, generator=generator)
    return cut(list(sampler), batch_size)


def fixed_count_arms(sizes, batch_size):
    """For each arm a function from the number of a shuffle to batches."""

    def balanced(seed, window=16):
        return list(BalancedBatchSampler(sizes, batch_size=batch_size, window=window, seed=seed))

    def random(seed):
        return cut(np.random.default_rng(seed).permutation(len(sizes)), batch_size)

    return {
        "random": random,
        "published rule, 0.1": lambda seed: nugraph_batches(
            sizes, batch_size, np.random.default_rng(seed)
        ),
        "published rule, 0.5": lambda seed: nugraph_batches(
            sizes, batch_size, np.random.default_rng(seed), 0.5
        ),
        "group_by_length": lambda seed: grouped_by_length(sizes, batch_size, seed),
        "penstock": balanced,
        "penstock, whole epoch": lambda seed: balanced(seed, window=10**9),
    }


def capped_arms(sizes):
    """For each arm a function from a cap and the number of a shuffle to batches."""

    def pyg(cap, seed):
        from torch_geometric.data import Data
        from torch_geometric.loader import DynamicBatchSampler

        torch.manual_seed(seed)
        graphs: Any = [Data(num_nodes=size) for size in sizes.tolist()]
        # No list(): it asks for the length, which this sampler refuses to give.
        return [batch for batch in DynamicBatchSampler(graphs, cap, mode="node", shuffle=True)]  # noqa: C416

    return {
        "PyG DynamicBatchSampler": pyg,
        "first-fit decreasing": lambda cap, seed: first_fit_decreasing(sizes, cap),
        "penstock": lambda cap, seed: list(BalancedBatchSampler(sizes, max_bytes=cap, seed=seed)),
    }


def batch_rows(data, where):
    """Largest batches of a fixed count, steps below a cap, and the time of a million samples."""
    rows = []
    for name, (batch_size, wanted) in BATCH_SIZES.items():
        sizes = sizes_of(data, name)
        largest, drawn = {}, []
        for arm, make in fixed_count_arms(sizes, batch_size).items():
            seconds, peaks = [], []
            for seed in range(NUM_SHUFFLES):
                begin = time.process_time()
                batches = make(seed)
                seconds.append(time.process_time() - begin)
                peaks.append(max(int(sizes[batch].sum()) for batch in batches))
            drawn = drawn or peaks
            largest[arm] = float(np.mean(peaks))
            gain = 1 - largest[arm] / largest["random"]
            limit = Limit(name="gain over random batches", value=wanted, unit="1")
            given = {"limit": limit, "measured": gain} if arm == "penstock" else {}
            # No batch of the count can be lighter than the mean: that is the most to be gained.
            mean = float(sizes.sum()) / -(-len(sizes) // batch_size)
            extra = {
                "largest_batch": largest[arm],
                "gain": gain,
                "most_gain": 1 - mean / largest["random"],
                "num_samples": len(sizes),
            }
            case = f"{name} in batches of {batch_size}"
            rows.append(
                BenchmarkRow.of(
                    seconds, topic=TOPIC, case=case, arm=arm, extra=extra, **given, **where
                )
            )
        random_steps = -(-len(sizes) // batch_size)
        for arm, make in capped_arms(sizes).items():
            seconds, steps = [], []
            for seed, cap in enumerate(drawn):
                begin = time.process_time()
                batches = make(cap, seed)
                seconds.append(time.process_time() - begin)
                assert max(int(sizes[batch].sum()) for batch in batches) <= cap
                steps.append(len(batches))
            share = float(np.mean(steps)) / random_steps
            bound = float(np.mean([-(-int(sizes.sum()) // cap) for cap in drawn])) / random_steps
            extra = {"steps": float(np.mean(steps)), "share": share, "share_of_bound": bound}
            given = {}
            if (arm, name) == ("penstock", "PROTEINS"):
                limit = Limit(name="steps of random batches", value=0.7, unit="1")
                given = {"limit": limit, "measured": share}
            case = f"{name} below the worst random batch of {batch_size}"
            rows.append(
                BenchmarkRow.of(
                    seconds, topic=TOPIC, case=case, arm=arm, extra=extra, **given, **where
                )
            )
    return [*rows, *time_rows(where)]


def time_rows(where):
    sizes = np.random.default_rng(0).lognormal(3, 1, MANY_SAMPLES).astype(int) + 1
    rows = []
    arms: dict[str, dict[str, Any]] = {
        "penstock, 32": {"batch_size": 32},
        "penstock, capped": {"max_bytes": 3 * int(sizes.max())},
        "penstock, capped, 8 ranks": {"max_bytes": 3 * int(sizes.max()), "num_replicas": 8},
    }
    for arm, arguments in arms.items():
        seconds = []
        for seed in range(3):
            begin = time.process_time()
            for _ in BalancedBatchSampler(sizes, seed=seed, **arguments):
                pass
            seconds.append(time.process_time() - begin)
        limit = Limit(name="2 us a sample", value=2e-6 * MANY_SAMPLES, unit="s")
        case = "an epoch of a million samples"
        row = BenchmarkRow.of(seconds, topic=TOPIC, case=case, arm=arm, limit=limit, **where)
        rows.append(row)
    return rows


def schedule_rows(data, where, iterations):
    """Batches of operators over the lower bound, on every published graph."""
    rows = []
    for path in sorted((data / "typed_graphs").glob("*.txt")):
        lines = [list(map(int, line.split())) for line in path.read_text().splitlines()[1:]]
        types, arguments = [line[0] for line in lines], [line[2:] for line in lines]
        simulation = Simulation(types, arguments)
        bound = schedule(types, arguments).lower_bound
        for arm, run in {
            "penstock": lambda t=types, a=arguments: schedule(t, a).batches,
            "ratio rule": lambda s=simulation: s.run(ratio_rule),
            "learned automaton": lambda s=simulation, b=bound: learned_automaton(
                s, b, iterations=iterations
            ),
            "by depth": lambda t=types, a=arguments: by_depth(t, a),
        }.items():
            begin = time.process_time()
            num_batches = len(run())
            seconds = [time.process_time() - begin]
            most = 1.2 if path.name.startswith("lattice") else 1.0
            limit = Limit(name="lower bound", value=most * bound, unit="1")
            extra = {"num_batches": num_batches, "lower_bound": bound, "ratio": num_batches / bound}
            rows.append(
                BenchmarkRow.of(
                    seconds,
                    topic=TOPIC,
                    case=f"schedule of {re.sub('.txt$', '', path.name)}",
                    arm=arm,
                    limit=limit,
                    measured=num_batches,
                    extra=extra,
                    **where,
                )
            )
    return rows


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", default=os.environ.get("PENSTOCK_DATA"), help="has batching/")
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--iterations", type=int, default=1000, help="of the learned automaton")
    options = parser.parse_args()
    if options.data is None:
        parser.error("--data is missing: the folder that has batching/, or set PENSTOCK_DATA")
    data = Path(options.data, "batching")
    if options.dry_run:
        announce((part, "all arms") for part in ([options.part] if options.part else PARTS))
        return
    where = environment(options.device)
    parts = {
        "batches": lambda: batch_rows(data, where),
        "schedules": lambda: schedule_rows(data, where, options.iterations),
        "trees": lambda: tree_rows(data, where, options.device),
        "bytes": lambda: prediction_rows(data, where, options.device),
        "training": lambda: training_rows(data, where, options.device),
        "frontier": lambda: frontier_rows(data, where, options.device),
    }
    if options.part == "figure":
        draw(where["device_name"], options.out)
        return
    chosen = [options.part] if options.part else list(parts)
    if not options.device.startswith("cuda"):
        chosen = [part for part in chosen if part != "frontier"]
    for part in chosen:
        rows = parts[part]()
        for row in rows:
            print(row, row.extra)
        write_rows(rows, options.out)


if __name__ == "__main__":
    main()
