"""The process of one arm: it trains a step per line of standard input, and reports each.

Its one argument is JSON, as `_processes.py` writes it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from penstock.cli._vector_math import settle_vector_math
from penstock.cli.demo._config import DemoConfig
from penstock.cli.demo._plans import PlannedArm, make_plans
from penstock.cli.demo._training import draw_batch, load_text, make_trainee, train


def _main(request: dict[str, Any]) -> None:
    config = DemoConfig(**request["config"])
    plans, store = request.get("plans", ""), request.get("store", "")
    settle_vector_math()
    if "plan_seconds" in request:
        batch = draw_batch(load_text(), config)
        seconds = request["plan_seconds"]
        make_plans(*make_trainee(config), batch, plans, store=store, plan_seconds=seconds)
        return

    def say(**event: Any) -> None:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()

    turns = iter(sys.stdin.readline, "")  # a line of the parent process starts a step
    planned = PlannedArm(plans, request["divisor"], store) if "divisor" in request else None
    train(config, turns, checkpoint="checkpoint" in request, planned=planned, say=say)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
