"""Chains of operators over the same rows: values that are spilled, streamed in chunks, or fused.

A segment of operators runs chunk by chunk of rows, so that the values within it stay in a cache;
values between segments are spilled to memory, whole. An operator that can be computed where its
operand is made is fused with it, and the value between them never leaves the registers (InTAR,
arXiv:2502.08807, chooses so for an FPGA). With R rows in chunks of c, of an operator

    seconds = max(operations R / rate, sum over levels of its bytes / rate of the level)
              + ceil(R / c) (launch + weights / rate of their level)

where operands and results move at the level that holds the chunk's live values, or memory where
they are spilled, and weights are read for each chunk, before its arithmetic, from memory or from
the cache that keeps them beside the chunk. A plan has the least sum of seconds and of `price` times
the bytes that are spilled or live in a chunk: dynamic programming over the sets of operators that
are done, exact over all cuts of the graph into connected segments and over chunks of powers of two.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from penstock.iomodel._levels import MemoryLevel, ceil_div, check_counts, level_rates, memory_levels
from penstock.memory import MachineProfile
from penstock.tables import Report
from penstock.units import format_bytes, format_seconds

Edge = Literal["spill", "stream", "fuse"]
MOST_OPERATORS = 24  # beyond a chain; a graph with many branches takes exponential time
_TICKS = 1e15  # for each second: sums of integers are the same in any order
_WORTH = 0.1  # of the time with everything spilled, for keeping all of it out of memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainOperator:
    """An operator that works on each row alone.

    Attributes:
        name: For reports.
        row_bytes: Bytes of its result for each row.
        inputs: Numbers of the operators whose results it reads, all before it; -1 is the input of
            the chain. None: the operator before it.
        weight_bytes: Bytes that it reads for all rows together.
        row_operations: Additions and multiplications for each row.
        row_seconds: Time of a row whose bytes are in a cache, on all threads, where it was
            measured: of functions that take longer than their additions and multiplications.
        can_fuse: Whether a kernel computes it where its operand is made.
    """

    name: str
    row_bytes: int
    inputs: tuple[int, ...] | None = None
    weight_bytes: int = 0
    row_operations: int = 0
    row_seconds: float = 0.0
    can_fuse: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainSegment:
    """Operators that run together, in chunks.

    Attributes:
        operators: Their numbers, in order.
        chunk_rows: Rows of a chunk; all rows for operators that run one after the other.
        level: The level that holds the chunk's values.
        seconds: Predicted time.
        spilled_bytes: Bytes of its results that later segments read from memory.
        live_bytes: The most bytes of a chunk's values at a time.
    """

    operators: tuple[int, ...]
    chunk_rows: int
    level: str
    seconds: float
    spilled_bytes: int
    live_bytes: int


@dataclasses.dataclass(frozen=True)
class ChainPlan(Report, title="penstock.iomodel.chain"):
    """The segments of a chain, in order.

    Attributes:
        segments: The segments.
        edges: By (producer, consumer), the producer -1 being the input: spilled, streamed or fused.
        cost: What was minimised, in 1e-15 s.
        unchunked_seconds: Predicted time with every value spilled.
        names: Names of the operators.
    """

    segments: tuple[ChainSegment, ...]
    edges: Mapping[tuple[int, int], Edge]
    cost: int
    unchunked_seconds: float
    names: tuple[str, ...]

    @property
    def predicted_seconds(self) -> float:
        """Sum of the segments' times."""
        return sum(segment.seconds for segment in self.segments)

    def _rows(self) -> list[tuple[str, object]]:
        rows: list[tuple[str, object]] = []
        for number, each in enumerate(self.segments):
            names = ", ".join(self.names[at] for at in each.operators)
            text = f"{names}: {each.chunk_rows} rows at a time in {each.level}"
            text += f", {format_seconds(each.seconds)}, {format_bytes(each.live_bytes)} live"
            rows.append((f"segment {number}", text))
        rows.append(("predicted_seconds", self.predicted_seconds))
        return [*rows, ("unchunked_seconds", self.unchunked_seconds)]


