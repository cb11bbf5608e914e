"""What a generated program gets from outside: pointers and numbers, each of 8 bytes, in one struct.

The source names a field when it first needs it; `_cpp_graph.py` and `_cpp.py` fill it in, for a
graph and for a call.
"""

from __future__ import annotations

import dataclasses

from penstock.rgnn._rows import RowMap, Space


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One member of the struct."""

    name: str
    declaration: str
    kind: str
    """What it is; see the methods of `Fields`."""
    maps: tuple[RowMap, ...] = ()
    position: int = -1
    """Of the value that it is about, if it is about one."""
    space: Space | None = None


class Fields:
    """The members that a source uses, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._fields = {"num_threads": Field("num_threads", "int64_t num_threads", "threads")}

    def all(self) -> tuple[Field, ...]:
        """The members so far."""
        return tuple(self._fields.values())

    def value(self, position: int) -> str:
        """Rows of a value of the program that some kernel writes."""
        return self._add(f"value_{position}", "value", "T*", position=position)

    def input(self, position: int) -> str:
        """Rows of an argument."""
        return self._add(f"input_{position}", "input", "const T*", position=position)

    def stride(self, position: int) -> str:
        """Elements from one row of an argument to the next."""
        return self._add(f"stride_{position}", "stride", position=position)

    def inverse_count(self, row_map: RowMap) -> str:
        """For each target, 1 / number of rows sent to it."""
        return self._add(f"inverse_count_{_name(row_map)}", "inverse_count", "const T*", row_map)

    def parts(self, position: int) -> str:
        """Room for what each task adds to a sum over rows of types."""
        return self._add(f"parts_{position}", "parts", "T*", position=position)

    def packed(self, position: int) -> str:
        """Room for the matrices of a product, laid out as its loops read them."""
        return self._add(f"packed_{position}", "packed", "T*", position=position)

    def index(self, row_map: RowMap) -> str:
        """For each row, where the map sends it."""
        return self._indices(f"index_{_name(row_map)}", "index", row_map)

    def rows(self, grouping: RowMap) -> str:
        """The rows grouped by where they are sent."""
        return self._indices(f"rows_by_{_name(grouping)}", "rows", grouping)

    def grouped(self, grouping: RowMap, row_map: RowMap) -> str:
        """Where `row_map` sends each of the grouped rows."""
        name = f"index_{_name(row_map)}_by_{_name(grouping)}"
        return self._indices(name, "grouped", grouping, row_map)

    def starts(self, grouping: RowMap) -> str:
        """Where each group begins among the grouped rows, and where the last ends."""
        return self._indices(f"starts_{_name(grouping)}", "starts", grouping)

    def chunks(self, grouping: RowMap) -> tuple[str, str]:
        """The first group of each chunk, about equal in work, and how many chunks there are."""
        name = f"chunks_{_name(grouping)}"
        chunks = self._indices(name, "chunks", grouping)
        return chunks, self._add(f"num_{name}", "num_chunks", "int64_t", grouping)

    def longest_group(self, grouping: RowMap) -> str:
        """The number of rows of the largest group."""
        return self._add(f"longest_{_name(grouping)}", "longest_group", "int64_t", grouping)

    def ranges(self, grouping: RowMap) -> tuple[str, str]:
        """The first node of each range that a thread takes at a time, and how many there are."""
        name = f"ranges_{_name(grouping)}"
        ranges = self._indices(name, "ranges", grouping)
        return ranges, self._add(f"num_{name}", "num_ranges", "int64_t", grouping)

    def longest_range(self, grouping: RowMap) -> str:
        """The number of nodes of the largest range."""
        return self._add(f"longest_range_{_name(grouping)}", "longest_range", "int64_t", grouping)

    def range_rows(self, grouping: RowMap) -> str:
        """For each range, and at the end, where its rows of each relation begin."""
        return self._indices(f"range_rows_{_name(grouping)}", "range_rows", grouping)

    def hubs(self, grouping: RowMap) -> tuple[str, str]:
        """The groups that are too long for one thread, and how many there are."""
        name = f"hubs_{_name(grouping)}"
        hubs = self._indices(name, "hubs", grouping)
        return hubs, self._add(f"num_{name}", "num_hubs", "int64_t", grouping)

    def tiles(self, row_map: RowMap) -> tuple[str, str]:
        """Short ranges of rows of one type, as (type, begin, end), and how many there are."""
        name = f"tiles_{_name(row_map)}"
        return self._indices(name, "tiles", row_map), self._add(
            f"num_{name}", "num_tiles", "int64_t", row_map
        )

    def tasks(self, row_map: RowMap) -> tuple[str, str]:
        """Long ranges of rows of one type, as (type, begin, end), and how many there are."""
        name = f"tasks_{_name(row_map)}"
        return self._indices(name, "tasks", row_map), self._add(
            f"num_{name}", "num_tasks", "int64_t", row_map
        )

    def task_starts(self, row_map: RowMap) -> str:
        """The first task of each type, and the number of all."""
        return self._indices(f"task_starts_{_name(row_map)}", "task_starts", row_map)

    def num_rows(self, space: Space) -> str:
        """How many rows a space has."""
        return self._add(f"num_{space.name.lower()}_rows", "num_rows", space=space)

    def _indices(self, name: str, kind: str, *maps: RowMap) -> str:
        return self._add(name, kind, "const Index*", *maps)

    def _add(
        self,
        name: str,
        kind: str,
        declaration: str = "int64_t",
        *maps: RowMap,
        position: int = -1,
        space: Space | None = None,
    ) -> str:
        field = Field(name, f"{declaration} {name}", kind, maps, position, space)
        self._fields.setdefault(name, field)
        return f"f.{name}"


def _name(row_map: RowMap) -> str:
    return row_map.name.replace(".", "_")
