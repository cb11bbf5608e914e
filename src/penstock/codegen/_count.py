"""Bytes that Triton kernels ask of memory, counted while Triton's interpreter runs them.

What a kernel moves is its reason to exist, and can be checked without a GPU: the interpreter does
every load, store and atomic of a kernel through a few functions, which are wrapped here. They are
private to Triton, so each is looked for, with its arguments, before anything is counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

from penstock.errors import PenstockError

_INTERPRETER = {
    "create_masked_load": ("ptrs", "mask"),
    "create_masked_store": ("ptrs", "value", "mask"),
    "create_atomic_rmw": ("rmwOp", "ptr", "val", "mask"),
    "create_atomic_cas": ("ptr", "cmp", "val"),
}
"""Methods of `InterpreterBuilder`, with the names of their first arguments. Accesses without a
mask, through block pointers and through descriptors end in the first two."""
_THROUGH_MASKED = (
    "create_load",
    "create_store",
    "create_descriptor_load",
    "create_descriptor_store",
)
_counting = threading.RLock()  # the interpreter is one for all threads


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByteCount:
    """Bytes that kernels ask for; each lane of an access counts that its mask lets through.

    The closed forms of Penstock's kernels are of this class too, and equal to what is counted.

    Attributes:
        loaded_bytes: Of loads.
        stored_bytes: Of stores.
        atomic_bytes: Of atomic operations, each of which both reads and writes them.
        num_launches: Kernels launched, those on an empty grid included.
        table_bytes: Of the loaded bytes, those of tables that programs find their work by: known to
            closed forms alone, and not compared.
    """

    loaded_bytes: int
    stored_bytes: int
    atomic_bytes: int = 0
    num_launches: int = 1
    table_bytes: int = dataclasses.field(default=0, compare=False)

    @property
    def requested_bytes(self) -> int:
        """Bytes of all accesses; an atomic operation reads and writes its own."""
        return self.loaded_bytes + self.stored_bytes + 2 * self.atomic_bytes

    def __add__(self, other: ByteCount) -> ByteCount:
        """Return the bytes of both."""
        return ByteCount(
            loaded_bytes=self.loaded_bytes + other.loaded_bytes,
            stored_bytes=self.stored_bytes + other.stored_bytes,
            atomic_bytes=self.atomic_bytes + other.atomic_bytes,
            num_launches=self.num_launches + other.num_launches,
            table_bytes=self.table_bytes + other.table_bytes,
        )

    def to_dict(self) -> dict[str, int]:
        """Return the fields as numbers that JSON has."""
        return dataclasses.asdict(self)


Visit = Callable[[str, Any, int], None]
"""Takes an access: `"loaded"`, `"stored"` or `"atomic"`, its addresses, and the bytes of each."""


def count_bytes(kernel_call: Callable[[], object], *, visit: Visit | None = None) -> ByteCount:
    """Count the bytes that Triton kernels load and store, under Triton's interpreter.

    These are requests: what a cache answers counts as well, and an element that two programs load
    counts twice. Loads of a scalar count like those of a block. Only the kernels of `kernel_call`
    may run meanwhile.

    Example:
        >>> count = count_bytes(lambda: add[(grid,)](x, y, out, n, BLOCK=128))  # doctest: +SKIP
        >>> count.loaded_bytes  # two float32 vectors of 1000  # doctest: +SKIP
        8000

    Args:
        kernel_call: A function without arguments that launches kernels, on tensors of any device.
            Triton must have been imported with the environment variable `TRITON_INTERPRET=1`.
        visit: Called for each access of a program, in order, with `"loaded"`, `"stored"` or
            `"atomic"`, the addresses (uint64 array) of the lanes that are let through, and the
            bytes of each.

    Returns:
        The bytes of all its launches.

    Raises:
        PenstockError: Triton is missing or does not interpret, its interpreter has other functions
            than those that are counted, or a kernel was compiled.
    """
    totals: dict[str, int] = dict.fromkeys(("loaded", "stored", "atomic", "launches"), 0)
    with _counting, _count_into(_find_interpreter(), totals, visit):
        kernel_call()
    return ByteCount(
        loaded_bytes=totals["loaded"],
        stored_bytes=totals["stored"],
        atomic_bytes=totals["atomic"],
        num_launches=totals["launches"],
    )


def _find_interpreter() -> Any:
    """Import Triton's interpreter and check that it has what is wrapped.

    Raises:
        PenstockError: It is not there, not used, or another than the one known.
    """
    try:
        import triton
        from triton import knobs
        from triton.runtime import interpreter
    except ImportError as error:
        raise PenstockError(
            "count_bytes needs Triton and its interpreter, which could not be imported: install "
            "triton>=3.6"
        ) from error
    if not knobs.runtime.interpret:
        raise PenstockError(
            "count_bytes counts under Triton's interpreter, which is off: set TRITON_INTERPRET=1 "
            "in the environment before Triton is imported"
        )
    builder = getattr(interpreter, "InterpreterBuilder", None)
    wrong = [
        f"{name}({', '.join(names)})"
        for name, names in _INTERPRETER.items()
        if _first_arguments(builder, name, len(names)) != names
    ]
    wrong += [name for name in _THROUGH_MASKED if not callable(getattr(builder, name, None))]
    wrong += [] if callable(getattr(interpreter, "GridExecutor", None)) else ["GridExecutor"]
    if wrong:
        raise PenstockError(
            f"the interpreter of Triton {triton.__version__} has no {', no '.join(wrong)}: "
            "count_bytes knows that of Triton 3.6"
        )
    return interpreter


@functools.lru_cache(64)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return a signature, which takes as long to make as a small kernel to run."""
    return inspect.signature(function)


