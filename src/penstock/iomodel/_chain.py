"""Chains of operators over the same rows: values that are spilled, streamed in chunks, or fused.

A segment of operators runs chunk by chunk of rows, so that the values within it stay in a cache;
values between segments are spilled to memory, whole. An operator that can be computed in place of
its operand is fused with it: the two values are one buffer (InTAR, arXiv:2502.08807, chooses among
these three for an FPGA). With R rows in chunks of c, of an operator

    seconds = max(operations R / rate, sum over levels of its bytes / rate of the level)
              + ceil(R / c) (launch + fixed + weights / rate of their level)
              + new bytes / rate of new memory

where operands and results move at the level that holds the chunk's live values, or memory where
they are spilled, and a result twice, since a store loads its line first; one in new memory does
not, as the kernel has just cleared its pages, which is part of the time of new bytes. Where the
time of a row in a cache was measured, it stands in place of the operations, and what memory takes
comes on top: the two hardly overlap. Weights are read for each chunk, before its arithmetic, from
memory or from the cache that keeps them beside the chunk. New bytes are those of values so large
that the C library has the operating system map and clear their pages each time; chunks take them
once. A chain product, elementwise operators, product may run in blocks of the features between them
instead, with all rows: each block reads its own part of the weights, once, and adds to the result.
In a step, what runs in chunks or blocks is computed again. A plan has the least sum of seconds and
of `price` times the bytes that are spilled or live in a chunk: dynamic programming over the sets of
operators that are done, exact over all cuts of the graph into connected segments, and over chunks
and blocks of powers of two.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from penstock._lazy import cached_property
from penstock.codegen import ceil_div
from penstock.iomodel._chain_operator import ChainOperator
from penstock.iomodel._levels import (
    MemoryLevel,
    check_amounts,
    check_counts,
    level_rates,
    memory_levels,
)
from penstock.memory import MachineProfile
from penstock.tables import Report
from penstock.units import format_bytes, format_seconds

Edge = Literal["spill", "stream", "fuse"]
MOST_OPERATORS = 24  # beyond a chain; a graph with many branches takes exponential time
KEPT_SHARE = 0.5  # of the values between products in blocks that a step keeps, not computed again
_TICKS = 1e15  # for each second: sums of integers are the same in any order
_WORTH = 0.4  # of the time with everything spilled, for keeping all of it out of memory
REUSED_BYTES = 31 * 2**20  # of a value that malloc hands out again: glibc's largest threshold is 32
_LEAST_BLOCK_BYTES = 4096  # of a row; products of fewer features are slower


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
        feature_blocks: Blocks of the features between two products; 1 for chunks of rows.
    """

    operators: tuple[int, ...]
    chunk_rows: int
    level: str
    seconds: float
    spilled_bytes: int
    live_bytes: int
    feature_blocks: int = 1


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
            blocks = f" by {each.feature_blocks} blocks" if each.feature_blocks > 1 else ""
            text = f"{names}: {each.chunk_rows} rows{blocks} at a time in {each.level}"
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
    new_bytes_per_second: float | None = None,
    chunk_new_bytes_per_second: float | None = None,
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
        new_bytes_per_second: Rate at which the operating system gives memory, and takes it back;
            None: at no cost.
        chunk_new_bytes_per_second: The same where operators run in chunks, which may have another
            allocator; None: `new_bytes_per_second`.

    Raises:
        TypeError: A count or a rate is no number.
        ValueError: An operator reads one that is not before it, 25 operators have branches, or a
            count or a rate is not above 0.
    """
    check_counts(num_threads=num_threads)
    rates = (new_bytes_per_second, chunk_new_bytes_per_second)
    for name, rate in zip(("new", "chunk_new"), rates, strict=True):
        if rate is not None:
            check_amounts(above=True, **{f"{name}_bytes_per_second": rate})
    graph = _ChainGraph(tuple(operators), rows, input_row_bytes)
    chunk_rate = chunk_new_bytes_per_second or new_bytes_per_second
    costs = SegmentCosts(graph, machine, num_threads, (new_bytes_per_second, chunk_rate))
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

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """By operator the numbers of what it reads."""
        return tuple(
            (number - 1,) if each.inputs is None else tuple(each.inputs)
            for number, each in enumerate(self.operators)
        )

    @cached_property
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

    def most_blocks(self, chosen: int) -> int:
        """Return the most blocks of features that a set of operators runs in; 1 where in none."""
        numbers = [at for at in range(len(self.operators)) if chosen >> at & 1]
        kinds = [self.operators[at].features for at in numbers]
        is_path = all(
            self.reads[after] == (before,) and self.readers[before] == (after,)
            for before, after in itertools.pairwise(numbers)
        )
        if len(numbers) < 2 or not is_path or {kinds[0], kinds[-1]} != {"product"}:
            return 1
        if len(self.reads[numbers[0]]) != 1 or any(kind != "each" for kind in kinds[1:-1]):
            return 1
        return max(1, self.operators[numbers[0]].row_bytes // _LEAST_BLOCK_BYTES)

    def is_fused(self, producer: int, consumer: int) -> bool:
        """Return whether a value within a segment is overwritten by the one made of it."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SegmentShape:
    """A set of operators with its chunk or blocks, and the levels that hold values and weights."""

    numbers: tuple[int, ...]
    chosen: int
    chunk_rows: int
    blocks: int
    level: str
    weights_level: str


