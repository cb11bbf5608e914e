"""What `benchmarks/execute.py` runs: the models, their plans, and training in one process.

Plans are made from measured operators and links and kept in a directory, so that what is timed is
only the running.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from _execute_peers import ordinary_step
from _models import MODELS as TRANSFORMERS
from _models import batch_of, build
from _plan_convolutions import wide_resnet
from _plan_recurrent import Recurrent
from _train import memory_bytes, reset_peak
from penstock.cli._vector_math import settle_vector_math
from penstock.errors import InfeasibleError
from penstock.executor import bind
from penstock.graph import StepGraph, capture, measure
from penstock.memory import probe
from penstock.planner import Plan, plan

MODELS = (*TRANSFORMERS, "resnet", "lstm")
ARMS = {  # share of what the full plan needs, tier, and the most times eager that a step may take
    "full": (1.0, "host", 1.05),
    "1/4 host": (1 / 4, "host", 1.10),
    "1/4 file": (1 / 4, "file", 1.10),
    "1/12 host": (1 / 12, "host", 1.15),
    "1/12 file": (1 / 12, "file", 1.15),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """How large models and batches are."""

    hidden: int = 512
    layers: int = 6
    heads: int = 8
    tokens: int = 512
    batch: int = 4
    vocabulary: int = 8192
    images: int = 16
    pixels: int = 96
    sequences: int = 64
    states: int = 64
    host_memory: str = "8GiB"

    def case(self, model: str) -> str:
        """What a row calls a model."""
        if model == "resnet":
            size = f"ResNet-50, {self.pixels} x {self.pixels} pixels, batch {self.images}"
        elif model == "lstm":
            size = f"hidden {self.hidden} layers 2, {self.states} states, batch {self.sequences}"
        else:
            size = (
                f"hidden {self.hidden} layers {self.layers} heads {self.heads} seq {self.tokens} "
                f"batch {self.batch} vocab {self.vocabulary}"
            )
        return f"{model} {size} adamw"


SHAPES = {
    "cpu": Shape(),
    "cuda": Shape(
        hidden=2048,
        layers=24,
        heads=16,
        tokens=1024,
        batch=16,
        vocabulary=32768,
        images=512,
        pixels=224,
        sequences=512,
        states=256,
        host_memory="96GiB",
    ),
}


def trainee(
    model: str, device: str
) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    """A model of the table, its optimizer and a batch; the same every time."""
    shape = SHAPES[device]
    if model in TRANSFORMERS:
        made = build(
            model,
            hidden=shape.hidden,
            layers=shape.layers,
            heads=shape.heads,
            seq=shape.tokens,
            vocab=shape.vocabulary,
        )
        batch = batch_of(model, batch=shape.batch, seq=shape.tokens, vocab=shape.vocabulary)
    else:
        made, batch = _trainee_of_plain_torch(model, shape)
    made.to(device)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    return made, torch.optim.AdamW(made.parameters(), lr=1e-4), batch


def _trainee_of_plain_torch(model: str, shape: Shape) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    if model == "resnet":
        images = torch.randn(shape.images, 3, shape.pixels, shape.pixels)
        labels = torch.randint(1000, (shape.images,))
        return wide_resnet((3, 4, 6, 3), width=1), {"images_BCHW": images, "labels_B": labels}
    made = Recurrent(num_layers=2, width=shape.hidden, bidirectional=False, cell="lstm")
    inputs = torch.randn(shape.states, shape.sequences, shape.hidden)
    return made, {"inputs_TBH": inputs, "target_BH": torch.randn(shape.sequences, shape.hidden)}


def file_name(arm: str) -> str:
    return arm.replace("/", "_").replace(" ", "_")


def prepare(
    model: str,
    device: str,
    directory: Path,
    store: str,
    *,
    time_limit: float,
    arms: Collection[str] = tuple(ARMS),
) -> None:
    """Capture, measure and plan; one file for each arm."""
    directory.mkdir(parents=True, exist_ok=True)
    graph_file = directory / "graph.json.gz"
    if not graph_file.exists():
        quietly_measured(capture(*trainee(model, device))).save(graph_file)
    graph = StepGraph.load(graph_file)
    machine = probe(store)
    full = plan(graph, machine=machine, time_limit=time_limit)
    full.save(directory / "full.json")
    for arm, (share, tier, _) in ARMS.items():
        if share == 1 or arm not in arms:
            continue
        below: dict[str, Any] = (
            {"store": store} if tier == "file" else {"host_memory": SHAPES[device].host_memory}
        )
        found, budget = None, int(full.peak_device_bytes * share)
        while found is None:
            try:
                found = plan(
                    graph, device_memory=budget, machine=machine, time_limit=time_limit, **below
                )
            except InfeasibleError as error:
                budget = int(max(error.sufficient_device_bytes or 0, budget) * 1.02)
        found.save(directory / f"{file_name(arm)}.json")
        print(
            model,
            arm,
            f"{found.peak_device_bytes / full.peak_device_bytes:.3f} of the memory,",
            f"{found.step_seconds / full.step_seconds:.3f} of the time, gap {found.gap:.3f}",
            file=sys.stderr,
        )


def quietly_measured(graph: StepGraph) -> StepGraph:
    """The quickest of three measurements: what else the machine did is no cost of an operator."""
    runs = [measure(graph, num_runs=3) for _ in range(3)]
    operators = []
    for same in zip(*(run.operators for run in runs), strict=True):
        seconds = [operator.seconds for operator in same if operator.seconds is not None]
        operators.append(dataclasses.replace(same[0], seconds=min(seconds, default=None)))
    return dataclasses.replace(graph, operators=tuple(operators))


def train(
    model_name: str, device: str, arm: str, directory: Path, store: str, num_steps: int
) -> dict[str, Any]:
    """Train in this process; returns times, the peak's growth, losses and a digest of the model."""
    settle_vector_math()
    model, optimizer, batch = trainee(model_name, device)
    step: Callable[[Any], torch.Tensor]
    with contextlib.ExitStack() as stack:
        if arm not in ARMS:
            step, planned = ordinary_step(arm, model, optimizer), None
        else:
            found = Plan.load(directory / f"{file_name(arm)}.json")
            graph = StepGraph.load(directory / "graph.json.gz")
            planned = stack.enter_context(bind(found, model, optimizer, graph=graph, store=store))
            step = planned
        torch.manual_seed(1)
        losses = [step(batch).item()]
        before, seconds, cpu_seconds = _begin_peak(device), [], []
        for _ in range(num_steps):
            begin, cpu_begin = time.perf_counter(), time.process_time()
            losses.append(step(batch).item())
            _settle(device)
            seconds.append(time.perf_counter() - begin)
            cpu_seconds.append(time.process_time() - cpu_begin)
        result: dict[str, Any] = {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "growth_bytes": _peak(device) - before,
            "load": os.getloadavg()[0],
            "losses": losses,
            "state": digest_of(model),
        }
        if planned is not None:
            result["report"] = planned.report().to_dict()
            del result["report"]["operator_seconds"]
    return result


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _begin_peak(device: str) -> int:
    """What is taken now; from here on the most of it is watched."""
    _settle(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    reset_peak()
    return memory_bytes("VmRSS")


def _peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else memory_bytes("VmHWM")


def digest_of(model: nn.Module) -> str:
    """A hash of all parameters and buffers."""
    state = hashlib.sha256()
    for tensor in model.state_dict().values():
        state.update(tensor.contiguous().cpu().numpy().tobytes())
    return state.hexdigest()


if __name__ == "__main__":  # model, device, arm, plans, store, steps
    name, kind, arm_name, plans, where, steps = sys.argv[1:]
    print(json.dumps(train(name, kind, arm_name, Path(plans), where, int(steps))))
