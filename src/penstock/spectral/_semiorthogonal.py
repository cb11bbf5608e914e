"""Estimates of how far Lanczos vectors have lost orthogonality: partial reorthogonalisation.

A vector of the recurrence is orthogonal to the two before it because they are subtracted, and to
the others but for rounding errors, which grow. How they grow follows from the recurrence itself
(Simon 1984, "The Lanczos algorithm with partial reorthogonalization", section 3). A sweep is needed
only when the estimate passes a threshold, and only over the vectors for which it does; it takes the
newest vector along, as the next one comes from both (Grcar 1981, periodic reorthogonalisation).
"""

from __future__ import annotations

import torch
from torch import Tensor

_CLEAN = 4.0  # rounding units that a sweep leaves
_WIDER = 1e-2  # of the threshold: what a sweep is about to need anyway
_OWN = 0.1  # of the threshold
_MOST = 0.6  # of the vectors: what sweeps over more of them do to the others is not estimated


class OrthogonalityEstimate:
    """Estimates w_ji of <v_i, v_j> for the two newest vectors of a basis.

    Args:
        capacity: Vectors of the basis.
        dtype: Of the projection, float64 or complex128.
        unit: Rounding unit of the vectors.
        threshold: Components that may stay.

    Attributes:
        lost: Norms of what A v_i has outside of the basis and the projection, (capacity,).
        is_first: Whether the next vector is the first one after a restart.
    """

    def __init__(self, capacity: int, dtype: torch.dtype, unit: float, threshold: float) -> None:
        self.threshold, self._clean = threshold, _CLEAN * unit
        self._newest = torch.zeros(capacity + 1, dtype=dtype, device="cpu")
        self._before = torch.zeros_like(self._newest)
        self._next = torch.zeros_like(self._newest)
        self.lost = torch.zeros(capacity, dtype=torch.float64, device="cpu")
        self._left_out = torch.zeros_like(self.lost)
        self._at, self.is_first = 0, False
        self.begin()

    def restart(self, kept: Tensor, dropped: Tensor | None) -> None:
        """Go on with combinations of the vectors, and a newest one that is orthogonal to none yet.

        Args:
            kept: Coefficients of the combinations, (m, q).
            dropped: Norms of their residuals, (q,), if the newest vector is not their direction.
        """
        lost = (self.lost + self._left_out)[: len(kept)].square()
        lost = (lost @ kept.abs().to(torch.float64).square()).sqrt()
        self._left_out.zero_()
        self.lost.zero_()
        self.lost[: len(lost)] = lost if dropped is None else lost + dropped
        self.is_first = True

    def begin(self) -> None:
        """Begin with a basis of one vector."""
        self.lost.zero_()
        self._left_out.zero_()
        self._newest.zero_()
        self._newest[0] = 1
        self._before.zero_()
        self.is_first = False

    def advance(self, h: Tensor, beta: float) -> Tensor:
        """Estimate the vector to come, and return the vectors that it must be swept against.

        Args:
            h: Hermitian projection with all that is known, (j + 1, j + 1).
            beta: Norm of the vector to come before it is normalised.

        Returns:
            Places below j, rising; all of them after a restart.
        """
        self._at = at = len(h) - 1
        self._next[at + 1] = 1
        if self.is_first:
            self.is_first = False
            self._newest[:at] = self._clean
            self._newest[at] = 1
            self._next[: at + 1] = self._clean
            return torch.arange(at, device="cpu")
        # beta w_{j+1,i} = sum_k h_ik w_jk - alpha_j w_ji - beta_{j-1} w_{j-1,i} + rounding
        new = h[:at] @ self._newest[: at + 1] - h[at, at] * self._newest[:at]
        if at:
            new -= h[at - 1, at] * self._before[:at]
        largest = float(h.abs().max())
        rounding = self._clean * largest + self.lost[:at]
        size = new.abs()
        sign = torch.where(size > 0, new / size.clamp(min=1e-300), torch.ones_like(new))
        new = (new + sign * rounding) / max(beta, 1e-300)
        new[max(0, at - 1) :] = self._clean
        self._next[:at], self._next[at] = new, self._clean
        size = self._next[:at].abs()
        if bool((size <= self.threshold).all()):
            return torch.arange(0, device="cpu")
        rows = (size > _WIDER * self.threshold).nonzero()[:, 0]
        if len(rows) > _MOST * at:
            rows = torch.arange(at, device="cpu")
        self._newest[rows] = self._clean
        self._next[rows] = self._clean
        return rows

    def choose_own(self, rows: Tensor) -> Tensor:
        """Return which components found by a sweep are entries of the projection, (r,).

        Those in vectors whose residuals are not in the basis are. What rounding has left in the
        others is not (Simon 1984, section 2).
        """
        return self.lost[rows] > _OWN * self.threshold

    def leave_out(self, h: Tensor, new: Tensor, newest: Tensor) -> None:
        """Take it that components that a sweep has found are not in the projection.

        Until the next restart they lie in vectors that those to come are orthogonal to.

        Args:
            h: Hermitian projection, (j + 1, j + 1).
            new: Components of the vector to come before it is normalised, (r,).
            newest: Components that the newest vector had, (r,).
        """
        at, moved = self._at, float(newest.norm())
        self._left_out[at] += float(new.norm()) + float(h.abs().max()) * moved
        if at:
            self._left_out[at - 1] += float(h[at - 1, at].abs()) * moved

    def amplify(self, factor: float) -> None:
        """Take it that the vector to come has lost so much of its norm by a sweep."""
        self._next[: self._at + 1] = self._clean * max(1.0, factor)

    def accept(self) -> None:
        """Take the vector to come, which is normalised now, as the newest one."""
        self._before, self._newest, self._next = self._newest, self._next, self._before
