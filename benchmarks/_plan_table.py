"""What the rows of `plan.py` say: share of the ideal by model, budget and arm, and the bars."""

from __future__ import annotations

import statistics
from pathlib import Path

from _plan_arms import ABLATIONS, ARMS, GENETIC, OURS
from _rows import BenchmarkRow, read_rows, results_file

FROZEN = f"{OURS} in the program's order, without recomputation"
TIGHT = ("1/8", "1/12", "minimum")


def show(device_name: str, directory: Path) -> None:
    """Print the table in Markdown, then the bars of the planner."""
    path = results_file(device_name, "plan", directory)
    if not path.exists():
        print(f"{path} does not exist: no rows yet")
        return
    rows = {(row.case, row.arm): row for row in read_rows(path) if row.extra.get("share")}
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
    return "none" if share is None else f"{share:.2f}"


def bars(rows: dict[tuple[str, str], BenchmarkRow], cases: list[str]) -> list[str]:
    """What is asked of the planner, one line each: met or not, and by how much."""
    lines = []
    gaps = {case: rows[case, FROZEN].extra.get("gap") for case in cases if (case, FROZEN) in rows}
    known = {case: gap for case, gap in gaps.items() if gap is not None}
    if known:
        worst = max(known, key=lambda case: known[case])
        within = sum(gap <= 0.10 for gap in known.values())
        lines.append(
            f"frozen: within 10 % of the bound in {within} of {len(known)} cases; "
            f"worst {known[worst]:.1%} ({worst})"
        )
    ratios, losses = [], []
    for case in cases:
        ours = rows.get((case, OURS))
        if ours is None or "share_of_ideal" not in ours.extra:
            continue
        for arm in ARMS:
            other = rows.get((case, arm))
            if arm == OURS or arm in ABLATIONS or other is None or not other.median_seconds:
                continue
            ratio = other.median_seconds / ours.median_seconds
            if ratio < 0.9999:
                losses.append(f"{arm} on {case}: {ratio:.3f}")
            if arm == GENETIC and ours.extra["share"] in TIGHT:
                ratios.append(ratio)
    lines.append(f"slower than another arm in {len(losses)} cases {losses}")
    if ratios:
        mean = statistics.geometric_mean(ratios)
        lines.append(f"faster than {GENETIC} at {', '.join(TIGHT)} by {mean - 1:.1%} (mean)")
    return lines
