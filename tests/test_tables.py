"""Tables show units, survive any text, and are plain where nobody looks at a terminal."""

import dataclasses
import io
import sys

import pytest

from penstock import tables
from penstock.tables import report_table


@dataclasses.dataclass(frozen=True)
class Report:
    num_steps: int = 1200
    peak_file_bytes: int = 3 * 2**30
    bytes_written: int = 2048
    stall_seconds: float = 0.0123
    write_bytes_per_second: float = 2.0**30
    gap: float = 0.123456
    direct_io: bool | None = True
    store: str | None = None
    moved_bytes: dict[str, int] = dataclasses.field(default_factory=lambda: {"device->file": 1024})


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def rows(table: str) -> dict[str, str]:
    """The rows of a table, label to value."""
    inner = [line.strip("│| ") for line in table.splitlines()[1:-1]]
    return {label: value.strip() for label, _, value in (line.partition("  ") for line in inner)}


def test_units_come_from_the_names():
    assert rows(report_table(Report(), title="t")) == {
        "steps": "1,200",
        "peak file": "3.00 GiB",
        "bytes written": "2.00 KiB",
        "stall": "12.3 ms",
        "write": "1.00 GiB/s",
        "gap": "0.1235",
        "direct io": "yes",
        "store": "-",
        "moved device->file": "1.00 KiB",
    }


def test_rows_and_title():
    table = report_table([("name", "x"), ("cpu_seconds", 2)], title="two things")
    assert "two things" in table.splitlines()[0]
    assert rows(table) == {"name": "x", "cpu": "2.00 s"}


def test_a_name_may_be_nothing_but_its_unit():
    link = {"file->device": 2.0**30}
    table = report_table([("bytes_per_second", link), ("seconds", 2)], title="t")
    assert rows(table) == {"bytes per second file->device": "1.00 GiB/s", "seconds": "2.00 s"}


def test_text_is_never_read_as_markup():
    table = report_table([("store", "/mnt/[bold]nvme[/bold]/:smile:")], title="[red]t")
    assert rows(table) == {"store": "/mnt/[bold]nvme[/bold]/:smile:"}
    assert "[red]t" in table


def test_long_text_is_folded_and_complete():
    reason = "word " * 60
    table = report_table([("reason", reason)], title="t")
    assert max(map(len, table.splitlines())) <= 100
    assert table.count("word") == 60


def test_no_escape_codes_unless_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" not in report_table(Report(), title="t")
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert "\x1b" in report_table(Report(), title="t")


def test_ascii_where_the_output_knows_nothing_else(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    table = report_table(Report(), title="t")
    assert table.isascii()
    assert rows(table)["peak file"] == "3.00 GiB"


def test_names_that_would_look_the_same_are_shown_whole():
    shown = report_table([("num_saved", 3), ("saved_bytes", 2**20), ("num_steps", 1)], title="t")
    assert "num saved" in shown
    assert "saved bytes" in shown
    assert "num steps" not in shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sums(tables.Report, title="two sums", hidden={"parts"}):
    num_steps: int
    parts: tuple[int, ...] = ()


class SumsAndMore(Sums, title="more"):
    def _rows(self) -> list[tuple[str, object]]:
        return [*super()._rows(), ("seconds", 2)]


def test_reports_are_plain_data_and_tables_without_what_is_hidden():
    report = Sums(num_steps=3, parts=(1, 2))
    assert report.to_dict() == {"num_steps": 3, "parts": (1, 2)}
    assert "two sums" in str(report).splitlines()[0]
    assert rows(str(report)) == {"steps": "3"}
    assert repr(report) == "Sums(num_steps=3, parts=(1, 2))"


def test_reports_may_show_more_than_their_fields():
    more = SumsAndMore(num_steps=3)
    assert rows(str(more)) == {"steps": "3", "parts": "()", "seconds": "2.00 s"}
    assert more.to_dict() == {"num_steps": 3, "parts": ()}
