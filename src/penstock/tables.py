"""Reports: frozen dataclasses that are plain data for JSON, and tables on the terminal.

The unit of a number is the end of its name: `peak_file_bytes` is shown in GiB and `stall_seconds`
in milliseconds without the report saying so again.
"""

from __future__ import annotations

import dataclasses
import io
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.units import format_bandwidth, format_bytes, format_seconds

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_WIDTH = 100  # columns where the output is no terminal
_UNITS = {
    "_bytes_per_second": format_bandwidth,
    "_bytes": format_bytes,
    "_seconds": format_seconds,
}


@dataclasses.dataclass(frozen=True)
class Report:
    """Base of reports, which are frozen dataclasses without slots; printing one shows a table.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Demo(Report, title="demo", hidden={"losses"}):
        ...     peak_file_bytes: int
        ...     losses: tuple[float, ...] = ()
        >>> print(Demo(3 * 2**30))
        ╭─ demo ────────────────╮
        │ peak file    3.00 GiB │
        ╰───────────────────────╯
    """

    _title: ClassVar[str]
    _hidden: ClassVar[Collection[str]]

    def __init_subclass__(cls, *, title: str, hidden: Collection[str] = ()) -> None:
        """Take the headline of the table, and the names of fields that are not in it."""
        cls._title, cls._hidden = title, hidden

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data, for JSON; keys of several parts have commas."""
        return {name: _join_keys(value) for name, value in dataclasses.asdict(self).items()}

    def _rows(self) -> list[tuple[str, object]]:
        """Return names and values of the table, as `report_table` takes them."""
        names = (field.name for field in dataclasses.fields(self))
        return [(name, getattr(self, name)) for name in names if name not in self._hidden]

    def __str__(self) -> str:
        return report_table(self._rows(), title=self._title)


def _join_keys(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    names = (",".join(map(str, key)) if isinstance(key, tuple) else key for key in value)
    return dict(zip(names, value.values(), strict=True))


def report_table(report: DataclassInstance | Iterable[tuple[str, object]], *, title: str) -> str:
    """Lay out a report as a table of names and values.

    Example:
        >>> print(report_table([("peak_file_bytes", 3 * 2**30), ("num_steps", 5)], title="demo"))
        ╭─ demo ────────────────╮
        │ peak file    3.00 GiB │
        │ steps               5 │
        ╰───────────────────────╯

    Args:
        report: A dataclass instance, or rows of name and value. Names ending in `_bytes`,
            `_seconds` or `_bytes_per_second` (or beginning with `bytes_`) give their numbers a
            unit; a mapping becomes one row per entry, with the unit of its own name.
        title: Headline of the table.

    Returns:
        Lines of text without a newline at the end; with colour only where standard output is a
        terminal.
    """
    from rich import box
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    is_terminal = bool(getattr(sys.stdout, "isatty", lambda: False)())
    console = Console(
        file=io.StringIO(),
        force_terminal=is_terminal,
        width=None if is_terminal else _WIDTH,
        force_jupyter=False,  # a notebook would get the table by itself instead of the text
    )
    grid = Table.grid(padding=(0, 4, 0, 0))
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    named = list(_rows(report))
    labels = Counter(_label(name) for name, _ in named)
    rows = [
        # `num_saved` and `saved_bytes` would both be "saved": then each keeps its whole name.
        (
            _label(name) if labels[_label(name)] == 1 else name.replace("_", " "),
            _format(name, value),
            _is_number(value),
        )
        for name, value in named
    ]
    # Numbers line up at their right end, close to their names even beside a long text.
    num_columns = max((len(shown) for _, shown, is_number in rows if is_number), default=0)
    for label, shown, is_number in rows:
        # Text, not a string: a path with brackets must not be read as markup.
        grid.add_row(Text(label), Text(shown.rjust(num_columns) if is_number else shown))
    can_draw = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    console.print(
        Panel(
            grid,
            title=Text(title),
            title_align="left",
            box=box.ROUNDED if can_draw else box.ASCII,
            expand=False,
        )
    )
    file = console.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _rows(report: DataclassInstance | Iterable[tuple[str, object]]) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(report) and not isinstance(report, type):
        rows: Iterable[tuple[str, object]] = [
            (field.name, getattr(report, field.name)) for field in dataclasses.fields(report)
        ]
    else:
        rows = report  # pyright: ignore[reportAssignmentType]
    for name, value in rows:
        if isinstance(value, Mapping):
            suffix = _suffix(name)
            stem = name.removesuffix(suffix)
            for key, entry in value.items():
                yield f"{stem} {key}{suffix}", entry
        else:
            yield name, value


def _suffix(name: str) -> str:
    return next((suffix for suffix in _UNITS if f"_{name}".endswith(suffix)), "")


def _label(name: str) -> str:
    return name.removesuffix(_suffix(name)).removeprefix("num_").replace("_", " ")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _format(name: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        suffix = _suffix(name) or ("_bytes" if name.startswith("bytes_") else "")
        if suffix:
            return _UNITS[suffix](value)
        return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    return str(value)
