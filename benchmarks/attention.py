"""Block-sparse attention: `penstock.attention` against torch's SDPA and FlexAttention.

    python benchmarks/attention.py                              # all parts
    python benchmarks/attention.py --part layouts --tokens 2048 --dims 64
    python benchmarks/attention.py --part memory packed
    python benchmarks/attention.py --device cuda --part layouts --tokens 8192 32768

Part `layouts` times steps, forward and backward, of 8 heads in float32, on a GPU in bfloat16; the
arms take turns in one process, ratios are taken within a round, and gradients are compared once.
SDPA with a mask takes the same time for every mask; FlexAttention has no backward pass on the CPU,
so that part `forward` has it, where its compiler is installed. FlashAttention has causal rows where
its package is. Part `memory` is one step at 65,536 tokens in a process of its own: the growth of
its peak, operands and gradients included. Part `packed` trains a Llama on packed documents; rows
hold the largest difference of a document's loss to that of the document alone.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _attention_training as training
from _attention_layouts import (
    FLEX,
    MASKED,
    OURS,
    PATTERNS,
    Case,
    draw_operands,
    make_forwards,
    make_layout,
    peak_of_long_step,
)
from _rows import (
    BenchmarkRow,
    Environment,
    Limit,
    announce,
    argument_parser,
    environment,
    write_rows,
)
from penstock.attention import blocksparse_report

TOPIC = "attention"
PARTS = ("layouts", "forward", "memory", "packed")
LONG_TOKENS, LONG_DIM, LONG_DENSITY = 65_536, 64, 0.02
MEMORY_BAR = int(1.3 * 2**30)
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Of the largest element, between two implementations."""


