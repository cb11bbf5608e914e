"""Thick-restart block Lanczos on a filtered operator, with a basis that may lie in several tiers.

Of a basis V of m vectors the projection H = V^H p(A) V is known; a restart keeps the best Ritz
vectors and goes on from the residual (Wu and Simon 2000; Stewart 2001). Vectors that have converged
stay in the basis and are no longer worked on: soft locking (Knyazev 2004).

A Krylov space holds one vector of each eigenspace per vector of its start, so eigenvalues that are
multiple could be missed. When all have converged, a random start in their complement is iterated
until an eigenvalue as good as the worst of them would have shown up, for sure but for the odds of a
random vector (Kuczynski and Wozniakowski 1992); what shows up is taken in.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from penstock.spectral._basis import Basis, gram, wide_dtype
from penstock.spectral._filter import ChebyshevFilter, check_finite
from penstock.spectral._lower import make_workspace
from penstock.spectral._operator import LinearOperator, make_random
from penstock.spectral._semiorthogonal import OrthogonalityEstimate

_NEW = 1e-9  # relative: a value that has grown by less belongs to the same eigenvector
_UNITS = 32.0  # of rounding, of the largest value: by less two values do not differ
_MOST_KEPT = 2 / 3  # of the vectors beyond those that are wanted, by a restart
_LEAST_STEPS = 6  # of a block between restarts, where the basis has room for twice as many
_SETTLES = 0.7  # times the least excess so far, in _MOST_SETTLING restarts: it converges yet
_MOST_SETTLING = 8
_REFINE = 4  # restarts after which the filter is looked at again
_MANY = 16  # restarts to come: as many are worth a new filter, which begins anew
_ODDS = 100.0  # a random vector has at least 1 / (100 sqrt(n)) of an eigenvector


@dataclasses.dataclass(frozen=True)
class RitzPairs:
    """Ritz values of the filtered operator, falling, and what they are made of.

    Attributes:
        values: (m,), of the filtered operator.
        vectors: Coefficients of the Ritz vectors in the basis, (m, m).
        residuals: Norms of their residuals, (m,).
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor


