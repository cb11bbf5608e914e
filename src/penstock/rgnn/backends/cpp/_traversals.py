"""Traversals as C++: loops over rows, grouped by where they are summed to.

Each group is computed by one thread from its first row to its last, so a sum has one writer and one
order. Where a graph has hubs, groups too long for one thread, those are cut into pieces of a fixed
length; their sums are added in order. Rows that are summed to types, of which there are few, are
cut into tasks of their own: each makes a part, and the parts are added up in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from penstock.rgnn.backends.cpp import _graph_arrays
from penstock.rgnn.backends.cpp._kernel import (
    KernelTask,
    Lines,
    Scope,
    declare_array,
    write_offset,
    write_zeros,
)
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


class TraversalWriter:
    """The writer of one kernel's loops."""

    def __init__(
        self, task: KernelTask, lines: Lines, sums: Mapping[int, str] | None = None
    ) -> None:
        self._task, self._lines = task, lines
        self._stages = task.kernel.stages
        self._sums = dict(sums or {})
        self._kept = _find_kept(task)
        softmaxes = {value for value in task.kernel.values if self._op(value) == "softmax"}
        self._buffered = sorted(self._kept | softmaxes)
        """Values with memory for all rows of the group at hand."""

    def write_rows(self) -> None:
        """Write a loop over rows in any order."""
        lines, num_rows = self._lines, self._task.field("num_rows", self._task.kernel.space)
        lines.add(f"Tasks blocks(({num_rows} + kBlockRows - 1) / kBlockRows);")
        with self._write_tasks("block"):
            lines.add(
                "const int64_t begin = block * kBlockRows;",
                f"const int64_t end = begin + kBlockRows < {num_rows} ? "
                f"begin + kBlockRows : {num_rows};",
            )
            for stage in range(len(self._stages)):
                self._write_stage(stage)

    def write_typed(self, grouping: RowMap) -> None:
        """Write the loop of rows that are summed to types: a part for each task."""
        assert len(self._stages) == 1
        assert not self._task.kernel.epilogue
        task, lines = self._task, self._lines
        tasks, num_tasks = task.counted_array("tasks", grouping)
        starts = task.field("task_starts", grouping)
        sums = [value for value in task.kernel.values if self._op(value) == "sum"]
        lines.add(f"Tasks tasks({num_tasks});")
        scratch = [f"Scratch<T> sum_{value}({task.size(value)});" for value in sums]
        with self._write_tasks("task", *scratch):
            lines.add(
                f"const int64_t group = {tasks}[3 * task];",
                f"const int64_t begin = {tasks}[3 * task + 1], end = {tasks}[3 * task + 2];",
                *(write_zeros(f"sum_{value}", task.size(value)) for value in sums),
            )
            self._write_stage(0)
            for value in sums:
                size = task.size(value)
                parts = f"{task.field('parts', value)}, {task.field('value', value)}"
                part = f"part_of<T>(task, {tasks}, {starts}, {size}, {parts})"
                lines.add(f"memcpy({part}, sum_{value}, {size} * sizeof(T));")
        num_types = task.field("num_rows", grouping.into)
        for value in sums:
            lines.add(
                f"add_parts<T>(f.num_threads, {starts}, {num_types}, {task.size(value)}, "
                f"{task.field('parts', value)}, {task.field('value', value)});"
            )

    def write_groups(self, grouping: RowMap) -> None:
        """Write loops over groups: stage by stage, then the groups' own values."""
        task, lines = self._task, self._lines
        chunks, num_chunks = task.counted_array("chunks", grouping)
        starts = task.field("starts", grouping)
        lines.add(f"Tasks chunks({num_chunks});")
        scratch = []
        for value in self._buffered:
            longest = task.field("longest_group", grouping)
            if task.has_hubs:
                most = _graph_arrays.HUB_ROWS
                longest = f"({longest} < {most} ? {longest} : {most})"
            scratch.append(f"Scratch<T> kept_{value}({longest} * {task.size(value)});")
        with (
            self._write_tasks("chunk", *scratch),
            lines.block(
                f"for (int64_t group = {chunks}[chunk]; group < {chunks}[chunk + 1]; ++group) {{"
            ),
        ):
            lines.add(f"const int64_t begin = {starts}[group], end = {starts}[group + 1];")
            if task.has_hubs:
                lines.add(f"if (end - begin > {_graph_arrays.HUB_ROWS}) continue;")
            for stage, values in enumerate(self._stages):
                self._declare_reductions(values)
                self._write_stage(stage)
                # y_i = exp(s_i - max s) / sum of exp(s_j - max s) over the group
                for value in values:
                    if self._op(value) == "softmax":
                        self._write_powers(value, "0", "end - begin")
                        self._write_weights(value, "begin", "end")
            self.write_epilogue()

    def write_hubs(self, grouping: RowMap) -> None:
        """Write loops over the groups that were left out: each by all threads, stage by stage."""
        task, lines = self._task, self._lines
        hubs, num_hubs = task.counted_array("hubs", grouping)
        starts, piece_rows = task.field("starts", grouping), _graph_arrays.PIECE_ROWS
        self._sums = {}
        with lines.block(f"for (int64_t hub = 0; hub < {num_hubs}; ++hub) {{"):
            lines.add(
                f"const int64_t group = {hubs}[hub];",
                f"const int64_t begin = {starts}[group], end = {starts}[group + 1];",
                f"const int64_t num_pieces = (end - begin + {piece_rows - 1}) / {piece_rows};",
            )
            for value in self._buffered:
                lines.add(f"Scratch<T> kept_{value}((end - begin) * {task.size(value)});")
            for stage in range(len(self._stages)):
                self._write_stage_of_hub(stage)
            self.write_epilogue()

    def _write_stage_of_hub(self, stage: int) -> None:
        values = self._stages[stage]
        reduced = [value for value in values if self._op(value) in _REDUCTIONS]
        self._declare_reductions(values)
        for value in reduced:
            self._lines.add(f"Scratch<T> pieces_{value}(num_pieces * {self._task.size(value)});")
        with self._write_pieces():
            self._declare_reductions(values)  # of the piece: they hide those of the group
            self._write_stage(stage, "first", "last")
            for value in reduced:
                self._keep_piece(value, "sum" if self._op(value) == "sum" else "largest")
        for value in reduced:
            if self._op(value) == "sum":
                self._join_pieces(value, "sum_{0}[{1}] += {2}")
                continue
            self._join_pieces(value, "largest_{0}[{1}] = larger<T>({2}, largest_{0}[{1}])")
            self._lines.add(declare_array(f"total_{value}", self._task.size(value), is_zero=True))
            with self._write_pieces():
                self._write_powers(value, "first - begin", "last - begin")
                self._keep_piece(value, "total")
            self._join_pieces(value, "total_{0}[{1}] += {2}")
            with self._write_pieces():
                self._write_weights(value, "first", "last")

    @contextmanager
    def _write_tasks(self, name: str, *scratch: str) -> Iterator[None]:
        """Write the loop of each thread over the tasks of a queue around statements for one."""
        with self._lines.block("parallel(f.num_threads, [&] {", "});"):
            self._lines.add(*scratch)
            with self._lines.block(f"for (int64_t {name}; {name}s.next(&{name});) {{"):
                yield

    @contextmanager
    def _write_pieces(self) -> Iterator[None]:
        """Write a loop over pieces around statements for the rows from `first` to `last`."""
        length = _graph_arrays.PIECE_ROWS
        with self._lines.block("{"):
            self._lines.add("Tasks pieces(num_pieces);")
            with self._write_tasks("piece"):
                self._lines.add(
                    f"const int64_t first = begin + piece * {length};",
                    f"const int64_t last = first + {length} < end ? first + {length} : end;",
                )
                yield

    def _keep_piece(self, value: int, name: str) -> None:
        size = self._task.size(value)
        place = f"pieces_{value} + piece * {size}"
        self._lines.add(f"memcpy({place}, {name}_{value}, {size} * sizeof(T));")

    def _join_pieces(self, value: int, statement: str) -> None:
        size = self._task.size(value)
        text = statement.format(value, f"i % {size}", f"pieces_{value}[i]")
        self._lines.add(f"for (int64_t i = 0; i < num_pieces * {size}; ++i) {text};")

    def _declare_reductions(self, values: tuple[int, ...]) -> None:
        for value in values:
            size = self._task.size(value)
            if self._op(value) == "sum":
                self._sums[value] = f"sum_{value}"
                self._lines.add(declare_array(f"sum_{value}", size, is_zero=True))
            elif self._op(value) == "softmax":
                self._lines.add(
                    declare_array(f"largest_{value}", size),
                    f"for (int64_t i = 0; i < {size}; ++i) "
                    f"largest_{value}[i] = -T(__builtin_inf());",
                )

    def _write_stage(self, stage: int, begin: str = "begin", end: str = "end") -> None:
        """Write the loop over some rows of the group that goes from `begin` to `end`."""
        task, lines = self._task, self._lines
        with lines.block(f"for (int64_t at = {begin}; at < {end}; ++at) {{"):
            scope = self._make_scope(stage)
            for value in self._stages[stage]:
                node = task.node(value)
                if node.op not in _REDUCTIONS:
                    if value in task.materialised or value in self._kept:
                        scope.require(value)
                    continue
                (operand,) = node.operands
                scope.require(operand)
                with lines.loops(node.shape) as subscript:
                    element = scope.write_element(operand, subscript)
                    i = write_offset(node.shape, subscript)
                    if node.op == "sum":
                        lines.add(f"sum_{value}[{i}] += {element};")
                        continue
                    place = f"kept_{value}[(at - begin) * {task.size(value)} + {i}]"
                    lines.add(
                        f"largest_{value}[{i}] = larger<T>({place} = {element}, "
                        f"largest_{value}[{i}]);"
                    )

    def _write_powers(self, value: int, begin: str, end: str) -> None:
        """Write the powers of kept scores between two places in the group, and their sum."""
        size = self._task.size(value)
        self._lines.add(declare_array(f"total_{value}", size, is_zero=True))
        with self._write_elements(begin, end, size):
            self._lines.add(
                f"T& x = kept_{value}[at * {size} + i];",
                f"total_{value}[i] += x = exponential(x - largest_{value}[i]);",
            )

    def _write_weights(self, value: int, begin: str, end: str) -> None:
        """Write the division of powers by their sum, from one row to another."""
        lines, size = self._lines, self._task.size(value)
        with self._write_elements(begin, end, size):
            lines.add(f"T& x = kept_{value}[(at - begin) * {size} + i];")
            lines.add(f"x /= total_{value}[i];")
            if value in self._task.materialised:
                row = self._write_index(None)
                lines.add(f"{self._task.field('value', value)}[int64_t({row}) * {size} + i] = x;")

    @contextmanager
    def _write_elements(self, begin: str, end: str, size: int) -> Iterator[None]:
        """Write loops over the elements of rows around statements for one."""
        with (
            self._lines.block(f"for (int64_t at = {begin}; at < {end}; ++at) {{"),
            self._lines.block(f"for (int64_t i = 0; i < {size}; ++i) {{"),
        ):
            yield

    def write_epilogue(self) -> None:
        """Write the stores of the finished sums of `group`, and the values computed from them."""
        task = self._task
        for value, name in self._sums.items():
            if value in task.materialised:
                place = task.address(value, "group")
                self._lines.add(f"memcpy({place}, {name}, {task.size(value)} * sizeof(T));")

        def index(row_map: RowMap | None) -> str:
            return "group" if row_map is None else task.follow((row_map,), "group")

        computed = frozenset(task.kernel.epilogue)
        rooted = self._find_rooted(computed)
        scope = Scope(task, self._lines, index, computed, rooted, dict(self._sums))
        for value in task.kernel.epilogue:
            if value in task.materialised:
                scope.require(value)

    def _make_scope(self, stage: int) -> Scope:
        """Return the scope of a row; values of earlier stages are kept or computed again."""
        task = self._task
        kept = {v: f"kept_{v} + (at - begin) * {task.size(v)}" for v in self._buffered}
        here = frozenset(v for v in self._stages[stage] if self._op(v) not in _REDUCTIONS)
        arrays = {}
        for value in (v for values in self._stages[:stage] for v in values):
            if value in kept:
                arrays[value] = f"({kept[value]})"
            elif self._op(value) != "sum":
                if value in task.materialised:
                    arrays[value] = f"({task.address(value, self._write_index(None))})"
                else:
                    here |= {value}
        return Scope(
            *(task, self._lines, self._write_index, here, self._find_rooted(here), arrays),
            *({v: kept[v] for v in self._stages[stage] if v in self._kept},),
            *(task.kernel.grouped_by, self._sums, self._write_index_ahead),
        )

    def _write_index_ahead(self, row_map: RowMap | None) -> str | None:
        later = self._write_index(row_map, "at + kAhead")
        return later if later.endswith("[at + kAhead]") else None

    def _write_index(self, row_map: RowMap | None, at: str = "at") -> str:
        """Return the target of a map for the row of the loop."""
        grouping = self._task.kernel.grouped_by
        if row_map is not None and row_map.into is Space.ONE:
            return "0"
        if row_map is not None and row_map == grouping:
            return "group"
        if grouping is None or is_sorted(grouping):
            return at if row_map is None else f"{self._task.field('index', row_map)}[{at}]"
        if row_map is None:
            return f"{self._task.field('rows', grouping)}[{at}]"
        return f"{self._task.field('grouped_index', grouping, row_map)}[{at}]"

    def _find_rooted(self, computed: frozenset[int]) -> frozenset[int]:
        """Find values that are stored as rows; the others are expressions of their readers."""
        task = self._task
        operands = [at for reader in task.kernel.values for at in task.node(reader).operands]
        read = [find_source(task.program, operand) for operand in operands]
        reshaped = {find_source(task.program, at) for at in operands if task.node(at).op in READS}
        return frozenset(
            value
            for value in computed
            if read.count(value) > 1
            or value in reshaped
            or value in task.materialised
            or value in self._kept
            or task.size(value) == 1
            or not is_elementwise(task.program, value)
        )

    def _op(self, value: int) -> str:
        return self._task.node(value).op


def _find_kept(task: KernelTask) -> frozenset[int]:
    """Find short rowwise values that a later stage reads."""
    stage_of = {v: s for s, values in enumerate(task.kernel.stages) for v in values}
    found = set()
    for reader, stage in stage_of.items():
        for operand in task.node(reader).operands:
            value = find_source(task.program, operand)
            is_rowwise = value in stage_of and task.node(value).op not in _REDUCTIONS
            if is_rowwise and stage_of[value] < stage and task.size(value) <= _MAX_KEPT:
                found.add(value)
    return frozenset(found - task.materialised)
