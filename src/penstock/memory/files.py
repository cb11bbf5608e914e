"""Files of results: written beside their place and renamed, so that none is left half written.

Only a regular file is ever replaced. A symbolic link stays, and the file that it leads to is
replaced; a device, a pipe, or the file that standard output goes to, is opened and written.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def replace_file(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a file as a whole; if that fails, an earlier file of that name is as it was.

    Example:
        >>> path = os.path.join(tempfile.mkdtemp(), "numbers.json")
        >>> replace_file(path, "[1, 2]")
        >>> os.listdir(os.path.dirname(path))
        ['numbers.json']

    Args:
        path: A file in an existing directory, or a device or pipe.
        content: Its bytes, or text, which is encoded as UTF-8.

    Raises:
        OSError: It cannot be written; the message names the path.
    """
    data = content.encode() if isinstance(content, str) else content
    with open_whole(path) as file:
        file.write(data)


@contextlib.contextmanager
def open_whole(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file that has its name once the block ends; an exception leaves an earlier one there.

    Args:
        path: As of `replace_file`.

    Raises:
        OSError: It cannot be written; the message names the path.
    """
    try:
        place = _find_place(path)
        if place is not None:
            with _open_beside(place) as file:
                yield file
            return
        sys.stdout.flush()  # what was printed before, if it is the same file
        with open(path, "ab" if _is_standard_output(os.stat(path)) else "wb") as file:
            yield file
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """Refuse a path that `replace_file` cannot write, before the work whose result it is.

    Raises:
        OSError: It is a directory, or its directory is missing or takes no files.
    """
    place = _find_place(path)
    if place is not None:
        tempfile.TemporaryFile(dir=os.path.dirname(place)).close()
    elif os.path.isdir(path) or not os.access(path, os.W_OK):
        os.close(os.open(path, os.O_WRONLY))  # the system's own words


def is_replaceable(path: str | os.PathLike[str]) -> bool:
    """Return True for a regular file and for a name that is free; False for a device or a pipe."""
    return _find_place(path) is not None


def _find_place(path: str | os.PathLike[str]) -> str | None:
    """Return the regular file to replace, or the free name to take; None if it must be opened."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return os.path.realpath(path)
    is_file = stat.S_ISREG(status.st_mode) and not _is_standard_output(status)
    place = os.path.realpath(path)
    # A file that may be written in a directory that may not is written where it is.
    return place if is_file and os.access(os.path.dirname(place), os.W_OK) else None


def _is_standard_output(status: os.stat_result) -> bool:
    for number in (1, 2):
        try:
            if os.path.samestat(status, os.fstat(number)):
                return True
        except OSError:  # it is closed
            continue
    return False


@contextlib.contextmanager
def _open_beside(place: str) -> Iterator[BinaryIO]:
    unfinished = Path(os.path.dirname(place), f".{os.getpid()}-{os.urandom(8).hex()}")
    try:
        with open(unfinished, "xb") as file:
            yield file
        if os.path.exists(place):
            unfinished.chmod(stat.S_IMODE(os.stat(place).st_mode))
        os.replace(unfinished, place)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
