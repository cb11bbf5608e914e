"""One training run, measured: an ordinary script that knows nothing of Penstock but `--arm`.

`benchmarks/offload.py` starts it once per arm and round, plain or under `penstock run`, and reads
the one JSON line that it prints.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _models import batch_of, build


def memory_bytes(field: str) -> int:
    """A field of /proc/self/status, such as VmHWM or VmRSS, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def reset_peak() -> None:
    """Make VmHWM start again from what is resident now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def digest(model: torch.nn.Module, losses: list[float]) -> str:
    """A hash of the losses and all gradients: equal if and only if they are, bit by bit."""
    total = hashlib.sha256(repr(losses).encode())
    for parameter in model.parameters():
        if parameter.grad is not None:
            total.update(parameter.grad.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--arm", default="keep")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--store", default=None, help="for the arms with the bare context manager")
    parser.add_argument("--policy", default="all")
    parser.add_argument("--device-memory", default=None)
    parser.add_argument("--write-rate", type=float, default=None, help="throttle, bytes/second")
    parser.add_argument("--read-rate", type=float, default=None, help="throttle, bytes/second")
    options = parser.parse_args()

    model: Any = build(
        options.model,
        hidden=options.hidden,
        layers=options.layers,
        seq=options.seq,
        vocab=options.vocab,
    )
    if "checkpoint" in options.arm:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch = batch_of(options.model, batch=options.batch, seq=options.seq, vocab=options.vocab)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    context: Any = contextlib.nullcontext()
    if "offload" in options.arm:
        import penstock
        from penstock.memory import FileStore

        context = penstock.offload(
            FileStore(
                options.store,
                write_bytes_per_second=options.write_rate,
                read_bytes_per_second=options.read_rate,
            ),
            policy=options.policy,
            device_memory=options.device_memory,
        )
    reset_peak()
    loaded = memory_bytes("VmRSS")
    losses, seconds, cpu_seconds = [], [], []
    with context:
        for _ in range(options.warmup + options.steps):
            start, cpu_start = time.perf_counter(), time.process_time()
            optimizer.zero_grad(set_to_none=True)
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            del loss
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu_start)
    result = {
        "seconds": seconds[options.warmup :],
        "cpu_seconds": cpu_seconds[options.warmup :],
        "warmup_seconds": seconds[: options.warmup],
        "growth_bytes": memory_bytes("VmHWM") - loaded,
        "losses": losses,
        "digest": digest(model, losses),
    }
    if "offload" in options.arm:
        result["report"] = context.report().to_dict()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
