"""The basis: orthonormal vectors on the device up to a budget, the others in a lower tier.

A step uses each vector once, and steps follow each other, so the order of uses is a cycle. What
Belady's rule evicts on a cycle is the vector that was just used: a fixed set stays resident, and
the others stream past through two buffers. Vectors that stay resident are never written to the
file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from penstock.memory import ExtentFile, Ledger, Tier
from penstock.memory.pages import DIRECT_IO_BYTES
from penstock.spectral._lower import make_lower, make_workspace
from penstock.spectral._native import rotate_rows

_CHUNK_BYTES = 4 * 2**20  # of a product in float64, or of rows that are rotated
_ENOUGH = 0.5  # of its norm that a vector keeps, or it is orthogonalised once more


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of Gram matrices: float64 or complex128."""
    return torch.complex128 if dtype.is_complex else torch.float64


def gram(left: Tensor, right: Tensor) -> Tensor:
    """Return `left right^H`, (a, b), in float64 or complex128, of vectors of any precision.

    Args:
        left: Vectors, (a, n).
        right: Vectors, (b, n).
    """
    # G_ij = conj(l_i) r_j, summed in float64
    wide = wide_dtype(left.dtype)
    if left.dtype == wide:
        return left.conj() @ right.T
    total = torch.zeros(len(left), len(right), dtype=wide, device=left.device)
    width = max(1, _CHUNK_BYTES // (8 * max(1, len(left) + len(right))))
    for begin in range(0, left.shape[1], width):
        part = slice(begin, begin + width)
        total += left[:, part].to(wide).conj() @ right[:, part].to(wide).T
    return total


class Basis:
    """Orthonormal vectors of n elements, of which the first `num_resident` are on the device.

    Args:
        capacity: Vectors that it has room for.
        length: Elements of a vector.
        dtype: Their dtype.
        device: The device tier.
        num_resident: Vectors that are kept there.
        file: File of the others; None: host memory.
        ledger: Account of what is resident and what moves.
        reduce: Sums a tensor over ranks, in place.
        accuracy: Components in the basis that new vectors may keep; 0: as few as rounding allows.

    Raises:
        StoreFullError: The file has no room for all vectors.
    """

    def __init__(
        self,
        capacity: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_resident: int,
        file: ExtentFile | None,
        ledger: Ledger,
        reduce: Callable[[Tensor], Tensor],
        accuracy: float = 0.0,
    ) -> None:
        # A sweep leaves rounding of what the vector was before it.
        self.enough = min(_ENOUGH, torch.finfo(dtype).eps / max(accuracy, 1e-300))
        self.count, self.capacity, self.length = 0, capacity, length
        self.dtype, self.device, self.reduce = dtype, device, reduce
        self.num_resident = min(num_resident, capacity)
        self._ledger = ledger
        self._gram = torch.zeros(
            0, 0, dtype=wide_dtype(dtype), device="cpu"
        )  # of the last rotation's vectors
        self._resident = make_workspace(self.num_resident, length, dtype, device)
        self._lower = make_lower(capacity - self.num_resident, length, dtype, device, file, ledger)
        self._device_bytes = self.num_resident * length * dtype.itemsize
        ledger.add(Tier.DEVICE, self._device_bytes)

    def append(self, vectors: Tensor) -> None:
        """Append vectors, (b, n), which are orthonormal to all."""
        for vector in vectors:
            if self.count < self.num_resident:
                self._resident[self.count].copy_(vector)
            else:
                self._lower.write(self.count - self.num_resident, vector)
            self.count += 1

    def fetch(self, index: int) -> Tensor:
        """Return a vector on the device, (1, n), valid until another one is read or appended."""
        if index < self.num_resident:
            return self._resident[index : index + 1]
        return self._lower.fetch(index - self.num_resident)[None]

    def orthogonalize(self, w: Tensor) -> Tensor:
        """Subtract from vectors, in place, what they have in common with all of the basis.

        The newest vectors come first: their share is the large one, and what its rounding leaves in
        the older ones is gone after the same sweep. A vector that lost much is swept once more
        (Daniel, Gragg, Kaufman and Stewart 1976).

        Args:
            w: Vectors, (b, n).

        Returns:
            Coefficients V^H w, (count, b), in float64 or complex128.
        """
        coefficients = torch.zeros(self.count, len(w), dtype=wide_dtype(w.dtype), device=w.device)
        newest = min(2 * len(w), max(0, min(self.count, self.num_resident)))
        if newest and self.count <= self.num_resident:
            group = slice(self.count - newest, self.count)
            self._subtract(self._resident[group], w, coefficients[group])
        before = self.norms(w)
        for _ in range(3):
            self._sweep(w, coefficients)
            after = self.norms(w)
            if bool((after > self.enough * before).all()) or bool((after == 0).any()):
                break
            before = after
        return coefficients

    def orthogonalize_locally(self, w: Tensor, num_newest: int = 2) -> Tensor:
        """Subtract from a vector, in place, the components in the newest of the basis, twice.

        Args:
            w: Vector, (1, n).
            num_newest: Vectors of the basis.

        Returns:
            Coefficients, (count, 1), in float64 or complex128; those of the others are zero.
        """
        coefficients = torch.zeros(self.count, 1, dtype=wide_dtype(w.dtype), device=w.device)
        newest = range(self.count - 1, max(-1, self.count - 1 - num_newest), -1)
        for index in (*newest, *newest):
            self._subtract(self.fetch(index), w, coefficients[index : index + 1])
        return coefficients

    def orthogonalize_to(
        self, rows: Tensor, w: Tensor, spare: Tensor, expected: Tensor | None = None
    ) -> Tensor:
        """Subtract the components in some vectors from a new vector and from the newest one.

        Args:
            rows: Places of the vectors, (r,), rising, all below the newest one.
            w: New vector, (1, n).
            spare: Workspace of one vector, (1, n), that is overwritten.
            expected: Components in the vectors that the new one has, (r,), float64 or complex128,
                where they are known and large: the vectors then are those of the last `rotate`, all
                of them, and that they are not quite orthogonal is made up for.

        Returns:
            Coefficients of the new vector and of the newest one, (2, r), in float64 or complex128.
        """
        last, chosen = self.count - 1, rows.tolist()
        both = (w, self.fetch(last))
        found = torch.zeros(2, len(chosen), 1, dtype=wide_dtype(w.dtype), device=w.device)
        num_above = int((rows < self.num_resident).sum())
        extra = torch.zeros_like(found)
        if expected is not None:
            extra[0, :, 0] = self._make_up(expected, num_above).to(w.device)
        spilled = [each - self.num_resident for each in chosen[num_above:]]
        stream = self._lower.stream(spilled, keep=last - self.num_resident, spare=spare[0])
        for turn, (_, vector) in enumerate(stream):
            place = slice(num_above + turn, num_above + turn + 1)
            self._subtract_two(vector[None], both, found[:, place], extra[:, place])
        begin = 0
        while begin < num_above:  # runs of neighbours, whose products are one
            end = begin + 1
            while end < num_above and chosen[end] == chosen[begin] + end - begin:
                end += 1
            group = self._resident[chosen[begin] : chosen[begin] + end - begin]
            self._subtract_two(group, both, found[:, begin:end], extra[:, begin:end])
            begin = end
        if last >= self.num_resident:
            self._lower.write(last - self.num_resident, both[1][0])
        return found[..., 0]

    def _make_up(self, expected: Tensor, num_above: int) -> Tensor:
        """Return what coefficients differ by from the products that are found in order.

        Of vectors with the Gram matrix G, components g have the coefficients c = G^-1 g; those
        found one after the other, from the one at `num_above` on and the others last, lack
        sum_k G_ik c_k of the ones before.
        """
        g = self._gram.clone()
        coefficients = torch.linalg.solve(g, expected)
        g.fill_diagonal_(0)
        before = torch.zeros_like(g)
        before[num_above:, num_above:] = g[num_above:, num_above:].tril()
        before[:num_above, num_above:] = g[:num_above, num_above:]
        return coefficients - expected + before @ coefficients

    def _subtract_two(
        self, group: Tensor, both: tuple[Tensor, Tensor], found: Tensor, extra: Tensor
    ) -> None:
        found += self.reduce(torch.stack([gram(group, each) for each in both])) + extra
        for each, coefficients in zip(both, found, strict=True):
            each.addmm_(coefficients.T.to(each.dtype), group, alpha=-1)

    def _sweep(self, w: Tensor, coefficients: Tensor) -> None:
        """Subtract the components in all vectors once: per group two products, one reduction."""
        spilled = range(self.count - self.num_resident - 1, -1, -1)
        for index, vector in self._lower.stream(spilled):
            place = self.num_resident + index
            self._subtract(vector[None], w, coefficients[place : place + 1])
        resident = min(self.count, self.num_resident)
        if resident:
            self._subtract(self._resident[:resident], w, coefficients[:resident])

    def _subtract(self, group: Tensor, w: Tensor, coefficients: Tensor) -> None:
        found = self.reduce(gram(group, w))
        coefficients += found
        w.addmm_(found.T.to(w.dtype), group, alpha=-1)

    def norms(self, w: Tensor) -> Tensor:
        """Return the norms of vectors, (b,), of (b, n), over all ranks."""
        squares = torch.stack([gram(each[None], each[None])[0, 0].real for each in w])
        return self.reduce(squares).sqrt()

    def rotate(self, y: Tensor) -> None:
        """Replace the vectors by combinations of them, chunk by chunk, in place.

        Args:
            y: Coefficients, (count, kept), in float64 or complex128; `kept` is the new count.
        """
        kept = y.shape[1]
        if self.count <= self.num_resident:
            total = rotate_rows(y, self._resident[: self.count], self._resident[:kept])
        else:
            total = torch.zeros(kept, kept, dtype=y.dtype, device=self.device)
            num = min(kept, self.num_resident)
            for part, chunk in self._chunks(range(self.count)):
                rotated = torch.empty(kept, chunk.shape[1], dtype=self.dtype, device=self.device)
                total += rotate_rows(y, chunk, rotated)
                self._resident[:num, part] = rotated[:num]
                if kept > num:
                    self._lower.write_part(part.start, rotated[num:])
        self.count = kept
        self._gram = self.reduce(total).cpu()

    def combine(self, y: Tensor, out: Tensor) -> Tensor:
        """Write combinations of the vectors to `out`, (k, n), and return it; `y` is as above."""
        for part, chunk in self._chunks(range(self.count)):
            out[:, part] = (y.T @ chunk.to(y.dtype)).to(dtype=out.dtype, device=out.device)
        return out

    def _chunks(self, indices: range) -> Iterator[tuple[slice, Tensor]]:
        """Yield the same elements of all vectors, chunk by chunk."""
        resident = min(len(indices), self.num_resident)
        if len(indices) <= self.num_resident:
            width = max(DIRECT_IO_BYTES, _CHUNK_BYTES // (8 * max(1, len(indices))))
            for begin in range(0, self.length, width):
                part = slice(begin, min(begin + width, self.length))
                yield part, self._resident[:resident, part]
            return
        for part, spilled in self._lower.stream_parts(len(indices) - resident):
            yield part, torch.cat([self._resident[:resident, part], spilled])

    def close(self) -> None:
        """Give back memory and file."""
        self._lower.close()
        self._ledger.add(Tier.DEVICE, -self._device_bytes)
        self._device_bytes = 0
        self._resident = self._resident.new_empty(0, self.length)  # a view would keep the memory
