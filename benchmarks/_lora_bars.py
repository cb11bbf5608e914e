"""Bars of LoRA on bytes, growth and time, held against the rows of `lora.py`."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from _lora_arms import ADD_INTO, BASE, COMPILED, FORWARD, OURS
from _lora_jobs import ONE_BY_ONE, PROCESSES, TOGETHER
from _lora_layers import CELL_BAR, CROWDED, CROWDED_BAR, LAYER, TOPIC
from _rows import BenchmarkRow, read_rows, results_file

MEAN_BARS = {True: 0.86, False: 0.94}
"""Geometric mean over the grid of the time over PEFT's, by whether there is dropout."""
GROWTH_BAR, GROWTH_TOKENS = 0.70, (512, 2048)
JOBS_BAR, JOBS_OF_BAR = 0.85, 4
NOT_MEASURED = "not measured"


@dataclasses.dataclass(frozen=True)
class Bar:
    """One bar and the result."""

    what: str
    asked: str
    found: str
    is_met: bool | None
    """None where it was not measured."""

    @classmethod
    def at_most(cls, what: str, most: float, found: float | None, where: str = "") -> Bar:
        """Return a bar that asks for a ratio of at most so much."""
        asked = f"at most {most:g}"
        if found is None:
            return cls(what, asked, NOT_MEASURED, None)
        return cls(what, asked, f"{found:.3f}{f' ({where})' if where else ''}", found <= most)


def rows_of(rows: Sequence[BenchmarkRow], part: str, arm: str) -> list[BenchmarkRow]:
    """Return the rows of an arm in one part."""
    return [row for row in rows if row.extra.get("part") == part and row.arm == arm]


def bars(rows: Sequence[BenchmarkRow]) -> Iterator[Bar]:
    """Return all bars, those of parts without rows as not measured."""
    yield from _layer_bars(rows_of(rows, LAYER, OURS))
    yield from _crowded_bars(rows_of(rows, CROWDED, OURS))
    yield from _growth_bars(rows_of(rows, "training", OURS))
    yield from _jobs_bars(rows)
    yield from _bytes_bars([row for row in rows if row.extra.get("part") == "bytes"])
    yield _packing_bar(rows_of(rows, "packing", "penstock"))


def geometric_mean(rows: Sequence[BenchmarkRow]) -> float | None:
    """Return the mean over shapes of the median ratios to PEFT; None without rows."""
    ratios = [row.extra["ratio_to_peft"]["median"] for row in rows]
    return statistics.geometric_mean(ratios) if ratios else None


def _layer_bars(ours: Sequence[BenchmarkRow]) -> Iterator[Bar]:
    what = "saved bytes of a layer over those of x and M x r, largest"
    yield _worst(what, 1.0, [(row.peak_bytes["saved"] / _most_saved(row), row) for row in ours])
    what = "layer, time over PEFT's, largest"
    yield _worst(what, CELL_BAR, [(row.extra["ratio_to_peft"]["median"], row) for row in ours])
    for has_dropout, most in MEAN_BARS.items():
        of_kind = [row for row in ours if bool(row.extra["dropout"]) is has_dropout]
        what = f"layer, time over PEFT's, {'with' if has_dropout else 'without'} dropout"
        found = geometric_mean(of_kind)
        yield Bar.at_most(f"{what}, geometric mean of {len(of_kind)} shapes", most, found)


def _most_saved(row: BenchmarkRow) -> int:
    return row.extra["most_saved_bytes"]


def _worst(what: str, most: float, found: Sequence[tuple[float, BenchmarkRow]]) -> Bar:
    if not found:
        return Bar.at_most(what, most, None)
    ratio, row = max(found, key=lambda each: each[0])
    return Bar.at_most(what, most, ratio, row.case.partition(": ")[2])


def _crowded_bars(ours: Sequence[BenchmarkRow]) -> Iterator[Bar]:
    ratios = [(row.extra["ratio_to_peft"]["median"], row) for row in ours]
    yield _worst("two processes at once, time over PEFT's, largest", CROWDED_BAR, ratios)


def _growth_bars(ours: Sequence[BenchmarkRow]) -> Iterator[Bar]:
    """Return the bars of a training step's growth over weights and optimizer state."""
    by_case = {
        (row.extra["tokens"], row.extra["dropout"]): row.extra["growth_ratio"]["median"]
        for row in ours
    }
    for tokens in GROWTH_TOKENS:
        what = f"growth of a step over PEFT's, {tokens} tokens, dropout 0.1"
        yield Bar.at_most(what, GROWTH_BAR, by_case.get((tokens, 0.1)))
    growths = [(row.extra["growth_ratio"]["median"], row) for row in ours]
    yield _worst("growth of a step over PEFT's, largest", 1.0, growths)


