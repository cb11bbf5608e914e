"""The traversals of a program as the source of one Python module of Triton kernels.

A traversal that sums has a block of groups in each program and goes through their rows together, a
few at a time; a later stage goes through them again, with the sums of the one before. A traversal
without sums has a block of rows, and of the features that it stores.

What is computed of the sums of a group follows its last loop: the epilogue.

A group that is too long for one program is cut into pieces. Then each stage is a kernel of its own:
it leaves a partial sum for each piece, and the next one reads the totals; so does the epilogue.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from penstock.codegen import ceil_power
from penstock.rgnn.backends.triton._body import (
    Inexpressible,
    InMemory,
    KernelBody,
    Parameter,
    Reduced,
    RowIndex,
    ValueRows,
    Variable,
)
from penstock.rgnn.backends.triton._index import (
    Axis,
    Index,
    index_axis,
    sort_axes,
    unravel,
)
from penstock.rgnn.backends.triton._operators import RULES
from penstock.rgnn.ir import Program, describe
from penstock.rgnn.lowering import Kernel, KernelKind, LoweredProgram
from penstock.rgnn.spaces import is_sorted

MAX_FEATURES = 16384
"""Features in a block beyond which registers would not do."""
_HEADER = '''"""Traversals of a relational program, written by Penstock for Triton.

{program}
"""

import triton
import triton.language as tl

from penstock.rgnn.backends.triton._kernels import sigmoid, tanh
'''
_LOWEST = "-3.4028234663852886e38"  # finite, so that a group without rows makes no NaN
_OF_ROWS = ("num_rows", "ROWS: tl.constexpr", "FEATURES: tl.constexpr", "COMPUTE: tl.constexpr")
_OF_GROUPS = (
    *("groups", "begins", "ends", "num_items"),
    *("GROUPS: tl.constexpr", "ROWS: tl.constexpr", "COMPUTE: tl.constexpr"),
)
_OF_EPILOGUE = ("groups", "num_items", "GROUPS: tl.constexpr", "COMPUTE: tl.constexpr")
_ROWS_OF_GROUPS = [
    "begin = tl.load(begins + item, mask=is_group, other=0)",
    "end = tl.load(ends + item, mask=is_group, other=0)",
    "most_rows = tl.max(end - begin)",
]
PARTS = {"sum": ("",), "softmax": ("_max", "_sum")}
"""Results of a reduction for each group, by operator: the ends of the names."""


@dataclasses.dataclass(frozen=True, slots=True)
class KernelSource:
    """The source of a Triton kernel and what it takes to launch it."""

    name: str
    text: str
    parameters: tuple[Parameter, ...]
    """The pointers that it takes, in order."""
    num_features: int
    """The most features in a block."""
    fewest_summed: int
    """The fewest features of what is summed or normalised."""
    reduced: tuple[int, ...] = ()
    """Of a stage for pieces of groups: the values of which it leaves something for each."""


@dataclasses.dataclass(frozen=True, slots=True)
class TraversalSource:
    """The kernels of a traversal."""

    whole: KernelSource
    stages: tuple[KernelSource, ...]
    """The same, one stage after another, for groups that are cut; none without groups."""
    epilogue: KernelSource | None
    """The kernel that follows the stages."""
    stored: tuple[int, ...]
    """The values that it writes to memory."""
    row_features: int
    """The most features of a row that it stores."""


@dataclasses.dataclass(frozen=True, slots=True)
class TritonSource:
    """A module of Triton kernels."""

    text: str
    traversals: Mapping[int, TraversalSource]
    """By the kernel's number in the schedule."""
    reasons: Mapping[int, str]
    """For the traversals that are no Triton kernels: why."""


def write_source(lowered: LoweredProgram) -> TritonSource:
    """Write the traversals of a program."""
    traversals: dict[int, TraversalSource] = {}
    reasons: dict[int, str] = {}
    for number, kernel in enumerate(lowered.schedule.kernels):
        if kernel.kind is not KernelKind.TRAVERSAL:
            continue
        try:
            traversals[number] = _write_traversal(lowered, kernel, f"traversal_{number}")
        except Inexpressible as reason:
            reasons[number] = str(reason)
    program = "\n".join(
        f"%{position} = {describe(node)}"
        for position, node in enumerate(lowered.optimized.program.nodes)
    )
    functions = [
        function.text
        for each in traversals.values()
        for function in (each.whole, *each.stages, each.epilogue)
        if function is not None
    ]
    text = "\n\n".join([_HEADER.format(program=_escape(program)), *functions])
    return TritonSource(text, traversals, reasons)


