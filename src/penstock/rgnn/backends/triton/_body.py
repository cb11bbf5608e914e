"""The body of one traversal: values of a program as Triton statements.

A value is asked for by its position and by the features that are wanted (`_index.py`), and becomes
a variable. What is the same for all rows of a group is computed before the loop over them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from penstock.rgnn import spaces
from penstock.rgnn.backends.triton._index import (
    Axis,
    Index,
    index_axis,
    index_row,
    ravel,
    refine_shapes,
    reshape_indices,
    sort_axes,
)
from penstock.rgnn.ir import READS, Node, Program, Shape, find_source
from penstock.rgnn.lowering import Kernel
from penstock.rgnn.spaces import RowMap, Space

SUMS = frozenset({"sum", "softmax"})


class Inexpressible(Exception):
    """A traversal that cannot be written as one Triton kernel; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class ValueRows:
    """A parameter: the rows of a value in memory."""

    position: int


@dataclasses.dataclass(frozen=True, slots=True)
class RowIndex:
    """A parameter: where maps lead from each row, or from each row as `order` groups them."""

    maps: tuple[RowMap, ...]
    order: RowMap | None


@dataclasses.dataclass(frozen=True, slots=True)
class GroupSizes:
    """A parameter: how many rows each target of a map has."""

    map: RowMap


@dataclasses.dataclass(frozen=True, slots=True)
class Reduced:
    """A parameter: what a reduction came to, for each group that is cut or each of its pieces."""

    position: int
    part: str
    of: Literal["total", "partial"]


InMemory = ValueRows | Reduced
Parameter = InMemory | RowIndex | GroupSizes


@dataclasses.dataclass(frozen=True, slots=True)
class Variable:
    """A variable of the source: axes of groups and rows, and then those of features."""

    name: str
    axes: tuple[Axis, ...] = ()
    is_shared: bool = False
    """True if it is the same for all rows of a group."""


Indices = tuple[Index, ...]
Rule = Callable[["KernelBody", Node, Indices, str], Variable]
"""From the node of an operator, features of its result and a name: an expression for them."""


