"""The body of one traversal: values of a program as Triton statements.

A value is asked for by its position and by the features that are wanted (`_index.py`), and becomes
a variable. What is the same for all rows of a group is computed before the loop over them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from penstock.rgnn import spaces
from penstock.rgnn.backends.triton._index import (
    Axis,
    Index,
    of_axis,
    ravel,
    refined,
    reshaped,
    sorted_axes,
    whole,
)
from penstock.rgnn.ir import READS, Node, Program, Shape, source
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
class Total:
    """A parameter: what a reduction came to, for each group that is cut."""

    position: int
    part: str


@dataclasses.dataclass(frozen=True, slots=True)
class Partial:
    """A parameter: what a reduction came to, for each piece of a group."""

    position: int
    part: str


InMemory = ValueRows | Total | Partial
Parameter = InMemory | RowIndex | GroupSizes


@dataclasses.dataclass(frozen=True, slots=True)
class Variable:
    """A variable of the source: axes of groups and rows, and then those of features."""

    name: str
    axes: tuple[Axis, ...] = ()
    is_shared: bool = False
    """Whether it is the same for all rows of a group."""


Indices = tuple[Index, ...]
Rule = Callable[["KernelBody", Node, Indices, str], Variable]
"""From the node of an operator, features of its result and a name: an expression for them."""


class KernelBody:
    """Statements of one kernel, before its loop and in it, and what they need.

    Args:
        program: The program.
        kernel: The traversal.
        rules: The expressions of rowwise operators, by operator.
    """

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
        self._is_epilogue = False
        self._layouts = _layouts(program, kernel)
        self._totals: dict[int, str] = {}
        self._shared: dict[object, Variable] = {}
        self._local: dict[object, Variable] = {}
        self._names: set[str] = set()

    def end_loop(self) -> None:
        """Forget what is known of the rows at hand."""
        self.before, self.loop = [], []
        self._local = {}

    def begin_epilogue(self) -> None:
        """From here on, values are of the groups themselves."""
        self._is_epilogue = True

    def finish(self, position: int, name: str) -> None:
        """Say that a reduction is complete; `name` begins the names of what it left."""
        self._totals[position] = name

    # ---------------------------------------------------------------- values

    def layout(self, shape: Shape) -> Shape:
        """The axes that a block has for all features of rows of a shape."""
        return self._layouts.get(math.prod(shape)) or shape

    def all_of(self, shape: Shape) -> tuple[Index, ...]:
        """The indices of all features of rows of a shape."""
        layout = self.layout(shape)
        return reshaped(whole(layout), layout, shape)

    def read(self, position: int, indices: tuple[Index, ...]) -> Variable:
        """Some features of a value, for the rows at hand."""
        key = (position, indices)
        found = self._shared.get(key) or self._local.get(key)
        if found is None:
            found = self._make(position, indices)
            (self._shared if found.is_shared else self._local)[key] = found
        return found

    def _make(self, position: int, indices: tuple[Index, ...]) -> Variable:
        name = f"x{position}"
        maps: tuple[RowMap, ...] = ()
        while (node := self.nodes[position]).op in READS:
            (operand,) = node.operands
            if node.op == "gather":
                maps = (*maps, node.map)
            else:
                indices = reshaped(indices, node.shape, self.nodes[operand].shape)
            position = operand
        if node.op == "inverse_count":
            return self._inverse_count(node.map, maps, name)
        if position not in self._computed:
            return self._load(position, maps, indices, name)
        if node.op == "sum":
            # The schedule lets a row read a sum of its own kernel only at its own group.
            assert maps == (() if self._is_epilogue else (self.grouped_by,)), (node, maps)
            return self.total(position, node.shape, indices)
        assert not maps, (node, maps)
        if node.op == "softmax":
            return self._weight(position, indices)
        return self._rules[node.op](self, node, indices, name)

    def total(
        self, position: int, shape: Shape, indices: Sequence[Index], part: str = ""
    ) -> Variable:
        """A finished reduction of this kernel, as an axis of the block at hand for each of its own.

        Raises:
            Inexpressible: Other features are wanted than lie in the lanes at hand.
        """
        assert position in self._totals, f"%{position} is read in its own loop"
        name, layout = f"{self._totals[position]}{part}", self.layout(shape)
        axes: list[Axis] = []
        for index, length in zip(reshaped(indices, shape, layout), layout, strict=True):
            if length == 1:
                continue
            axis = index.plain()
            if axis is None or axis.length != length or axis in axes:
                raise Inexpressible(f"%{position} is read at other features than were summed")
            axes.append(axis)
        if axes == sorted(axes):
            return Variable(name, tuple(axes), is_shared=True)
        places = [self.num_leading + axes.index(axis) for axis in sorted(axes)]
        order = ", ".join(map(str, [*range(self.num_leading), *places]))
        return self.assign(f"tl.permute({name}, {order})", tuple(sorted(axes)), True, f"{name}_of")

    def _weight(self, position: int, indices: tuple[Index, ...]) -> Variable:
        """One row of a finished softmax."""
        node = self.nodes[position]
        score = self.read(node.operands[0], indices)
        largest = self.total(position, node.shape, indices, "_max")
        total = self.total(position, node.shape, indices, "_sum")
        return self.compute("tl.exp({0} - {1}) / {2}", score, largest, total, name=f"x{position}")

    def _inverse_count(self, row_map: RowMap, maps: tuple[RowMap, ...], name: str) -> Variable:
        sizes = self.parameter(GroupSizes(row_map))
        row, mask = self._row(maps)
        guard = "" if mask is None else f", mask={mask}, other=1"
        count = f"tl.load({sizes} + {row.name}{guard})"
        return self.assign(f"1 / tl.maximum({count}, 1).to(COMPUTE)", (), row.is_shared, name)

    # ---------------------------------------------------------------- memory

    def _load(
        self, position: int, maps: tuple[RowMap, ...], indices: Sequence[Index], name: str
    ) -> Variable:
        row, mask = self._row(maps)
        axes = sorted_axes(indices)
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
        """Where features of rows lie, and which of the lanes there mean something."""
        self.note(axes)
        shape = self.nodes[parameter.position].shape
        length = math.prod(shape)
        at = self.lifted(row, axes)
        parts = [self.parameter(parameter), at if length == 1 else f"{at} * {length}"]
        flat = ravel(indices, shape)
        if flat != Index():
            parts.append(self._text(flat, axes))
        masks = [] if mask is None else [self.lifted(Variable(mask), axes)]
        for index, bound in zip(indices, shape, strict=True):
            low, high = index.bounds()
            if low < 0:
                masks.append(f"({self._text(index, axes)} >= 0)")
            if high >= bound:
                whole_index, most = index.undivided(bound)
                masks.append(f"({self._text(whole_index, axes)} < {most})")
        plain = {index.plain() for index in indices}
        for axis in axes:
            if axis.block is not None and axis.block > axis.length and axis not in plain:
                masks.append(f"({self._text(of_axis(axis), axes)} < {axis.length})")
        return " + ".join(parts), " & ".join(masks)

    def own_row(self) -> tuple[Variable, str]:
        """The row whose values are computed, and the mask for the lanes that have one."""
        if self._is_epilogue:
            return Variable("group", is_shared=True), "is_group"
        return Variable("row"), "is_row"

    def _row(self, maps: tuple[RowMap, ...]) -> tuple[Variable, str | None]:
        """The row that maps lead to, and the mask for the lanes that have one."""
        maps = tuple(each for each in maps if each != spaces.identity(each.rows))
        if not maps:
            return self.own_row()
        if any(each.into is Space.ONE for each in maps):
            return Variable("first_row", is_shared=True), None
        rest = None
        if self.grouped_by is not None and not self._is_epilogue:
            rest = spaces.factor(maps[0], self.grouped_by)
        if self._is_epilogue:
            at, mask, order, is_shared = "group", "is_group", None, True
        elif rest is None:
            at = "row" if self.grouped_by is None else "slot"
            mask, order, is_shared = "is_row", self.grouped_by, False
        else:
            maps = (*(() if rest == spaces.identity(rest.rows) else (rest,)), *maps[1:])
            if not maps:
                return Variable("group", is_shared=True), "is_group"
            at, mask, order, is_shared = "group", "is_group", None, True
        key = (maps, is_shared)
        memo = self._shared if is_shared else self._local
        if key not in memo:
            index = self.parameter(RowIndex(maps, order))
            text = f"tl.load({index} + {at}, mask={mask}, other=0).to(tl.int64)"
            memo[key] = self.assign(text, (), is_shared, index.replace("index", "row", 1))
        return memo[key], mask

    # ---------------------------------------------------------------- statements

    def compute(self, template: str, *operands: Variable, name: str) -> Variable:
        """An elementwise expression in which `{0}`, `{1}`, ... stand for operands."""
        axes = tuple(sorted(set(itertools.chain.from_iterable(each.axes for each in operands))))
        text = template.format(*(self.lifted(operand, axes) for operand in operands))
        return self.assign(text, axes, all(each.is_shared for each in operands), name)

    def added_up(self, block: Variable, axis: Axis, name: str) -> Variable:
        """The sum over an axis of features."""
        axes = tuple(sorted({*block.axes, axis}))
        masked = self.lifted(block, axes)
        if axis not in block.axes or axis.block != axis.length:
            valid = self.lifted(Variable(axis.name, (axis,)), axes, is_leading=False)
            masked = f"tl.where({valid} < {axis.length}, {masked}, 0.0)"
        self.note(axes)
        rest = tuple(each for each in axes if each != axis)
        text = f"tl.sum({masked}, axis={self.num_leading + axes.index(axis)})"
        return self.assign(text, rest, block.is_shared, name)

    def is_between(self, index: Index, begin: int, end: int) -> Variable:
        """Where an index lies in a half-open interval."""
        axes = sorted_axes([index])
        self.note(axes)
        text = self._text(index, axes)
        return Variable(f"(({text} >= {begin}) & ({text} < {end}))", axes, is_shared=True)

    def assign(self, text: str, axes: tuple[Axis, ...], is_shared: bool, name: str) -> Variable:
        """A new variable."""
        self.note(axes)
        unique = next(
            candidate
            for candidate in itertools.chain([name], (f"{name}_{n}" for n in itertools.count(2)))
            if candidate not in self._names
        )
        self._names.add(unique)
        (self.before if is_shared else self.loop).append(f"{unique} = {text}")
        return Variable(unique, axes, is_shared)

    def lifted(self, block: Variable, axes: tuple[Axis, ...], *, is_leading: bool = True) -> str:
        """A variable with its axes in their places among those of a larger block.

        Args:
            block: The variable.
            axes: Of features, of the larger block.
            is_leading: Whether the variable has axes of groups and rows.
        """
        places = [":" if is_leading else "None"] * self.num_leading
        places += [":" if axis in block.axes else "None" for axis in axes]
        if "None" not in places:
            return block.name
        return f"{block.name}[{', '.join(places)}]"

    def parameter(self, parameter: Parameter) -> str:
        """The name of a parameter."""
        if parameter not in self.parameters:
            if isinstance(parameter, ValueRows):
                name = f"v{parameter.position}"
            elif isinstance(parameter, Total | Partial):
                kind = type(parameter).__name__.lower()
                name = f"{kind}{parameter.position}{parameter.part}"
            elif isinstance(parameter, GroupSizes):
                name = f"num_{_name(parameter.map)}"
            else:
                name = "_of_".join(["index", *map(_name, reversed(parameter.maps))])
                name += "" if parameter.order is None else "_in_order"
            self.parameters[parameter] = name
        return self.parameters[parameter]

    def _text(self, index: Index, axes: tuple[Axis, ...]) -> str:
        return index.text(
            lambda axis: self.lifted(Variable(axis.name, (axis,)), axes, is_leading=False)
        )

    def note(self, axes: tuple[Axis, ...]) -> None:
        """Count the features of a block that has these axes."""
        self.axes.update(axes)
        length = math.prod(axis.block for axis in axes if axis.block is not None)
        self.num_features = max(self.num_features, length)


def _layouts(program: Program, kernel: Kernel) -> dict[int, Shape | None]:
    """By number of features, axes in which what is summed can be read in all shapes that occur."""
    reductions = {v for v in kernel.values if program.nodes[v].op in SUMS}
    held = reductions.union(kernel.epilogue)
    shapes = {program.nodes[value].shape for value in held}
    for value in kernel.values:
        for operand in program.nodes[value].operands:
            if source(program, operand) in held:
                shapes.add(program.nodes[operand].shape)
    sizes = {math.prod(shape) for shape in shapes}
    return {n: refined(shape for shape in shapes if math.prod(shape) == n) for n in sizes}


def _name(row_map: RowMap) -> str:
    return row_map.name.replace(".", "_")
