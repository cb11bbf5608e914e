"""The step graph: one training step as operators, values and storages.

The bytes belong to storages. A value is one version of a storage: every operator that writes into
a storage ends one value and begins the next, so a value never changes, and an operator that needs
an old version says so. Views cost nothing and are no operators: an operator's arguments name a
value and the strides of its view (`TensorView`).
"""

from __future__ import annotations

import enum
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from penstock._lazy import cached_property
from penstock.errors import GraphFileError
from penstock.memory.files import replace_file

FORMAT = "penstock-step-graph"
VERSION = 1  # of the format; raise it when a field changes its meaning

DAMAGES = (
    *(KeyError, TypeError, ValueError, IndexError, AttributeError),
    *(OverflowError, RecursionError),  # numbers like 1e999, brackets without an end
)
"""Errors that reading the content of a damaged file may raise."""


def checksum(content: Any) -> str:
    """Return the SHA-256 of plain data, the same before and after a way through JSON."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class Kind(enum.StrEnum):
    """The kinds of content of a storage.

    Parameters, buffers of the model and the optimizer's state live from step to step.
    """

    PARAMETER = "parameter"
    BUFFER = "buffer"
    OPTIMIZER_STATE = "optimizer_state"
    INPUT = "input"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    SCALAR = "scalar"

    persistent: bool
    """True if the next step begins with the value that this step ends with."""

    def __init__(self, value: str) -> None:
        self.persistent = value in ("parameter", "buffer", "optimizer_state")

    __hash__ = str.__hash__  # that of `Enum` is a call in Python


class Phase(enum.StrEnum):
    """The part of a training step that an operator belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class TensorView(NamedTuple):
    """The view of a value that an operator gets.

    Attributes:
        value: Index of the value.
        dtype: Name of the dtype, as `"float32"`.
        shape: Sizes.
        stride: Strides, in elements.
        offset: Where the view begins in the storage, in elements.
    """

    value: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @property
    def end(self) -> int:
        """Elements from the beginning of the storage up to and with the view's last one."""
        extents = zip(self.shape, self.stride, strict=True)
        return self.offset + 1 + sum((size - 1) * stride for size, stride in extents)


def views_in(value: Any) -> Iterator[TensorView]:
    """Yield the views among arguments and in expressions, at any depth."""
    if isinstance(value, TensorView):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from views_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from views_in(item)


