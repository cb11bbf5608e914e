"""Records that are saved beside step graphs, each with its checksum: plans and partitions."""

from __future__ import annotations

import abc
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from penstock.errors import GraphFileError
from penstock.graph.step_graph import DAMAGES, StepGraph, checksum
from penstock.memory.files import replace_file

_HEADER = ("format", "version", "checksum")


class SavedRecord(abc.ABC):
    """Base of what belongs to a step graph and is plain data, in memory and in a file."""

    _noun: ClassVar[str]
    """`"plan"` or `"partition"`; also the verb that makes one, and its class."""
    _version: ClassVar[int]
    """Version of the format that is written and read."""
    graph_digest: str

    @abc.abstractmethod
    def _encode(self) -> dict[str, Any]:
        """Return the fields as plain data for JSON."""

    @classmethod
    @abc.abstractmethod
    def _decode(cls, content: Mapping[str, Any]) -> Self:
        """Return the record of what `_encode` returned, also after a way through JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data for JSON: fields by name, a format, a version and a checksum."""
        content, form = self._encode(), f"penstock-{self._noun}"
        return {
            "format": form,
            "version": self._version,
            "checksum": checksum(content),
            **content,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, graph: StepGraph | None = None) -> Self:
        """Make it from what `to_dict` returned, also after a way through JSON.

        Args:
            data: The dictionary.
            graph: The graph that it is to be used with, if at hand: one for another is refused.

        Raises:
            GraphFileError: It is something else, of another version, damaged, or for another graph.
        """
        noun = cls._noun
        form = f"penstock-{noun}"
        if not isinstance(data, Mapping) or data.get("format") != form:
            raise GraphFileError(
                f"this is no {noun}: its 'format' is not {form!r}; pass what {cls.__name__}"
                f".to_dict() returned or {cls.__name__}.save() wrote"
            )
        if type(data.get("version")) is not int or data["version"] != cls._version:
            raise GraphFileError(
                f"this {noun} has version {data.get('version')!r} of the format and this Penstock "
                f"reads version {cls._version}: {noun} again"
            )
        content = {name: data[name] for name in data if name not in _HEADER}
        try:
            made, found = cls._decode(content), checksum(content)
        except DAMAGES as error:
            fault = f"{type(error).__name__}: {error}"
            raise GraphFileError(f"this {noun} is damaged ({fault}): {noun} again") from error
        if found != data.get("checksum"):
            raise GraphFileError(
                f"this {noun} is damaged: its content does not match its checksum"
                + ("" if "checksum" in data else ", which is missing")
                + f"; {noun} again"
            )
        if graph is not None:
            made.check_graph(graph)
        return made

    def check_graph(self, graph: StepGraph) -> None:
        """Raise `GraphFileError` where it belongs to another graph."""
        if graph.digest != self.graph_digest:
            raise GraphFileError(
                f"this {self._noun} is for the graph {self.graph_digest[:12]} and not for "
                f"{graph.digest[:12]}, the one given: {self._noun} again for this model, optimizer "
                "and batch"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON.

        Raises:
            OSError: It cannot be written; a file that was there is as it was.
        """
        replace_file(path, json.dumps(self.to_dict(), separators=(",", ":")))

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, graph: StepGraph | None = None) -> Self:
        """Read what `save` wrote; `graph` and errors as of `from_dict`."""
        try:
            data = json.loads(Path(path).read_bytes())
        except DAMAGES as error:
            raise GraphFileError(
                f"{os.fspath(path)!r} is no {cls._noun} or is damaged ({error}): {cls._noun} again"
            ) from error
        return cls.from_dict(data, graph=graph)
