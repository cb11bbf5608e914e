"""Several fine-tuning jobs in one process, of stock PEFT or of `penstock.lora.Jobs`.

`lora.py` starts it, once for the arms in one process and once a job for the arm of a process each.
It says when it is warm, waits for a line, trains, and prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _lora_models import add_flags, base_bytes, model_of, with_adapter
from _train import memory_bytes

TOGETHER = "penstock, jobs together"
ONE_BY_ONE = "PEFT, one after the other"
FUSED_ONE_BY_ONE = "penstock, one after the other"
PROCESSES = "PEFT, one process each"
ARMS = (ONE_BY_ONE, PROCESSES, FUSED_ONE_BY_ONE, TOGETHER)
LEARNING_RATE = 1e-4


def samples_of(options: argparse.Namespace, job: int, num_steps: int) -> list[Any]:
    """Return the samples of a job, one a step."""
    model = model_of(options)
    return [
        model.batch(rows=1, length=options.rows, device=options.device, seed=100 * job + step)
        for step in range(num_steps)
    ]


def train_one_by_one(base: Any, options: argparse.Namespace, num_steps: int) -> list[list[float]]:
    """Train each job with PEFT's model of the one base; return the losses by job."""
    losses = []
    for job in range(options.first, options.first + options.jobs):
        peft = with_adapter(
            base,
            rank=options.rank,
            dropout=options.dropout,
            fused=options.arm == FUSED_ONE_BY_ONE,
        )
        trained = [each for each in peft.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE)
        losses.append([])
        for batch in samples_of(options, job, num_steps):
            optimizer.zero_grad(set_to_none=True)
            loss = peft(**batch).loss
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
        base = peft.unload()
    return losses
