"""Sources of operators: matrices in any tier, functions, and objects of other libraries."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.memory import Ledger
from penstock.spectral._native import KINDS
from penstock.spectral._operator import (
    CallableOperator,
    DenseOperator,
    LinearOperator,
    SparseOperator,
)
from penstock.spectral._tiles import (
    DenseSource,
    FileList,
    SparseSource,
    TiledOperator,
    TileSource,
)
from penstock.unified import UnifiedTensor, unify

_ACCEPTED = (
    "a square matrix (a tensor, dense or in CSR or COO, a unified table, a NumPy array, a SciPy "
    "sparse matrix, the path of a table), penstock.spectral.CSR, "
    "penstock.spectral.SymmetricOperator, or an object with shape, dtype and matvec"
)


@dataclasses.dataclass(frozen=True, eq=False)
class CSR:
    """A sparse matrix in compressed rows, whose lists may be in memory or in files.

    Example:
        >>> import torch
        >>> offsets, columns = torch.tensor([0, 2, 4]), torch.tensor([0, 1, 0, 1])
        >>> matrix = CSR(offsets, columns, torch.tensor([2.0, 1.0, 1.0, 2.0]), (2, 2))
        >>> penstock.spectral.eigs(matrix, 1).values
        tensor([3.], dtype=torch.float64)

    Args:
        offsets: Offsets of the rows, (num_rows + 1,), int32 or int64: a tensor, a table or a path.
        columns: Columns of the entries, (num_entries,), of the same dtype as the offsets: a tensor,
            a table in memory, or the path of a list in a file (".npy" or "x.safetensors#name").
        values: Values of the entries, (num_entries,), likewise.
        shape: Rows and columns. Of several ranks, the rows are those of this rank.
    """

    offsets: Any
    columns: Any
    values: Any
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        if not isinstance(self.shape, Sequence) or len(self.shape) != 2:
            raise TypeError(f"shape={self.shape!r}: expected (rows, columns)")


@dataclasses.dataclass(frozen=True, eq=False)
class SymmetricOperator:
    """A symmetric or Hermitian operator that is given by a function.

    Example:
        >>> import torch
        >>> diagonal = torch.arange(1.0, 101.0, dtype=torch.float64)
        >>> operator = SymmetricOperator(lambda v: diagonal * v, 100, dtype=torch.float64)
        >>> penstock.spectral.eigs(operator, 1).values
        tensor([100.], dtype=torch.float64)

    Args:
        function: Returns the product with a vector (n,), of the same shape.
        length: Elements n of a vector.
        dtype: Dtype of the vectors: float32, float64, complex64 or complex128.
        device: Device of the vectors.
    """

    function: Callable[[Tensor], Tensor]
    length: int
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Conditions under which an operator is opened.

    Attributes:
        budget_bytes: The most bytes for tiles of a matrix in a file, and for reserved vectors; None
            for as many as there are.
        num_reserved: Vectors for which room is left in the budget.
        ledger: Account of bytes.
        num_columns: Columns of the matrix, where its rows are those of one rank; None: as many as
            rows.
    """

    budget_bytes: int | None
    num_reserved: int
    ledger: Ledger
    num_columns: int | None = None

    def tile(self, source: TileSource) -> TiledOperator:
        """Return the operator of a matrix in a file."""
        return TiledOperator(
            source,
            budget_bytes=self.budget_bytes,
            num_reserved=self.num_reserved,
            ledger=self.ledger,
            device=torch.device("cpu"),
        )


def as_operator(source: Any, around: Surroundings) -> LinearOperator:
    """Return the operator of a source.

    Args:
        source: What `eigs` takes.
        around: Budget, ledger and ranks.

    Raises:
        TypeError: It is no source.
        ValueError: It is not square.
    """
    if isinstance(source, LinearOperator):
        return source
    if isinstance(source, SymmetricOperator):
        device, dtype = torch.device(source.device), check_dtype(source.dtype)
        return CallableOperator(source.function, int(source.length), dtype, device)
    source = read_source(source)
    if isinstance(source, CSR):
        return _read_csr(source, around)
    if isinstance(source, Tensor):
        return _read_matrix(source, around)
    if hasattr(source, "shape") and hasattr(source, "dtype"):
        return _read_object(source)
    raise TypeError(f"operator: got {type(source).__name__}; expected {_ACCEPTED}")


