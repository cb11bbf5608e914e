"""Arguments of a generated program: pointers and numbers, each of 8 bytes, in one struct.

The source names a field when it first needs it; `_graph_arrays.py` fills in those of a graph, and
`_backend.py` those of a call.
"""

from __future__ import annotations

import dataclasses

from penstock.rgnn.spaces import RowMap, Space


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One member of the struct."""

    name: str
    declaration: str
    kind: str
    """The method of `Fields`, or of `GraphArrays` for what is a graph's."""
    maps: tuple[RowMap, ...] = ()
    position: int = -1
    """Position of the value that it is about; -1 for none."""
    space: Space | None = None


class Fields:
    """The members that a source uses, in the order in which they were asked for.

    Each method returns the expression by which the source reads a member.
    """

    def __init__(self) -> None:
        self._fields = {"num_threads": Field("num_threads", "int64_t num_threads", "threads")}

    def all(self) -> tuple[Field, ...]:
        """Return the members so far."""
        return tuple(self._fields.values())

    def value(self, position: int) -> str:
        """Add the rows of a value of the program that some kernel writes."""
        return self._add_of_value("value", "T*", position)

    def input(self, position: int) -> str:
        """Add the rows of an argument."""
        return self._add_of_value("input", "const T*", position)

    def stride(self, position: int) -> str:
        """Add the number of elements from one row of an argument to the next."""
        return self._add_of_value("stride", "int64_t", position)

    def parts(self, position: int) -> str:
        """Add the memory for the part of a sum over rows of types that each task computes."""
        return self._add_of_value("parts", "T*", position)

    def packed(self, position: int) -> str:
        """Add the memory for the matrices of a product, laid out as its loops read them."""
        return self._add_of_value("packed", "T*", position)

    def inverse_count(self, row_map: RowMap) -> str:
        """Add, for each target, 1 / number of rows sent to it."""
        return self._add("inverse_count", "const T*", row_map)

    def array(self, kind: str, *maps: RowMap) -> str:
        """Add an array of a graph, by the name of a method of `GraphArrays`."""
        return self._add(kind, "const Index*", *maps)

    def counted_array(self, kind: str, row_map: RowMap) -> tuple[str, str]:
        """Add an array of a graph, and the number of its elements or intervals."""
        return self.array(kind, row_map), self.number(f"num_{kind}", row_map)

    def number(self, kind: str, row_map: RowMap) -> str:
        """Add a number of a graph, by the name of a method of `GraphArrays`."""
        return self._add(kind, "int64_t", row_map)

    def num_rows(self, space: Space) -> str:
        """Add the number of rows of a space."""
        name = f"num_{space.name.lower()}_rows"
        return self._add_field(Field(name, f"int64_t {name}", "num_rows", space=space))

    def _add_of_value(self, kind: str, declaration: str, position: int) -> str:
        name = f"{kind}_{position}"
        return self._add_field(Field(name, f"{declaration} {name}", kind, position=position))

    def _add(self, kind: str, declaration: str, *maps: RowMap) -> str:
        name = "_".join([kind, *(row_map.name.replace(".", "_") for row_map in maps)])
        return self._add_field(Field(name, f"{declaration} {name}", kind, maps))

    def _add_field(self, field: Field) -> str:
        self._fields.setdefault(field.name, field)
        return f"f.{field.name}"
