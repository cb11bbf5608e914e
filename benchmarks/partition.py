"""Steps over several devices: bytes that ranks hold and exchange, against how people split them.

    python benchmarks/partition.py                          # all models; an hour
    python benchmarks/partition.py --models wresnet-50-4 lstm-6-4k --time-limit 20
    python benchmarks/partition.py --part search --models llama-70b   # seconds of one search
    python benchmarks/partition.py --part table             # what the rows say

Models: Tofu's table (Wang, Huang, Li, EuroSys 2019: wide ResNets of width 4 to 10, LSTMs of 6 to 10
layers and width 4k to 8k, 20 steps, over 8 devices) and transformers up to Llama-70B over 64.

Arms: `batch` (data parallelism), `fsdp`, `tensor` (Megatron's rule; by batch between nodes),
`chop` (every tensor along one axis over all devices), `greedy` (one operator after the other),
`flat` (one integer program over one level of ranks, within the memory of `fsdp`), and `auto`, that
is `penstock.partition`, with as much memory as the arm it is compared with. Every partition passes
`check`.

Values are bytes that a rank receives in a step: counted, not measured. The limit of a row of `auto`
is the arm's exchange at the same memory. Searches may run beside other work: `search_cpu_seconds`
are those of the processor. `--part search` measures the seconds of one search, on a quiet machine,
within the memory of a device.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable

import torch

import penstock
from _plan_convolutions import wide_resnet
from _plan_models import make_optimizer
from _plan_recurrent import Recurrent
from _rows import (
    BenchmarkRow,
    Limit,
    announce,
    argument_parser,
    environment,
    read_rows,
    results_file,
    write_rows,
)
from penstock.cli._models import ModelOptions, load_graph
from penstock.errors import InfeasibleError
from penstock.graph import StepGraph, with_workspace
from penstock.memory import machine
from penstock.partitioner import Partition, check, partition
from penstock.partitioner._api import assemble, with_bound
from penstock.partitioner._flat import solve_flat
from penstock.partitioner._fold import find_groups
from penstock.partitioner._mesh import make_mesh
from penstock.partitioner._search import SplitSearch
from penstock.partitioner._split import Model as SplitModel
from penstock.partitioner.axes import find_axes

TOPIC = "partition"
MACHINE = machine("h100-80gb")
FLAT = "flat"
ARMS = ("batch", "fsdp", "tensor", "chop", "greedy", FLAT)
DEVICE_MEMORY = "80GiB"
_FLAT_SECONDS = 60.0
_RESNET_BATCH, _LSTM_BATCH = 32, 512  # of all devices together
_RESNET_BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


@dataclasses.dataclass(frozen=True)
class Model:
    """A model over a number of devices."""

    devices: int
    make: Callable[[], StepGraph]


def _wide_resnet(depth: int, width: int) -> StepGraph:
    with torch.device("meta"):
        model = wide_resnet(_RESNET_BLOCKS[depth], width).train()
        batch = (
            torch.empty(_RESNET_BATCH, 3, 224, 224),
            torch.zeros(_RESNET_BATCH, dtype=torch.long),
        )
    return penstock.capture(model, make_optimizer("sgd", model), batch)


def _lstm(num_layers: int, width: int) -> StepGraph:
    with torch.device("meta"):
        model = Recurrent(num_layers=num_layers, width=width, bidirectional=False, cell="lstm")
        batch = torch.empty(20, _LSTM_BATCH, width), torch.empty(_LSTM_BATCH, width)
    return penstock.capture(model.train(), make_optimizer("sgd", model), batch)


def _transformer(name: str, batch: int, length: int) -> StepGraph:
    return load_graph(name, ModelOptions(batch=batch, sequence=length, dtype="bfloat16"))


MODELS: dict[str, Model] = {
    **{
        f"lstm-{layers}-{width}k": Model(
            8, lambda layers=layers, width=width: _lstm(layers, 1024 * width)
        )
        for layers in (6, 8, 10)
        for width in (4, 6, 8)
    },
    **{
        f"wresnet-{depth}-{width}": Model(
            8, lambda depth=depth, width=width: _wide_resnet(depth, width)
        )
        for depth in _RESNET_BLOCKS
        for width in (4, 6, 8, 10)
    },
    "gpt2-xl": Model(8, lambda: _transformer("gpt2-xl", 16, 1024)),
    "llama-7b": Model(8, lambda: _transformer("llama-7b", 8, 2048)),
    "llama-70b": Model(64, lambda: _transformer("llama-70b", 64, 2048)),
}


def run(model: str, time_limit: float) -> list[BenchmarkRow]:
    """The rows of a model: each arm, and ours with its memory."""
    case = MODELS[model]
    graph = with_workspace(case.make(), "cuda")
    rows, budgets = [], {}
    ours: dict[int, tuple[Partition, float]] = {}
    for arm in ARMS:
        began = time.process_time()
        try:
            if arm == FLAT:
                found = _solve_flat(graph, case.devices, budgets["fsdp"], time_limit)
            else:
                found = _partition(graph, case.devices, None, time_limit, arm)
        except InfeasibleError as error:
            print(f"{model}: {arm}: {error}", file=sys.stderr)
            continue
        rows.append(_row(model, arm, found, time.process_time() - began))
        budget = budgets[arm] = found.peak_device_bytes
        if budget not in ours:
            began = time.process_time()
            best = _partition(graph, case.devices, budget, time_limit, "auto")
            ours[budget] = best, time.process_time() - began
        limit = Limit(name=arm, value=float(found.exchanged_bytes), unit="B")
        rows.append(_row(model, f"auto, memory of {arm}", *ours[budget], limit))
    return rows


def run_search(model: str, time_limit: float) -> BenchmarkRow:
    """The row of one search within the memory of a device, timed without `check`."""
    case = MODELS[model]
    graph = with_workspace(case.make(), "cuda")
    began = time.monotonic()
    found = partition(
        graph,
        devices=case.devices,
        device_memory=DEVICE_MEMORY,
        machine=MACHINE,
        time_limit=time_limit,
    )
    seconds = time.monotonic() - began
    check(graph, found)
    row = _row(model, f"auto, {DEVICE_MEMORY}", found, seconds)
    return dataclasses.replace(
        row,
        median_seconds=seconds,
        quartiles_seconds=(seconds, seconds),
        limit=Limit(name="search", value=60.0, unit="s"),
        limit_fraction=seconds / 60.0,
        extra={
            **{name: each for name, each in row.extra.items() if name != "search_cpu_seconds"},
            "times": "measured",
            "step_seconds": found.step_seconds,
        },
    )


def _partition(
    graph: StepGraph, devices: int, budget: int | None, time_limit: float, method: str
) -> Partition:
    found = partition(
        graph,
        devices=devices,
        device_memory=budget,
        machine=MACHINE,
        time_limit=time_limit,
        method=method,
    )
    check(graph, found)
    return found


def _solve_flat(graph: StepGraph, devices: int, budget: int, time_limit: float) -> Partition:
    axes = find_axes(graph)
    model = SplitModel(graph, axes, find_groups(graph, axes))
    mesh = make_mesh((devices,), MACHINE)
    flat = solve_flat(model, mesh, budget, max(time_limit, _FLAT_SECONDS))
    if flat.step is None:
        raise InfeasibleError("no flat split was found in time")
    search = SplitSearch(model, MACHINE, None)
    found = with_bound(search, assemble(search, search.add(flat.step, FLAT), 0))
    check(graph, found)
    return dataclasses.replace(found, notes={**found.notes, "is_proved": flat.is_proved})


def _row(
    model: str, arm: str, found: Partition, seconds: float, limit: Limit | None = None
) -> BenchmarkRow:
    exchanged = float(found.exchanged_bytes)
    return BenchmarkRow.of(
        [found.step_seconds],
        **environment("cpu"),
        topic=TOPIC,
        case=f"{model} over {found.devices}",
        arm=arm,
        limit=limit,
        measured=exchanged,
        moved_bytes={kind: num for kind, (_, num) in found.count_collectives().items()},
        peak_bytes={"device": found.peak_device_bytes},
        extra={
            "exchanged_bytes": found.exchanged_bytes,
            "mesh": "x".join(map(str, found.mesh)),
            "lower_bound_bytes": found.lower_bound_bytes,
            "search_cpu_seconds": seconds,
            "exchange_seconds": found.exchange_seconds,
            "times": "predicted",
            **({"is_proved": found.notes["is_proved"]} if "is_proved" in found.notes else {}),
        },
    )


def print_table(rows: list[BenchmarkRow]) -> None:
    """Print each arm with ours at its memory, and the geometric mean of their ratio."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        exchanged = row.extra["exchanged_bytes"] / 1e9
        peak = row.peak_bytes["device"] / 1e9
        ratio = "" if row.limit_fraction is None else f"{row.limit_fraction:5.2f}"
        print(f"{row.case:24} {row.arm:24} {peak:9.2f} GB held {exchanged:9.2f} GB moved {ratio}")
        if row.limit is not None and row.limit.unit == "B" and row.limit_fraction:
            ratios.setdefault(row.limit.name, []).append(row.limit_fraction)
    for arm, each in ratios.items():
        mean = math.exp(sum(map(math.log, each)) / len(each))
        print(f"auto against {arm}: {mean:.2f} of its bytes at its memory (geometric mean)")


def main() -> None:
    """Run the models that were asked for, and write their rows."""
    parser = argument_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--part", choices=("run", "search", "table"), default="run")
    options = parser.parse_args()
    if options.part == "table":
        print_table(read_rows(results_file(environment("cpu")["device_name"], TOPIC, options.out)))
        return
    if options.dry_run:
        announce((model, arm) for model in options.models for arm in (*ARMS, "auto"))
        return
    for model in options.models:
        limit = options.time_limit
        rows = [run_search(model, limit)] if options.part == "search" else run(model, limit)
        write_rows(rows, options.out)
        print_table(rows)


if __name__ == "__main__":
    main()