def read_source(source: Any) -> Any:
    """Return a table for a path, a tensor for an array, `CSR` for SciPy's matrix, or the source.

    Raises:
        TypeError: The array is masked, or its dtype is none of torch's.
    """
    if isinstance(source, str | os.PathLike):
        return unify(source, device="cpu", cache=0)
    if isinstance(source, np.ndarray):
        return _read_array(source)
    if hasattr(source, "tocsr"):
        matrix = source.tocsr()
        lists = (matrix.indptr, matrix.indices, matrix.data)
        return CSR(*map(_read_array, lists), shape=matrix.shape)
    return source


def _read_array(array: np.ndarray) -> Tensor:
    """Return an array as a tensor, in its memory unless strides or byte order forbid it."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("operator: is a masked array; fill it first, as with array.filled(0)")
    native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    with warnings.catch_warnings():
        # Operators are read only, and so may arrays be.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        try:
            return torch.from_numpy(native)
        except TypeError as error:
            raise TypeError(
                f"operator: dtype is NumPy's {array.dtype}, which torch does not have; convert it"
            ) from error


def _read_matrix(source: Tensor, around: Surroundings) -> LinearOperator:
    _check_shape(tuple(source.shape), around.num_columns)
    if source.layout == torch.sparse_coo:
        if source.dense_dim():
            raise TypeError("operator: got rows that are dense; convert it to CSR or a dense one")
        source = source.detach().coalesce().to_sparse_csr()
    if source.layout == torch.sparse_csr:
        source = source.detach()
        lists = (source.crow_indices(), source.col_indices(), source.values())
        shape = (source.shape[0], source.shape[1])
        return _read_csr(CSR(*lists, shape=shape), around)
    if source.layout != torch.strided:
        raise TypeError(f"operator: got a tensor in {source.layout}; convert it to CSR")
    check_dtype(source.dtype)
    if isinstance(source, UnifiedTensor):
        if source.report().tier == "file":
            return around.tile(DenseSource(unify(source, device="cpu", cache=0)))
        source = source.as_subclass(Tensor)
    return DenseOperator(source.detach())


def _read_csr(source: CSR, around: Surroundings) -> LinearOperator:
    shape = _check_shape(source.shape, around.num_columns)
    offsets, columns, values = read_lists(source)
    if isinstance(columns, FileList) and isinstance(values, FileList):
        return around.tile(SparseSource(offsets, columns, values, shape[1]))
    assert isinstance(columns, Tensor) and isinstance(values, Tensor)
    return SparseOperator(offsets, columns, values)


def read_lists(source: CSR) -> tuple[Tensor, Tensor | FileList, Tensor | FileList]:
    """Return offsets, columns and values of a matrix, of which the last two are of one kind.

    Raises:
        TypeError: A list is none, or has a dtype that is not supported.
        ValueError: They do not belong together.
    """
    num_rows, num_columns = source.shape
    offsets = _as_list(source.offsets, "offsets", in_memory=True)
    columns = _as_list(source.columns, "columns")
    values = _as_list(source.values, "values")
    assert isinstance(offsets, Tensor)
    _check_indices(offsets, "offsets")
    _check_indices(columns, "columns")
    count = columns.count if isinstance(columns, FileList) else len(columns)
    num_values = values.count if isinstance(values, FileList) else len(values)
    if len(offsets) != num_rows + 1:
        raise ValueError(
            f"operator: there are {len(offsets)} offsets, but there must be {num_rows + 1}, from 0 "
            f"to {count}"
        )
    if int(offsets[0]) or int(offsets[-1]) != count:
        raise ValueError(
            f"operator: offsets go from {int(offsets[0])} to {int(offsets[-1])}, but must go from "
            f"0 to {count}"
        )
    if num_values != count or bool((offsets.diff() < 0).any()):
        raise ValueError(
            f"operator: {count} columns and {num_values} values; there must be as many, and "
            "offsets must not fall"
        )
    check_dtype(values.dtype)
    if isinstance(columns, FileList) or isinstance(values, FileList):
        if not (isinstance(columns, FileList) and isinstance(values, FileList)):
            raise TypeError("operator: columns and values must both be paths, or both tensors")
        return offsets, columns, values
    if count and not 0 <= int(columns.min()) <= int(columns.max()) < num_columns:
        raise ValueError(f"operator: columns must lie from 0 to {num_columns - 1}")
    index = columns.dtype if count <= torch.iinfo(columns.dtype).max else torch.int64
    return offsets.to(index), columns.to(index), values


def _check_indices(found: Tensor | FileList, name: str) -> None:
    if found.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"operator: {name} are {found.dtype}, but must be int32 or int64")


def _as_list(source: Any, name: str, *, in_memory: bool = False) -> Tensor | FileList:
    if isinstance(source, str | os.PathLike):
        if not in_memory:
            return FileList.open(source)
        source = unify(source, device="cpu", cache=0)
    if isinstance(source, UnifiedTensor):
        if source.report().tier == "host":
            return source.as_subclass(Tensor)
        if not in_memory:
            raise TypeError(
                f"operator: {name} is a table in a file, whose single numbers are slow to read; "
                "give its path instead"
            )
        return source.gather_rows(torch.arange(len(source), device="cpu"))
    if not isinstance(source, Tensor) or source.dim() != 1:
        found = tuple(source.shape) if isinstance(source, Tensor) else type(source).__name__
        raise TypeError(
            f"operator: {name} is {found}; expected a tensor of one dimension, or a path"
        )
    # C++ reads the memory, which has other numbers than a tensor that is conjugated lazily.
    return source.detach().contiguous().resolve_conj().resolve_neg()


def _read_object(source: Any) -> LinearOperator:
    """Return the operator of an object with `shape`, `dtype` and a product with vectors."""
    shape = _check_shape(tuple(source.shape), None)
    dtype = source.dtype
    if not isinstance(dtype, torch.dtype):
        try:
            dtype = torch.from_numpy(np.empty(0, dtype)).dtype
        except TypeError as error:
            raise TypeError(f"operator: dtype {dtype} is not one of torch's") from error
    device = torch.device(getattr(source, "device", "cpu"))
    if callable(source):
        function: Any = source
        return CallableOperator(function, shape[0], check_dtype(dtype), device)
    if not hasattr(source, "matvec"):
        raise TypeError(f"operator: got {type(source).__name__}; expected {_ACCEPTED}")

    def multiply(vector: Tensor) -> Tensor:  # of NumPy's arrays
        return _read_array(np.asarray(source.matvec(vector.numpy())))

    return CallableOperator(multiply, shape[0], check_dtype(dtype), device)


def _check_shape(shape: Sequence[int], num_columns: int | None) -> tuple[int, int]:
    if len(shape) != 2 or (shape[0] != shape[1] if num_columns is None else False):
        raise ValueError(
            f"operator: has shape {tuple(shape)}, but must be square; for a matrix of other shapes "
            "there is svds"
        )
    if num_columns is not None and shape[1] != num_columns:
        raise ValueError(f"operator: has {shape[1]} columns, but the ranks have {num_columns} rows")
    return shape[0], shape[1]


def check_dtype(dtype: torch.dtype, name: str = "operator") -> torch.dtype:
    if dtype not in KINDS:
        raise TypeError(
            f"{name}: dtype is {dtype}, but must be float32, float64, complex64 or complex128; "
            "convert it"
        )
    return dtype