class SegmentCosts:
    """Costs of segments on a machine.

    Attributes:
        unchunked_seconds: Time of all operators one after the other, with every value spilled.
    """

    def __init__(
        self,
        graph: _ChainGraph,
        machine: MachineProfile,
        num_threads: int,
        new_bytes_per_second: tuple[float | None, float | None] = (None, None),
    ) -> None:
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
        # Of a byte of new memory, of operators with all rows and of those in chunks
        self._new_seconds, self._chunk_new_seconds = (
            1 / each if each else 0.0 for each in new_bytes_per_second
        )
        names = ("link", "file", "memory", "shared")
        self._caches: list[MemoryLevel] = [
            each for each in memory_levels(machine) if each.name not in names and each.name in rates
        ]
        self._price = 0.0
        whole = [self.evaluate(1 << at, graph.rows) for at in range(len(graph.operators))]
        self.unchunked_seconds = sum(each.seconds for each in whole)
        spilled = sum(each.spilled_bytes for each in whole)
        self._price = _WORTH * self.unchunked_seconds / spilled if spilled else 0.0

    def choose(self, chosen: int) -> tuple[int, ChainSegment]:
        """Return the cost, in ticks, and the chunk of a set of operators that costs least."""
        rows = self._graph.rows
        options = [self.price(self.evaluate(chosen, rows))]
        if chosen & (chosen - 1):  # one operator gains nothing by chunks
            chunk = 1 << (rows - 1).bit_length() >> 1
            while chunk:
                options.append(self.price(self.evaluate(chosen, chunk)))
                chunk //= 2
            blocks = 2
            while blocks <= self._graph.most_blocks(chosen):
                options.append(self.price(self.evaluate(chosen, rows, blocks)))
                blocks *= 2
        return min(options, key=lambda each: each[0])

    def price(self, segment: ChainSegment) -> tuple[int, ChainSegment]:
        """Return the cost of a segment, in ticks, with the segment."""
        held = segment.spilled_bytes
        if len(segment.operators) > 1:
            held += segment.live_bytes
        return round((segment.seconds + self._price * held) * _TICKS), segment

    def evaluate(self, chosen: int, chunk_rows: int, blocks: int = 1) -> ChainSegment:
        """Return a set of operators as a segment in chunks of rows, or in blocks of features."""
        graph, rows = self._graph, self._graph.rows
        numbers = tuple(at for at in range(len(graph.operators)) if chosen >> at & 1)
        live = self._find_live_bytes(numbers) * chunk_rows
        if blocks > 1:
            live = -(-rows * self._find_block_bytes(numbers) // blocks)
        weights = sum(graph.operators[at].weight_bytes for at in numbers)
        shape = _SegmentShape(
            numbers=numbers,
            chosen=chosen,
            chunk_rows=chunk_rows,
            blocks=blocks,
            level=self._find_level(live),
            weights_level=self._find_level(live + weights),
        )
        leaving = [at for at in numbers if graph.readers[at] and self._leaves(at, chosen)]
        kept = self._find_kept_bytes(numbers) if blocks > 1 else 0
        return ChainSegment(
            operators=numbers,
            chunk_rows=chunk_rows,
            level=shape.level,
            seconds=sum(self._find_seconds(at, shape) for at in numbers),
            spilled_bytes=rows * sum(map(graph.row_bytes, leaving)) + kept,
            live_bytes=live,
            feature_blocks=blocks,
        )

    def _find_seconds(self, at: int, shape: _SegmentShape) -> float:
        """Return the time of one operator, as the module's formula has it."""
        of, rows = self._graph.operators[at], self._graph.rows
        chunks = ceil_div(rows, shape.chunk_rows)
        is_whole = chunks == shape.blocks == 1
        new_seconds = self._new_seconds if is_whole else self._chunk_new_seconds
        spilled, streamed = self._find_row_bytes(at, shape.chosen)
        if shape.blocks > 1 and of.features == "product":  # each block reads or adds to all rows
            spilled *= shape.blocks
        moved = spilled / self._rates["memory"] + streamed / self._rates[shape.level]
        if of.row_seconds and shape.level != "memory":  # which has what moves in a cache
            moved = spilled / self._rates["memory"]
        moved *= of.value_passes
        arithmetic = of.row_operations / self._flops
        fixed = of.weight_bytes / self._rates["memory"] + of.chunk_seconds
        fixed += (chunks - 1) * (of.weight_bytes / self._rates[shape.weights_level])
        fixed += (chunks - 1) * of.chunk_seconds + chunks * shape.blocks * self._launch_seconds
        is_product_last = of.features == "product" and at == shape.numbers[-1]
        share = 0.0 if is_whole or is_product_last else 1 - KEPT_SHARE * (shape.blocks > 1)
        again = share * of.again_row_seconds
        fixed += share * chunks * of.again_chunk_seconds
        fixed += new_seconds * self._count_new_bytes(at, shape)
        taken = of.row_seconds + moved if of.row_seconds else max(arithmetic, moved)
        return rows * (taken + again) + fixed

    def _count_new_bytes(self, at: int, shape: _SegmentShape) -> int:
        """Return the bytes of an operator's values that lie in memory not used before."""
        of, rows = self._graph.operators[at], self._graph.rows
        new = of.row_bytes if of.new_row_bytes is None else of.new_row_bytes
        graph, chosen, reads = self._graph, shape.chosen, self._graph.reads[at]
        largest = max(of.row_bytes, *(graph.row_bytes(each) for each in reads))
        first = 0  # bytes of the first chunk or block, in whose memory those of later ones lie
        if largest * shape.chunk_rows // shape.blocks > REUSED_BYTES:
            if shape.chunk_rows >= rows and shape.blocks == 1:
                return rows * new
            first = new * shape.chunk_rows // shape.blocks
        spilled = [of.row_bytes] if self._leaves(at, chosen) else []
        if of.value_passes > 1:  # a step has gradients of what comes in, too
            spilled += [graph.row_bytes(by) for by in reads if by < 0 or not chosen >> by & 1]
        return first + sum(rows * each for each in spilled if rows * each > REUSED_BYTES)

    def _find_block_bytes(self, numbers: tuple[int, ...]) -> int:
        """Return the most bytes of a row that are live in blocks, times the number of blocks."""
        graph, most = self._graph, 0
        for before, at in itertools.pairwise((-1, *numbers[:-1])):
            is_alone = before < 0 or graph.is_fused(before, at)
            most = max(most, graph.row_bytes(at) + (0 if is_alone else graph.row_bytes(before)))
        return most

    def _find_kept_bytes(self, numbers: tuple[int, ...]) -> int:
        """Return the bytes that a step in blocks keeps of the first product."""
        first = self._graph.operators[numbers[0]]
        is_step = first.again_row_seconds > 0
        return int(KEPT_SHARE * first.row_bytes * self._graph.rows) if is_step else 0

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
            else:
                streamed += graph.row_bytes(producer)
        if self._leaves(at, chosen):
            is_new = self._new_seconds and graph.rows * graph.row_bytes(at) > REUSED_BYTES
            spilled += 0 if is_new else 2 * graph.row_bytes(at)
        else:
            streamed += 2 * graph.row_bytes(at)
        return spilled, streamed

    def _find_live_bytes(self, numbers: tuple[int, ...]) -> int:
        """Return the most bytes of a row that are live while one of the operators runs."""
        graph, most = self._graph, 0
        for at in numbers:
            held = {at, *(of for of in graph.reads[at] if not graph.is_fused(of, at))}
            held |= {
                made for made in numbers if made < at and max(graph.readers[made], default=-1) >= at
            }
            most = max(most, sum(map(graph.row_bytes, held)))
        return most

    def _find_level(self, num_bytes: int) -> str:
        return next(
            (each.name for each in self._caches if num_bytes <= each.capacity_bytes), "memory"
        )
