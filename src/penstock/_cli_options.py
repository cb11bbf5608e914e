"""Options that several commands of the terminal have, written once."""

from __future__ import annotations

from typing import Any

import typer

OPEN_TRACE = "open it with https://ui.perfetto.dev."
NEEDS_VIZ = "as a PNG (or SVG, PDF); needs the extra `viz`."


def size_option(help_text: str) -> Any:
    """A number of bytes, or a size such as 8GiB."""
    return typer.Option(metavar="SIZE", help=help_text, show_default=False)


def file_option(help_text: str) -> Any:
    """A file to write."""
    return typer.Option(metavar="FILE", help=help_text, show_default=False)


def directory_option(help_text: str) -> Any:
    """A directory for the bytes that leave."""
    return typer.Option(metavar="DIR", help=help_text, show_default=False)


def name_option(help_text: str) -> Any:
    """One of some names."""
    return typer.Option(metavar="NAME", help=help_text)


def number_option(help_text: str, **limits: Any) -> Any:
    """A whole number, with `min=` where there is one."""
    return typer.Option(metavar="N", help=help_text, **limits)