class KernelBody:
    """Statements of one kernel, before its loop and in it, and what they need."""

    def __init__(self, program: Program, kernel: Kernel, rules: Mapping[str, Rule]) -> None:
        self._rules = rules
        self.nodes = program.nodes
        self.grouped_by = kernel.grouped_by
        self.num_leading = 1 if kernel.grouped_by is None else 2
        self.parameters: dict[Parameter, str] = {}
        self.axes: set[Axis] = set()
        self.before: list[str] = []
        self.loop: list[str] = []
        self.num_features = 1
        """The most features in a block, of axes that are not tiled."""
        reductions = [
            node for node in map(self.nodes.__getitem__, kernel.values) if node.op in SUMS
        ]
        self.fewest_summed = min((math.prod(node.shape) for node in reductions), default=1)
        """The fewest features of what is summed or normalised."""
        self._computed = frozenset(kernel.values)
        self.is_epilogue = False
        """True for the values of the groups themselves."""
        self._layouts = _find_layouts(program, kernel)
        self.totals: dict[int, str] = {}
        """Reductions that are complete: what the names of their variables begin with."""
        self._shared: dict[object, Variable] = {}
        self._local: dict[object, Variable] = {}
        self._names: set[str] = set()

    def end_loop(self) -> None:
        """Forget the variables of the rows at hand."""
        self.before, self.loop = [], []
        self._local = {}

    # ---------------------------------------------------------------- values

    def find_layout(self, shape: Shape) -> Shape:
        """Return the axes that a block has for all features of rows of a shape."""
        return self._layouts.get(math.prod(shape)) or shape

    def index_all(self, value: int) -> tuple[Index, ...]:
        """Return the indices of all features of rows of a value."""
        shape = self.nodes[value].shape
        layout = self.find_layout(shape)
        return reshape_indices(index_row(layout), layout, shape)

    def read(self, position: int, indices: tuple[Index, ...]) -> Variable:
        """Return some features of a value, for the rows at hand."""
        key = (position, indices)
        found = self._shared.get(key) or self._local.get(key)
        if found is None:
            found = self._make(position, indices)
            (self._shared if found.is_shared else self._local)[key] = found
        return found

    def _make(self, position: int, indices: tuple[Index, ...]) -> Variable:
        name = f"x{position}"
        if not math.prod(self.nodes[position].shape):  # a part of no length, read where it is not
            row, _ = self._find_row(())
            return self.assign(f"({row.name} * 0).to(COMPUTE)", (), row.is_shared, name)
        maps: tuple[RowMap, ...] = ()
        while (node := self.nodes[position]).op in READS:
            (operand,) = node.operands
            if node.op == "gather":
                maps = (*maps, node.map)
            else:
                indices = reshape_indices(indices, node.shape, self.nodes[operand].shape)
            position = operand
        if node.op == "inverse_count":
            sizes = self.name_parameter(GroupSizes(node.map))
            row, mask = self._find_row(maps)
            guard = "" if mask is None else f", mask={mask}, other=1"
            count = f"tl.load({sizes} + {row.name}{guard})"
            return self.assign(f"1 / tl.maximum({count}, 1).to(COMPUTE)", (), row.is_shared, name)
        if position not in self._computed:
            return self._load(position, maps, indices, name)
        if node.op == "sum":
            # The schedule lets a row read a sum of its own kernel only at its own group.
            assert maps == (() if self.is_epilogue else (self.grouped_by,)), (node, maps)
            return self.read_total(position, node.shape, indices)
        assert not maps, (node, maps)
        if node.op == "softmax":
            # One row of it when it is finished: exp(s - max) / sum.
            score = self.read(node.operands[0], indices)
            largest, total = (
                self.read_total(position, node.shape, indices, part) for part in ("_max", "_sum")
            )
            return self.compute(
                "tl.exp({0} - {1}) / {2}", score, largest, total, name=f"x{position}"
            )
        return self._rules[node.op](self, node, indices, name)

    def read_total(
        self, position: int, shape: Shape, indices: Sequence[Index], part: str = ""
    ) -> Variable:
        """Return a finished reduction of this kernel, with its axes those of the block at hand."""
        assert position in self.totals, f"%{position} is read in its own loop"
        name, layout = f"{self.totals[position]}{part}", self.find_layout(shape)
        axes: list[Axis] = []
        for index, length in zip(reshape_indices(indices, shape, layout), layout, strict=True):
            if length == 1:
                continue
            axis = index.as_axis()
            if axis is None or axis.length != length or axis in axes:
                raise Inexpressible(f"%{position} is read at other features than were summed")
            axes.append(axis)
        if axes == sorted(axes):
            return Variable(name, tuple(axes), is_shared=True)
        places = [self.num_leading + axes.index(axis) for axis in sorted(axes)]
        order = ", ".join(map(str, [*range(self.num_leading), *places]))
        return self.assign(f"tl.permute({name}, {order})", tuple(sorted(axes)), True, f"{name}_of")

    # ---------------------------------------------------------------- memory

    def _load(
        self, position: int, maps: tuple[RowMap, ...], indices: Sequence[Index], name: str
    ) -> Variable:
        row, mask = self._find_row(maps)
        axes = sort_axes(indices)
        address, masks = self.address(ValueRows(position), row, mask, indices, axes)
        guard = f", mask={masks}, other=0" if masks else ""
        return self.assign(f"tl.load({address}{guard}).to(COMPUTE)", axes, row.is_shared, name)

    def address(
        self,
        parameter: InMemory,
        row: Variable,
        mask: str | None,
        indices: Sequence[Index],
        axes: tuple[Axis, ...],
    ) -> tuple[str, str]:
        """Return the address of features of rows, and the mask of the lanes that have one."""
        self.note_axes(axes)
        shape = self.nodes[parameter.position].shape
        length = math.prod(shape)
        at = self.lift(row, axes)
        parts = [self.name_parameter(parameter), at if length == 1 else f"{at} * {length}"]
        flat = ravel(indices, shape)
        if flat != Index():
            parts.append(self._write_index(flat, axes))
        masks = [] if mask is None else [self.lift(Variable(mask), axes)]
        for index, bound in zip(indices, shape, strict=True):
            low, high = index.bounds()
            if low < 0:
                masks.append(f"({self._write_index(index, axes)} >= 0)")
            if high >= bound:
                whole_index, most = index.drop_division(bound)
                masks.append(f"({self._write_index(whole_index, axes)} < {most})")
        plain = {index.as_axis() for index in indices}
        for axis in axes:
            if axis.block is not None and axis.block > axis.length and axis not in plain:
                masks.append(f"({self._write_index(index_axis(axis), axes)} < {axis.length})")
        return " + ".join(parts), " & ".join(masks)

    def find_own_row(self) -> tuple[Variable, str]:
        """Return the row of the values computed, and the mask of the lanes that have one."""
        if self.is_epilogue:
            return Variable("group", is_shared=True), "is_group"
        return Variable("row"), "is_row"

    def _find_row(self, maps: tuple[RowMap, ...]) -> tuple[Variable, str | None]:
        """Return the row that maps lead to, and the mask of the lanes that have one."""
        maps = tuple(each for each in maps if each != spaces.identity(each.rows))
        if not maps:
            return self.find_own_row()
        if any(each.into is Space.ONE for each in maps):
            return Variable("first_row", is_shared=True), None
        at, mask, order, is_shared = "group", "is_group", None, True
        if not self.is_epilogue:
            grouping = self.grouped_by
            rest = None if grouping is None else spaces.factor(maps[0], grouping)
            if rest is None:
                at = "row" if grouping is None else "slot"
                mask, order, is_shared = "is_row", grouping, False
            else:
                maps = (*(() if rest == spaces.identity(rest.rows) else (rest,)), *maps[1:])
                if not maps:
                    return Variable("group", is_shared=True), "is_group"
        key = (maps, is_shared)
        memo = self._shared if is_shared else self._local
        if key not in memo:
            index = self.name_parameter(RowIndex(maps, order))
            text = f"tl.load({index} + {at}, mask={mask}, other=0).to(tl.int64)"
            memo[key] = self.assign(text, (), is_shared, index.replace("index", "row", 1))
        return memo[key], mask

    # ---------------------------------------------------------------- statements

    def compute(self, template: str, *operands: Variable, name: str) -> Variable:
        """Assign an elementwise expression in which `{0}`, `{1}`, ... stand for operands."""
        axes = tuple(sorted(set(itertools.chain.from_iterable(each.axes for each in operands))))
        text = template.format(*(self.lift(operand, axes) for operand in operands))
        return self.assign(text, axes, all(each.is_shared for each in operands), name)

    def sum_axis(self, block: Variable, axis: Axis, name: str) -> Variable:
        """Sum over an axis of features."""
        axes = tuple(sorted({*block.axes, axis}))
        masked = self.lift(block, axes)
        if axis not in block.axes or axis.block != axis.length:
            valid = self.lift(Variable(axis.name, (axis,)), axes, is_leading=False)
            masked = f"tl.where({valid} < {axis.length}, {masked}, 0.0)"
        self.note_axes(axes)
        rest = tuple(each for each in axes if each != axis)
        text = f"tl.sum({masked}, axis={self.num_leading + axes.index(axis)})"
        return self.assign(text, rest, block.is_shared, name)

    def is_between(self, index: Index, begin: int, end: int) -> Variable:
        """Return the mask of the lanes with an index in a half-open interval."""
        axes = sort_axes([index])
        self.note_axes(axes)
        text = self._write_index(index, axes)
        return Variable(f"(({text} >= {begin}) & ({text} < {end}))", axes, is_shared=True)

    def assign(self, text: str, axes: tuple[Axis, ...], is_shared: bool, name: str) -> Variable:
        """Assign an expression to a new variable."""
        self.note_axes(axes)
        unique = next(
            candidate
            for candidate in itertools.chain([name], (f"{name}_{n}" for n in itertools.count(2)))
            if candidate not in self._names
        )
        self._names.add(unique)
        (self.before if is_shared else self.loop).append(f"{unique} = {text}")
        return Variable(unique, axes, is_shared)

    def lift(self, block: Variable, axes: tuple[Axis, ...], *, is_leading: bool = True) -> str:
        """Return a variable with its axes in their places among those of a larger block."""
        places = [":" if is_leading else "None"] * self.num_leading
        places += [":" if axis in block.axes else "None" for axis in axes]
        if "None" not in places:
            return block.name
        return f"{block.name}[{', '.join(places)}]"

    def name_parameter(self, parameter: Parameter) -> str:
        """Return the name of a parameter, which is added at its first use."""
        if parameter not in self.parameters:
            if isinstance(parameter, ValueRows):
                name = f"v{parameter.position}"
            elif isinstance(parameter, Reduced):
                name = f"{parameter.of}{parameter.position}{parameter.part}"
            elif isinstance(parameter, GroupSizes):
                name = f"num_{_name(parameter.map)}"
            else:
                name = "_of_".join(["index", *map(_name, reversed(parameter.maps))])
                name += "" if parameter.order is None else "_in_order"
            self.parameters[parameter] = name
        return self.parameters[parameter]

    def _write_index(self, index: Index, axes: tuple[Axis, ...]) -> str:
        return index.write(
            lambda axis: self.lift(Variable(axis.name, (axis,)), axes, is_leading=False)
        )

    def note_axes(self, axes: tuple[Axis, ...]) -> None:
        """Count the features of a block that has these axes."""
        self.axes.update(axes)
        length = math.prod(axis.block for axis in axes if axis.block is not None)
        self.num_features = max(self.num_features, length)


def _find_layouts(program: Program, kernel: Kernel) -> dict[int, Shape | None]:
    """Return, by number of features, axes in which sums can be read in all shapes."""
    reductions = {v for v in kernel.values if program.nodes[v].op in SUMS}
    held = reductions.union(kernel.epilogue)
    shapes = {program.nodes[value].shape for value in held}
    for value in kernel.values:
        for operand in program.nodes[value].operands:
            if find_source(program, operand) in held:
                shapes.add(program.nodes[operand].shape)
    sizes = {math.prod(shape) for shape in shapes}
    return {n: refine_shapes(shape for shape in shapes if math.prod(shape) == n) for n in sizes}


def _name(row_map: RowMap) -> str:
    return row_map.name.replace(".", "_")
