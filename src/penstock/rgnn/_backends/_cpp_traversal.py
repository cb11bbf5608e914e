"""Traversals as C++: loops over rows, grouped by where they are summed to.

Each group is computed by one thread from its first row to its last, so a sum has one writer and one
order. Rows that are summed to types, of which there are few, are cut into tasks of their own: each
makes a part, and the parts are added up in order.
"""

from __future__ import annotations

import dataclasses
import math

from penstock.rgnn import _rows
from penstock.rgnn._backends._cpp_fields import Fields
from penstock.rgnn._backends._cpp_rowwise import Lines, Scope, is_expression, offset
from penstock.rgnn._ir import Program
from penstock.rgnn._rows import RowMap, Space
from penstock.rgnn._schedule import READS, TYPES, Kernel, Schedule, source

SORTED = frozenset({_rows.EDGE_TYPE, _rows.EDGE_DST_PAIR, _rows.SRC_PAIR_TYPE, _rows.DST_PAIR_TYPE})
"""Maps along which the rows are in ascending order already, in every graph."""

_MAX_KEPT = (
    16  # elements of a row that is kept from one stage to the next; longer ones are made anew
)


def is_sorted(row_map: RowMap) -> bool:
    """Whether the rows that a map sends to one target are next to each other in every graph."""
    return row_map in SORTED or row_map.into is Space.ONE


def write_traversal(
    program: Program, schedule: Schedule, kernel: Kernel, head: str, fields: Fields
) -> str:
    """The source of a traversal; `head` is its function's name and parameters."""
    lines = Lines()
    writer = _Traversal(program, schedule, kernel, fields, lines)
    with lines.block(f"void {head} {{"):
        if kernel.grouped_by is None:
            writer.write_rows()
        elif kernel.grouped_by.into in TYPES:
            writer.write_typed(kernel.grouped_by)
        else:
            writer.write_groups(kernel.grouped_by)
    return str(lines)


