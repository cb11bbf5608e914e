"""Transformers: a `Trainer` whose steps run as planned, and attention over blocks.

    plan_training(trainer, device_memory="4GiB", store="/mnt/nvme")
    trainer.train()

The trainer keeps its data, its loss, its optimizer, schedule, clipping, accumulation, logs,
evaluations and checkpoints. Only the work between a batch and the updated model is one planned
step.

    register_attention()
    model.set_attn_implementation("penstock")

Packed documents and sliding windows then cost what they see (`docs/attention.md`).
"""

# ruff: noqa: E402  # its absence is reported first

from penstock.compat.packages import import_package

import_package("transformers", "penstock.integrations.transformers")

from penstock.integrations.transformers._attention import register_attention
from penstock.integrations.transformers._shapes import TrainingReport
from penstock.integrations.transformers._training import (
    PlannedTraining,
    plan_trainers,
    plan_training,
)
from penstock.integrations.transformers._training import is_training as is_training  # for the CLI

__all__ = [
    "PlannedTraining",
    "TrainingReport",
    "plan_trainers",
    "plan_training",
    "register_attention",
]
