"""Two revisions side by side: is any benchmark slower than before?

    PENSTOCK_DATA=/data python benchmarks/revisions.py 1acd486 HEAD
    python benchmarks/revisions.py 1acd486 HEAD --topics capture unified --rounds 5

Both revisions are checked out beside each other, and each runs its own benchmarks, cut short, on
its own source. Rounds alternate: before and after, then after and before. A row is the median over
the rounds of what a benchmark calls its median; its arm is named by the revision. Arms of others
(eager, PyG, `index_select`) are kept, too: where they differ as ours do, it was the machine. A
benchmark that only the revision before cannot run is printed and has no rows.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from _rows import REPOSITORY, BenchmarkRow, Limit, announce, argument_parser, read_rows, write_rows

COMMANDS = {
    "capture": [["capture.py", "--layers", "12"]],
    "offload": [
        ["offload.py", "--models", "gpt2", "--arms", "keep", "run all", "--rounds", "1"],
        ["offload.py", "--part", "saves", "--rounds", "2"],
    ],
    "execute": [
        [
            *("execute.py", "--models", "gpt2", "--arms", "full", "1/4 host"),
            *("--rounds", "1", "--steps", "3", "--time-limit", "5"),
        ],
        ["execute.py", "--part", "operators", "--rounds", "2"],
    ],
    "plan": [["plan.py", "--part", "speed"]],
    "rgnn": [
        [
            *("rgnn.py", "--part", "cases", "--quick", "--models", "RGCN", "RGAT"),
            *("--graphs", "wn18rr", "--modes", "training step", "--budget-seconds", "1"),
        ],
    ],
    "unified": [["unified.py", "--table-bytes", "1GiB", "--row-bytes", "64", "1024"]],
    "batching": [["batching.py", "--part", "batches"], ["batching.py", "--part", "trees"]],
}
ORDER = ("before", "after")
SLOWER = 1.03  # ratio of the medians below which a difference is none


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("before", nargs="?", default="HEAD~1", help="a commit")
    parser.add_argument("after", nargs="?", default="HEAD", help="a commit")
    parser.add_argument("--topics", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.dry_run:
        announce((topic, arm) for topic in options.topics for arm in ORDER)
        return
    with tempfile.TemporaryDirectory() as folder:
        trees = {name: Path(folder, name) for name in ORDER}
        try:
            for name, tree in trees.items():
                git("worktree", "add", "--detach", str(tree), getattr(options, name))
            for topic in options.topics:
                pairs = compare(topic, trees, options, Path(folder))
                if not pairs:
                    raise SystemExit(f"{topic}: no case has rows of both revisions")
                for pair in pairs:
                    print(describe(*pair), flush=True)
                write_rows((row for pair in pairs for row in pair), options.out)
        finally:
            for tree in trees.values():
                git("worktree", "remove", "--force", str(tree))


def git(*arguments: str) -> None:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    subprocess.run(command, check=True, capture_output=True)


def compare(
    topic: str, trees: dict[str, Path], options: argparse.Namespace, folder: Path
) -> list[tuple[BenchmarkRow, BenchmarkRow]]:
    """Run a topic on both revisions in alternating order; return their rows, case by case."""
    found = {name: defaultdict(list) for name in trees}
    for number in range(options.rounds):
        for name in ORDER if number % 2 == 0 else ORDER[::-1]:
            out = folder / f"{topic}-{name}-{number}"
            for command in COMMANDS[topic]:
                run(command, trees[name], out, options.device)
            for path in out.rglob("*.json"):
                for row in read_rows(path):
                    found[name][row.topic, row.case, row.arm].append(row)
    before, after = found["before"], found["after"]
    return [
        (summary(before[key], "before"), summary(after[key], "after", before[key]))
        for key in before
        if key in after
    ]


def run(command: list[str], tree: Path, out: Path, device: str) -> None:
    """Run one benchmark of a revision, on its own source; one before may fail, and is printed."""
    script, *flags = command
    done = subprocess.run(
        [sys.executable, tree / "benchmarks" / script, *flags, "--device", device, "--out", out],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree / "src")},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        error = f"{' '.join(command)} failed in {tree.name}:\n{done.stderr[-2000:]}"
        if tree.name != ORDER[0]:
            raise SystemExit(error)
        print(error, file=sys.stderr, flush=True)


def summary(
    rows: list[BenchmarkRow], name: str, before: list[BenchmarkRow] | None = None
) -> BenchmarkRow:
    """Return the medians of the rounds as one row, held against the revision before."""
    limit = None
    if before and (value := statistics.median(row.median_seconds for row in before)):
        limit = Limit(name="before", value=value, unit="s")
    first = rows[0]
    return BenchmarkRow.of(
        [row.median_seconds for row in rows],
        topic="revisions",
        case=f"{first.topic}: {first.case}: {first.arm}",
        arm=name,
        device_name=first.device_name,
        versions=first.versions,
        commit=first.commit,
        command=first.command,
        limit=limit,
    )


def describe(before: BenchmarkRow, after: BenchmarkRow) -> str:
    """Return a line on a case: both medians, their ratio, and whether the spreads lie apart."""
    ratio = after.median_seconds / before.median_seconds if before.median_seconds else 1.0
    apart = after.quartiles_seconds[0] > before.quartiles_seconds[1] and ratio > SLOWER
    return (
        f"{before.case}: {before.median_seconds:.4g} -> {after.median_seconds:.4g} s, "
        f"{ratio:.3f}{' SLOWER' if apart else ''}"
    )


if __name__ == "__main__":
    main()
