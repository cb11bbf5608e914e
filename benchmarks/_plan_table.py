"""What the rows of `plan.py` say: share of the ideal by model, budget and arm, and the bars."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path

from _plan_arms import ABLATIONS, ARMS, GENETIC, OURS, REFERENCES
from _rows import BenchmarkRow, read_rows, results_file

ONCE = f"{OURS} without recomputation"  # as the genetic algorithm's plans
FROZEN = f"{OURS} in the program's order, without recomputation"
TIGHT = ("1/8", "1/12", "minimum")
NEAR_IDEAL = ("wresnet-152-10", "brnn-8k")

Rows = Mapping[tuple[str, str], BenchmarkRow]


def show(device_name: str, directory: Path) -> None:
    """Print the table in Markdown, then the bars of the planner."""
    own = results_file(device_name, "plan", directory)
    # Steps are simulated: rows of other machines say as much, where this one has none.
    paths = sorted(own.parent.parent.glob("*/plan.json"), key=lambda path: path == own)
    if not paths:
        print(f"{own} does not exist: no rows yet")
        return
    found = itertools.chain.from_iterable(map(read_rows, paths))
    rows = {(row.case, row.arm): row for row in found if row.extra.get("share")}
    cases = list(dict.fromkeys(case for case, _ in rows))
    arms = [arm for arm in ARMS if any((case, arm) in rows for case in cases)]
    print("| model, memory | bound | " + " | ".join(arms) + " |")
    print("|---|" + "---|" * (len(arms) + 1))
    for case in cases:
        of_case = [rows[case, arm] for arm in arms if (case, arm) in rows]
        bounds = [row.limit.value / row.extra["ideal_seconds"] for row in of_case if row.limit]
        bound = f"{1 / min(bounds):.2f}" if bounds else ""
        cells = [_cell(rows.get((case, arm))) for arm in arms]
        print(f"| {case.replace('; ', ', ')} | {bound} | " + " | ".join(cells) + " |")
    for line in bars(rows, cases):
        print(line)


def _cell(row: BenchmarkRow | None) -> str:
    if row is None:
        return ""
    share = row.extra.get("share_of_ideal")
    if share is None:
        return "none"
    gap = row.extra.get("gap") if row.arm in (OURS, *ABLATIONS) else None
    return f"{share:.2f}" if gap is None else f"{share:.2f}, gap {gap:.1%}"


def bars(rows: Rows, cases: list[str]) -> list[str]:
    """What is asked of the planner, one line each: met or not, and by how much."""
    return [
        line
        for line in (
            _near_the_bound(rows, cases, FROZEN, "frozen", worst=0.10),
            _near_the_bound(rows, cases, OURS, "free", worst=0.15),
            _never_slower(rows, cases, (*REFERENCES, GENETIC), "another arm"),
            _never_slower(rows, cases, ABLATIONS, "with decisions frozen"),
            _faster_than_genetic(rows, cases, OURS),
            _faster_than_genetic(rows, cases, ONCE),
            *_near_the_ideal(rows, cases),
        )
        if line
    ]


def _near_the_bound(rows: Rows, cases: list[str], arm: str, name: str, *, worst: float) -> str:
    gaps = {case: rows[case, arm].extra.get("gap") for case in cases if (case, arm) in rows}
    known = {case: gap for case, gap in gaps.items() if gap is not None}
    if not gaps:
        return ""
    median = statistics.median(known.values()) if known else 0.0
    beyond = {case: f"{gap:.1%}" for case, gap in known.items() if gap > worst}
    return (
        f"{name}: within {worst:.0%} of the bound in {len(known) - len(beyond)} of {len(known)} "
        f"cases, worst {max(known.values(), default=0.0):.1%}, median {median:.1%}; beyond: "
        f"{beyond}; without a plan: "
        f"{[case for case, gap in gaps.items() if gap is None]}"
    )


def _never_slower(rows: Rows, cases: list[str], arms: Iterable[str], name: str) -> str:
    losses, num_compared = [], 0
    for case in cases:
        ours = rows.get((case, OURS))
        for arm in arms:
            other = rows.get((case, arm))
            if ours is None or other is None or not other.median_seconds:
                continue
            num_compared += 1
            ratio = ours.median_seconds / other.median_seconds
            if not ratio or ratio > 1.0001:  # no time: no plan
                losses.append(f"{arm} on {case}: {f'{ratio:.3f}' if ratio else 'only it has one'}")
    return f"slower than {name} in {len(losses)} of {num_compared} comparisons {losses}"


def _faster_than_genetic(rows: Rows, cases: list[str], arm: str) -> str:
    ratios, num_alone = [], 0
    for case in cases:
        ours, other = rows.get((case, arm)), rows.get((case, GENETIC))
        if ours is None or other is None or ours.extra["share"] not in TIGHT:
            continue
        if ours.median_seconds and other.median_seconds:
            ratios.append(other.median_seconds / ours.median_seconds)
        num_alone += bool(ours.median_seconds and not other.median_seconds)
    if not ratios:
        return ""
    return (
        f"{arm} is faster than {GENETIC} at {', '.join(TIGHT)} by "
        f"{statistics.geometric_mean(ratios) - 1:.1%} (geometric mean of {len(ratios)}); in "
        f"{num_alone} cases only it has a plan"
    )


def _near_the_ideal(rows: Rows, cases: list[str]) -> list[str]:
    lines = []
    for model in NEAR_IDEAL:
        of_model = [rows[case, OURS] for case in cases if (case, OURS) in rows]
        of_model = [row for row in of_model if row.extra["model"] == model]
        if of_model:
            tightest = min(of_model, key=lambda row: row.extra["device_bytes"])
            share = tightest.extra.get("share_of_ideal", 0.0)
            lines.append(f"{model} at {tightest.extra['share']}: {share:.1%} of ideal, asked 85 %")
    return lines
