"""Reading of what is saved beside step graphs: plans and partitions, each with its checksum."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import GraphFileError
from penstock.graph.step_graph import DAMAGES, checksum

_Made = TypeVar("_Made")
_HEADER = ("format", "version", "checksum")


def read_saved(
    data: object,
    *,
    noun: str,
    version: int,
    make: Callable[[Mapping[str, Any]], _Made],
) -> _Made:
    """Make an object from its dictionary, also after a way through JSON.

    Args:
        data: The dictionary: a format (`"penstock-<noun>"`), a version, a checksum, and fields.
        noun: `"plan"` or `"partition"`; also the verb that makes one, and its class.
        version: The version that is read.
        make: Returns the object of the dictionary.

    Raises:
        GraphFileError: It is something else, of another version, or damaged.
    """
    form = f"penstock-{noun}"
    if not isinstance(data, Mapping) or data.get("format") != form:
        name = noun.capitalize()
        raise GraphFileError(
            f"this is no {noun}: its 'format' is not {form!r}; pass what {name}.to_dict() "
            f"returned or {name}.save() wrote"
        )
    if type(data.get("version")) is not int or data["version"] != version:
        raise GraphFileError(
            f"this {noun} has version {data.get('version')!r} of the format and this Penstock "
            f"reads version {version}: {noun} again"
        )
    try:
        made = make(data)
        found = checksum({name: data[name] for name in data if name not in _HEADER})
    except DAMAGES as error:
        fault = f"{type(error).__name__}: {error}"
        raise GraphFileError(f"this {noun} is damaged ({fault}): {noun} again") from error
    if found != data.get("checksum"):
        raise GraphFileError(
            f"this {noun} is damaged: its content does not match its checksum"
            + ("" if "checksum" in data else ", which is missing")
            + f"; {noun} again"
        )
    return made


def load_saved(path: str | os.PathLike[str], noun: str) -> Any:
    """Read a file as JSON.

    Raises:
        GraphFileError: It is none.
        OSError: It cannot be read.
    """
    try:
        return json.loads(Path(path).read_bytes())
    except DAMAGES as error:
        raise GraphFileError(
            f"{os.fspath(path)!r} is no {noun} or is damaged ({error}): {noun} again"
        ) from error