def _jobs_bars(rows: Sequence[BenchmarkRow]) -> Iterator[Bar]:
    together = [row for row in rows_of(rows, "jobs", TOGETHER) if row.extra["jobs"] == JOBS_OF_BAR]
    what = f"{JOBS_OF_BAR} jobs together, time over {ONE_BY_ONE}"
    if not together:
        yield Bar.at_most(what, JOBS_BAR, None)
    for row in together:
        ratio = row.extra["ratio"]["median"]
        yield Bar.at_most(f"{what}, dropout {row.extra['dropout']:g}", JOBS_BAR, ratio)
    what = f"{JOBS_OF_BAR} jobs together, bases in memory"
    numbers = {
        name: max(
            (
                row.extra["num_bases"]
                for row in rows_of(rows, "jobs", name)
                if row.extra["jobs"] == JOBS_OF_BAR
            ),
            default=None,
        )
        for name in (TOGETHER, PROCESSES)
    }
    found, others = numbers[TOGETHER], numbers[PROCESSES]
    if found is None:
        yield Bar(what, "1", NOT_MEASURED, None)
    else:
        text = f"{found:g}" if others is None else f"{found:g} ({PROCESSES}: {others:g})"
        yield Bar(what, "1", text, found == 1)


def _bytes_bars(rows: Sequence[BenchmarkRow]) -> Iterator[Bar]:
    """Return the bars that kernels move what their closed forms say, and no more forward."""
    kernels = [row for row in rows if row.arm != FORWARD]
    what, asked = "Triton kernels, counted bytes", "the closed form, no atomics"
    if not kernels:
        yield Bar(what, asked, NOT_MEASURED, None)
    else:
        wrong = [row for row in kernels if row.limit_fraction != 1 or row.extra["atomic"]]
        found = f"{len(kernels) - len(wrong)} of {len(kernels)} launches"
        yield Bar(what, asked, found, not wrong)
    what = f"Triton kernels, {FORWARD}, over MK + 2Mr + Nr + rK, largest"
    yield _worst(
        what, 1.0, [(row.limit_fraction or 0.0, row) for row in rows if row.arm == FORWARD]
    )


def _packing_bar(ours: Sequence[BenchmarkRow]) -> Bar:
    what, asked = "packing 100,000 samples", "below 5 s"
    limited = [row for row in ours if row.limit is not None]
    if not limited:
        return Bar(what, asked, NOT_MEASURED, None)
    (row,) = limited
    found = f"{row.median_seconds:.3g} s, {row.extra['over_bound']:.4f} of the bound's batches"
    return Bar(what, asked, found, (row.limit_fraction or 0.0) < 1)


def show(device_name: str, directory: Path) -> None:
    """Print the bars of a device's rows, and the other arms' times beside ours."""
    path = results_file(device_name, TOPIC, directory)
    if not path.exists():
        print(f"{path} has no rows yet")
        return
    rows = read_rows(path)
    table = Table(title=f"lora on {device_name}", title_justify="left")
    for heading in ("bar", "asked", "found", "met"):
        table.add_column(heading, justify="left" if heading == "bar" else "right")
    for bar in bars(rows):
        met = {True: "[green]yes", False: "[red]no", None: "-"}[bar.is_met]
        table.add_row(bar.what, bar.asked, bar.found, met)
    console = Console(width=None if Console().is_terminal else 160)
    console.print(table)
    console.print(_arms_table(rows))


def _arms_table(rows: Sequence[BenchmarkRow]) -> Table:
    """Return the geometric means of the layer's arms over PEFT, shapes of both alone."""
    table = Table(title="layer, time over PEFT's, geometric mean", title_justify="left")
    for heading in ("arm", "without dropout", "with dropout"):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    for arm in (COMPILED, ADD_INTO, OURS, BASE):
        cells = []
        for has_dropout in (False, True):
            of_kind = [
                row
                for row in rows_of(rows, LAYER, arm)
                if bool(row.extra["dropout"]) is has_dropout
            ]
            mean = geometric_mean(of_kind)
            cells.append("" if mean is None else f"{mean:.3f} ({len(of_kind)})")
        table.add_row(arm, *cells)
    return table
