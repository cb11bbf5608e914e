"""`penstock demo`: one small GPT-2, trained three ways, so that anybody can see what Penstock does.

Read it in two halves. `train` is an ordinary training script, run in a process of its own as
`python -m penstock.demo`; for the arm "penstock" the very same script is started by `penstock run`.
`run_demo` starts those processes and compares what they report. The processes take turns, a step
each: a machine that is busy with something else for a while then slows all of them alike, and the
ratio of two steps of one round still means something.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import env
from penstock._vector_math import settle_vector_math
from penstock.errors import PenstockError
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

_ARMS = {
    "stock": "stock PyTorch",
    "checkpoint": "checkpointing",
    "penstock": "Penstock",
}
_CORPUS_BYTES = 4 << 20
_LEARNING_RATE = 1.5e-4
# What a measured step may take in all arms together; a machine that needs longer takes fewer steps.
_SECONDS_PER_ROUND = 35
# Slowest over fastest step of one arm, beyond which its times say more about the machine.
_UNSTEADY = 1.5


class DemoError(PenstockError):
    """The demo cannot go on; for a process that died, the message holds its last words."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The model and its training; the same in every arm."""

    hidden_size: int = 512
    """Width of the model."""
    num_layers: int = 4
    """Transformer layers."""
    num_heads: int = 8
    """Attention heads of a layer."""
    sequence_length: int = 512
    """Bytes of text in one sequence."""
    batch_size: int = 8
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


def train(
    config: DemoConfig, turns: Iterable[object], *, checkpoint: bool, say: Callable[..., None]
) -> None:
    """Train the model; an ordinary loop that knows nothing of Penstock.

    Args:
        config: model and training.
        turns: one item for every step; the loop waits for the next one and ends with the last.
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
    say(num_parameters=model.num_parameters())

    for _ in turns:
        start = time.perf_counter()
        batch = _sample(text, config)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(seconds=time.perf_counter() - start, loss=loss.item())
    growth_bytes = max(0, _status_bytes("VmHWM") - loaded_bytes)
    say(peak_growth_bytes=growth_bytes, weights_sha256=_digest(model))


def _make_model(config: DemoConfig) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

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
    settle_vector_math()

    def say(**event: Any) -> None:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()

    turns = iter(sys.stdin.readline, "")  # whoever started this process says when
    train(DemoConfig(**values), turns, checkpoint=checkpoint, say=say)


def _option(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


# ------------------------------------------------------------------------------- the comparison


def run_demo(
    config: DemoConfig,
    *,
    num_steps: int = 6,
    out: str | os.PathLike[str],
    store: str | os.PathLike[str] | None = None,
    policy: str = "auto",
    min_bytes: str = "1MiB",
) -> bool:
    """Run all arms, print the comparison, write the timeline of Penstock's last step.

    Example:
        >>> run_demo(DemoConfig(), out="penstock-demo")  # doctest: +SKIP
        True

    Args:
        config: model and training.
        num_steps: measured steps of every arm, after one that is not; fewer on a machine so slow
            that six of them would take four minutes.
        out: directory for ``timeline.png``, ``timeline.trace.json``, ``report.json`` (of
            `penstock run`) and ``demo.json`` (the table's numbers).
        store: directory for the activations; by default a temporary one inside `out`.
        policy: ``"auto"`` or ``"all"``; see `penstock.offload`.
        min_bytes: smaller tensors stay where they are.

    Returns:
        Whether Penstock's losses and weights are those of stock PyTorch, bit for bit.

    Raises:
        DemoError: an arm did not finish, or a package is missing.
        OSError: `out` cannot be written.
    """
    from rich.console import Console

    for package in ("transformers", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise DemoError(f"{package} is not installed: pip install 'penstock[demo]'")
    start = time.monotonic()
    out = Path(out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    console.print(
        f"A byte-level GPT-2 ({config.num_layers} layers, width {config.hidden_size}) learns "
        f"Python, {config.batch_size} x {config.sequence_length} tokens a step, in three "
        f"processes that take turns: 1 + {num_steps} steps each."
    )
    with contextlib.ExitStack() as stack:
        if store is None:
            store = stack.enter_context(tempfile.TemporaryDirectory(prefix="store-", dir=out))
        if env.filesystem_type(os.fspath(store)) in env.MEMORY_FILESYSTEMS:
            console.print(
                f"{store} lies in RAM: offloading to it frees nothing. Choose --out or --store "
                "on a disk.",
                style="yellow",
            )
        commands = _commands(config, out, store=store, policy=policy, min_bytes=min_bytes)
        tell = stack.enter_context(_progress(console, num_turns=len(commands) * (1 + num_steps)))
        arms = [stack.enter_context(_Arm(name, command)) for name, command in commands.items()]
        _take_turns(arms, num_steps, start + num_steps * _SECONDS_PER_ROUND, tell)
        results = [arm.finish() for arm in arms]

    stock, _, ours = results
    equal = (stock.losses, stock.weights_sha256) == (ours.losses, ours.weights_sha256)
    console.print(_table(results, config))
    console.print(_verdict(stock, ours, equal=equal))
    for remark in _remarks(stock, num_steps):
        console.print(remark, style="yellow")
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


def _take_turns(
    arms: Sequence[_Arm], num_steps: int, deadline: float, tell: Callable[[str, int], None]
) -> None:
    """Let every arm take a step in every round, the first round unmeasured."""
    tell("three processes load torch and the model", 0)
    for arm in arms:
        arm.wait_until_loaded()
    longest_seconds = 0.0
    for round_index in range(1 + num_steps):
        start = time.monotonic()
        # Two measured rounds are the fewest that make a median of anything.
        if round_index > 2 and start + longest_seconds > deadline:
            return
        first = round_index % len(arms)
        for arm in (*arms[first:], *arms[:first]):
            event = arm.take_step()
            tell(
                f"{_ARMS[arm.name]:<13}  step {round_index + 1} of {1 + num_steps}  "
                f"{event['seconds']:5.1f} s  loss {event['loss']:.3f}",
                1,
            )
        longest_seconds = max(longest_seconds, time.monotonic() - start)


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


class _Arm:
    """The process of one arm, which takes a step whenever it is told to."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self._losses: list[float] = []
        self._seconds: list[float] = []
        # Closed by __exit__, like the process that writes to it.
        self._complaints = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            # Nothing is downloaded, and no library should try.
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
        )

    def __enter__(self) -> _Arm:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout, self._complaints):
            assert stream is not None
            # The process may be gone, with a line for it still in our buffer.
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self._process.wait()

    def wait_until_loaded(self) -> None:
        """Return when the model is there and nothing has been trained yet."""
        self._next_event()

    def take_step(self) -> dict[str, Any]:
        """Train one step; return its ``seconds`` and ``loss``."""
        assert self._process.stdin is not None
        # A process that has died is reported by the read that follows, with its last words.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        event = self._next_event()
        self._losses.append(event["loss"])
        self._seconds.append(event["seconds"])
        return event

    def finish(self) -> ArmResult:
        """Let the process end, and return what it reported."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        event = self._next_event()
        if self._process.wait() != 0:
            raise self._error()
        return ArmResult(
            arm=self.name,
            peak_growth_bytes=event["peak_growth_bytes"],
            step_seconds=tuple(self._seconds[1:]),
            losses=tuple(self._losses),
            weights_sha256=event["weights_sha256"],
        )

    def _next_event(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        self._process.wait()
        raise self._error()

    def _error(self) -> DemoError:
        self._complaints.seek(0)
        last_lines = "".join(self._complaints.readlines()[-20:])
        return DemoError(
            f"the arm {_ARMS[self.name]!r} ended with exit status {self._process.returncode}; "
            f"its last words:\n{last_lines}"
        )


@contextlib.contextmanager
def _progress(console: Console, *, num_turns: int) -> Iterator[Callable[[str, int], None]]:
    """A live bar on a terminal, one line per step elsewhere; yields what to call per step."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if not console.is_terminal:
        # print, not console.print: a log file wants each line whole and at once.
        yield lambda text, _: print(text, flush=True)
        return
    columns = [TextColumn("{task.description:<52}"), BarColumn(), MofNCompleteColumn()]
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=num_turns)
        yield lambda text, done: progress.update(task, description=text, advance=done)