def map_views(function: Callable[[TensorView], TensorView], value: Any) -> Any:
    """Return arguments or an expression with other views, at any depth."""
    if isinstance(value, TensorView):
        return function(value)
    if isinstance(value, tuple):
        return tuple(map_views(function, item) for item in value)
    if isinstance(value, Mapping):
        return {key: map_views(function, item) for key, item in value.items()}
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A block of memory that tensors view.

    Attributes:
        name: Readable and unique: the name of the parameter, or of the operator that makes it.
        num_bytes: Bytes that it takes on the device. Python numbers, step counts, random states and
            what a step on a GPU makes on the CPU take none: plans leave them in host memory.
        kind: The kind of its content.
        initial: The value that it holds when the step begins; None if the step makes it.
        final: The value that has to be there when the step ends: of persistent storages the next
            step's `initial`, of results (the loss) the one that the caller reads. None if nothing
            of it outlives the step. Inputs whose final value is the initial one may lie anywhere
            between steps, like parameters; the others are on the device when a step begins.
    """

    name: str
    num_bytes: int
    kind: Kind
    initial: int | None = None
    final: int | None = None

    @property
    def persistent(self) -> bool:
        """True if the next step begins with the value that this step ends with, on any tier."""
        if self.kind.persistent:
            return True
        return self.initial is not None and self.initial == self.final and self.kind is Kind.INPUT


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator of the step.

    Attributes:
        name: Readable and unique.
        target: The function that runs, as `"aten.addmm.default"`.
        args: Arguments: `TensorView`, numbers, strings, None, and tuples of them, or mappings such
            as `{"dtype": "float32"}` where JSON has no word.
        kwargs: Keyword arguments, in the same form.
        outputs: Its results in order; None for a result without a use.
        reads: Values that must be on the device when it runs, without those of `mutates`.
        creates: Values that it makes in memory of their own.
        mutates: Pairs (old, new): it writes into the storage of `old`, which is then `new`. It
            needs `old` on the device, and `old` is gone afterwards.
        may_overwrite: Pairs (read, created): element for element the result may take the place of
            an operand whose live range ends here.
        after: Operators (indices) that have to run before it though it reads nothing of them, as
            the one that drew random numbers before it.
        phase: Forward, backward or optimizer.
        module: Qualified name of the module it belongs to; `""` if to none.
        flops: Floating-point operations (a multiply-add is two).
        bytes_read: Bytes that it reads.
        bytes_written: Bytes that it writes.
        workspace_bytes: Memory that it needs while it runs, beyond its operands and results.
        random: Whether it draws random numbers. Where it runs again, the generator is put back to
            its state of the first run, and afterwards to the state that it had before.
        recomputable: Whether running it again on the same values gives the same bits and changes
            nothing else.
        recompute_target: The function that recomputes it without repeating its mutations (a batch
            norm without its running statistics): it needs only `reads` and makes only `creates`.
            None: `target` itself.
        recompute_args: The arguments of `recompute_target`; None if that is None.
        seconds: Measured time; None where only a roofline can say.
    """

    name: str
    target: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[TensorView | None, ...] = ()
    reads: tuple[int, ...] = ()
    creates: tuple[int, ...] = ()
    mutates: tuple[tuple[int, int], ...] = ()
    may_overwrite: tuple[tuple[int, int], ...] = ()
    after: tuple[int, ...] = ()
    phase: Phase = Phase.FORWARD
    module: str = ""
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    workspace_bytes: int = 0
    random: bool = False
    recomputable: bool = True
    recompute_target: str | None = None
    recompute_args: tuple[Any, ...] | None = None
    seconds: float | None = None

    @property
    def needs(self) -> tuple[int, ...]:
        """Values that must be on the device when it runs."""
        return self.reads + tuple(old for old, _ in self.mutates)

    @property
    def makes(self) -> tuple[int, ...]:
        """Values that exist after it has run, and not before."""
        return self.creates + tuple(new for _, new in self.mutates)


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """A training step as a dataflow graph; plain data, without tensors.

    The order of `operators` is the program's own and is always a valid one.

    Example:
        >>> weight = Storage(name="w", num_bytes=8, kind=Kind.PARAMETER, initial=0, final=1)
        >>> update = Operator(name="add_", target="aten.add_.Tensor", mutates=((0, 1),))
        >>> graph = StepGraph(storages=(weight,), storage_of_value=(0, 0), operators=(update,))
        >>> graph.num_bytes(1)
        8

    Attributes:
        storages: The blocks of memory.
        storage_of_value: For each value the index of its storage.
        operators: In program order.
        loss: The view whose number the step returns; None where there is none.
        device: `"cpu"` or `"cuda"`: the device that its operators run on.
        tensors: The tensors that the step begins with, by name: `"model.<parameter or buffer>"`
            (each of its names, if weights are tied), `"optimizer.state.<parameter>.<key>"`,
            `"batch.<path>"` and `"optimizer.param_groups.<i>.<key>"` (Python numbers, storages of
            kind SCALAR).
        guards: Comparisons of those numbers that the program made, and their outcomes: with
            numbers that compare otherwise it would be another graph.
        metadata: Its origin (model, optimizer, versions), device of workspace: strings and numbers.
        captured: The record of its capture in this process; not saved.

    Raises:
        ValueError: The parts do not fit together; the message says which.
    """

    storages: tuple[Storage, ...]
    storage_of_value: tuple[int, ...]
    operators: tuple[Operator, ...]
    loss: TensorView | None = None
    device: str = "cpu"
    tensors: Mapping[str, TensorView] = field(default_factory=dict)
    guards: tuple[tuple[Any, bool], ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    captured: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        _validate(self)

    def storage(self, value: int) -> Storage:
        """Return the storage of a value."""
        return self.storages[self.storage_of_value[value]]

    def num_bytes(self, value: int) -> int:
        """Return the bytes of a value: those of its storage."""
        return self.storages[self.storage_of_value[value]].num_bytes

    @cached_property
    def workspace_bytes(self) -> int:
        """The most workspace that one of its operators needs."""
        return max((operator.workspace_bytes for operator in self.operators), default=0)

    @cached_property
    def producers(self) -> tuple[int | None, ...]:
        """The operator that makes each value; None for initial values."""
        producers: list[int | None] = [None] * len(self.storage_of_value)
        for index, operator in enumerate(self.operators):
            for value in operator.makes:
                producers[value] = index
        return tuple(producers)

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """The operators that need each value, in program order."""
        consumers: list[list[int]] = [[] for _ in self.storage_of_value]
        for index, operator in enumerate(self.operators):
            for value in dict.fromkeys(operator.needs):
                consumers[value].append(index)
        return tuple(map(tuple, consumers))

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """The operators that have to run before each one, in any order without recomputation.

        These are the operators that make the values it needs, those that need a value which it
        ends, and `after`.
        """
        predecessors = []
        for index, operator in enumerate(self.operators):
            found = {*operator.after, *(self.producers[value] for value in operator.needs)}
            found.update(*(self.consumers[old] for old, _ in operator.mutates))
            predecessors.append(tuple(sorted(found - {index, None})))
        return tuple(predecessors)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content, by which plans name their graph."""
        return checksum(self._content())

    @cached_property
    def derived(self) -> dict[tuple[int, bool], StepGraph]:
        """The graphs that `split` made of this one, by bytes of an operator and `products`."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Return the graph as plain data for JSON."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "digest": self.digest,
            "checksum": checksum([self.digest, dict(self.metadata)]),
            **self._content(),
            "metadata": dict(self.metadata),
        }

    def _content(self) -> dict[str, Any]:
        return {
            "storages": [_to_plain(storage) for storage in self.storages],
            "storage_of_value": list(self.storage_of_value),
            "operators": [_to_plain(operator) for operator in self.operators],
            "loss": _encode(self.loss),
            "device": self.device,
            "tensors": _encode(self.tensors),
            "guards": _encode(self.guards),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepGraph:
        """Return the graph of a result of `to_dict`, also after a way through JSON.

        Raises:
            GraphFileError: It is something else, of another version, or damaged.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise GraphFileError(
                f"this is no step graph: its 'format' is not {FORMAT!r}; pass what "
                "StepGraph.to_dict() returned or StepGraph.save() wrote"
            )
        if type(data.get("version")) is not int or data["version"] != VERSION:
            raise GraphFileError(
                f"this step graph has version {data.get('version')!r} of the format and this "
                f"Penstock reads version {VERSION}: capture the model again"
            )
        try:
            graph = cls(
                storages=tuple(
                    Storage(**{**plain, "kind": Kind(plain["kind"])}) for plain in data["storages"]
                ),
                storage_of_value=tuple(map(int, data["storage_of_value"])),
                operators=tuple(_operator(plain) for plain in data["operators"]),
                loss=_decode(data["loss"]),
                device=str(data["device"]),
                tensors={name: _decode(view) for name, view in data["tensors"].items()},
                guards=tuple(_decode(data["guards"])),
                metadata=dict(data["metadata"]),
            )
            sums = graph.digest, checksum([graph.digest, dict(graph.metadata)])
        except DAMAGES as error:
            raise GraphFileError(
                f"this step graph is damaged ({type(error).__name__}: {error}): capture the model "
                "again"
            ) from error
        if sums != (data.get("digest"), data.get("checksum")):
            raise GraphFileError(
                "this step graph is damaged: its content does not match its digest or checksum, or "
                "one of them is missing; capture the model again"
            )
        return graph

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the graph as JSON, whole or not at all; compressed if the name ends in `.gz`."""
        data = json.dumps(self.to_dict(), separators=(",", ":")).encode()
        replace_file(path, gzip.compress(data) if Path(path).suffix == ".gz" else data)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StepGraph:
        """Read a file that `save` wrote.

        Raises:
            GraphFileError: The file is something else, of another version, or damaged.
            OSError: It cannot be read.
        """
        data = Path(path).read_bytes()
        try:
            plain = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        except (*DAMAGES, zlib.error, OSError, EOFError) as error:
            raise GraphFileError(
                f"{os.fspath(path)!r} is no step graph or is damaged ({error}): capture the model "
                "again"
            ) from error
        return cls.from_dict(plain)


def _validate(graph: StepGraph) -> None:
    """Raise unless the operators can run in the program's own order."""
    num_values = len(graph.storage_of_value)
    for value, storage in enumerate(graph.storage_of_value):
        if not 0 <= storage < len(graph.storages):
            raise ValueError(f"value {value} belongs to storage {storage}, which does not exist")
    current: list[bool] = [False] * num_values  # readable now
    _validate_storages(graph, current)
    made = [*current]
    for index, operator in enumerate(graph.operators):
        for value in operator.needs:
            if not (0 <= value < num_values and current[value]):
                raise ValueError(f"operator {operator.name!r} needs value {value}, not there then")
        for earlier in operator.after:
            if not 0 <= earlier < index:
                raise ValueError(f"operator {operator.name!r} comes after {earlier}, a later one")
        for old, new in operator.mutates:
            current[old] = False
            if graph.storage_of_value[old] != graph.storage_of_value[new]:
                raise ValueError(f"operator {operator.name!r} mutates {old} into another storage")
        for read, created in operator.may_overwrite:
            if read not in operator.reads or created not in operator.creates:
                raise ValueError(f"operator {operator.name!r} may overwrite what it does not have")
        for value in operator.makes:
            if not 0 <= value < num_values or made[value]:
                raise ValueError(f"operator {operator.name!r} makes value {value} once more")
            current[value] = made[value] = True
    if not all(made):
        raise ValueError(f"value {made.index(False)} is made by no operator")
    for storage in graph.storages:
        if storage.final is not None and not current[storage.final]:
            raise ValueError(f"storage {storage.name!r} ends as a value that is overwritten")


def _validate_storages(graph: StepGraph, current: list[bool]) -> None:
    """Check each storage, and mark its initial value as current."""
    num_values = len(current)
    for index, storage in enumerate(graph.storages):
        if storage.num_bytes < 0:
            raise ValueError(f"storage {storage.name!r} has {storage.num_bytes} bytes")
        for value in (storage.initial, storage.final):
            if value is not None and not (
                0 <= value < num_values and graph.storage_of_value[value] == index
            ):
                raise ValueError(f"storage {storage.name!r} names value {value}, not one of its")
        if storage.persistent and (storage.initial is None or storage.final is None):
            raise ValueError(f"storage {storage.name!r} is persistent: it needs initial and final")
        if storage.initial is not None:
            current[storage.initial] = True


def _to_plain(item: Storage | Operator) -> dict[str, Any]:
    """Return the fields by name, without those that have their default."""
    named = ((name, getattr(item, name), default) for name, default in _DEFAULTS[type(item)])
    return {name: _encode(value) for name, value, default in named if value != default}


_DEFAULTS = {
    kind: [
        (each.name, {} if each.default_factory is not MISSING else each.default)
        for each in fields(kind)
    ]
    for kind in (Storage, Operator)
}
_PLAIN = frozenset({int, str, float, bool, type(None)})


def _encode(value: Any) -> Any:
    if type(value) in _PLAIN:  # most are
        return value
    if isinstance(value, TensorView):
        return {"view": [value.value, value.dtype, [*value.shape], [*value.stride], value.offset]}
    if isinstance(value, tuple | list):
        return [*value] if _PLAIN.issuperset(map(type, value)) else [*map(_encode, value)]
    if isinstance(value, Mapping):
        return {str(key): _encode(item) for key, item in value.items()}
    return value.value if isinstance(value, enum.StrEnum) else value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"view"}:
            index, dtype, shape, stride, offset = value["view"]
            return TensorView(index, dtype, tuple(shape), tuple(stride), offset)
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_decode(item) for item in value)
    return value


def _operator(plain: Mapping[str, Any]) -> Operator:
    decoded = {key: _decode(value) for key, value in plain.items()}
    return Operator(**{**decoded, "phase": Phase(decoded.get("phase", Phase.FORWARD))})