@dataclasses.dataclass(slots=True)
class _Traversal:
    program: Program
    schedule: Schedule
    kernel: Kernel
    fields: Fields
    lines: Lines
    sums: dict[int, str] = dataclasses.field(default_factory=dict)

    def write_rows(self) -> None:
        """Rows in any order."""
        lines, num_rows = self.lines, self.fields.num_rows(self.kernel.space)
        lines.add(f"Tasks blocks(({num_rows} + kBlockRows - 1) / kBlockRows);")
        with lines.block("parallel(f.num_threads, [&] {", "});"):
            with lines.block("for (int64_t block; blocks.next(&block);) {"):
                lines.add(
                    "const int64_t begin = block * kBlockRows;",
                    f"const int64_t end = begin + kBlockRows < {num_rows} ? "
                    f"begin + kBlockRows : {num_rows};",
                )
                for stage in range(len(self.kernel.stages)):
                    self._write_stage(stage)

    def write_typed(self, grouping: RowMap) -> None:
        """Rows summed to types: a part for each task."""
        assert len(self.kernel.stages) == 1
        assert not self.kernel.epilogue
        lines = self.lines
        tasks, num_tasks = self.fields.tasks(grouping)
        starts = self.fields.task_starts(grouping)
        sums = [v for v in self.kernel.values if self.program.nodes[v].op == "sum"]
        lines.add(f"Tasks tasks({num_tasks});")
        with lines.block("parallel(f.num_threads, [&] {", "});"):
            for value in sums:
                lines.add(f"Scratch<T> sum_{value}({self._size(value)});")
            with lines.block("for (int64_t task; tasks.next(&task);) {"):
                lines.add(
                    f"const int64_t group = {tasks}[3 * task];",
                    f"const int64_t begin = {tasks}[3 * task + 1], end = {tasks}[3 * task + 2];",
                )
                for value in sums:
                    lines.add(f"memset(sum_{value}, 0, {self._size(value)} * sizeof(T));")
                self._write_stage(0)
                for value in sums:
                    size = self._size(value)
                    part = (
                        f"part_of<T>(task, {tasks}, {starts}, {size}, "
                        f"{self.fields.parts(value)}, {self.fields.value(value)})"
                    )
                    lines.add(f"memcpy({part}, sum_{value}, {size} * sizeof(T));")
        num_types = self.fields.num_rows(grouping.into)
        for value in sums:
            lines.add(
                f"add_parts<T>(f.num_threads, {starts}, {num_types}, {self._size(value)}, "
                f"{self.fields.parts(value)}, {self.fields.value(value)});"
            )

    def write_groups(self, grouping: RowMap) -> None:
        """Rows group by group, stage by stage, then the groups' own values."""
        lines = self.lines
        chunks, num_chunks = self.fields.chunks(grouping)
        starts = self.fields.starts(grouping)
        lines.add(f"Tasks chunks({num_chunks});")
        with lines.block("parallel(f.num_threads, [&] {", "});"):
            for value in sorted(self._kept() | self._softmaxes()):
                longest = self.fields.longest_group(grouping)
                lines.add(f"Scratch<T> kept_{value}({longest} * {self._size(value)});")
            with (
                lines.block("for (int64_t chunk; chunks.next(&chunk);) {"),
                lines.block(
                    f"for (int64_t group = {chunks}[chunk]; group < {chunks}[chunk + 1]; "
                    f"++group) {{"
                ),
            ):
                lines.add(f"const int64_t begin = {starts}[group], end = {starts}[group + 1];")
                for stage, values in enumerate(self.kernel.stages):
                    self._declare_reductions(values)
                    self._write_stage(stage)
                    self._finish_softmaxes(values)
                self._write_epilogue()

    def _declare_reductions(self, values: tuple[int, ...]) -> None:
        for value in values:
            node = self.program.nodes[value]
            if node.op == "sum":
                name = f"sum_{value}"
                self.lines.add(f"T {name}[{self._size(value)}] = {{}};")
                self.sums[value] = name
            elif node.op == "softmax":
                size = self._size(value)
                self.lines.add(
                    f"T largest_{value}[{size}];",
                    f"for (T& x : largest_{value}) x = -T(__builtin_inf());",
                )

    def _write_stage(self, stage: int) -> None:
        """The loop over the rows from `begin` to `end`."""
        lines = self.lines
        with lines.block("for (int64_t at = begin; at < end; ++at) {"):
            scope = self._scope(stage)
            for value in self.kernel.stages[stage]:
                node = self.program.nodes[value]
                if node.op in ("sum", "softmax"):
                    (operand,) = node.operands
                    scope.require(operand)
                    shape = self.program.nodes[operand].shape
                    with lines.loops(shape) as subscript:
                        element, i = scope.element(operand, subscript), offset(shape, subscript)
                        if node.op == "sum":
                            lines.add(f"sum_{value}[{i}] += {element};")
                        else:
                            place = f"kept_{value}[(at - begin) * {self._size(value)} + {i}]"
                            lines.add(
                                f"largest_{value}[{i}] = larger<T>({place} = {element}, "
                                f"largest_{value}[{i}]);"
                            )
                elif value in self.schedule.materialised or value in self._kept():
                    scope.require(value)

    def _finish_softmaxes(self, values: tuple[int, ...]) -> None:
        """Scores to weights; the largest score of the group is taken off first."""
        lines = self.lines
        for value in values:
            if self.program.nodes[value].op != "softmax":
                continue
            size = self._size(value)
            lines.add(f"T total_{value}[{size}] = {{}};")
            with lines.block("for (int64_t at = 0; at < end - begin; ++at) {"):
                with lines.block(f"for (int64_t i = 0; i < {size}; ++i) {{"):
                    lines.add(
                        f"T& x = kept_{value}[at * {size} + i];",
                        f"total_{value}[i] += x = exponential(x - largest_{value}[i]);",
                    )
            with lines.block("for (int64_t at = begin; at < end; ++at) {"):
                with lines.block(f"for (int64_t i = 0; i < {size}; ++i) {{"):
                    lines.add(f"T& x = kept_{value}[(at - begin) * {size} + i];")
                    lines.add(f"x /= total_{value}[i];")
                    if value in self.schedule.materialised:
                        row = self._index(None)
                        lines.add(f"{self.fields.value(value)}[int64_t({row}) * {size} + i] = x;")

    def _write_epilogue(self) -> None:
        lines, nodes = self.lines, self.program.nodes
        for value, name in self.sums.items():
            if value in self.schedule.materialised:
                size = self._size(value)
                place = f"{self.fields.value(value)} + group * {size}"
                lines.add(f"memcpy({place}, {name}, {size} * sizeof(T));")
        if not self.kernel.epilogue:
            return

        def memory(value: int) -> str | None:
            if value not in self.schedule.materialised:
                return None
            return f"{self.fields.value(value)} + group * {math.prod(nodes[value].shape)}"

        def index(row_map: RowMap | None) -> str:
            if row_map is None:
                return "group"
            return "0" if row_map.into is Space.ONE else f"{self.fields.index(row_map)}[group]"

        computed = frozenset(self.kernel.epilogue)
        scope = Scope(
            self.program, self.fields, lines, index, computed, self._rooted(computed),
            dict(self.sums), memory,
        )  # fmt: skip
        for value in self.kernel.epilogue:
            if value in self.schedule.materialised:
                scope.require(value)

    def _scope(self, stage: int) -> Scope:
        """What a row of a stage can read; values of earlier stages are kept or made anew."""
        kernel, nodes = self.kernel, self.program.nodes
        here = frozenset(v for v in kernel.stages[stage] if nodes[v].op not in ("sum", "softmax"))
        arrays = {}
        for value in (v for values in kernel.stages[:stage] for v in values):
            size = self._size(value)
            if nodes[value].op == "softmax" or value in self._kept():
                arrays[value] = f"(kept_{value} + (at - begin) * {size})"
            elif nodes[value].op != "sum":
                if value in self.schedule.materialised:
                    place = f"int64_t({self._index(None)}) * {size}"
                    arrays[value] = f"({self.fields.value(value)} + {place})"
                else:
                    here |= {value}

        def memory(value: int) -> str | None:
            size = self._size(value)
            if value in self.schedule.materialised:
                return f"{self.fields.value(value)} + int64_t({self._index(None)}) * {size}"
            if value in self._kept() and value in kernel.stages[stage]:
                return f"kept_{value} + (at - begin) * {size}"
            return None

        return Scope(
            self.program, self.fields, self.lines, self._index, here, self._rooted(here), arrays,
            memory, kernel.grouped_by, self.sums, self._ahead,
        )  # fmt: skip

    def _ahead(self, row_map: RowMap | None) -> str | None:
        later = self._index(row_map, "at + kAhead")
        return later if later.endswith("[at + kAhead]") else None

    def _index(self, row_map: RowMap | None, at: str = "at") -> str:
        """Where a map sends the row of the loop."""
        grouping = self.kernel.grouped_by
        is_in_order = grouping is None or is_sorted(grouping)
        if row_map is None:
            return at if is_in_order else f"{self.fields.rows(grouping)}[{at}]"  # pyright: ignore[reportArgumentType]
        if row_map.into is Space.ONE:
            return "0"
        if row_map == grouping:
            return "group"
        if is_in_order:
            return f"{self.fields.index(row_map)}[{at}]"
        return f"{self.fields.grouped(grouping, row_map)}[{at}]"  # pyright: ignore[reportArgumentType]

    def _rooted(self, computed: frozenset[int]) -> frozenset[int]:
        """Values that are stored as rows; the others are expressions of their readers."""
        num_readers = dict.fromkeys(computed, 0)
        reshaped = set()
        for reader in self.kernel.values:
            for operand in self.program.nodes[reader].operands:
                read = source(self.program, operand)
                if read in num_readers:
                    num_readers[read] += 1
                    if self.program.nodes[operand].op in READS:
                        reshaped.add(read)
        return frozenset(
            value
            for value in computed
            if num_readers[value] > 1
            or value in reshaped
            or value in self.schedule.materialised
            or value in self._kept()
            or self._size(value) == 1
            or not is_expression(self.program, value)
        )

    def _kept(self) -> frozenset[int]:
        """Short rowwise values that a later stage reads."""
        stage_of = {v: s for s, values in enumerate(self.kernel.stages) for v in values}
        found = set()
        for reader, stage in stage_of.items():
            for operand in self.program.nodes[reader].operands:
                value = source(self.program, operand)
                is_rowwise = value in stage_of and self.program.nodes[value].op not in (
                    "sum",
                    "softmax",
                )
                if is_rowwise and stage_of[value] < stage and self._size(value) <= _MAX_KEPT:
                    found.add(value)
        return frozenset(found - self.schedule.materialised)

    def _softmaxes(self) -> frozenset[int]:
        return frozenset(v for v in self.kernel.values if self.program.nodes[v].op == "softmax")

    def _size(self, value: int) -> int:
        return math.prod(self.program.nodes[value].shape)
