"""Errors and warnings of Penstock: one `except PenstockError` catches all errors.

Wrong arguments raise `ValueError` or `TypeError`; these classes are for what goes wrong with the
right arguments: a full disk, a broken compiler, a budget that cannot be met.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class PenstockError(Exception):
    """Base class of the errors that Penstock raises itself.

    Example:
        >>> issubclass(StoreFullError, PenstockError)
        True
    """


class CapacityError(PenstockError):
    """A budget cannot be met, even after a wait, and with everything else moved elsewhere."""


class InfeasibleError(CapacityError):
    """No plan fits the budget, or none was found within the time limit; the message says which.

    Attributes:
        minimum_device_bytes: No plan fits less, in any order of the operators; bytes as they are,
            without alignment. None where that is unknown. (Of `pack`: a capacity that suffices.)
        operator: Name of the operator that needs it, where there is one.
        proved: Whether it is proved that nothing fits; else a longer search may find a plan.
        sufficient_device_bytes: The least budget for which a plan was found, if any was.
    """

    def __init__(
        self,
        message: str,
        *,
        minimum_device_bytes: int | None = None,
        operator: str | None = None,
        proved: bool = False,
        sufficient_device_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.minimum_device_bytes = minimum_device_bytes
        self.operator = operator
        self.proved = proved
        self.sufficient_device_bytes = sufficient_device_bytes


class CaptureError(PenstockError):
    """A training step cannot be captured as a graph; the message names the user's line."""


class GraphFileError(PenstockError):
    """A saved step graph or plan is damaged, of another version, or belongs to another model."""


class PrefixFileError(PenstockError):
    """A file of saved keys and values is damaged, of another version or of another model.

    Attributes:
        path: The file.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class PlanError(PenstockError):
    """A plan breaks a rule, so that executing it would give wrong results.

    Attributes:
        rule: Name of the first rule broken, as `"residency"`.
    """

    def __init__(self, message: str, *, rule: str) -> None:
        super().__init__(message)
        self.rule = rule


class TornStepError(PenstockError):
    """A planned step failed in the middle of its update and could not be undone.

    Attributes:
        updated: Names of the tensors that hold the numbers after the step.
        lost: Names of the tensors whose numbers are neither those before the step nor those after
            it.
    """

    def __init__(self, message: str, *, updated: tuple[str, ...], lost: tuple[str, ...]) -> None:
        super().__init__(message)
        self.updated = updated
        self.lost = lost


class NonFiniteLossError(PenstockError):
    """The loss of a planned step is infinite or NaN; model and optimizer are as before the step.

    Attributes:
        loss: Its value.
    """

    def __init__(self, message: str, *, loss: float) -> None:
        super().__init__(message)
        self.loss = loss


class UnlikeEagerError(PenstockError):
    """A planned step's loss has other bits than that of the program, called eagerly.

    Attributes:
        loss: Loss of the planned step.
        expected: Loss of the program.
    """

    def __init__(self, message: str, *, loss: float, expected: float) -> None:
        super().__init__(message)
        self.loss = loss
        self.expected = expected


class RankError(PenstockError):
    """Another rank of a process group has ended, or does not answer within the group's timeout.

    Attributes:
        rank: The rank that has noticed.
        best: From `penstock.spectral.eigs` the error that carries this rank's rows of the best
            iterate; else None.
    """

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.best: NoConvergenceError | None = None


class NoConvergenceError(PenstockError):
    """An iteration gave up, or its operator failed; the error carries what was reached.

    Attributes:
        values: Eigenvalues of the best iterate, rising; of PageRank the last ranks.
        vectors: Eigenvectors as columns, in the order of the values; None where there are none.
        residuals: Estimates of their residuals; None where there are none.
    """

    def __init__(
        self,
        message: str,
        *,
        values: Tensor,
        vectors: Tensor | None = None,
        residuals: Tensor | None = None,
    ) -> None:
        super().__init__(message)
        self.values = values
        self.vectors = vectors
        self.residuals = residuals


class WholeTableError(PenstockError):
    """An operation would copy a whole table, perhaps into a memory that is smaller."""


class BuildError(PenstockError):
    """Generated or shipped source code could not be compiled or loaded."""


class StoreError(PenstockError):
    """A store's file failed; the message names the path and the remedy.

    Example:
        >>> error = StoreError("no such extent", path="/mnt/nvme", offset=4096)
        >>> error.path, error.offset, error.errno
        ('/mnt/nvme', 4096, None)

    Args:
        message: The failure, its place and the remedy.
        path: The directory of the store.
        offset: Byte offset in the store's file at which it happened, where there is one.
        errno: The operating system's error number, where there is one.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        offset: int | None = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(message)
        self.path = path
        self.offset = offset
        self.errno = errno


class StoreUnavailableError(StoreError):
    """The store's directory cannot be used: missing, not a directory, not writable."""


class StoreFullError(StoreError):
    """The store has no room: its own limit, the file system's, a quota's or a file size limit."""


class StoreWriteError(StoreError):
    """Bytes could not be written; what was to be stored is still where it was."""


class StoreReadError(StoreError):
    """Bytes that were stored could not be read back; the destination must not be used."""


class StoreWarning(UserWarning):
    """A store works otherwise than expected, as a directory that lies in RAM does."""


def stacklevel_of_user() -> int:
    """Return the `stacklevel` with which the function that warns points at the user's line."""
    here, level = os.path.dirname(__file__) + os.sep, 1
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(here):
        frame, level = frame.f_back, level + 1
    return level
