"""Traversals as C++: loops over rows, grouped by where they are summed to.

Each group is computed by one thread from its first row to its last, so a sum has one writer and one
order. Where a graph has hubs, groups too long for one thread, those are cut into pieces of a fixed
length; their sums are added in order. Rows that are summed to types, of which there are few, are
cut into tasks of their own: each makes a part, and the parts are added up in order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.rgnn.backends.cpp import _graph_arrays
from penstock.rgnn.backends.cpp._kernel import KernelTask
from penstock.rgnn.backends.cpp._rowwise import Lines, Scope, declare_array, write_offset
from penstock.rgnn.ir import READS, TYPES, find_source
from penstock.rgnn.lowering import is_elementwise
from penstock.rgnn.spaces import RowMap, Space, is_sorted

_REDUCTIONS = ("sum", "softmax")
_MAX_KEPT = 16
"""Elements of a row that is kept from one stage to the next; longer ones are computed again."""


def write_traversal(task: KernelTask) -> str:
    """Write a traversal: loops over rows, grouped where they are reduced."""
    lines, grouping = Lines(), task.kernel.grouped_by
    writer = TraversalWriter(task, lines)
    with lines.block(task.head):
        if grouping is None:
            writer.write_rows()
        elif grouping.into in TYPES:
            writer.write_typed(grouping)
        else:
            writer.write_groups(grouping)
            if task.has_hubs:
                writer.write_hubs(grouping)
    return str(lines)


@dataclasses.dataclass(slots=True)
class TraversalWriter:
    """The writer of one kernel's loops."""

    task: KernelTask
    lines: Lines
    sums: dict[int, str] = dataclasses.field(default_factory=dict)
    """Names of the sums of the group at hand."""

    def write_rows(self) -> None:
        """Write a loop over rows in any order."""
        lines, num_rows = self.lines, self.task.fields.num_rows(self.task.kernel.space)
        lines.add(f"Tasks blocks(({num_rows} + kBlockRows - 1) / kBlockRows);")
        with lines.block("parallel(f.num_threads, [&] {", "});"):
            with lines.block("for (int64_t block; blocks.next(&block);) {"):
                lines.add(
                    "const int64_t begin = block * kBlockRows;",
                    f"const int64_t end = begin + kBlockRows < {num_rows} ? "
                    f"begin + kBlockRows : {num_rows};",
                )
                for stage in range(len(self.task.kernel.stages)):
                    self._write_stage(stage)

    def write_typed(self, grouping: RowMap) -> None:
        """Write the loop of rows that are summed to types: a part for each task."""
        assert len(self.task.kernel.stages) == 1
        assert not self.task.kernel.epilogue
        lines = self.lines
        tasks, num_tasks = self.task.fields.counted_array("tasks", grouping)
        starts = self.task.fields.array("task_starts", grouping)
        sums = [v for v in self.task.kernel.values if self.task.node(v).op == "sum"]
        lines.add(f"Tasks tasks({num_tasks});")
        with lines.block("parallel(f.num_threads, [&] {", "});"):
            for value in sums:
                lines.add(f"Scratch<T> sum_{value}({self.task.size(value)});")
            with lines.block("for (int64_t task; tasks.next(&task);) {"):
                lines.add(
                    f"const int64_t group = {tasks}[3 * task];",
                    f"const int64_t begin = {tasks}[3 * task + 1], end = {tasks}[3 * task + 2];",
                )
                for value in sums:
                    lines.add(f"memset(sum_{value}, 0, {self.task.size(value)} * sizeof(T));")
                self._write_stage(0)
                for value in sums:
                    size = self.task.size(value)
                    part = (
                        f"part_of<T>(task, {tasks}, {starts}, {size}, "
                        f"{self.task.fields.parts(value)}, {self.task.fields.value(value)})"
                    )
                    lines.add(f"memcpy({part}, sum_{value}, {size} * sizeof(T));")
        num_types = self.task.fields.num_rows(grouping.into)
        for value in sums:
            lines.add(
                f"add_parts<T>(f.num_threads, {starts}, {num_types}, {self.task.size(value)}, "
                f"{self.task.fields.parts(value)}, {self.task.fields.value(value)});"
            )

    def write_groups(self, grouping: RowMap) -> None:
        """Write loops over groups: stage by stage, then the groups' own values."""
        lines = self.lines
        chunks, num_chunks = self.task.fields.counted_array("chunks", grouping)
        starts = self.task.fields.array("starts", grouping)
        lines.add(f"Tasks chunks({num_chunks});")
        with lines.block("parallel(f.num_threads, [&] {", "});"):
            for value in sorted(self._find_kept() | self._find_softmaxes()):
                longest = self.task.fields.number("longest_group", grouping)
                if self.task.has_hubs:
                    most = _graph_arrays.HUB_ROWS
                    longest = f"({longest} < {most} ? {longest} : {most})"
                lines.add(f"Scratch<T> kept_{value}({longest} * {self.task.size(value)});")
            with (
                lines.block("for (int64_t chunk; chunks.next(&chunk);) {"),
                lines.block(
                    f"for (int64_t group = {chunks}[chunk]; group < {chunks}[chunk + 1]; "
                    f"++group) {{"
                ),
            ):
                lines.add(f"const int64_t begin = {starts}[group], end = {starts}[group + 1];")
                if self.task.has_hubs:
                    lines.add(f"if (end - begin > {_graph_arrays.HUB_ROWS}) continue;")
                for stage, values in enumerate(self.task.kernel.stages):
                    self._declare_reductions(values)
                    self._write_stage(stage)
                    self._finish_softmaxes(values)
                self.write_epilogue()

    def write_hubs(self, grouping: RowMap) -> None:
        """Write loops over the groups that were left out: each by all threads, stage by stage."""
        lines = self.lines
        hubs, num_hubs = self.task.fields.counted_array("hubs", grouping)
        starts, piece_rows = self.task.fields.array("starts", grouping), _graph_arrays.PIECE_ROWS
        self.sums = {}
        with lines.block(f"for (int64_t hub = 0; hub < {num_hubs}; ++hub) {{"):
            lines.add(
                f"const int64_t group = {hubs}[hub];",
                f"const int64_t begin = {starts}[group], end = {starts}[group + 1];",
                f"const int64_t num_pieces = (end - begin + {piece_rows - 1}) / {piece_rows};",
            )
            for value in sorted(self._find_kept() | self._find_softmaxes()):
                lines.add(f"Scratch<T> kept_{value}((end - begin) * {self.task.size(value)});")
            for stage in range(len(self.task.kernel.stages)):
                self._write_stage_of_hub(stage)
            self.write_epilogue()

    def _write_stage_of_hub(self, stage: int) -> None:
        values, op_of = self.task.kernel.stages[stage], self.task.program.nodes
        reduced = [value for value in values if op_of[value].op in _REDUCTIONS]
        self._declare_reductions(values)
        for value in reduced:
            self.lines.add(f"Scratch<T> pieces_{value}(num_pieces * {self.task.size(value)});")
        with self._write_pieces():
            self._declare_reductions(values)  # of the piece: they hide those of the group
            self._write_stage(stage, "first", "last")
            for value in reduced:
                self._keep_piece(value, "sum" if op_of[value].op == "sum" else "largest")
        for value in reduced:
            if op_of[value].op == "sum":
                self._join_pieces(value, "sum_{0}[{1}] += {2}")
                continue
            self._join_pieces(value, "largest_{0}[{1}] = larger<T>({2}, largest_{0}[{1}])")
            total = declare_array(f"total_{value}", self.task.size(value), is_zero=True)
            self.lines.add(total)
            with self._write_pieces():
                self.lines.add(total)
                self._write_powers(value, "first - begin", "last - begin")
                self._keep_piece(value, "total")
            self._join_pieces(value, "total_{0}[{1}] += {2}")
            with self._write_pieces():
                self._write_weights(value, "first", "last")

    @contextmanager
    def _write_pieces(self) -> Iterator[None]:
        """Write a loop over pieces around statements for the rows from `first` to `last`."""
        lines, length = self.lines, _graph_arrays.PIECE_ROWS
        with lines.block("{"):
            lines.add("Tasks pieces(num_pieces);")
            with (
                lines.block("parallel(f.num_threads, [&] {", "});"),
                lines.block("for (int64_t piece; pieces.next(&piece);) {"),
            ):
                lines.add(
                    f"const int64_t first = begin + piece * {length};",
                    f"const int64_t last = first + {length} < end ? first + {length} : end;",
                )
                yield

    def _keep_piece(self, value: int, name: str) -> None:
        size = self.task.size(value)
        place = f"pieces_{value} + piece * {size}"
        self.lines.add(f"memcpy({place}, {name}_{value}, {size} * sizeof(T));")

    def _join_pieces(self, value: int, statement: str) -> None:
        size = self.task.size(value)
        text = statement.format(value, f"i % {size}", f"pieces_{value}[i]")
        self.lines.add(f"for (int64_t i = 0; i < num_pieces * {size}; ++i) {text};")

    def _declare_reductions(self, values: tuple[int, ...]) -> None:
        for value in values:
            node = self.task.node(value)
            if node.op == "sum":
                name = f"sum_{value}"
                self.lines.add(declare_array(name, self.task.size(value), is_zero=True))
                self.sums[value] = name
            elif node.op == "softmax":
                size = self.task.size(value)
                self.lines.add(
                    declare_array(f"largest_{value}", size),
                    f"for (int64_t i = 0; i < {size}; ++i) "
                    f"largest_{value}[i] = -T(__builtin_inf());",
                )

    def _write_stage(self, stage: int, begin: str = "begin", end: str = "end") -> None:
        """Write the loop over some rows of the group that goes from `begin` to `end`."""
        lines = self.lines
        with lines.block(f"for (int64_t at = {begin}; at < {end}; ++at) {{"):
            scope = self._make_scope(stage)
            for value in self.task.kernel.stages[stage]:
                node = self.task.node(value)
                if node.op in _REDUCTIONS:
                    (operand,) = node.operands
                    scope.require(operand)
                    shape = self.task.node(operand).shape
                    with lines.loops(shape) as subscript:
                        element, i = (
                            scope.write_element(operand, subscript),
                            write_offset(shape, subscript),
                        )
                        if node.op == "sum":
                            lines.add(f"sum_{value}[{i}] += {element};")
                        else:
                            place = f"kept_{value}[(at - begin) * {self.task.size(value)} + {i}]"
                            lines.add(
                                f"largest_{value}[{i}] = larger<T>({place} = {element}, "
                                f"largest_{value}[{i}]);"
                            )
                elif value in self.task.materialised or value in self._find_kept():
                    scope.require(value)

    def _finish_softmaxes(self, values: tuple[int, ...]) -> None:
        """Write softmaxes: y_i = exp(s_i - max s) / sum of exp(s_j - max s) over the group."""
        for value in values:
            if self.task.node(value).op == "softmax":
                self.lines.add(declare_array(f"total_{value}", self.task.size(value), is_zero=True))
                self._write_powers(value, "0", "end - begin")
                self._write_weights(value, "begin", "end")

    def _write_powers(self, value: int, begin: str, end: str) -> None:
        """Write the powers of kept scores between two places in the group, and their sum."""
        lines, size = self.lines, self.task.size(value)
        with lines.block(f"for (int64_t at = {begin}; at < {end}; ++at) {{"):
            with lines.block(f"for (int64_t i = 0; i < {size}; ++i) {{"):
                lines.add(
                    f"T& x = kept_{value}[at * {size} + i];",
                    f"total_{value}[i] += x = exponential(x - largest_{value}[i]);",
                )

    def _write_weights(self, value: int, begin: str, end: str) -> None:
        """Write the division of powers by their sum, from one row to another."""
        lines, size = self.lines, self.task.size(value)
        with lines.block(f"for (int64_t at = {begin}; at < {end}; ++at) {{"):
            with lines.block(f"for (int64_t i = 0; i < {size}; ++i) {{"):
                lines.add(f"T& x = kept_{value}[(at - begin) * {size} + i];")
                lines.add(f"x /= total_{value}[i];")
                if value in self.task.materialised:
                    row = self._write_index(None)
                    lines.add(f"{self.task.fields.value(value)}[int64_t({row}) * {size} + i] = x;")

    def write_epilogue(self) -> None:
        """Write the stores of the finished sums of `group`, and the values computed from them."""
        lines = self.lines
        for value, name in self.sums.items():
            if value in self.task.materialised:
                size = self.task.size(value)
                place = f"{self.task.fields.value(value)} + group * {size}"
                lines.add(f"memcpy({place}, {name}, {size} * sizeof(T));")
        if not self.task.kernel.epilogue:
            return

        def memory(value: int) -> str | None:
            if value not in self.task.materialised:
                return None
            return f"{self.task.fields.value(value)} + group * {self.task.size(value)}"

        def index(row_map: RowMap | None) -> str:
            if row_map is None:
                return "group"
            return (
                "0"
                if row_map.into is Space.ONE
                else f"{self.task.fields.array('index', row_map)}[group]"
            )

        computed = frozenset(self.task.kernel.epilogue)
        rooted = self._find_rooted(computed)
        scope = Scope(self.task, lines, index, computed, rooted, dict(self.sums), memory)
        for value in self.task.kernel.epilogue:
            if value in self.task.materialised:
                scope.require(value)

    def _make_scope(self, stage: int) -> Scope:
        """Return the scope of a row; values of earlier stages are kept or computed again."""
        kernel, nodes = self.task.kernel, self.task.program.nodes
        here = frozenset(v for v in kernel.stages[stage] if nodes[v].op not in _REDUCTIONS)
        arrays = {}
        for value in (v for values in kernel.stages[:stage] for v in values):
            size = self.task.size(value)
            if nodes[value].op == "softmax" or value in self._find_kept():
                arrays[value] = f"(kept_{value} + (at - begin) * {size})"
            elif nodes[value].op != "sum":
                if value in self.task.materialised:
                    place = f"int64_t({self._write_index(None)}) * {size}"
                    arrays[value] = f"({self.task.fields.value(value)} + {place})"
                else:
                    here |= {value}

        def memory(value: int) -> str | None:
            size = self.task.size(value)
            if value in self.task.materialised:
                return (
                    f"{self.task.fields.value(value)} + int64_t({self._write_index(None)}) * {size}"
                )
            if value in self._find_kept() and value in kernel.stages[stage]:
                return f"kept_{value} + (at - begin) * {size}"
            return None

        return Scope(
            *(
                self.task,
                self.lines,
                self._write_index,
                here,
                self._find_rooted(here),
                arrays,
                memory,
            ),
            *(kernel.grouped_by, self.sums, self._write_index_ahead),
        )

    def _write_index_ahead(self, row_map: RowMap | None) -> str | None:
        later = self._write_index(row_map, "at + kAhead")
        return later if later.endswith("[at + kAhead]") else None

    def _write_index(self, row_map: RowMap | None, at: str = "at") -> str:
        """Return the target of a map for the row of the loop."""
        grouping = self.task.kernel.grouped_by
        is_in_order = grouping is None or is_sorted(grouping)
        if row_map is None:
            return at if is_in_order else f"{self.task.fields.array('rows', grouping)}[{at}]"  # pyright: ignore[reportArgumentType]
        if row_map.into is Space.ONE:
            return "0"
        if row_map == grouping:
            return "group"
        if is_in_order:
            return f"{self.task.fields.array('index', row_map)}[{at}]"
        return f"{self.task.fields.array('grouped_index', grouping, row_map)}[{at}]"  # pyright: ignore[reportArgumentType]

    def _find_rooted(self, computed: frozenset[int]) -> frozenset[int]:
        """Find values that are stored as rows; the others are expressions of their readers."""
        num_readers = dict.fromkeys(computed, 0)
        reshaped = set()
        for reader in self.task.kernel.values:
            for operand in self.task.node(reader).operands:
                read = find_source(self.task.program, operand)
                if read in num_readers:
                    num_readers[read] += 1
                    if self.task.node(operand).op in READS:
                        reshaped.add(read)
        return frozenset(
            value
            for value in computed
            if num_readers[value] > 1
            or value in reshaped
            or value in self.task.materialised
            or value in self._find_kept()
            or self.task.size(value) == 1
            or not is_elementwise(self.task.program, value)
        )

    def _find_kept(self) -> frozenset[int]:
        """Find short rowwise values that a later stage reads."""
        stage_of = {v: s for s, values in enumerate(self.task.kernel.stages) for v in values}
        found = set()
        for reader, stage in stage_of.items():
            for operand in self.task.node(reader).operands:
                value = find_source(self.task.program, operand)
                is_rowwise = value in stage_of and self.task.node(value).op not in _REDUCTIONS
                if is_rowwise and stage_of[value] < stage and self.task.size(value) <= _MAX_KEPT:
                    found.add(value)
        return frozenset(found - self.task.materialised)

    def _find_softmaxes(self) -> frozenset[int]:
        return frozenset(v for v in self.task.kernel.values if self.task.node(v).op == "softmax")
