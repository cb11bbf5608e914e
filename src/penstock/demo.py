"""`penstock demo`: one small GPT-2, trained three ways, so that anybody can see what Penstock does.

Read it in two halves. `train` is an ordinary training script, run in a process of its own as
`python -m penstock.demo`; for the arm "penstock" the very same script is started by `penstock run`.
`run_demo` starts those processes one after the other, and compares what they report.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import env
from penstock.errors import PenstockError
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import torch
    from rich.table import Table

_ARMS = {
    "stock": "stock PyTorch",
    "checkpoint": "torch.utils.checkpoint",
    "penstock": "Penstock",
}
_CORPUS_BYTES = 4 << 20
_LEARNING_RATE = 1e-3


class DemoError(PenstockError):
    """An arm of the demo did not finish; the message holds the end of what it printed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The model and its training; the same in every arm."""

    num_steps: int = 6
    """Measured steps, after one that is not."""
    hidden_size: int = 512
    """Width of the model."""
    num_layers: int = 4
    """Transformer layers."""
    num_heads: int = 8
    """Attention heads of a layer."""
    sequence_length: int = 512
    """Bytes of text in one sequence."""
    batch_size: int = 4
    """Sequences in one step."""
    seed: int = 0
    """Seed of the weights and of the choice of text."""

    @property
    def tokens_per_step(self) -> int:
        """Bytes of text that one step trains on."""
        return self.batch_size * self.sequence_length


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArmResult:
    """What the process of one arm reported."""

    arm: str
    """``"stock"``, ``"checkpoint"`` or ``"penstock"``."""
    peak_growth_bytes: int
    """How far the operating system saw the process grow beyond the loaded model, at most."""
    step_seconds: tuple[float, ...]
    """Duration of every measured step."""
    losses: tuple[float, ...]
    """Loss of every step, the warm-up first."""
    weights_sha256: str
    """Digest of all weights after the last step."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data, for JSON."""
        return dataclasses.asdict(self)


# ------------------------------------------------------------------------- the training script


def train(config: DemoConfig, *, checkpoint: bool, say: Callable[..., None]) -> None:
    """Train the model; an ordinary loop that knows nothing of Penstock.

    Args:
        config: model and training.
        checkpoint: recompute activations with `torch.utils.checkpoint` instead of keeping them.
        say: called with keyword arguments after loading, after every step, and at the end.
    """
    import torch

    text = torch.frombuffer(bytearray(_corpus()), dtype=torch.uint8)
    torch.manual_seed(config.seed)
    model = _make_model(config)
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)

    loaded_bytes = _watch_peak()
    for step in range(1 + config.num_steps):
        start = time.perf_counter()
        batch = _sample(text, config)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(step=step, seconds=time.perf_counter() - start, loss=loss.item())
    growth_bytes = max(0, _status_bytes("VmHWM") - loaded_bytes)
    say(peak_growth_bytes=growth_bytes, weights_sha256=_digest(model))


def _make_model(config: DemoConfig) -> Any:
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise ImportError(
            f"penstock demo needs transformers ({error}): pip install 'penstock[demo]'"
        ) from error

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
    return GPT2LMHeadModel(gpt2).train()


def _corpus() -> bytes:
    """The first Python sources of the standard library, in a fixed order."""
    directory = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(directory.glob("*.py")) + sorted(directory.glob("[a-z]*/*.py")):
        text += path.read_bytes()
        if len(text) >= _CORPUS_BYTES:
            break
    if not text:
        raise DemoError(f"no Python sources in {directory}; this Python came without them")
    return bytes(text[:_CORPUS_BYTES])


def _sample(text: torch.Tensor, config: DemoConfig) -> torch.Tensor:
    """A batch of random passages, int64 of shape (batch_size, sequence_length)."""
    import torch

    starts = torch.randint(len(text) - config.sequence_length, (config.batch_size,)).tolist()
    passages = [text[start : start + config.sequence_length] for start in starts]
    return torch.stack(passages).long()


def _digest(model: Any) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def _watch_peak() -> int:
    """Start the kernel's record of the peak anew; return the bytes that are resident now."""
    # Where the kernel refuses, the record still holds the peak of loading. The result is then an
    # upper bound, and an exact one as soon as training needs more than loading did.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status_bytes("VmRSS")