def _table(results: Sequence[ArmResult], config: DemoConfig) -> Table:
    from rich import box
    from rich.table import Table

    stock = results[0]
    table = Table(box=box.SIMPLE_HEAD, title="One model, trained three ways")
    table.add_column("", no_wrap=True)
    loss_heading = f"loss after {len(stock.losses)}"
    for heading in ("peak memory", "step time", "tokens/s", loss_heading):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        seconds = statistics.median(result.step_seconds)
        # Steps of the same round are compared: they met the machine in the same mood.
        pairs = zip(result.step_seconds, stock.step_seconds, strict=True)
        time_ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        peak_ratio = result.peak_growth_bytes / max(stock.peak_growth_bytes, 1)
        table.add_row(
            _ARMS[result.arm],
            f"{format_bytes(result.peak_growth_bytes)}  {peak_ratio:.2f}x",
            f"{format_seconds(seconds)}  {time_ratio:.2f}x",
            f"{config.tokens_per_step / seconds:,.0f}",
            f"{result.losses[-1]:.6f}",
        )
    table.caption = (
        "Peak memory: how far the process grew beyond the loaded model (VmHWM), gradients and "
        "optimizer state included. Step time: median, and median ratio to the stock step of the "
        "same round."
    )
    table.caption_justify = "left"
    return table


def _remarks(stock: ArmResult, num_steps: int) -> Iterator[str]:
    """What a reader must know about the machine before believing the times."""
    if len(stock.step_seconds) < num_steps:
        yield f"The machine is slow: only {len(stock.step_seconds)} steps were measured."
    fastest, slowest = min(stock.step_seconds), max(stock.step_seconds)
    if slowest > _UNSTEADY * fastest:
        yield (
            "The machine was busy with something else: a stock step took between "
            f"{format_seconds(fastest)} and {format_seconds(slowest)}. Trust the ratios more than "
            "the seconds, and neither much."
        )


def _verdict(stock: ArmResult, ours: ArmResult, *, equal: bool) -> str:
    num_equal = sum(a == b for a, b in zip(stock.losses, ours.losses, strict=True))
    if equal:
        return f"Stock and Penstock: all {num_equal} losses and the weights are equal bit for bit."
    weights = "equal" if stock.weights_sha256 == ours.weights_sha256 else "different"
    return (
        f"Stock and Penstock DIFFER: {num_equal} of {len(stock.losses)} losses are equal bit for "
        f"bit, and the final weights are {weights}."
    )


if __name__ == "__main__":
    _worker_main()