def run_step(forward: Callable[[], Tensor], operands: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the output of an arm and its gradients."""
    *given, dout = operands
    out = forward()
    return [out.detach(), *torch.autograd.grad(out, given, dout)]


def run_forward(forward: Callable[[], Tensor], operands: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the output of an arm."""
    with torch.no_grad():
        return [forward()]


def time_arms(
    arms: dict[str, Callable[[], Any]], rounds: int, device: str
) -> dict[str, list[float]]:
    """Return the seconds of each arm in each round; the order alternates."""
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for number in range(rounds):
        for arm in list(arms) if number % 2 == 0 else reversed(arms):
            if device != "cpu":
                torch.cuda.synchronize()
            start = time.perf_counter()
            arms[arm]()
            if device != "cpu":
                torch.cuda.synchronize()
            times[arm].append(time.perf_counter() - start)
    return times


def check_results(results: dict[str, list[Tensor]]) -> None:
    """Raise AssertionError where an arm has other results than ours."""
    for arm, found in results.items():
        for ours, theirs in zip(results[OURS], found, strict=True):
            error = float((ours - theirs).abs().max() / theirs.abs().max())
            assert error < TOLERANCES[ours.dtype], f"{arm} differs from {OURS} by {error}"


def layout_rows(
    case: Case, rounds: int, device: str, where: Environment, *, is_forward: bool = False
) -> Iterator[BenchmarkRow]:
    """Yield a row for each arm of a case."""
    layout = make_layout(case.pattern, case.num_tokens).to(device)
    *given, dout = draw_operands(case, device)
    q, k, v = [each.detach() for each in given] if is_forward else given
    names = (OURS, MASKED, FLEX) if is_forward else case.arms
    run = run_forward if is_forward else run_step
    arms = {
        arm: functools.partial(run, forward, (q, k, v, dout))
        for arm, forward in make_forwards(case, layout, (q, k, v), names).items()
    }
    check_results({arm: step() for arm, step in arms.items()})
    times = time_arms(arms, rounds, device)
    report = blocksparse_report(q, k, v, layout)
    bar = None if is_forward else case.bar(layout.density)
    ratios = {
        arm: statistics.median(a / b for a, b in zip(times[arm], times[OURS], strict=True))
        for arm in arms
    }
    for arm, seconds in times.items():
        held = bar if arm == OURS else None
        name = f"{held[1]} times faster than {held[0]}" if held else ""
        yield BenchmarkRow.of(
            seconds,
            topic=TOPIC,
            case=str(case).replace("layouts", "forward" if is_forward else "layouts"),
            arm=arm,
            limit=held and Limit(name=name, value=held[1], unit="1"),
            measured=held and ratios[held[0]],
            extra={
                "density": layout.density,
                "times_of_ours": ratios[arm],
                "path": report.path if arm == OURS else None,
                "num_threads": torch.get_num_threads(),
            },
            **where,
        )


def memory_row(where: Environment) -> BenchmarkRow:
    """Return the row of one long step, in a process of its own."""
    command = [sys.executable, __file__, "--peak"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, grown = json.loads(done.stdout)
    return BenchmarkRow.of(
        [seconds],
        topic=TOPIC,
        case=f"memory: {LONG_TOKENS} tokens, 8 heads of {LONG_DIM}, density {LONG_DENSITY}",
        arm=OURS,
        peak_bytes={"device": grown},
        limit=Limit(name="1.3 GiB", value=MEMORY_BAR, unit="B"),
        measured=grown,
        **where,
    )


def packed_rows(options: argparse.Namespace, where: Environment) -> Iterator[BenchmarkRow]:
    """Yield the rows of a model's training on packed documents."""
    found, alone = training.measure(4096, options.layers, options.hidden, options.rounds)
    limit = Limit(name=f"{training.BAR} x the time of SDPA", value=training.BAR, unit="1")
    for arm, measured in found.items():
        difference = float(((measured.losses - alone).abs() / alone).max())
        yield BenchmarkRow.of(
            measured.seconds,
            topic=TOPIC,
            case=f"packed: Llama, {options.layers} layers of {options.hidden}, 4096 tokens",
            arm=arm,
            limit=limit if arm == training.OURS else None,
            measured=training.ratio(found) if arm == training.OURS else None,
            extra={"num_documents": len(alone), "largest_loss_difference": difference},
            **where,
        )


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Return the shapes and layouts that the options name."""
    return [
        Case(pattern=pattern, num_tokens=num_tokens, dim=dim)
        for num_tokens in options.tokens
        for dim in options.dims
        for pattern in options.patterns
    ]


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 4096])
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--peak", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def announce_rows(options: argparse.Namespace) -> None:
    """Print what would be measured."""
    cases = [(str(case), arm) for case in cases_of(options) for arm in case.arms]
    announce(cases if "layouts" in options.part else ())
    if "forward" in options.part:
        named = [str(case).replace("layouts", "forward") for case in cases_of(options)]
        announce((case, arm) for case in named for arm in (OURS, MASKED, FLEX))
    if "memory" in options.part:
        announce([(f"memory: {LONG_TOKENS} tokens", OURS)])
    if "packed" in options.part:
        announce(("packed: Llama", arm) for arm in (training.OURS, training.STOCK))


def main() -> None:
    options = arguments()
    if options.peak:
        print(json.dumps(peak_of_long_step(LONG_TOKENS, LONG_DIM, LONG_DENSITY)))
        return
    if options.device != "cpu":
        options.part = [part for part in options.part if part in ("layouts", "forward")]
    if options.dry_run:
        announce_rows(options)
        return
    where = environment(options.device)

    def write(rows: Iterator[BenchmarkRow]) -> None:
        for row in rows:
            print(row, file=sys.stderr, flush=True)
            write_rows([row], options.out)

    for part in ("layouts", "forward"):
        for case in cases_of(options) if part in options.part else ():
            is_forward = part == "forward"
            write(layout_rows(case, options.rounds, options.device, where, is_forward=is_forward))
    if "memory" in options.part:
        write(iter([memory_row(where)]))
    if "packed" in options.part:
        write(packed_rows(options, where))


if __name__ == "__main__":
    main()