def _status_bytes(field: str) -> int:
    """A size from the kernel's account of this process, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise DemoError(f"the kernel does not report {field} in /proc/self/status")


def _worker_main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m penstock.demo")
    parser.add_argument("--checkpoint", action="store_true")
    for field in dataclasses.fields(DemoConfig):
        parser.add_argument(_option(field.name), type=int, default=field.default)
    values = vars(parser.parse_args(arguments))
    checkpoint = values.pop("checkpoint")

    def say(**event: Any) -> None:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()

    train(DemoConfig(**values), checkpoint=checkpoint, say=say)


def _option(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


# ------------------------------------------------------------------------------- the comparison


def run_demo(
    config: DemoConfig,
    *,
    out: str | os.PathLike[str],
    store: str | os.PathLike[str] | None = None,
    policy: str = "auto",
    min_bytes: str = "1MiB",
) -> bool:
    """Run all arms, print the comparison, write the timeline of Penstock's last step.

    Example:
        >>> run_demo(DemoConfig(num_steps=2), out="penstock-demo")  # doctest: +SKIP
        True

    Args:
        config: model and training.
        out: directory for ``timeline.png``, ``timeline.trace.json``, ``report.json`` (of
            `penstock run`) and ``demo.json`` (the table's numbers).
        store: directory for the activations; by default a temporary one inside `out`.
        policy: ``"auto"`` or ``"all"``; see `penstock.offload`.
        min_bytes: smaller tensors stay where they are.

    Returns:
        Whether Penstock's losses and weights are those of stock PyTorch, bit for bit.

    Raises:
        DemoError: an arm did not finish.
        OSError: `out` cannot be written.
    """
    from rich.console import Console

    out = Path(out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    console.print(
        f"A byte-level GPT-2 ({config.num_layers} layers, width {config.hidden_size}) learns "
        f"Python: {config.batch_size} x {config.sequence_length} tokens a step, "
        f"1 + {config.num_steps} steps an arm, every arm in a process of its own."
    )
    with contextlib.ExitStack() as stack:
        if store is None:
            store = stack.enter_context(tempfile.TemporaryDirectory(prefix="store-", dir=out))
        if env.filesystem_type(store) in env.MEMORY_FILESYSTEMS:
            console.print(
                f"{store} lies in RAM: offloading to it frees nothing. Choose --out or --store "
                "on a disk.",
                style="yellow",
            )
        commands = _commands(config, out, store=store, policy=policy, min_bytes=min_bytes)
        report_step = stack.enter_context(_progress(console, len(commands), config))
        results = [_run_arm(arm, command, report_step) for arm, command in commands.items()]

    by_arm = {result.arm: result for result in results}
    stock, ours = by_arm["stock"], by_arm["penstock"]
    equal = (stock.losses, stock.weights_sha256) == (ours.losses, ours.weights_sha256)
    console.print(_table(results, config))
    console.print(_verdict(stock, ours, equal=equal))
    numbers = {
        "config": dataclasses.asdict(config),
        "policy": policy,
        "bitwise_equal": equal,
        "arms": [result.to_dict() for result in results],
    }
    (out / "demo.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    console.print("\nThe last step of Penstock:")
    # Paths are printed as they are: rich would break them at the width of the terminal.
    print(f"  picture  {out / 'timeline.png'}")
    print(f"  trace    {out / 'timeline.trace.json'} (open it with https://ui.perfetto.dev)")
    print(f"  report   {out / 'report.json'}")
    return equal


def _commands(
    config: DemoConfig, out: Path, *, store: str | os.PathLike[str], policy: str, min_bytes: str
) -> dict[str, list[str]]:
    """The command line of every arm, in the order in which they run."""
    script = ["-m", "penstock.demo"]
    for name, value in dataclasses.asdict(config).items():
        script += [_option(name), str(value)]
    run = ["-m", "penstock", "run", "--store", os.fspath(store), "--policy", policy]
    run += ["--min-bytes", min_bytes, "--report", str(out / "report.json")]
    run += ["--trace", str(out / "timeline.trace.json"), "--picture", str(out / "timeline.png")]
    return {
        "stock": [sys.executable, *script],
        "checkpoint": [sys.executable, *script, "--checkpoint"],
        "penstock": [sys.executable, *run, *script],
    }


def _run_arm(arm: str, command: list[str], report_step: Callable[..., None]) -> ArmResult:
    """Run one arm, passing its steps on as they come."""
    events: list[dict[str, Any]] = []
    report_step(arm, None)
    # Nothing is downloaded, and no library should try.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=complaints, text=True, env=environment
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    events.append(json.loads(line))
                    if "step" in events[-1]:
                        report_step(arm, events[-1])
            exit_code = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
            process.stdout.close()
            process.wait()
        if exit_code != 0 or not events or "weights_sha256" not in events[-1]:
            complaints.seek(0)
            last_lines = "".join(complaints.readlines()[-20:])
            raise DemoError(
                f"the arm {_ARMS[arm]!r} ended with exit status {exit_code}; its last words:\n"
                f"{last_lines}"
            )
    steps = [event for event in events if "step" in event]
    return ArmResult(
        arm=arm,
        peak_growth_bytes=events[-1]["peak_growth_bytes"],
        step_seconds=tuple(event["seconds"] for event in steps[1:]),
        losses=tuple(event["loss"] for event in steps),
        weights_sha256=events[-1]["weights_sha256"],
    )


@contextlib.contextmanager
def _progress(console: Any, num_arms: int, config: DemoConfig) -> Iterator[Callable[..., None]]:
    """A live bar on a terminal, one line per step elsewhere; yields what to call per step."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    def describe(arm: str, event: dict[str, Any] | None) -> str:
        if event is None:
            return f"{_ARMS[arm]}: loading"
        return (
            f"{_ARMS[arm]}: step {event['step'] + 1} of {1 + config.num_steps}, "
            f"{event['seconds']:.1f} s, loss {event['loss']:.3f}"
        )

    if not console.is_terminal:
        # print, not console.print: a log file wants each line whole and at once.
        yield lambda arm, event: print(describe(arm, event), flush=True)
        return
    columns = [TextColumn("{task.description:<52}"), BarColumn(), MofNCompleteColumn()]
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("starting", total=num_arms * (1 + config.num_steps))

        def report_step(arm: str, event: dict[str, Any] | None) -> None:
            progress.update(
                task, description=describe(arm, event), advance=0 if event is None else 1
            )

        yield report_step


def _table(results: list[ArmResult], config: DemoConfig) -> Table:
    from rich.table import Table

    table = Table(title="One model, trained three ways", title_justify="left")
    table.add_column("")
    for heading in ("peak memory", "step time", "tokens/s", f"loss after {1 + config.num_steps}"):
        table.add_column(heading, justify="right")
    stock = results[0]
    stock_seconds = statistics.median(stock.step_seconds)
    for result in results:
        seconds = statistics.median(result.step_seconds)
        peak_ratio = result.peak_growth_bytes / max(stock.peak_growth_bytes, 1)
        table.add_row(
            _ARMS[result.arm],
            f"{format_bytes(result.peak_growth_bytes)}  {peak_ratio:.2f}x",
            f"{format_seconds(seconds)}  {seconds / stock_seconds:.2f}x",
            f"{config.tokens_per_step / seconds:,.0f}",
            f"{result.losses[-1]:.6f}",
        )
    table.caption = (
        "Peak memory: growth of the process over the loaded model (VmHWM); gradients and optimizer "
        "state, which all arms need, are in it. Step time: the median."
    )
    table.caption_justify = "left"
    return table


def _verdict(stock: ArmResult, ours: ArmResult, *, equal: bool) -> str:
    num_equal = sum(a == b for a, b in zip(stock.losses, ours.losses, strict=True))
    if equal:
        return f"Bit for bit equal in stock and Penstock: all {num_equal} losses, and the weights."
    weights = "equal" if stock.weights_sha256 == ours.weights_sha256 else "different"
    return (
        f"Stock and Penstock DIFFER: {num_equal} of {len(stock.losses)} losses are equal bit for "
        f"bit, and the final weights are {weights}."
    )


if __name__ == "__main__":
    _worker_main()
