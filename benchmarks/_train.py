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
from penstock.cli._vector_math import settle_vector_math


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
            flat = parameter.grad.detach().cpu().contiguous().flatten()
            total.update(flat.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def arguments() -> argparse.Namespace:
    """What `benchmarks/offload.py` chooses for one process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt2", help="one of _models.MODELS")
    parser.add_argument("--arm", default="keep", help="words joined by +; see `wrap`")
    parser.add_argument("--steps", type=int, default=3, help="steps that count")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="of the weights")
    parser.add_argument("--store", default=None, help="for the arms with the context manager")
    parser.add_argument("--device-memory", default=None)
    parser.add_argument("--write-rate", type=float, default=None, help="throttle, bytes/second")
    parser.add_argument("--read-rate", type=float, default=None, help="throttle, bytes/second")
    return parser.parse_args()


def wrap(options: argparse.Namespace) -> Any:
    """The context manager of an arm.

    Words of an arm: keep (nothing), checkpoint, compile, all or auto (Penstock with that policy),
    file (with a store, on a GPU), gds (with a store that the GPU writes to itself, by kvikio),
    save_on_cpu (PyTorch's), trl (TRL's).
    """
    words = options.arm.split("+")
    if "all" in words or "auto" in words:
        import penstock
        from penstock.memory import FileStore

        store = FileStore(
            options.store,
            write_bytes_per_second=options.write_rate,
            read_bytes_per_second=options.read_rate,
            gpu_direct="gds" in words,
        )
        return penstock.offload(
            store if options.device == "cpu" or {"file", "gds"} & set(words) else None,
            policy="all" if "all" in words else "auto",
            device_memory=options.device_memory,
        )
    if "save_on_cpu" in words:
        return torch.autograd.graph.save_on_cpu(pin_memory=options.device != "cpu")
    if "trl" in words:
        from trl.models.activation_offloading import OffloadActivations  # type: ignore[import]

        return OffloadActivations()
    return contextlib.nullcontext()


def peak_bytes(options: argparse.Namespace, loaded: int) -> int:
    """Growth of the peak over the loaded model: of the process, or of CUDA's allocator."""
    if options.device == "cpu":
        return memory_bytes("VmHWM") - loaded
    return torch.cuda.max_memory_allocated() - loaded


def synchronize(options: argparse.Namespace) -> None:
    if options.device != "cpu":
        torch.cuda.synchronize()


def model_and_batch(options: argparse.Namespace) -> tuple[Any, dict[str, torch.Tensor]]:
    """What is trained: the model on its device, and one batch."""
    shape = {name: getattr(options, name) for name in ("hidden", "layers", "heads", "seq", "vocab")}
    dtype = getattr(torch, options.dtype)
    with torch.device(options.device):  # a GPU draws billions of weights in no time
        model: Any = build(options.model, **shape).to(options.device, dtype)
    batch = batch_of(options.model, batch=options.batch, seq=options.seq, vocab=options.vocab)
    return model, {name: tensor.to(options.device) for name, tensor in batch.items()}


def main() -> None:
    options = arguments()
    settle_vector_math()  # in every arm, or no two runs of stock could be compared bit by bit
    model, batch = model_and_batch(options)
    words = options.arm.split("+")
    if "checkpoint" in words:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if "compile" in words:
        for layer in model.modules():
            if type(layer).__name__.endswith(("Block", "DecoderLayer", "BertLayer")):
                layer.compile()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    context = wrap(options)
    if options.device == "cpu":
        reset_peak()
        loaded = memory_bytes("VmRSS")
    else:
        torch.cuda.reset_peak_memory_stats()
        loaded = torch.cuda.memory_allocated()
    losses, seconds, cpu_seconds = [], [], []
    with context:
        for _ in range(options.warmup + options.steps):
            synchronize(options)
            start, cpu_start = time.perf_counter(), time.process_time()
            optimizer.zero_grad(set_to_none=True)
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            del loss
            synchronize(options)
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu_start)
    result = {
        "seconds": seconds[options.warmup :],
        "cpu_seconds": cpu_seconds[options.warmup :],
        "warmup_seconds": seconds[: options.warmup],
        "growth_bytes": peak_bytes(options, loaded),
        "losses": losses,
        "digest": digest(model, losses),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
    }
    if hasattr(context, "report"):
        result["report"] = context.report().to_dict()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
