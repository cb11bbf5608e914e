"""Two revisions side by side: is any benchmark slower than before?

    PENSTOCK_DATA=/data python benchmarks/revisions.py 1acd486 HEAD
    python benchmarks/revisions.py 1acd486 HEAD --topics capture unified --rounds 5
    python benchmarks/revisions.py 1acd486 HEAD --topics offload --part 1 --rounds 1 --keep FOLDER

Both revisions are checked out beside each other, and each runs its own benchmarks, cut short, on
its own source. Rounds alternate: before and after, then after and before. A row is the median over
the rounds of what a benchmark calls its median; its arm is named by the revision. Arms of others
(eager, PyG, `index_select`) are kept, too: where they differ as ours do, it was the machine. A
benchmark that only the revision before cannot run is printed and has no rows. With `--keep`, rows
of rounds stay in a folder, and a later call for the same commits goes on from them: so rounds fit
into the times at which a machine is quiet.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from _rows import REPOSITORY, BenchmarkRow, Limit, announce, argument_parser, read_rows, write_rows

PLANS = "PLANS"  # in a command: a folder for each revision, whose plans the later rounds run again
COMMANDS = {
    "capture": [["capture.py", "--layers", "12"]],
    "offload": [
        ["offload.py", "--models", "gpt2", "--arms", "keep", "run all", "--rounds", "1"],
        ["offload.py", "--part", "saves", "--rounds", "2"],
    ],
    "execute": [
        [
            *("execute.py", "--models", "gpt2", "--arms", "full", "1/4 host"),
            *("--rounds", "1", "--steps", "3", "--time-limit", "5", "--plans", PLANS),
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
    parser.add_argument("--part", type=int, help="only this benchmark of each topic, from 0 on")
    parser.add_argument("--keep", type=Path, help="where rows of rounds stay, and lie from before")
    options = parser.parse_args()
    if options.dry_run:
        announce((topic, arm) for topic in options.topics for arm in ORDER)
        return
    with tempfile.TemporaryDirectory() as folder:
        trees = {name: Path(folder, name) for name in ORDER}
        commits = {name: git("rev-parse", "--short", getattr(options, name)) for name in ORDER}
        rounds = (options.keep or Path(folder, "rounds")) / "-".join(commits.values())
        try:
            for name, tree in trees.items():
                git("worktree", "add", "--detach", str(tree), commits[name])
            for topic in options.topics:
                pairs = compare(topic, trees, options, rounds)
                if not pairs:
                    raise SystemExit(f"{topic}: no case has rows of both revisions")
                for pair in pairs:
                    print(describe(*pair), flush=True)
                write_rows((row for pair in pairs for row in pair), options.out)
        finally:
            for tree in trees.values():
                git("worktree", "remove", "--force", str(tree))


def git(*arguments: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def compare(
    topic: str, trees: dict[str, Path], options: argparse.Namespace, rounds: Path
) -> list[tuple[BenchmarkRow, BenchmarkRow]]:
    """Run a topic on both revisions in alternating order; return their rows, case by case.

    `rounds` receives the rows of each round, in a folder of its own once the round is over.
    """
    for part, command in enumerate(COMMANDS[topic]):
        if options.part in (None, part):
            for _ in range(options.rounds):
                run_round(command, trees, rounds / f"{topic}-{part}", options.device)
    found = {name: defaultdict(list) for name in trees}
    for name in trees:
        for path in sorted(rounds.glob(f"{topic}-*/[0-9]*/{name}/**/*.json")):
            for row in read_rows(path):
                found[name][row.topic, row.case, row.arm].append(row)
    before, after = found["before"], found["after"]
    pairs = [
        (summary(before[key], "before"), summary(after[key], "after", before[key]))
        for key in before
        if key in after
    ]
    # Revisions may name one machine differently.
    return [(replace(a, device_name=b.device_name), b) for a, b in pairs]


def run_round(command: list[str], trees: dict[str, Path], rounds: Path, device: str) -> None:
    """Run a benchmark once on each revision; a round that is stopped leaves no rows."""
    number = len(list(rounds.glob("[0-9]*")))
    with tempfile.TemporaryDirectory() as folder:
        for name in ORDER if number % 2 == 0 else ORDER[::-1]:
            plans = str(rounds / "plans" / name)
            flags = [plans if flag == PLANS else flag for flag in command]
            run(flags, trees[name], Path(folder, name), device)
        shutil.copytree(folder, rounds / f"{number:03}")


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
