"""The script of the arms: an ordinary training loop, in a process of its own for each arm.

It trains a step per line of standard input, and reports each. Its one argument is JSON, as
`list_commands` writes it; with "plan_seconds" the step is not trained but planned.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli._vector_math import settle_vector_math
from penstock.cli.demo import PLANNED, DemoConfig, DemoError

if TYPE_CHECKING:
    import torch

    from penstock.graph import StepGraph
    from penstock.planner import Plan

_CORPUS_BYTES = 4 << 20
_LEARNING_RATE = 1.5e-4
_NUM_RUNS = 3  # of each operator, to measure its time
_SLACK = 1.02  # the factor on the smallest known budget, if a share is infeasible


def _main(request: dict[str, Any]) -> None:
    config = DemoConfig(**request["config"])
    settle_vector_math()
    if "plan_seconds" in request:
        _make_plans(config, request)
    else:
        _train(config, request)


def _say(**event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def _train(config: DemoConfig, request: dict[str, Any]) -> None:
    """Train the model in an ordinary loop, without Penstock but for planned steps.

    Events are said after loading, after every step, and at the end.
    """
    # A plan is loaded before memory is watched, and bound afterwards.
    planned = _load_plan(request) if "planned" in request else None
    corpus = _load_text()
    model, optimizer = _make_trainee(config)
    if "checkpoint" in request:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
    loaded_bytes = _watch_peak()
    _say(num_parameters=model.num_parameters())

    def eager_step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with contextlib.ExitStack() as stack:
        step: Callable[[Any], torch.Tensor] = eager_step
        if planned is not None:
            from penstock.executor import bind

            graph, plan = planned
            bound = bind(plan, model, optimizer, graph=graph, store=request["store"])
            step = stack.enter_context(bound)
        for _ in iter(sys.stdin.readline, ""):  # a line of the parent process starts a step
            start = time.perf_counter()
            loss = step(_draw_batch(corpus, config)).item()
            _say(seconds=time.perf_counter() - start, loss=loss)
        peak_bytes = model_bytes + _read_status("VmHWM") - loaded_bytes
        _say(peak_bytes=peak_bytes, weights_sha256=_hash_weights(model))


def _make_plans(config: DemoConfig, request: dict[str, Any]) -> None:
    """Capture and measure the step, and plan it for less and less memory, into a directory."""
    from penstock.errors import InfeasibleError
    from penstock.graph import capture, measure
    from penstock.memory import probe
    from penstock.planner import plan

    batch = _draw_batch(_load_text(), config)
    graph = measure(capture(*_make_trainee(config), batch), num_runs=_NUM_RUNS)
    directory = Path(request["plans"])
    graph.save(directory / "graph.json.gz")
    limits = {"machine": probe(request["store"]), "time_limit": request["plan_seconds"]}
    full = plan(graph, **limits)
    for name, divisor in PLANNED.items():
        budget = full.peak_device_bytes // divisor
        found = None
        while found is None:
            try:
                found = plan(graph, device_memory=budget, store=request["store"], **limits)
            except InfeasibleError as error:
                budget = int(max(error.sufficient_device_bytes or 0, budget) * _SLACK)
        found.save(directory / f"{name}.json")


def _load_plan(request: dict[str, Any]) -> tuple[StepGraph, Plan]:
    from penstock.graph import StepGraph
    from penstock.planner import Plan

    directory = Path(request["plans"])
    graph = StepGraph.load(directory / "graph.json.gz")
    return graph, Plan.load(directory / f"{request['planned']}.json")


def _load_text() -> torch.Tensor:
    """Return the text to learn, a byte a token."""
    import torch

    return torch.frombuffer(bytearray(_read_corpus()), dtype=torch.uint8)


def _make_trainee(config: DemoConfig) -> tuple[Any, torch.optim.Optimizer]:
    """Make the model and its optimizer, the same in every process."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(config.seed)
    gpt2 = GPT2Config(
        vocab_size=256,  # one token per byte
        n_positions=config.sequence_length,
        n_embd=config.hidden_size,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(gpt2).train()
    return model, torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)


def _read_corpus() -> bytes:
    """Read the first Python sources of the standard library, in a fixed order."""
    directory = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(directory.glob("*.py")) + sorted(directory.glob("[a-z]*/*.py")):
        text += path.read_bytes()
        if len(text) >= _CORPUS_BYTES:
            break
    if not text:
        raise DemoError(f"no Python sources in {directory}; this Python came without them")
    return bytes(text[:_CORPUS_BYTES])


def _draw_batch(text: torch.Tensor, config: DemoConfig) -> dict[str, torch.Tensor]:
    """Draw a batch of random passages, int64 of shape (batch_size, sequence_length)."""
    import torch

    starts = torch.randint(
        len(text) - config.sequence_length, (config.batch_size,), device="cpu"
    ).tolist()
    passages = [text[start : start + config.sequence_length] for start in starts]
    batch = torch.stack(passages).long()
    return {"input_ids": batch, "labels": batch}


def _hash_weights(model: Any) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def _watch_peak() -> int:
    """Reset the kernel's record of the peak; return the bytes in RAM now."""
    # Where the kernel refuses, the record still holds the peak of loading. The result is then an
    # upper bound, and an exact one as soon as training needs more than loading did.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _read_status("VmRSS")


def _read_status(field: str) -> int:
    """Read a size of this process from the kernel, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise DemoError(f"the kernel does not report {field} in /proc/self/status")


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
