"""Fine-tuning with `transformers.Trainer` on sentences of real lengths: planned steps beside eager.

    PENSTOCK_DATA=/data python benchmarks/trainer.py
    python benchmarks/trainer.py --data /data --models llama --tiers host --repetitions 1

Batches are padded to their longest sentence (Stanford Sentiment Treebank). The budget is a share of
what the step of the longest batch takes without one. Each planned run stands between two eager
ones. A step's time ends where the next begins, and planning, which is in the first, is a number of
its own; the losses of every step are compared.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import statistics
import tempfile
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

import _models
from _rows import BenchmarkRow, Limit, announce, argument_parser, environment, write_rows

TOPIC = "trainer"
MODELS = ("gpt2", "llama")
TIERS = ("host", "file")
VOCAB, LAYERS, HIDDEN, HEADS, BATCH, EPOCHS = 8192, 6, 192, 6, 16, 2
BAR = 1.15

Run = dict[str, Any]


def sentences(data: Path, number: int) -> list[dict[str, list[int]]]:
    """Word numbers of the first sentences, as inputs and labels."""
    numbers: dict[str, int] = {}
    found = []
    with (data / "batching" / "text" / "sst_trees.txt").open() as lines:
        for _, line in zip(range(number), lines, strict=False):
            words = re.findall(r" ([^() ]+)\)", line)
            tokens = [1 + numbers.setdefault(word, len(numbers)) % (VOCAB - 1) for word in words]
            found.append({"input_ids": tokens, "labels": tokens})
    return found


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad to the longest row."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, filling: int) -> torch.Tensor:
        return torch.tensor([row[name] + [filling] * (longest - len(row[name])) for row in rows])

    mask = [[1] * len(row["input_ids"]) for row in rows]
    mask = [row + [0] * (longest - len(row)) for row in mask]
    return {
        "input_ids": padded("input_ids", 0),
        "attention_mask": torch.tensor(mask),
        "labels": padded("labels", -100),
    }


def model_of(name: str, longest: int) -> Any:
    model: Any = _models.build(
        name, hidden=HIDDEN, layers=LAYERS, heads=HEADS, seq=2 * longest, vocab=VOCAB
    )
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def budget_of(model: Any, rows: list[dict[str, list[int]]], share: Fraction) -> int:
    """A share of the bytes that a step of the longest batch takes, in whole bytes."""
    from penstock import plan
    from penstock.graph.capturing.capture import record_step
    from penstock.graph.capturing.step_program import StepProgram

    batch = collate(sorted(rows, key=lambda row: len(row["input_ids"]))[-BATCH:])
    graph = record_step(StepProgram(model, batch), torch.optim.AdamW(model.parameters()))
    return int(plan(graph, time_limit=5).peak_device_bytes * share)


def train(name: str, rows: list[dict[str, list[int]]], options: dict[str, Any] | None) -> Run:
    """Train; times of steps in seconds, losses, and the report where it is planned."""
    import transformers

    from penstock.integrations.transformers import plan_training

    longest = max(len(row["input_ids"]) for row in rows)
    begins: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            begins.append(time.perf_counter())

        def on_train_end(self, *_: Any, **__: Any) -> None:
            begins.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as directory:
        trainer = transformers.Trainer(
            model=model_of(name, longest),
            args=transformers.TrainingArguments(
                output_dir=directory,
                per_device_train_batch_size=BATCH,
                num_train_epochs=EPOCHS,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                seed=0,
            ),
            train_dataset=rows,  # pyright: ignore[reportArgumentType]
            data_collator=collate,
            callbacks=[Clock()],
        )
        training = None
        if options is not None:
            training = plan_training(trainer, **options)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    seconds = [end - begin for begin, end in itertools.pairwise(begins)]
    report = training.report() if training is not None else None
    return {"seconds": seconds, "losses": losses, "report": report}


def compared(
    name: str, tier: str, rows: list[dict[str, list[int]]], arguments: argparse.Namespace
) -> list[BenchmarkRow]:
    """Rows of a model on a tier and beside it."""
    case = f"{name} hidden {HIDDEN} layers {LAYERS} batch {BATCH}, {len(rows)} sentences"
    longest = max(len(row["input_ids"]) for row in rows)
    device_memory = budget_of(model_of(name, longest), rows, arguments.share)
    below = {"host_memory": "4GiB"} if tier == "host" else {"store": arguments.store}
    options = {
        "device_memory": device_memory,
        "time_limit": arguments.time_limit,
        "cache": False,
        **below,
    }
    before = train(name, rows, None)
    eager, planned, ratios = [before], [], []
    for _ in range(arguments.repetitions):
        planned.append(train(name, rows, options))
        eager.append(train(name, rows, None))
        ratios.append(
            _seconds(planned[-1]) / statistics.mean([_seconds(eager[-2]), _seconds(eager[-1])])
        )
        print(name, tier, f"{ratios[-1]:.3f}", planned[-1]["report"], flush=True)
    differences = [
        abs(one - other) / abs(one)
        for run in planned
        for one, other in zip(before["losses"], run["losses"], strict=True)
    ]
    where = environment(arguments.device)
    arm = f"planned, {arguments.share}, {tier}"
    return [
        BenchmarkRow.of(
            [_seconds(run) for run in eager],
            topic=TOPIC,
            case=case,
            arm=f"eager, beside {tier}",
            **where,
        ),
        BenchmarkRow.of(
            [_seconds(run) for run in planned],
            topic=TOPIC,
            case=case,
            arm=arm,
            limit=Limit(name=f"{BAR} x eager", value=BAR, unit="1"),
            measured=statistics.median(ratios),
            extra={
                "budget_bytes": device_memory,
                "ratios": ratios,
                "median_step_ratio": _median_step(planned) / _median_step(eager),
                "first_step_seconds": [run["seconds"][0] for run in planned],
                "largest_relative_loss_difference": max(differences),
                "steps": len(before["losses"]),
                "report": str(planned[-1]["report"]),
                "load": os.getloadavg()[0],
            },
            **where,
        ),
    ]


def _seconds(run: Run) -> float:
    """Seconds of the steps but the first, which plans."""
    return sum(run["seconds"][1:])


def _median_step(runs: list[Run]) -> float:
    return statistics.median(seconds for run in runs for seconds in run["seconds"][1:])


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", default=os.environ.get("PENSTOCK_DATA"), type=Path, metavar="DIR")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--tiers", nargs="+", default=TIERS, choices=TIERS)
    parser.add_argument("--sentences", default=960, type=int, help="of an epoch")
    parser.add_argument("--share", default=Fraction(1, 4), type=Fraction)
    parser.add_argument("--store", default=tempfile.gettempdir(), metavar="DIR")
    parser.add_argument("--repetitions", default=3, type=int)
    parser.add_argument("--time-limit", default=60.0, type=float, help="for planning, in seconds")
    arguments = parser.parse_args()
    cases = [(model, tier) for model in arguments.models for tier in arguments.tiers]
    if arguments.dry_run:
        announce((model, f"planned, {arguments.share}, {tier}") for model, tier in cases)
        return
    if arguments.data is None:
        parser.error("--data (or $PENSTOCK_DATA) is missing: the folder that has batching/")
    rows = sentences(arguments.data, arguments.sentences)
    for model, tier in cases:
        write_rows(compared(model, tier, rows, arguments), arguments.out)


if __name__ == "__main__":
    main()