def _escape(text: str) -> str:
    """Return text that cannot end the docstring it is put into: names are a user's."""
    return text.encode("ascii", "backslashreplace").decode().replace("\\", "/").replace('"', "'")


def _write_traversal(lowered: LoweredProgram, kernel: Kernel, name: str) -> TraversalSource:
    program = lowered.optimized.program
    shapes = [program.nodes[value].shape for value in kernel.values]
    if any(0 in shape for shape in shapes):
        raise Inexpressible("rows have no features")
    stored = tuple(value for value in kernel.values if value in lowered.schedule.materialised)
    said = [f"%{value} = {_escape(describe(program.nodes[value]))}" for value in kernel.values]
    lengths = [math.prod(program.nodes[value].shape) for value in stored]
    if kernel.grouped_by is None:
        body = KernelBody(program, kernel, RULES)
        whole = _write_kernel(name, said, _write_rowwise(body, stored), body, _OF_ROWS)
        return TraversalSource(whole, (), None, stored, max(lengths))
    writer = _GroupedWriter(program, kernel, stored)
    whole = _write_kernel(name, said, writer.write(), writer.body, _OF_GROUPS)
    stages, epilogue = [], None
    for number in range(len(writer.stages)):
        writer = _GroupedWriter(program, kernel, stored)
        comment = [f"Stage {number} of {name}, for pieces of groups."]
        arguments = (f"{name}_stage_{number}", comment, writer.write_stage(number), writer.body)
        function = _write_kernel(*arguments, ("cut_groups", *_OF_GROUPS))
        stages.append(dataclasses.replace(function, reduced=writer.find_reduced(number)))
    if kernel.epilogue:
        writer = _GroupedWriter(program, kernel, stored)
        comment = [f"What follows the stages of {name}, for groups that are cut."]
        arguments = (f"{name}_epilogue", comment, writer.write_epilogue(), writer.body)
        epilogue = _write_kernel(*arguments, _OF_EPILOGUE)
    return TraversalSource(whole, tuple(stages), epilogue, stored, max(lengths, default=1))


def _write_kernel(
    name: str, comments: Sequence[str], lines: list[str], body: KernelBody, arguments: Sequence[str]
) -> KernelSource:
    """Write a kernel from its statements; `arguments` come after the pointers."""
    if body.num_features > MAX_FEATURES:
        raise Inexpressible(f"a block would have {body.num_features} features")
    (count,) = {"num_rows", "num_items"}.intersection(arguments)
    text = [
        *(f"# {comment}" for comment in comments),
        f'@triton.jit(do_not_specialize=["{count}"])',
        f"def {name}(",
        *(f"    {argument}," for argument in [*body.parameters.values(), *arguments]),
        "):",
        *(f"    {line}" for line in _remove_unused(lines)),
        "",
    ]
    parameters, sizes = tuple(body.parameters), (body.num_features, body.fewest_summed)
    return KernelSource(name, "\n".join(text), parameters, *sizes)


def _write_axes(axes: set[Axis]) -> list[str]:
    return [f"{a.name} = tl.arange(0, {a.block})" for a in sorted(axes) if a.block is not None]


def _remove_unused(lines: Sequence[str]) -> list[str]:
    """Remove assignments of names that no later statement reads."""
    kept: list[str] = []
    read: set[str] = set()
    for line in reversed(lines):
        name, is_assignment, value = line.strip().partition(" = ")
        if is_assignment and name.isidentifier() and name not in read:
            continue
        kept.append(line)
        read.update(re.findall(r"[A-Za-z_]\w*", value if is_assignment else line))
    return kept[::-1]


