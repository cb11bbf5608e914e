"""A linear program, built row by row and solved by HiGHS."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_INFINITY = float("inf")


class LinearProgram:
    """Minimise a cost over columns with bounds, under rows with bounds.

    Example:
        >>> program = LinearProgram()
        >>> x = program.column(cost=1.0)
        >>> program.row([x], [2.0], lower=6.0)
        >>> round(program.solve(time_limit=1.0), 6)
        3.0
    """

    def __init__(self) -> None:
        self._cost: list[float] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._integer: list[bool] = []
        self._row_lower: list[float] = []
        self._row_upper: list[float] = []
        self._starts: list[int] = [0]
        self._columns: list[int] = []
        self._factors: list[float] = []
        self.values: np.ndarray = np.zeros(0)
        self.proved_optimal = False
        self.has_solution = False
        self.proved_infeasible = False
        self.bound = -_INFINITY

    @property
    def num_entries(self) -> int:
        """Entries of the matrix so far."""
        return len(self._columns)

    def column(
        self,
        *,
        cost: float = 0.0,
        lower: float = 0.0,
        upper: float = _INFINITY,
        integer: bool = False,
    ) -> int:
        """Add a column; return its index."""
        self._cost.append(cost)
        self._lower.append(lower)
        self._upper.append(upper)
        self._integer.append(integer)
        return len(self._cost) - 1

    def row(
        self,
        columns: Sequence[int],
        factors: Sequence[float],
        *,
        lower: float = -_INFINITY,
        upper: float = _INFINITY,
    ) -> None:
        """Add a row: lower <= sum of factor * column <= upper. A column may occur twice."""
        self._columns += columns
        self._factors += factors
        self._starts.append(len(self._columns))
        self._row_lower.append(lower)
        self._row_upper.append(upper)

    def solve(self, *, time_limit: float, relative_gap: float = 0.0) -> float | None:
        """Return the optimum; None if it is not known within the time or does not exist.

        With integers a solution counts as the optimum if it is within `relative_gap` of `bound`.

        `values` has the columns of the best solution, which with integers may be no optimum:
        `proved_optimal` says whether it is, and `bound` what no solution is below.
        """
        import highspy

        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = len(self._cost), len(self._row_lower)
        program.col_cost_ = np.array(self._cost)
        program.col_lower_, program.col_upper_ = np.array(self._lower), np.array(self._upper)
        program.row_lower_ = np.array(self._row_lower)
        program.row_upper_ = np.array(self._row_upper)
        columns, factors, starts = self._merged()
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = starts
        program.a_matrix_.index_ = columns
        program.a_matrix_.value_ = factors
        if any(self._integer):
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            program.integrality_ = [kinds[integer] for integer in self._integer]
        solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("time_limit", float(time_limit))
        solver.setOptionValue("mip_rel_gap", relative_gap)
        solver.passModel(program)
        solver.run()
        self.proved_infeasible = solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible
        self.proved_optimal = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
        self.values = np.array(solver.getSolution().col_value)
        self.has_solution = bool(solver.getSolution().value_valid)
        if any(self._integer):
            self.bound = solver.getInfo().mip_dual_bound
        elif self.proved_optimal:
            self.bound = solver.getObjectiveValue()
        return solver.getObjectiveValue() if self.proved_optimal else None

    def _merged(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The matrix by rows, each column at most once a row."""
        starts = np.array(self._starts, dtype=np.int64)
        rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        keys = rows * max(len(self._cost), 1) + np.array(self._columns, dtype=np.int64)
        unique, inverse = np.unique(keys, return_inverse=True)
        factors = np.bincount(inverse, weights=self._factors, minlength=len(unique))
        rows, columns = np.divmod(unique, max(len(self._cost), 1))
        counts = np.bincount(rows, minlength=len(starts) - 1)
        merged = np.concatenate([[0], np.cumsum(counts)])
        return columns.astype(np.int32), factors, merged.astype(np.int32)