class ThickRestartLanczos:
    """One solution by thick-restart Lanczos; `solve` returns when the wanted pairs have converged.

    Args:
        operator: The operator.
        k: Pairs that are wanted, those of the largest values of the filter.
        filter: The polynomial that is iterated with.
        basis: Empty basis.
        block: Vectors that the operator is applied to at once.
        max_restarts: Restarts after which it gives up.
        generator: Source of random vectors.
        threshold: Components in the basis that a vector may keep until it is swept, of a block of
            one vector; 0: each is swept against all of the basis.
    """

    def __init__(
        self,
        operator: LinearOperator,
        k: int,
        filter: ChebyshevFilter,
        basis: Basis,
        *,
        block: int,
        max_restarts: int,
        generator: torch.Generator,
        threshold: float = 0.0,
    ) -> None:
        self.operator, self.k, self.filter, self.basis = operator, k, filter, basis
        self.block, self.max_restarts = block, max_restarts
        self.num_restarts = self.num_steps = 0
        self._generator = generator
        wide = wide_dtype(operator.dtype)
        self._h = torch.zeros(basis.capacity, basis.capacity, dtype=wide, device="cpu")
        self._known = 0  # columns of H
        self._coupling = torch.zeros(
            block, block, dtype=wide, device="cpu"
        )  # R of the last residual
        shape = (block, operator.length)
        self._w = make_workspace(*shape, operator.dtype, operator.device)
        self._u = make_workspace(*shape, operator.dtype, operator.device)
        self._after_random = 0  # steps since the last random start
        self._excesses: list[float] = []  # of the restarts with this filter and start
        self.num_sweeps = self.num_swept = 0
        self._expected: Tensor | None = None
        self._estimate: OrthogonalityEstimate | None = None
        if threshold:
            unit = torch.finfo(operator.dtype).eps
            self._estimate = OrthogonalityEstimate(basis.capacity, wide, unit, threshold)

    def solve(
        self,
        start: Tensor | None,
        find_excess: Callable[[RitzPairs], float],
        refine: Callable[[RitzPairs], ChebyshevFilter | None],
    ) -> RitzPairs:
        """Iterate until the wanted pairs have converged and none is missed.

        Args:
            start: Vectors to begin with, (b, n); None: random ones.
            find_excess: Returns the largest residual of Ritz pairs over what it may be: with 1
                or less they have converged.
            refine: Returns a better filter, by what Ritz pairs tell of the spectrum, or None.

        Returns:
            All Ritz pairs of the basis, of which the first k are wanted.

        Raises:
            FloatingPointError: A product is not finite.
            StopIteration: There were `max_restarts`; `best` has what was reached.
        """
        self._begin(start)
        verified: RitzPairs | None = None  # what is compared with a random start
        while True:
            self._extend()
            pairs = self.best()
            self._excesses.append(find_excess(pairs))
            has_converged = self._excesses[-1] <= 1
            if not has_converged:
                if verified is not None and self._is_larger(pairs, verified):
                    verified = None
                if verified is None and self._is_slow():
                    better = refine(pairs)
                    if better is not None:
                        self._change_filter(pairs, better)
                        continue
            elif verified is None or self._is_larger(pairs, verified):
                verified = pairs
                self._restart(pairs, self.k, at_random=True)
                continue
            # What the random start mixed in converges too, as far as rounding lets it.
            is_over = has_converged or self._is_stalled()
            if verified and is_over and self._after_random >= self._steps_to_show(verified):
                return pairs
            if self._known >= self.operator.global_length and self._excesses[-1] < math.inf:
                return pairs
            self._restart(pairs, self._num_kept(pairs))

    def _is_slow(self) -> bool:
        """Return, now and then, whether many restarts are to come at the rate of the last ones."""
        if len(self._excesses) % _REFINE:
            return False
        before, excess = self._excesses[-_REFINE], self._excesses[-1]
        if not excess < before:
            return True
        rate = math.log(before / excess) / (_REFINE - 1)
        return math.log(excess) > _MANY * rate

    def _is_stalled(self) -> bool:
        """Return whether the last restarts since the random start have not lowered the excess."""
        last, before = self._excesses[-_MOST_SETTLING:], self._excesses[:-_MOST_SETTLING]
        return bool(before) and min(last) > _SETTLES * min(before)

    def _is_larger(self, pairs: RitzPairs, verified: RitzPairs) -> bool:
        """Return whether a value has grown by more than it could by converging further."""
        found, before = pairs.values[: self.k], verified.values[: self.k]
        rounding = _UNITS * torch.finfo(self.operator.dtype).eps * float(pairs.values.abs().max())
        converging = verified.residuals[: self.k].clamp(min=_NEW * before.abs().clamp(min=1))
        return bool((found - before > converging + rounding).any())

    def _steps_to_show(self, verified: RitzPairs) -> int:
        """Return the steps after which a value above the k-th is seen, if there is one."""
        # T_s(mu_k) >= 100 sqrt(n), where all that is not wanted lies in [-1, 1].
        worst = float(verified.values[self.k - 1])
        if self.filter.degree == 1:
            return self._steps_unfiltered
        growth = math.acosh(max(worst, 1.0 + 1e-4))
        wanted = math.acosh(_ODDS * math.sqrt(self.operator.global_length))
        return math.ceil(wanted / growth)

    @property
    def _steps_unfiltered(self) -> int:
        return max(1, self._steps_before_random // 2)

    def _begin(self, start: Tensor | None) -> None:
        self._steps_before_random = 0
        if start is None:
            self._append_random()
            return
        self._w.copy_(start)
        self._normalize(self._w)
        self.basis.append(self._w)

    def _extend(self) -> None:
        """Append blocks until the basis is full."""
        basis, block = self.basis, self.block
        while True:
            at = basis.count - block
            self._u, self._w = self._w, self._u  # what was appended last
            self._w, self._u = self.filter.apply(self.operator, self._u, self._w)
            if self._estimate is None:
                column = basis.orthogonalize(self._w).cpu()
                self._count_sweep(basis.count)
            else:
                column = self._orthogonalize_partly(self._estimate).cpu()
            check_finite(float(column.abs().sum()))
            self._h[: at + block, at : at + block] = column
            self._known = basis.count
            self.num_steps += 1
            self._after_random += 1
            self._coupling = self._normalize(self._w)
            if self._estimate is not None:
                self._estimate.accept()
            if basis.count + block > min(basis.capacity, self.operator.global_length):
                return
            basis.append(self._w)

    def _orthogonalize_partly(self, estimate: OrthogonalityEstimate) -> Tensor:
        """Subtract the two newest vectors, and those to which orthogonality would be lost."""
        basis, at, w = self.basis, self.basis.count - 1, self._w
        column = basis.orthogonalize_locally(w, 1 if estimate.is_first else 2)
        check_finite(float(column.abs().sum()))
        h = self._h[: at + 1, : at + 1].clone()
        h[:, at] = column[:, 0].cpu()
        h = torch.triu(h) + torch.triu(h, 1).mH
        is_first, before = estimate.is_first, float(basis.norms(w))
        expected = self._expected if is_first else None
        rows = estimate.advance(h, before)
        is_own = rows >= 0 if is_first and expected is None else estimate.choose_own(rows)
        if expected is not None:  # known to all digits, while what is found has rounding in it
            column[rows, 0] += expected.to(column.device)
        for _ in range(3 if len(rows) else 0):
            found = basis.orthogonalize_to(rows, w, self._u, expected).cpu()
            self._count_sweep(len(rows))
            if expected is not None:
                found[0] -= expected
            column[rows, 0] += torch.where(is_own, found[0], 0).to(column.device)
            estimate.leave_out(h, found[0, ~is_own], found[1])
            after = float(basis.norms(w))
            if is_first:
                estimate.amplify(before / max(after, 1e-300))
            if after > basis.enough * before or after == 0:
                break
            before, expected = after, None
        return column

    def _count_sweep(self, num_vectors: int) -> None:
        self.num_sweeps += 1
        self.num_swept += num_vectors

    def best(self) -> RitzPairs:
        """Return the Ritz pairs of what is known."""
        known = self._known
        h = self._h[:known, :known]
        last = h[-self.block :, -self.block :]
        h = torch.triu(h) + torch.triu(h, 1).mH
        h[-self.block :, -self.block :] = (last + last.mH) / 2
        values, vectors = torch.linalg.eigh(h)
        values, vectors = values.flip(0), vectors.flip(1)
        residuals = (self._coupling @ vectors[-self.block :]).norm(dim=0)
        return RitzPairs(values, vectors, residuals)

    def _num_kept(self, pairs: RitzPairs) -> int:
        """Return how many vectors a restart keeps: the wanted ones and some that help them.

        Convergence in the m - q steps to come goes by the gap behind what is kept, so a cluster is
        kept as a whole (Wu and Simon 2000, section 5). Where the spectrum thickens at the wanted
        end the gaps of Ritz values promise too much: what is kept beyond them is limited.
        """
        theta, k, m = pairs.values, self.k, self._known
        left = max(2 * self.block, min(_LEAST_STEPS * self.block, (m - k) // 2))
        most = min(m - left, k + int(_MOST_KEPT * (m - k)))
        first, last = k + 1, min(most, m - 1)
        if first >= last:
            return min(max(k, last), m - 1)
        # maximise (m - q) sqrt((theta_k - theta_q+1) / (theta_k - theta_m))
        kept = torch.arange(first, last + 1, device="cpu")
        gaps = (theta[k - 1] - theta[kept]).clamp(min=0)
        return int(kept[((m - kept) * gaps.sqrt()).argmax()])

    def _restart(self, pairs: RitzPairs, kept: int, *, at_random: bool = False) -> None:
        if self.num_restarts == self.max_restarts:
            raise StopIteration
        self.num_restarts += 1
        self.basis.rotate(pairs.vectors[:, :kept].to(self.operator.device))
        self._h.zero_()
        self._h[:kept, :kept] = torch.diag(pairs.values[:kept]).to(self._h.dtype)
        self._known = kept
        if self._estimate is not None:
            dropped = pairs.residuals[:kept] if at_random else None
            # A y_i = theta_i y_i + r s_i, so y_i has s_i of the product with r.
            last = pairs.vectors[-1, :kept]
            self._expected = None if at_random else (self._coupling[0, 0] * last).conj()
            self._estimate.restart(pairs.vectors[:, :kept], dropped)
        if at_random:
            self._append_random()
        else:
            self.basis.append(self._w)

    def _change_filter(self, pairs: RitzPairs, better: ChebyshevFilter) -> None:
        """Begin anew with another filter, from sums of the best Ritz vectors."""
        if self.num_restarts == self.max_restarts:
            raise StopIteration
        self.num_restarts += 1
        count = min(len(pairs.values), self.k + self.block)
        sums = torch.zeros(len(pairs.values), self.block, dtype=self._h.dtype, device="cpu")
        for each in range(count):
            sums[:, each % self.block] += pairs.vectors[:, each]
        self.basis.combine(sums.to(self.operator.device), self._w)
        self.basis.count = self._known = 0
        self._h.zero_()
        self.filter = better
        self._excesses.clear()
        self._normalize(self._w)
        self.basis.append(self._w)
        if self._estimate is not None:
            self._estimate.begin()

    def _append_random(self) -> None:
        self._steps_before_random += self._after_random
        self._after_random = 0
        self._excesses.clear()
        self._coupling = torch.zeros_like(self._coupling)
        self._w.copy_(make_random((len(self._w), self._w.shape[1]), self.operator, self._generator))
        self.basis.orthogonalize(self._w)
        if self.basis.count:
            self._count_sweep(self.basis.count)
        self._normalize(self._w)
        self.basis.append(self._w)

    def _normalize(self, w: Tensor) -> Tensor:
        """Make vectors orthonormal, in place: w = R^H q, and return R, (b, b).

        Twice by the Cholesky factor of their Gram matrix; vectors that depend on each other are
        replaced by random ones, and their rows of R are zero.
        """
        if len(w) == 1 and not w.is_complex():
            return self._normalize_real(w)
        reduce = self.basis.reduce
        total = torch.eye(len(w), dtype=self._h.dtype, device="cpu")
        for turn in range(3):
            g = reduce(gram(w, w)).cpu()
            check_finite(float(g.abs().sum()))
            scale = g.diagonal().real.max().sqrt()
            factor, info = torch.linalg.cholesky_ex(g)
            least = factor.diagonal().real.min() if not info else 0.0
            if turn == 0 and (info or least <= 1e-6 * scale or float(scale) < self._tiny):
                return self._normalize_one_by_one(w)
            inverse = torch.linalg.inv(factor)
            w.copy_(inverse.conj().to(w) @ w)
            total = factor.mH @ total
            if turn and float(scale) < 1 + 1e-10:
                break
            if turn == 0 and self.basis.count and least <= 1e-2 * scale:
                self.basis.orthogonalize(w)
        return total

    def _normalize_real(self, w: Tensor) -> Tensor:
        """Do the same for one vector of real numbers, whose factors are numbers: the same bits."""
        total = 1.0
        for turn in range(3):
            g = float(self.basis.reduce(gram(w, w)))
            check_finite(g)
            factor = math.sqrt(g)
            if turn == 0 and factor < self._tiny:
                return self._normalize_one_by_one(w)
            w.copy_(w.new_full((1, 1), 1 / factor) @ w)
            total = factor * total
            if turn and factor < 1 + 1e-10:
                break
        return torch.full((1, 1), total, dtype=self._h.dtype, device="cpu")

    @property
    def _tiny(self) -> float:
        return (
            1e-14
            if self.operator.dtype.itemsize // (1 + self.operator.dtype.is_complex) == 8
            else 1e-6
        )

    def _normalize_one_by_one(self, w: Tensor) -> Tensor:
        reduce, r = (
            self.basis.reduce,
            torch.zeros(len(w), len(w), dtype=self._h.dtype, device="cpu"),
        )
        largest = float(max(reduce(gram(each[None], each[None])).real.max() for each in w)) ** 0.5
        for row in range(len(w)):
            before, vector = w[:row], w[row : row + 1]
            attempt, norm = 0, 0.0
            for attempt in range(3):
                for _ in range(2):
                    if row:
                        found = reduce(gram(before, vector))
                        vector.addmm_(found.T.to(w.dtype), before, alpha=-1)
                        if attempt == 0:
                            r[:row, row : row + 1] += found.cpu()
                norm = float(reduce(gram(vector, vector)).real) ** 0.5
                if norm > max(self._tiny, 1e-8 * largest if attempt == 0 else 0.0):
                    break
                vector.copy_(make_random((1, w.shape[1]), self.operator, self._generator))
                self.basis.orthogonalize(vector)
            if attempt == 0:
                r[row, row] = norm
            vector /= norm
            if self.basis.count and attempt == 0:
                self.basis.orthogonalize(vector)
                vector /= float(reduce(gram(vector, vector)).real) ** 0.5
        return r
