"""The traversals of a plan as the source of one Python module of Triton kernels.

A traversal that sums has a block of groups in each program and goes through their rows together, a
few at a time; a later stage goes through them again, with the sums of the one before. A traversal
without sums has a block of rows, and of the features that it stores.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

from penstock.rgnn._backends._triton._body import (
    Block,
    Body,
    Inexpressible,
    Parameter,
    RowIndex,
)
from penstock.rgnn._backends._triton._index import Axis, Index, of_axis, sorted_axes, unravel, whole
from penstock.rgnn._backends._triton._tables import is_sorted
from penstock.rgnn._ir import Program, Shape, describe
from penstock.rgnn._plan import Plan
from penstock.rgnn._schedule import Kernel, KernelKind

MAX_FEATURES = 16384
"""Features in a block beyond which registers would not do."""
_LOWEST = "-3.4028234663852886e38"  # finite, so that a group without rows makes no NaN
_HEADER = '''"""Traversals of a relational program, written by Penstock for Triton.

{program}
"""

import triton
import triton.language as tl

from penstock.rgnn._backends._triton._kernels import sigmoid, tanh
'''


@dataclasses.dataclass(frozen=True, slots=True)
class Traversal:
    """The source of a kernel and what it takes to launch it."""

    name: str
    text: str
    parameters: tuple[Parameter, ...]
    """The pointers that it takes, in order."""
    stored: tuple[int, ...]
    """The values that it writes to memory."""
    num_features: int
    """The most features in a block."""
    row_features: int
    """The most features of a row that it stores."""
    may_cut: bool
    """Whether a group may be cut into pieces whose sums are added afterwards."""


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A module of Triton kernels."""

    text: str
    traversals: Mapping[int, Traversal]
    """By the kernel's number in the schedule."""
    reasons: Mapping[int, str]
    """For the traversals that are no Triton kernels: why."""


def write(plan: Plan) -> Source:
    """Write the traversals of a plan."""
    traversals: dict[int, Traversal] = {}
    reasons: dict[int, str] = {}
    for number, kernel in enumerate(plan.schedule.kernels):
        if kernel.kind is not KernelKind.TRAVERSAL:
            continue
        try:
            traversals[number] = _traversal(plan, kernel, f"traversal_{number}")
        except Inexpressible as reason:
            reasons[number] = str(reason)
    program = "\n".join(
        f"%{position} = {describe(node)}" for position, node in enumerate(plan.program.nodes)
    )
    kernels = [traversal.text for traversal in traversals.values()]
    text = "\n\n".join([_HEADER.format(program=_safe(program)), *kernels])
    return Source(text, traversals, reasons)


def _safe(text: str) -> str:
    """Text that cannot end the docstring it is put into: names are a user's."""
    return text.encode("ascii", "backslashreplace").decode().replace("\\", "/").replace('"', "'")


def _traversal(plan: Plan, kernel: Kernel, name: str) -> Traversal:
    nodes = plan.program.nodes
    if any(0 in nodes[value].shape for value in kernel.values):
        raise Inexpressible("rows have no features")
    stored = tuple(value for value in kernel.values if value in plan.schedule.materialised)
    writer = _Rowwise if kernel.grouped_by is None else _Grouped
    written = writer(plan.program, kernel, stored)
    lines = _without_unused(written.lines())
    body = written.body
    if body.num_features > MAX_FEATURES:
        raise Inexpressible(f"a block would have {body.num_features} features")
    text = "\n".join(
        [
            *(f"# %{value} = {_safe(describe(nodes[value]))}" for value in kernel.values),
            f'@triton.jit(do_not_specialize=["{written.count}"])',
            f"def {name}(",
            *(f"    {each}," for each in [*body.parameters.values(), *written.arguments]),
            "):",
            *(f"    {line}" for line in lines),
            "",
        ]
    )
    return Traversal(
        name,
        text,
        tuple(body.parameters),
        stored,
        body.num_features,
        max((math.prod(nodes[value].shape) for value in stored), default=1),
        written.may_cut,
    )


def _axis_lines(axes: set[Axis]) -> list[str]:
    return [f"{a.name} = tl.arange(0, {a.block})" for a in sorted(axes) if a.block is not None]


def _without_unused(lines: list[str]) -> list[str]:
    """Statements without assignments of names that no later one reads."""
    kept: list[str] = []
    read: set[str] = set()
    for line in reversed(lines):
        name, is_assignment, value = line.strip().partition(" = ")
        if is_assignment and name.isidentifier() and name not in read:
            continue
        kept.append(line)
        read.update(re.findall(r"[A-Za-z_]\w*", value if is_assignment else line))
    return kept[::-1]


class _Rowwise:
    """A traversal without sums."""

    arguments = (
        "num_rows",
        "ROWS: tl.constexpr",
        "FEATURES: tl.constexpr",
        "COMPUTE: tl.constexpr",
    )
    count = "num_rows"
    may_cut = False

    def __init__(self, program: Program, kernel: Kernel, stored: tuple[int, ...]) -> None:
        self.body = Body(program, kernel)
        self._stored = stored

    def lines(self) -> list[str]:
        """The statements of the kernel."""
        body = self.body
        longest = max(math.prod(body.nodes[value].shape) for value in self._stored)
        feature = Axis(0, longest, "feature", None)
        for value in self._stored:
            indices = _features(feature, body.nodes[value].shape)
            block = body.read(value, indices)
            axes = sorted_axes(indices)
            address, mask = body.address(value, Block("row"), "is_row", indices, axes)
            body.loop.append(f"tl.store({address}, {body.lifted(block, axes)}, mask={mask})")
        return [
            "row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)",
            "is_row = row < num_rows",
            "first_row = tl.zeros([1], tl.int64)",
            "feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)",
            *_axis_lines(body.axes),
            *body.before,
            *body.loop,
        ]


