"""Small trainers for tests of planned training, and what they log and learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

import _models

BATCH, SEQ, VOCAB = 4, 32, 128
BUDGET = "640KiB"  # the step's parameters, moments and gradients have 0.9 MiB
SPLITTING = "448KiB"  # a budget in which operators of the step are split
PLAN: dict[str, Any] = {
    "device_memory": BUDGET,
    "host_memory": "1GiB",
    "machine": "h200",
    "time_limit": 0.05,
    "cache": False,
    "debug": True,
}
SMALL: dict[str, Any] = {**PLAN, "device_memory": "64MiB"}


def arguments_of(directory: Path, **options: Any) -> transformers.TrainingArguments:
    """Make the arguments of a short training on the CPU."""
    settings = {
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "warmup_steps": 2,
        "max_grad_norm": 0.5,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 0,
        **options,
    }
    return transformers.TrainingArguments(output_dir=str(directory), **settings)


def trainer_of(
    directory: Path,
    *,
    kind: type[transformers.Trainer] = transformers.Trainer,
    num_samples: int = 10,
    lengths: tuple[int, ...] = (SEQ,),
    model: torch.nn.Module | None = None,
    **options: Any,
) -> transformers.Trainer:
    """Make a trainer of a tiny GPT-2, whose batches of four rows have the lengths in turn."""
    if model is None:
        model = _models.build("gpt2", hidden=64, layers=1, heads=2, seq=SEQ, vocab=VOCAB)
    tokens = torch.randint(1, VOCAB, (num_samples, SEQ), generator=torch.Generator().manual_seed(1))
    rows = [row[: lengths[i // BATCH % len(lengths)]] for i, row in enumerate(tokens)]
    dataset: Any = [{"input_ids": row, "labels": row} for row in rows]
    return kind(
        model=model,
        args=arguments_of(directory, **options),
        train_dataset=dataset,
        eval_dataset=dataset[:BATCH],
    )


def outcome_of(trainer: transformers.Trainer) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return what was logged, without times, and the weights."""
    logged = [
        {
            name: value
            for name, value in entry.items()
            if name in ("loss", "grad_norm", "learning_rate", "epoch", "step", "eval_loss")
        }
        for entry in trainer.state.log_history
    ]
    model: Any = trainer.model
    return logged, {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    """Compare two outcomes bit for bit."""
    assert found[0] == expected[0]
    assert len(found[0]) > 2
    for name, weight in expected[1].items():
        assert torch.equal(found[1][name], weight), name
