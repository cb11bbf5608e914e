"""Matrix Market files (Boisvert, Pozo and Remington 1996): places of a sparse matrix's entries."""

from __future__ import annotations

import gzip
import warnings
import zlib
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

_FIELDS = ("real", "double", "integer", "complex", "pattern", "unsigned-integer")
_SYMMETRIES = ("general", "symmetric", "skew-symmetric", "hermitian")


def read_pattern(path: Path) -> tuple[Tensor, int]:
    """Return the places of the entries, int64 of shape (2, count) from 0 on, and the rows.

    Entries off the diagonal of a file that is not general are there a second time, mirrored.

    Raises:
        ValueError: The file is of another format, damaged, or its matrix is not square.
    """
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            symmetry = _read_banner(file, path)
            num_rows, count = _read_sizes(file, path)
            places = _read_places(file, path, count)
    except (EOFError, UnicodeDecodeError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{path}: is no whole text, or none that gzip has packed: {error}"
        ) from error
    if count and (int(places.min()) < 1 or int(places.max()) > num_rows):
        wrong = int(((places < 1) | (places > num_rows)).any(1).argmax())
        raise ValueError(
            f"{path}: entry {wrong + 1} is at {tuple(places[wrong].tolist())}, but the matrix has "
            f"{num_rows} rows and columns"
        )
    edges = torch.from_numpy(np.ascontiguousarray(places.T)) - 1
    if symmetry != "general":
        mirrored = edges[:, edges[0] != edges[1]].flip(0)
        edges = torch.cat([edges, mirrored], dim=1)
    return edges, num_rows


def _read_banner(file: IO[str], path: Path) -> str:
    """Return the symmetry that the first line says."""
    words = file.readline().lower().split()
    is_known = (
        len(words) == 5
        and words[:3] == ["%%matrixmarket", "matrix", "coordinate"]
        and words[3] in _FIELDS
        and words[4] in _SYMMETRIES
    )
    if not is_known:
        raise ValueError(
            f"{path}: begins with {' '.join(words)!r}; expected "
            f"'%%MatrixMarket matrix coordinate', one of {', '.join(_FIELDS)}, and one of "
            f"{', '.join(_SYMMETRIES)}"
        )
    return words[4]


def _read_sizes(file: IO[str], path: Path) -> tuple[int, int]:
    """Return rows and entries."""
    for line in file:
        if line.strip() and not line.startswith("%"):
            break
    else:
        line = ""
    try:
        num_rows, num_columns, count = (int(word) for word in line.split())
    except ValueError:
        num_rows, num_columns, count = -1, -1, -1
    if min(num_rows, count) < 0 or num_rows != num_columns:
        raise ValueError(
            f"{path}: its line of sizes is {line.strip()!r}; expected rows, as many columns, and "
            "entries"
        )
    return num_rows, count


def _read_places(file: IO[str], path: Path, count: int) -> np.ndarray:
    """Return rows and columns of the entries, from 1 on."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "loadtxt: input contained no data")
            places = np.loadtxt(file, dtype=np.int64, comments="%", usecols=(0, 1), ndmin=2)
    except UnicodeDecodeError:  # which is a ValueError, and said as that of the whole file
        raise
    except ValueError as error:
        raise ValueError(f"{path}: an entry has no whole row and column: {error}") from error
    if len(places) != count:
        raise ValueError(f"{path}: has {len(places)} entries, but its line of sizes says {count}")
    return places
