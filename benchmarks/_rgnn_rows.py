"""Benchmark rows of the events that a process of `_rgnn_case.py` prints."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from typing import Any

from _rgnn_arms import EDGEWISE, OURS, PYG
from _rgnn_graphs import ONE_WAY
from _rgnn_steps import TRAINING
from _rows import BenchmarkRow, Limit

TOPIC = "rgnn"
OUT_OF_MEMORY, KILLED, TOO_LONG = "out of memory", "ended its process", "took too long"

# How many times longer than ours a training step of another arm has to take.
SPEEDUP_BARS = {
    ("RGCN", "aifb", PYG): 20.0,
    ("RGCN", "mutag", PYG): 15.0,
    ("RGCN", "fb15k-237", PYG): 35.0,
    ("RGCN", "wn18rr", PYG): 3.0,
    ("RGCN", "mag-tiny", PYG): 3.0,
    ("RGCN", ONE_WAY, EDGEWISE): 5.0,
    ("HGT", "mag-tiny", PYG): 2.0,
    ("HGT", "am-sizes", PYG): 2.0,
    ("HGT", "bgs-sizes", PYG): 2.0,
}
RGAT_BARS = {PYG: 30.0, EDGEWISE: 3.0}  # on every graph
GEOMEAN_BAR = 2.5  # of RGCN over segment-mm on all graphs with reverse edges


@dataclasses.dataclass
class Measured:
    """One arm in one mode."""

    arm: str
    mode: str
    outcome: str = "ok"
    seconds: list[float] = dataclasses.field(default_factory=list)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


class Record:
    """The events of the processes of one layer on one graph.

    Args:
        model: The layer.
        graph: The graph's name.
        reference: Our arm that ratios are taken to.
        width: Features of each node.
    """

    def __init__(self, model: str, graph: str, reference: str, width: int) -> None:
        self.model, self.graph, self.reference, self.width = model, graph, reference, width
        self.counts: dict[str, Any] = {}
        self.measured: dict[tuple[str, str], Measured] = {}
        self.preparation: dict[str, float] = {}

    def add(self, events: Iterable[dict[str, Any]], only: str | None = None) -> None:
        """Add the events of one process; ratios are taken within it.

        Args:
            events: In their order.
            only: An arm; all others were there for comparison.
        """
        found: dict[tuple[str, str], Measured] = {}
        for event in events:
            kind = event.pop("event")
            if kind == "graph":
                self.counts = event
                continue
            arm = event.pop("arm")
            if kind == "prepared":
                self.preparation[arm] = statistics.median(event["seconds"])
                continue
            key = (arm, event.pop("mode"))
            entry = found.setdefault(key, Measured(*key))
            if kind == "measured":
                entry.seconds = event["seconds"]
            elif kind == "failed":
                entry.outcome = event.get("outcome", OUT_OF_MEMORY)
                entry.seconds = [event["seconds"]]
            elif kind in ("tried", "planned", "kernels"):
                entry.facts |= event
        for (arm, mode), entry in found.items():
            ours = found.get((self.reference, mode))
            if ours is not None and ours.outcome == entry.outcome == "ok":
                entry.facts["ratio_to_ours"] = ratios(entry.seconds, ours.seconds)
            if only in (None, arm):
                self.measured[arm, mode] = entry

    def rows(self, where: Any) -> list[BenchmarkRow]:
        """Return a row per arm and mode; `where` are the fields that all rows share."""
        return [self._row(entry, where) for entry in self.measured.values() if entry.seconds]

    def _row(self, entry: Measured, where: Any) -> BenchmarkRow:
        facts = {name: rounded(value) for name, value in entry.facts.items()}
        peak = facts.pop("peak_bytes", None)
        extra = {
            "model": self.model,
            "graph": self.graph,
            "mode": entry.mode,
            "outcome": entry.outcome,
            **facts,
        }
        if entry.arm == self.reference:
            extra["counts"] = self.counts
        if entry.arm in self.preparation and entry.mode == TRAINING:
            extra["preparation_seconds"] = rounded(self.preparation[entry.arm])
            extra["paid_off_after_steps"] = self._paid_off(entry.arm)
        row = BenchmarkRow.of(
            entry.seconds,
            topic=TOPIC,
            case=f"{self.model}, {self.graph}, d={self.width}, {entry.mode}",
            arm=entry.arm,
            peak_bytes={} if peak is None else {"tensors of a step": peak},
            limit=self._limit(entry),
            extra=extra,
            **where,
        )
        if entry.outcome == "ok":
            return row
        # The time is the one after which it failed.
        return dataclasses.replace(row, num_repetitions=0)

    def _limit(self, entry: Measured) -> Limit | None:
        """Return the limit of our arm: the time of another one over the bar's factor."""
        if entry.arm != self.reference or entry.mode != TRAINING or entry.outcome != "ok":
            return None
        bars = {arm: self._bar(arm) for arm in (PYG, EDGEWISE)}
        for arm, factor in bars.items():
            other = self.measured.get((arm, TRAINING))
            if factor is not None and other is not None and other.outcome == "ok":
                seconds = statistics.median(other.seconds) / factor
                return Limit(name=f"{arm} / {factor:g}", value=seconds, unit="s")
        return None

    def _bar(self, arm: str) -> float | None:
        if self.model == "RGAT":
            return RGAT_BARS[arm]
        return SPEEDUP_BARS.get((self.model, self.graph, arm))

    def _paid_off(self, arm: str) -> dict[str, int]:
        """Return the training steps that pay off the preparation, for each slower arm."""
        ours = self.measured[arm, TRAINING]
        found = {}
        for (other, mode), entry in self.measured.items():
            if mode != TRAINING or other.startswith(OURS) or entry.outcome != "ok":
                continue
            gained = statistics.median(entry.seconds) - statistics.median(ours.seconds)
            spent = self.preparation[arm] - self.preparation.get(other, 0.0)
            if gained > 0:
                found[other] = max(0, -int(-spent // gained))
        return found


def ratios(seconds: list[float], reference: list[float]) -> dict[str, float]:
    """Return the time over a reference's, within rounds: quartiles and median."""
    each = [theirs / ours for theirs, ours in zip(seconds, reference, strict=False)]
    if len(each) == 1:
        return dict.fromkeys(("lower", "median", "upper"), rounded(each[0]))
    lower, _, upper = statistics.quantiles(each, n=4, method="inclusive")
    return {
        "lower": rounded(lower),
        "median": rounded(statistics.median(each)),
        "upper": rounded(upper),
    }


def rounded(value: Any) -> Any:
    """Round a float to four digits; return everything else as it is."""
    return float(f"{value:.4g}") if isinstance(value, float) else value
