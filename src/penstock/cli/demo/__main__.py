"""The process of one arm: it trains a step per line of standard input, and reports each."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from penstock.cli._vector_math import settle_vector_math
from penstock.cli.demo._config import DemoConfig
from penstock.cli.demo._plans import PlannedArm, make_plans
from penstock.cli.demo._processes import format_option
from penstock.cli.demo._training import draw_batch, load_text, make_trainee, train


def _main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m penstock.cli.demo")
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--plans", help="directory of the plans")
    parser.add_argument("--plan-seconds", type=float, help="make them, in so much time each")
    parser.add_argument("--planned", type=int, help="which plan to run")
    parser.add_argument("--store")
    for field in dataclasses.fields(DemoConfig):
        parser.add_argument(format_option(field.name), type=int, default=field.default)
    values = vars(parser.parse_args(arguments))
    checkpoint, plans, plan_seconds, divisor, store = (
        values.pop(name) for name in ("checkpoint", "plans", "plan_seconds", "planned", "store")
    )
    config = DemoConfig(**values)
    settle_vector_math()
    if plan_seconds is not None:
        batch = draw_batch(load_text(), config)
        make_plans(*make_trainee(config), batch, plans, store=store, plan_seconds=plan_seconds)
        return

    def say(**event: Any) -> None:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()

    turns = iter(sys.stdin.readline, "")  # a line of the parent process starts a step
    planned = None if divisor is None else PlannedArm(plans, divisor, store)
    train(config, turns, checkpoint=checkpoint, planned=planned, say=say)


if __name__ == "__main__":
    _main()