def _store_rows(body: KernelBody, value: int, indices: tuple[Index, ...]) -> None:
    """Store features of a value for the rows at hand."""
    block = body.read(value, indices)
    axes = sort_axes(indices)
    row, has_row = body.find_own_row()
    address, mask = body.address(ValueRows(value), row, has_row, indices, axes)
    body.loop.append(f"tl.store({address}, {body.lift(block, axes)}, mask={mask})")


def _write_rowwise(body: KernelBody, stored: Sequence[int]) -> list[str]:
    """Return the statements of a traversal without sums."""
    longest = max(math.prod(body.nodes[value].shape) for value in stored)
    feature = Axis(0, longest, "feature", None)
    for value in stored:
        _store_rows(body, value, unravel(index_axis(feature), body.nodes[value].shape))
    return [
        "row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)",
        "is_row = row < num_rows",
        "first_row = tl.zeros([1], tl.int64)",
        "feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)",
        *_write_axes(body.axes),
        *body.before,
        *body.loop,
    ]


class _GroupedWriter:
    """A traversal with rows grouped by where they are summed to, or one stage of it."""

    def __init__(self, program: Program, kernel: Kernel, stored: Sequence[int]) -> None:
        assert kernel.grouped_by is not None
        self.body = KernelBody(program, kernel, RULES)
        self._stored = stored
        self._grouped_by = kernel.grouped_by
        self._epilogue = [value for value in kernel.epilogue if value in stored]
        self.stages = kernel.stages
        if any(self._op(value) == "softmax" and value in stored for value in kernel.stages[-1]):
            self.stages = (*kernel.stages, ())  # one more loop, which stores it

    def write(self) -> list[str]:
        """Return the statements of a kernel that has all stages."""
        loops: list[str] = []
        for number in range(len(self.stages)):
            loops += self._write_loop(number)
            for value in self.find_reduced(number):
                self.body.totals[value] = self._name(value)
                if self._op(value) == "sum" and value in self._stored:
                    loops.append(self._store(ValueRows(value), "group", value, ""))
        return self._add_group_lines([*_ROWS_OF_GROUPS, *loops, *self._write_epilogue()])

    def write_stage(self, number: int) -> list[str]:
        """Return the statements of a kernel of one stage, for pieces of groups.

        It reads the totals of the stages before and stores what it sums, both in the precision in
        which it computes.
        """
        totals = self._load_totals(number)
        loop = self._write_loop(number)
        partial = [
            self._store(Reduced(value, part, "partial"), "item", value, part)
            for value in self.find_reduced(number)
            for part in PARTS[self._op(value)]
        ]
        giant = "giant = tl.load(cut_groups + item, mask=is_group, other=0).to(tl.int64)"
        return self._add_group_lines([*_ROWS_OF_GROUPS, giant, *totals, *loop, *partial])

    def write_epilogue(self) -> list[str]:
        """Return the statements of a kernel of the epilogue, for groups that are cut."""
        totals = self._load_totals(len(self.stages))
        return self._add_group_lines(["giant = item", *totals, *self._write_epilogue()])

    def find_reduced(self, number: int) -> tuple[int, ...]:
        """Return the values that are summed or normalised in a stage."""
        return tuple(value for value in self.stages[number] if self._op(value) in PARTS)

    def _load_totals(self, number: int) -> list[str]:
        """Write loads of the totals of the stages before one."""
        lines: list[str] = []
        for value in (value for stage in range(number) for value in self.find_reduced(stage)):
            name = self.body.totals[value] = self._name(value)
            indices = self.body.index_all(value)
            axes = sort_axes(indices)
            self.body.note_axes(axes)
            for part in PARTS[self._op(value)]:
                total = Reduced(value, part, "total")
                address, mask = self.body.address(
                    total, Variable("giant"), "is_group", indices, axes
                )
                lines.append(f"{name}{part} = tl.load({address}, mask={mask}, other=0)")
        return lines

    def _write_epilogue(self) -> list[str]:
        self.body.is_epilogue = True
        for value in self._epilogue:
            _store_rows(self.body, value, self.body.index_all(value))
        return [*self.body.before, *self.body.loop]

    def _add_group_lines(self, statements: list[str]) -> list[str]:
        return [
            "item = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)[:, None]",
            "is_group = item < num_items",
            "group = tl.load(groups + item, mask=is_group, other=0).to(tl.int64)",
            "first_row = tl.zeros([1, 1], tl.int64)",
            *_write_axes(self.body.axes),
            *statements,
        ]

    def _write_loop(self, number: int) -> list[str]:
        """Write one loop over the rows of a group."""
        body, stage = self.body, self.stages[number]
        for value in self.stages[number - 1] if number else ():
            if self._op(value) == "softmax" and value in self._stored:
                _store_rows(body, value, self.body.index_all(value))
        for value in stage:
            if self._op(value) == "sum":
                self._write_sum(value)
            elif self._op(value) == "softmax":
                self._write_softmax(value)
            elif value in self._stored:
                _store_rows(body, value, self.body.index_all(value))
        lines = list(body.before)
        if body.loop:
            lines += [
                "for first in tl.range(0, most_rows, ROWS):",
                *(f"    {line}" for line in [*self._write_row_lines(), *body.loop]),
            ]
        body.end_loop()
        return lines

    def _write_row_lines(self) -> list[str]:
        row = "slot.to(tl.int64)"
        is_read = any(re.search(r"\brow\b", line) for line in self.body.loop)
        if is_read and not is_sorted(self._grouped_by):
            order = self.body.name_parameter(RowIndex((), self._grouped_by))
            row = f"tl.load({order} + slot, mask=is_row, other=0).to(tl.int64)"
        return [
            "slot = begin + first + tl.arange(0, ROWS)[None, :]",
            "is_row = slot < end",
            f"row = {row}",
        ]

    def _write_sum(self, value: int) -> None:
        body, name = self.body, self._name(value)
        lengths, axes = self._shape_block(value)
        block = body.read(body.nodes[value].operands[0], self.body.index_all(value))
        is_row = body.lift(Variable("is_row"), axes)
        rows = f"tl.where({is_row}, {body.lift(block, axes)}, 0.0)"
        body.before.append(f"{name} = tl.zeros([{lengths}], COMPUTE)")
        body.loop.append(f"{name} += tl.sum({rows}, axis=1, keep_dims=True)")

    def _write_softmax(self, value: int) -> None:
        """Write an online softmax: m' = max(m, s), z' = z * exp(m - m') + sum of exp(s - m')."""
        body, name = self.body, self._name(value)
        lengths, axes = self._shape_block(value)
        block = body.read(body.nodes[value].operands[0], self.body.index_all(value))
        is_row, score = body.lift(Variable("is_row"), axes), body.lift(block, axes)
        body.before += [
            f"{name}_max = tl.full([{lengths}], {_LOWEST}, COMPUTE)",
            f"{name}_sum = tl.zeros([{lengths}], COMPUTE)",
        ]
        scores = f"tl.where({is_row}, {score}, {_LOWEST})"
        powers = f"tl.where({is_row}, tl.exp({score} - {name}_new), 0.0)"
        body.loop += [
            f"{name}_new = tl.maximum({name}_max, tl.max({scores}, axis=1, keep_dims=True))",
            f"{name}_sum *= tl.exp({name}_max - {name}_new)",
            f"{name}_sum += tl.sum({powers}, axis=1, keep_dims=True)",
            f"{name}_max = {name}_new",
        ]

    def _store(self, into: InMemory, row: str, value: int, part: str) -> str:
        indices = self.body.index_all(value)
        axes = sort_axes(indices)
        address, mask = self.body.address(into, Variable(row), "is_group", indices, axes)
        return f"tl.store({address}, {self._name(value)}{part}, mask={mask})"

    def _shape_block(self, value: int) -> tuple[str, tuple[Axis, ...]]:
        """Return the shape, as source, of a reduction for a block of groups, and its axes."""
        axes = sort_axes(self.body.index_all(value))
        self.body.note_axes(axes)
        return ", ".join(["GROUPS", "1", *(str(ceil_power(a.length)) for a in axes)]), axes

    def _name(self, value: int) -> str:
        return f"{self._op(value)}{value}"

    def _op(self, value: int) -> str:
        return self.body.nodes[value].op