def _first_arguments(builder: Any, name: str, count: int) -> tuple[str, ...]:
    function = getattr(builder, name, None)
    if not inspect.isfunction(function):
        return ()
    return tuple(_signature(function).parameters)[1 : count + 1]


@contextlib.contextmanager
def _count_into(interpreter: Any, totals: dict[str, int], visit: Visit | None) -> Iterator[None]:
    """Wrap the interpreter's accesses and launches, and restore them at the end."""
    from triton.runtime.jit import JITFunction

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor

    def add(kind: str, pointers: Any, mask: Any) -> None:
        lanes = pointers.data.size if mask is None else _count_lanes(pointers, mask)
        bits = pointers.get_element_ty().primitive_bitwidth
        item_bytes = max(1, bits // 8)  # a bool takes a byte
        totals[kind] += lanes * item_bytes
        if visit is not None:
            visit(kind, _find_addresses(pointers, mask), item_bytes)

    # Each with what it does before the interpreter's own.
    wrapped = {
        (builder, "create_masked_load"): lambda self, ptrs, mask, *_: add("loaded", ptrs, mask),
        (builder, "create_masked_store"): lambda self, ptrs, value, mask, *_: add(
            "stored", ptrs, mask
        ),
        (builder, "create_atomic_rmw"): lambda self, op, ptr, value, mask, *_: add(
            "atomic", ptr, mask
        ),
        (builder, "create_atomic_cas"): lambda self, ptr, *_: add("atomic", ptr, None),
        (executor, "__call__"): lambda *_, **__: totals.update(launches=totals["launches"] + 1),
        (JITFunction, "run"): _refuse_compiled,
    }
    with contextlib.ExitStack() as stack:
        for (owner, name), before in wrapped.items():
            original = getattr(owner, name)
            setattr(owner, name, _run_before(original, before))
            stack.callback(setattr, owner, name, original)
        yield


def _refuse_compiled(*_: Any, **__: Any) -> None:
    raise PenstockError(
        "a kernel is compiled, where count_bytes counts interpreted ones: set TRITON_INTERPRET=1 "
        "before the module of the kernel is imported"
    )


def _run_before(function: Callable[..., Any], before: Callable[..., None]) -> Callable[..., Any]:
    signature = _signature(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            bound = signature.bind(*args, **kwargs)
            before(*bound.args, **bound.kwargs)
        else:  # binding takes longer than counting
            before(*args)
        return function(*args, **kwargs)

    return run


def _count_lanes(pointers: Any, mask: Any) -> int:
    """Return the lanes of an access that its mask lets through."""
    import numpy as np

    return int(np.count_nonzero(_find_lanes(pointers, mask)))


def _find_addresses(pointers: Any, mask: Any) -> Any:
    """Return the addresses of an access that its mask lets through, in the order of its lanes."""
    return pointers.data.ravel() if mask is None else pointers.data[_find_lanes(pointers, mask)]


def _find_lanes(pointers: Any, mask: Any) -> Any:
    """Return the mask of an access with the shape of its addresses.

    Args:
        pointers: The interpreter's handle of addresses.
        mask: A handle of bools; from block pointers and descriptors the bools themselves.
    """
    import numpy as np

    lanes = mask if isinstance(mask, np.ndarray) else mask.data
    return np.broadcast_to(lanes, pointers.data.shape)