def chain(
    operators: Sequence[ChainOperator],
    rows: int,
    machine: MachineProfile,
    *,
    input_row_bytes: int,
    num_threads: int = 1,
) -> ChainPlan:
    """Plan which values of a chain, or small graph, are spilled, streamed in chunks, or fused.

    Example:
        >>> from penstock.memory import machine
        >>> mlp = [ChainOperator(name=name, row_bytes=size) for name, size in
        ...        (("up", 65536), ("gelu", 65536), ("down", 16384))]
        >>> len(chain(mlp, 8192, machine("h200"), input_row_bytes=16384).segments)
        1

    Args:
        operators: The operators, in an order in which each follows what it reads.
        rows: Rows of the input.
        machine: Capacities and rates of the levels.
        input_row_bytes: Bytes of the input for each row.
        num_threads: Threads that compute.

    Raises:
        ValueError: An operator reads one that is not before it, or 25 operators have branches.
    """
    graph = _ChainGraph(tuple(operators), rows, input_row_bytes)
    costs = SegmentCosts(graph, machine, num_threads)
    best: dict[int, tuple[int, tuple[ChainSegment, ...]]] = {0: (0, ())}
    for done in graph.list_ideals():
        cost, segments = best[done]
        for chosen in graph.grow_segments(done):
            more, segment = costs.choose(chosen)
            found = best.get(done | chosen)
            if found is None or cost + more < found[0]:
                best[done | chosen] = (cost + more, (*segments, segment))
    cost, segments = best[(1 << len(graph.operators)) - 1]
    edges, names = graph.name_edges(segments), tuple(each.name for each in graph.operators)
    return ChainPlan(segments, edges, cost, costs.unchunked_seconds, names)


@dataclasses.dataclass(frozen=True)
class _ChainGraph:
    """A chain whose reads are checked; sets of operators are bits of a number."""

    operators: tuple[ChainOperator, ...]
    rows: int
    input_row_bytes: int

    def __post_init__(self) -> None:
        check_counts(rows=self.rows, input_row_bytes=self.input_row_bytes)
        check_counts(operators=len(self.operators))
        for number, reads in enumerate(self.reads):
            if not reads or not all(-1 <= at < number for at in reads):
                raise ValueError(
                    f"operator {number} reads {reads}; pass numbers of operators before it, and -1 "
                    "for the input"
                )
        is_chain = all(reads == (number - 1,) for number, reads in enumerate(self.reads))
        if len(self.operators) > MOST_OPERATORS and not is_chain:
            raise ValueError(
                f"there are {len(self.operators)} operators with branches; pass at most "
                f"{MOST_OPERATORS}, or a chain"
            )

    @functools.cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """By operator the numbers of what it reads."""
        return tuple(
            (number - 1,) if each.inputs is None else tuple(each.inputs)
            for number, each in enumerate(self.operators)
        )

    @functools.cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """By operator the numbers of those that read it."""
        count = range(len(self.operators))
        return tuple(tuple(at for at in count if number in self.reads[at]) for number in count)

    def row_bytes(self, number: int) -> int:
        """Return the bytes of a value for each row; -1 is the input."""
        return self.input_row_bytes if number < 0 else self.operators[number].row_bytes

    def _is_ready(self, done: int, number: int) -> bool:
        return all(at < 0 or done >> at & 1 for at in self.reads[number])

    def list_ideals(self) -> list[int]:
        """Return the sets that have all that their operators read, small ones first."""
        found, level = [0], {0}
        while level:
            level = {
                done | 1 << number
                for done in level
                for number in range(len(self.operators))
                if not done >> number & 1 and self._is_ready(done, number)
            }
            found += sorted(level)
        return found

    def grow_segments(self, done: int) -> Iterator[int]:
        """Yield the connected sets of operators that can run next, after those that are done."""
        seen, level = set(), {0}
        while level:
            level = {
                chosen | 1 << number
                for chosen in level
                for number in range(len(self.operators))
                if not (done | chosen) >> number & 1 and self._is_ready(done | chosen, number)
            } - seen
            seen |= level
        yield from (chosen for chosen in sorted(seen) if self.is_connected(chosen))

    def is_connected(self, chosen: int) -> bool:
        """Return whether operators hang together by values between them."""
        numbers = [at for at in range(len(self.operators)) if chosen >> at & 1]
        reached, stack = {numbers[0]}, [numbers[0]]
        while stack:
            at = stack.pop()
            for other in (*self.reads[at], *self.readers[at]):
                if other >= 0 and chosen >> other & 1 and other not in reached:
                    reached.add(other)
                    stack.append(other)
        return len(reached) == len(numbers)

    def is_fused(self, producer: int, consumer: int) -> bool:
        """Return whether a value within a segment never leaves the registers."""
        if producer < 0 or not self.operators[consumer].can_fuse:
            return False
        return self.readers[producer] == (consumer,)

    def name_edges(self, segments: Sequence[ChainSegment]) -> dict[tuple[int, int], Edge]:
        """Return what becomes of each value on its way to each reader."""
        segment_of = {at: n for n, each in enumerate(segments) for at in each.operators}
        edges: dict[tuple[int, int], Edge] = {}
        for consumer, reads in enumerate(self.reads):
            for producer in reads:
                is_within = segment_of.get(producer, -1) == segment_of[consumer]
                fused = is_within and self.is_fused(producer, consumer)
                edges[producer, consumer] = "fuse" if fused else "stream" if is_within else "spill"
        return edges


