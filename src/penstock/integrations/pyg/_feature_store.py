"""Tables as PyG's `FeatureStore`: features by group and name, gathered row by row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch_geometric.data import FeatureStore, TensorAttr

from penstock.unified import UnifiedTensor, unify


class UnifiedFeatureStore(FeatureStore):
    """Features in tables, in memory or in files, for PyG's loaders and for your own.

    Example:
        >>> store = UnifiedFeatureStore({("paper", "x"): torch.rand(100, 8)})
        >>> store["paper", "x", torch.tensor([3, 1])].shape
        torch.Size([2, 8])

    Args:
        features: Features by (group, name), such as `("paper", "x")`; the group is a node type, an
            edge type or None. Each is a table, or another source of `penstock.unify`: a tensor, an
            array, the path of a file.

    Raises:
        TypeError: A key is no pair.
    """

    def __init__(self, features: Mapping[tuple[Any, str], Any] | None = None) -> None:
        super().__init__()
        self._tables: dict[tuple[Any, str], UnifiedTensor] = {}
        for key, source in (features or {}).items():
            if not isinstance(key, tuple) or len(key) != 2:
                raise TypeError(f"features: expected keys (group, name), got {key!r}")
            self._tables[key] = _as_table(source)

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        """Put a new table, or write rows of the one that is there; return False if none is."""
        if attr.index is None:
            self._tables[_key(attr)] = _as_table(tensor)
            return True
        table = self._tables.get(_key(attr))
        if table is None:
            return False
        rows = torch.as_tensor(tensor, dtype=table.dtype)
        index = attr.index
        if isinstance(index, slice):  # a table in a file is written by row numbers
            index = torch.arange(*index.indices(len(table)))
        elif isinstance(index, int):
            index, rows = torch.tensor([index]), rows[None]
        with torch.no_grad():
            table[index] = rows
        return True

    def update_tensor(self, tensor: Any, *args: Any, **kwargs: Any) -> bool:
        """Write rows of a table, or replace a table; returns whether it was there.

        Args:
            tensor: Rows, or a whole table.
            *args: Arguments of `TensorAttr`: the group, the name and the index.
            **kwargs: Arguments of `TensorAttr` by name.
        """
        attr: Any = self._tensor_attr_cls.cast(
            *args, **kwargs
        )  # PyG's own would drop the whole table
        return _key(attr) in self._tables and self.put_tensor(tensor, attr)

    def _get_tensor(self, attr: TensorAttr) -> torch.Tensor:
        table = self._tables.get(_key(attr))
        if table is None:
            known = ", ".join(map(repr, self._tables)) or "nothing"
            raise KeyError(f"no features {_key(attr)!r} in the store; it has {known}")
        index = attr.index
        if index is None or (isinstance(index, slice) and index == slice(None)):
            return table
        return table[index]

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        return self._tables.pop(_key(attr), None) is not None

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        if _key(attr) not in self._tables:
            return None
        return tuple(self._get_tensor(attr).shape)

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """Return group and name of each table; a loader fills in the index."""
        return [TensorAttr(group, name) for group, name in self._tables]

    def __repr__(self) -> str:
        parts = ", ".join(f"{key!r}: {tuple(t.shape)}" for key, t in self._tables.items())
        return f"{type(self).__name__}({{{parts}}})"


def _key(attr: TensorAttr) -> tuple[Any, str]:
    return attr.group_name, cast("str", attr.attr_name)


def _as_table(source: Any) -> UnifiedTensor:
    return source if isinstance(source, UnifiedTensor) else unify(source)
