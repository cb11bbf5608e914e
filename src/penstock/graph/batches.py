"""Content of a batch: tensors, and constants that are part of the step.

Tensors lie in dictionaries, lists, tuples and dataclasses, and are named by their paths
(`"batch.0.ids"`). Numbers, strings and None among them decide the course of the step, so a graph
holds them, and a batch with others is not of its form.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from penstock.compat.dispatch import no_dispatch
from penstock.compat.fake_tensors import FakeTensor

_CONSTANTS = (type(None), bool, numbers.Number, str, bytes, enum.Enum, torch.dtype, torch.device)


def tensors_in(batch: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a batch with their paths.

    Raises:
        TypeError: Something in it is neither a tensor, a constant, nor a container of these.
    """
    for path, leaf in _leaves(batch, name):
        if isinstance(leaf, torch.Tensor):
            yield path, leaf


def constants_in(batch: Any, name: str) -> dict[str, str]:
    """Return the constants of a batch by path, in the form that is compared.

    Example:
        >>> constants_in({"ids": torch.zeros(2), "scale": 0.5, "mask": None}, "batch")
        {'batch.scale': '0.5', 'batch.mask': 'None'}
    """
    return {
        path: repr(leaf)
        for path, leaf in _leaves(batch, name)
        if not isinstance(leaf, torch.Tensor)
    }


def describe_calls(batch: Any, accumulate: int | None) -> dict[str, str]:
    """Return how a model is called with a batch, or with each of its micro-batches, by path.

    Example:
        >>> describe_calls((torch.zeros(2), torch.zeros(2)), None)
        {'batch': 'model(*batch)'}
    """
    if accumulate is None:
        return {"batch": _describe_call(batch)}
    return {f"batch.{number}": _describe_call(part) for number, part in enumerate(batch)}


def _describe_call(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return "model(**batch)"
    return "model(*batch)" if isinstance(batch, tuple) else "model(batch)"


def is_full_mask(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of a batch looks like a mask of tokens that masks none of them."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.dim() != 2 or not tensor.numel():
        return False
    is_mask = tensor.dtype in (torch.bool, torch.int64, torch.int32) and tensor.numel() <= 2**20
    with no_dispatch():
        return is_mask and bool((tensor == 1).all())


def replace_tensors(
    batch: Any, name: str, replace: Callable[[torch.Tensor, str], torch.Tensor]
) -> Any:
    """Return a batch of the same form with other tensors: `replace(tensor, path)`."""
    if isinstance(batch, torch.Tensor):
        return replace(batch, name)
    parts = _parts(batch, name)
    if parts is None:
        return batch
    items = {key: replace_tensors(item, f"{name}.{key}", replace) for key, item in parts}
    if isinstance(batch, Mapping):
        return items
    if dataclasses.is_dataclass(batch):
        made = copy.copy(batch)
        for key, item in items.items():
            object.__setattr__(made, key, item)  # also of frozen ones
        return made
    is_named = isinstance(batch, tuple) and hasattr(batch, "_fields")
    return type(batch)(*items.values()) if is_named else type(batch)(items.values())


def _leaves(batch: Any, name: str) -> Iterator[tuple[str, Any]]:
    parts = _parts(batch, name)
    if parts is None:
        yield name, batch
        return
    for key, item in parts:
        yield from _leaves(item, f"{name}.{key}")


def _parts(value: Any, name: str) -> list[tuple[Any, Any]] | None:
    """Return keys and items of a container; None for a tensor or a constant."""
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(each.name, getattr(value, each.name)) for each in dataclasses.fields(value)]
    if isinstance(value, _CONSTANTS):
        return None
    raise TypeError(
        f"{name} is a {type(value).__name__}; a batch is made of tensors, numbers, strings and "
        "None, in dictionaries, lists, tuples and dataclasses: pass those "
        "(torch.from_numpy(array), data.to_dict())"
    )