class SegmentCosts:
    """Costs of segments on a machine.

    Attributes:
        unchunked_seconds: Time of all operators one after the other, with every value spilled.
    """

    def __init__(self, graph: _ChainGraph, machine: MachineProfile, num_threads: int) -> None:
        compute = machine.compute
        rates = level_rates(machine, num_threads)
        if compute is None or "memory" not in rates:
            raise ValueError(
                f"machine {machine.device_name} has no rates of its memory and arithmetic; pass "
                "what penstock.probe(refresh=True) returns"
            )
        self._graph, self._rates = graph, rates
        self._flops = compute.flops_per_second["float32"]
        self._launch_seconds = compute.launch_seconds
        names = ("link", "file", "memory", "shared")
        self._caches: list[MemoryLevel] = [
            each for each in memory_levels(machine) if each.name not in names and each.name in rates
        ]
        self._price = 0.0
        whole = [self._evaluate(1 << at, graph.rows) for at in range(len(graph.operators))]
        self.unchunked_seconds = sum(each.seconds for each in whole)
        spilled = sum(each.spilled_bytes for each in whole)
        self._price = _WORTH * self.unchunked_seconds / spilled if spilled else 0.0

    def choose(self, chosen: int) -> tuple[int, ChainSegment]:
        """Return the cost, in ticks, and the chunk of a set of operators that costs least."""
        rows, options = self._graph.rows, []
        chunk = 1 << (rows - 1).bit_length()
        while chunk:
            options.append(self.price(self._evaluate(chosen, min(chunk, rows))))
            chunk //= 2
            if chosen & (chosen - 1) == 0:  # one operator gains nothing by chunks
                break
        return min(options, key=lambda each: each[0])

    def price(self, segment: ChainSegment) -> tuple[int, ChainSegment]:
        """Return the cost of a segment, in ticks, with the segment."""
        held = segment.spilled_bytes
        if len(segment.operators) > 1:
            held += segment.live_bytes
        return round((segment.seconds + self._price * held) * _TICKS), segment

    def _evaluate(self, chosen: int, chunk_rows: int) -> ChainSegment:
        graph, rows = self._graph, self._graph.rows
        numbers = tuple(at for at in range(len(graph.operators)) if chosen >> at & 1)
        live = self._find_live_bytes(numbers) * chunk_rows
        weights = sum(graph.operators[at].weight_bytes for at in numbers)
        level = self._find_level(live)
        kept_at = self._find_level(live + weights)
        chunks = ceil_div(rows, chunk_rows)
        seconds = 0.0
        for at in numbers:
            of = graph.operators[at]
            spilled, streamed = self._find_row_bytes(at, chosen)
            moved = rows * (spilled / self._rates["memory"] + streamed / self._rates[level])
            weights_seconds = of.weight_bytes / self._rates["memory"]
            weights_seconds += (chunks - 1) * of.weight_bytes / self._rates[kept_at]
            arithmetic = rows * max(of.row_operations / self._flops, of.row_seconds)
            seconds += max(moved, arithmetic) + weights_seconds + chunks * self._launch_seconds
        leaving = [at for at in numbers if graph.readers[at] and self._leaves(at, chosen)]
        return ChainSegment(
            operators=numbers,
            chunk_rows=chunk_rows,
            level=level,
            seconds=seconds,
            spilled_bytes=rows * sum(map(graph.row_bytes, leaving)),
            live_bytes=live,
        )

    def _leaves(self, at: int, chosen: int) -> bool:
        """Return whether a result is read outside of the set, or is one of the chain's."""
        readers = self._graph.readers[at]
        return not readers or not all(chosen >> reader & 1 for reader in readers)

    def _find_row_bytes(self, at: int, chosen: int) -> tuple[int, int]:
        """Return the bytes of a row that an operator moves in memory, and within its chunk."""
        graph, spilled, streamed = self._graph, 0, 0
        for producer in graph.reads[at]:
            if producer < 0 or not chosen >> producer & 1:
                spilled += graph.row_bytes(producer)
            elif not graph.is_fused(producer, at):
                streamed += graph.row_bytes(producer)
        within = [reader for reader in graph.readers[at] if chosen >> reader & 1]
        if self._leaves(at, chosen):
            spilled += graph.row_bytes(at)
        elif not (len(within) == 1 and graph.is_fused(at, within[0])):
            streamed += graph.row_bytes(at)
        return spilled, streamed

    def _find_live_bytes(self, numbers: tuple[int, ...]) -> int:
        """Return the most bytes of a row that are live while one of the operators runs."""
        graph, most = self._graph, 0
        for at in numbers:
            held = {at, *graph.reads[at]}
            held |= {
                made for made in numbers if made < at and max(graph.readers[made], default=-1) >= at
            }
            most = max(most, sum(map(graph.row_bytes, held)))
        return most

    def _find_level(self, num_bytes: int) -> str:
        return next(
            (each.name for each in self._caches if num_bytes <= each.capacity_bytes), "memory"
        )