def _features(feature: Axis, shape: Shape) -> tuple[Index, ...]:
    """The features of a row, in the order in which they lie in memory."""
    return unravel(of_axis(feature), shape)


class _Grouped:
    """A traversal whose rows are grouped by where they are summed to."""

    arguments = (
        "groups",
        "begins",
        "ends",
        "num_items",
        "GROUPS: tl.constexpr",
        "ROWS: tl.constexpr",
        "IN_PIECES: tl.constexpr",
        "COMPUTE: tl.constexpr",
    )
    count = "num_items"

    def __init__(self, program: Program, kernel: Kernel, stored: tuple[int, ...]) -> None:
        assert kernel.grouped_by is not None
        self.body = Body(program, kernel)
        self._stages = kernel.stages
        self._stored = stored
        self._grouped_by = kernel.grouped_by
        has_softmax = any(program.nodes[value].op == "softmax" for value in kernel.values)
        self.may_cut = len(kernel.stages) == 1 and not has_softmax

    def lines(self) -> list[str]:
        """The statements of the kernel."""
        loops: list[str] = []
        to_store: list[int] = []  # softmaxes that the last loop has finished
        for stage in (*self._stages, ()):
            loops += self._stage(stage, to_store)
            to_store = [value for value in stage if self._is(value, "softmax")]
            to_store = [value for value in to_store if value in self._stored]
        return [
            "item = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)[:, None]",
            "is_group = item < num_items",
            "group = tl.load(groups + item, mask=is_group, other=0).to(tl.int64)",
            "target = item if IN_PIECES else group",
            "begin = tl.load(begins + item, mask=is_group, other=0)",
            "end = tl.load(ends + item, mask=is_group, other=0)",
            "most_rows = tl.max(end - begin)",
            "first_row = tl.zeros([1, 1], tl.int64)",
            *_axis_lines(self.body.axes),
            *loops,
        ]

    def _is(self, value: int, op: str) -> bool:
        return self.body.nodes[value].op == op

    def _stage(self, stage: tuple[int, ...], to_store: list[int]) -> list[str]:
        """One loop over the rows of a group, and what is done when it has ended."""
        body = self.body
        for value in to_store:
            self._store_rows(value)
        for value in stage:
            if self._is(value, "sum"):
                self._add_up(value)
            elif self._is(value, "softmax"):
                self._normalise(value)
            elif value in self._stored:
                self._store_rows(value)
        lines: list[str] = list(body.before)
        if body.loop:
            lines += [
                "for first in tl.range(0, most_rows, ROWS):",
                *(f"    {line}" for line in [*self._row_lines(), *body.loop]),
            ]
        body.end_loop()
        for value in stage:
            if self._is(value, "sum"):
                body.finish(value, f"sum{value}")
                if value in self._stored:
                    lines.append(self._store_sum(value))
            elif self._is(value, "softmax"):
                body.finish(value, f"softmax{value}")
        return lines

    def _row_lines(self) -> list[str]:
        row = "slot.to(tl.int64)"
        is_read = any(re.search(r"\brow\b", line) for line in self.body.loop)
        if is_read and not is_sorted(self._grouped_by):
            order = self.body.parameter(RowIndex((), self._grouped_by))
            row = f"tl.load({order} + slot, mask=is_row, other=0).to(tl.int64)"
        return [
            "slot = begin + first + tl.arange(0, ROWS)[None, :]",
            "is_row = slot < end",
            f"row = {row}",
        ]

    def _add_up(self, value: int) -> None:
        body = self.body
        shape = body.nodes[value].shape
        lengths, axes = body.zeros(shape)
        block = body.read(body.nodes[value].operands[0], whole(shape))
        is_row = body.lifted(Block("is_row"), axes)
        rows = f"tl.where({is_row}, {body.lifted(block, axes)}, 0.0)"
        body.before.append(f"sum{value} = tl.zeros([{lengths}], COMPUTE)")
        body.loop.append(f"sum{value} += tl.sum({rows}, axis=1, keep_dims=True)")

    def _normalise(self, value: int) -> None:
        """The largest score and the sum of powers so far, which shrink as the largest grows."""
        body = self.body
        shape = body.nodes[value].shape
        lengths, axes = body.zeros(shape)
        block = body.read(body.nodes[value].operands[0], whole(shape))
        is_row, score = body.lifted(Block("is_row"), axes), body.lifted(block, axes)
        name = f"softmax{value}"
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

    def _store_rows(self, value: int) -> None:
        body = self.body
        indices = whole(body.nodes[value].shape)
        axes = sorted_axes(indices)
        block = body.read(value, indices)
        address, mask = body.address(value, Block("row"), "is_row", indices, axes)
        body.loop.append(f"tl.store({address}, {body.lifted(block, axes)}, mask={mask})")

    def _store_sum(self, value: int) -> str:
        body = self.body
        indices = whole(body.nodes[value].shape)
        axes = sorted_axes(indices)
        address, mask = body.address(value, Block("target"), "is_group", indices, axes)
        return f"tl.store({address}, sum{value}, mask={mask})"
