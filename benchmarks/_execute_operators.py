"""What an operator of a planned step costs beside its arithmetic: steps of the smallest tensors.

Each step runs as it is, and with functions in the place of torch's operators that only return what
these once returned: what is left then is the interpreter's own.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from _rows import BenchmarkRow, Limit, environment
from penstock.executor import bind
from penstock.executor.program import operators
from penstock.graph import capture
from penstock.planner import plan

_WIDTH, _NUM_LAYERS, _NUM_STEPS = 8, 64, 100
_MOST_SECONDS = 4e-6
_OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


def rows() -> Iterator[BenchmarkRow]:
    """Time steps of a deep and narrow network, per operator; on one thread."""
    torch.set_num_threads(1)
    for optimizer in _OPTIMIZERS:
        for share in (1.0, 0.5):
            yield _row(optimizer, share)


def _row(optimizer_name: str, share: float) -> BenchmarkRow:
    eager_seconds = _median_seconds(_eager(*_trainee(optimizer_name)))
    model, optimizer, batch = _trainee(optimizer_name)
    graph = capture(model, optimizer, batch, loss=_loss)
    found = full = plan(graph, machine="h200", time_limit=2)
    if share < 1:
        found = plan(
            graph,
            device_memory=int(full.peak_device_bytes * share),
            host_memory="1GiB",
            machine="h200",
            time_limit=2,
        )
    with bind(found, model, optimizer, graph=graph, loss=_loss, shadow=0) as step:
        seconds = _median_seconds(lambda: step(batch))
        report = step.report()
    with (
        _without_operators(),
        bind(found, *_trainee(optimizer_name)[:2], graph=graph, loss=_loss, shadow=0) as step,
    ):
        own_seconds = _median_seconds(lambda: step(batch))
    return BenchmarkRow.of(
        [own_seconds / report.num_operators],
        topic="execute",
        case=f"an operator of {_NUM_LAYERS} layers of width {_WIDTH}, {optimizer_name}",
        arm=f"{share:g} of the memory",
        # Where transfers of a few bytes follow each other, it is mostly their threads that count.
        limit=Limit(name="4 us an operator", value=_MOST_SECONDS, unit="s") if share == 1 else None,
        extra={
            "num_operators": report.num_operators,
            "num_transfers": len(found.transfers),
            "step_seconds": seconds,
            "seconds_per_operator": seconds / report.num_operators,
            "eager_step_seconds": eager_seconds,
        },
        **environment(),
    )


@contextlib.contextmanager
def _without_operators() -> Iterator[None]:
    """Bind steps whose operators return what they returned when they were bound, at once."""
    real = operators.find_entry_point

    def find_entry_point(
        target: str, args: list[Any], kwargs: dict[str, Any]
    ) -> Callable[..., Any]:
        function = real(target, args, kwargs)
        first = args[0][0] if isinstance(args[0], list) else args[0]
        if first.numel() == 1:  # a count of steps, by which others divide
            return function
        with torch.no_grad():
            result = function(*args, **kwargs)
        return lambda *_, **__: result

    with mock.patch.object(operators, "find_entry_point", find_entry_point):
        yield


def _trainee(optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    layers = [(nn.Linear(_WIDTH, _WIDTH), nn.ReLU()) for _ in range(_NUM_LAYERS)]
    model = nn.Sequential(*(part for layer in layers for part in layer))
    return model, _OPTIMIZERS[optimizer](list(model.parameters())), torch.randn(_WIDTH, _WIDTH)


def _loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return (output - batch).square().mean()


def _eager(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> Callable[[], object]:
    def step() -> None:
        optimizer.zero_grad()
        _loss(model(batch), batch).backward()
        optimizer.step()

    return step


def _median_seconds(step: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_NUM_STEPS):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[_NUM_STEPS // 4 :])
