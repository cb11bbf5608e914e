"""Training steps of one arm in a process of its own: time, growth of a step, resident bytes.

`lora.py` starts it once per arm and round and reads the one JSON line that it prints. Growth is
over weights and optimizer state, once as the allocator counts it (a step under torch's profiler)
and once as the operating system sees the process.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _lora_arms import COMPILED, OURS
from _lora_layers import peak_of
from _lora_models import add_flags, base_bytes, model_of, with_adapter
from _train import memory_bytes, reset_peak


class Training:
    """A model with one adapter, its optimizer and its batch.

    Args:
        options: The command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        model = model_of(options)
        base = model.build(options.device)
        self.peft = with_adapter(
            base, rank=options.rank, dropout=options.dropout, fused=options.arm == OURS
        )
        if options.arm == COMPILED:
            for layer in base.modules():
                if type(layer).__name__ == "LlamaDecoderLayer":
                    layer.compile()
        self.batch = model.batch(rows=1, length=options.tokens, device=options.device)
        self.trained = [each for each in self.peft.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4)
        self.losses: list[float] = []

    def step(self) -> None:
        """Train one step."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.peft(**self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def state_bytes(self) -> int:
        """Return the bytes of the optimizer's state."""
        return sum(
            value.untyped_storage().nbytes()
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options that `lora.py` chooses for one process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arm", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--dropout", type=float, required=True)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3, help="that count")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    add_flags(parser)
    return parser.parse_args(given)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return what one process measures."""
    torch.set_num_threads(options.threads)
    training = Training(options)
    reset_peak()
    loaded = memory_bytes("VmRSS")
    seconds = []
    for _ in range(options.warmup + options.steps):
        start = time.perf_counter()
        training.step()  # reads the loss, so the device is idle after it
        seconds.append(time.perf_counter() - start)
    process_bytes = memory_bytes("VmHWM") - loaded - training.state_bytes()
    training.optimizer.zero_grad(set_to_none=True)
    growth = peak_of(training.step, options.device)
    return {
        "seconds": seconds[options.warmup :],
        "warmup_seconds": seconds[: options.warmup],
        "growth_bytes": growth,
        "process_growth_bytes": process_bytes,
        "process_peak_bytes": memory_bytes("VmHWM"),
        "base_bytes": base_bytes(training.peft),
        "state_bytes": training.state_bytes(),
        "losses": training.losses,
    }


if __name__ == "__main__":
    print(json.dumps(run(arguments())))
