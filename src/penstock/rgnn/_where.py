"""Which line of the user's a traced operation comes from, for errors and for plans."""

from __future__ import annotations

import dataclasses
import linecache
import sys
from pathlib import Path

_HERE = str(Path(__file__).parent)


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A line of source."""

    file: str
    number: int
    text: str

    @property
    def short(self) -> str:
        """The file's name, the number and the text, for plans."""
        return f"{Path(self.file).name}:{self.number}: {self.text}"

    def __str__(self) -> str:
        return f'  File "{self.file}", line {self.number}\n    {self.text}'


def users_line() -> Line:
    """The innermost line on the stack that is not this package's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(Path(frame.f_code.co_filename).parent) == _HERE:
        frame = frame.f_back
    name, number = frame.f_code.co_filename, frame.f_lineno
    return Line(name, number, linecache.getline(name, number).strip())


class TraceError(TypeError):
    """A compiled function does what cannot be compiled; the message ends with its line.

    Args:
        message: What is wrong and what to do instead.
    """

    def __init__(self, message: str) -> None:
        self.line = users_line()
        super().__init__(f"{message}\n{self.line}")
