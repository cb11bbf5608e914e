"""A table as a tensor: what ordinary code does with it, and where that runs.

A `UnifiedTensor` *is* a tensor over the table's memory, so whatever PyTorch can do with a tensor it
can do with this one, without a copy. `__torch_function__` takes over where a table is different:
rows are gathered by kernels made for that, their gradients are sparse, and what would copy the
whole table raises. `_placement.py` has the list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from penstock.unified._tables import HostTable


class UnifiedTensor(torch.Tensor):
    """A table of shape (num_rows, *row), whose rows are gathered from where they lie.

    Made by `penstock.unified.unify` and `penstock.unified.empty`.
    """

    _table: HostTable

    @staticmethod
    def _over(table: HostTable, *, requires_grad: bool = False) -> UnifiedTensor:
        """A tensor over `table`; all of them share its version counter."""
        tensor = torch.Tensor._make_subclass(UnifiedTensor, table.rows, requires_grad)
        tensor._table = table
        return tensor

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        from penstock.unified._placement import HANDLERS

        handler = HANDLERS.get(func)
        with torch._C.DisableTorchFunctionSubclass():
            if handler is not None:
                return handler(func, *args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    def gather_rows(self, index: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of the table, copied side by side.

        Example:
            >>> from penstock.unified import unify
            >>> table = unify(torch.arange(12.0).view(4, 3))
            >>> table.gather_rows(torch.tensor([2, 0]))
            tensor([[6., 7., 8.],
                    [0., 1., 2.]])

        Args:
            index: integers of any shape, from 0 to num_rows - 1.
            out: where the rows go, of shape (*index.shape, *row) and the table's dtype; not where
                gradients are recorded.

        Returns:
            `out`, or a new tensor. Its gradient reaches the table as a sparse tensor.

        Raises:
            IndexError: an index is out of range; the message names it.
            TypeError: `index` does not hold integers, or `out` has another dtype.
            ValueError: `out` has another shape.
        """
        from penstock.unified._gather import gather

        with torch._C.DisableTorchFunctionSubclass():
            return gather(self, index, out=out)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise copies_everything(self, "copy.deepcopy", "share it, or copy it with unify(u.cpu())")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """By content, as for `torch.save`; processes share tables through multiprocessing."""
        with torch._C.DisableTorchFunctionSubclass():
            return rebuild_from_content, (self._table.rows, self.requires_grad)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        parts = f"shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}'"
        return f"UnifiedTensor({parts}{', requires_grad=True' if self.requires_grad else ''})"


def copies_everything(table: torch.Tensor, operation: str, remedy: str) -> TypeError:
    """The error of an operation that would copy a whole table behind its user's back."""
    from penstock.units import format_bytes

    num_bytes = table.numel() * table.element_size()
    return TypeError(
        f"{operation} would copy the whole table of {format_bytes(num_bytes)}: {remedy}."
    )


def rebuild_from_content(rows: torch.Tensor, requires_grad: bool) -> UnifiedTensor:
    """A new table with the content of `rows`."""
    table = HostTable.empty(tuple(rows.shape), rows.dtype)
    table.rows.copy_(rows)
    return UnifiedTensor._over(table, requires_grad=requires_grad)
