"""Errors of a capture, which say at which line of the user's program they arise."""

from penstock.compat.user_line import UserLine, user_line
from penstock.errors import CaptureError


def error_here(message: str) -> CaptureError:
    """Return an error whose message begins with the user's line that is running."""
    return CaptureError(f"{describe_line(user_line())}: {message}")


def describe_line(line: UserLine | None) -> str:
    """Return a line as messages show it."""
    return "a line that Python does not know" if line is None else str(line)
