"""The table, the picture and the sentences about the results of the arms."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.demo._config import ARMS, PLANNED, ArmResult, DemoConfig
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

# Slowest over fastest step of one arm; beyond this its times say more about the machine.
_UNSTEADY = 1.5


def is_same(stock: ArmResult, ours: ArmResult) -> bool:
    """Return whether two arms have the same bits."""
    return (stock.losses, stock.weights_sha256) == (ours.losses, ours.weights_sha256)


def make_table(results: Sequence[ArmResult], config: DemoConfig) -> Table:
    """Return memory, times and losses of all arms as a table."""
    from rich import box
    from rich.table import Table

    stock = results[0]
    table = Table(box=box.SIMPLE_HEAD, title=f"One model, trained in {len(results)} ways")
    table.add_column("", no_wrap=True)
    loss_heading = f"loss after {len(stock.losses)}"
    for heading in ("peak memory", "step time", "tokens/s", loss_heading):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        seconds = statistics.median(result.step_seconds)
        # Steps of the same round are compared: the machine was in the same state.
        pairs = zip(result.step_seconds, stock.step_seconds, strict=True)
        time_ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        peak_ratio = result.peak_bytes / max(stock.peak_bytes, 1)
        table.add_row(
            ARMS[result.arm],
            f"{format_bytes(result.peak_bytes)}  {peak_ratio:.2f}x",
            f"{format_seconds(seconds)}  {time_ratio:.2f}x",
            f"{config.tokens_per_step / seconds:,.0f}",
            f"{result.losses[-1]:.6f}",
        )
    table.caption = (
        "Peak memory: the parameters, and how far the process grew beyond the loaded model "
        "(VmHWM), with gradients and optimizer state; planned arms were given that share of what "
        "the step needs. Step time: median, and median ratio to the stock step of the "
        "same round."
    )
    table.caption_justify = "left"
    return table


def state_verdict(stock: ArmResult, ours: ArmResult, *, equal: bool) -> str:
    """Return a sentence about whether an arm has the bits of stock PyTorch."""
    num_equal = sum(a == b for a, b in zip(stock.losses, ours.losses, strict=True))
    if equal:
        return f"Stock and Penstock: all {num_equal} losses and the weights are equal bit for bit."
    weights = "equal" if stock.weights_sha256 == ours.weights_sha256 else "different"
    return (
        f"Stock and {ARMS[ours.arm]} DIFFER: {num_equal} of {len(stock.losses)} losses are equal "
        f"bit for bit, and the final weights are {weights}."
    )


def list_remarks(stock: ArmResult, num_steps: int) -> Iterator[str]:
    """Yield warnings about a machine whose times cannot be trusted."""
    if len(stock.step_seconds) < num_steps:
        yield f"The machine is slow: only {len(stock.step_seconds)} steps were measured."
    fastest, slowest = min(stock.step_seconds), max(stock.step_seconds)
    if slowest > _UNSTEADY * fastest:
        yield (
            "The machine was busy with something else: a stock step took between "
            f"{format_seconds(fastest)} and {format_seconds(slowest)}. Trust the ratios more than "
            "the seconds, and neither much."
        )


def draw(results: Sequence[ArmResult], config: DemoConfig, path: Path) -> None:
    """Draw throughput against memory, of all arms."""
    from penstock.report import ComparisonPoint, draw_comparison

    points = [
        ComparisonPoint(
            ARMS[result.arm].removeprefix("planned, ").replace("Penstock", "offload"),
            result.peak_bytes,
            config.tokens_per_step / statistics.median(result.step_seconds),
            curve=result.arm in PLANNED,
        )
        for result in results
    ]
    title = f"GPT-2, {config.num_layers} layers of {config.hidden_size}, AdamW, on this machine"
    draw_comparison(points, path, title=title, curve="planned", unit="tokens/s")
