"""Linear and integer programs, built row by row and solved by HiGHS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.compat.packages import import_package, is_installed

_INFINITY = float("inf")


def can_solve() -> bool:
    """Return whether HiGHS is installed."""
    return is_installed("highspy")


def _import_solver() -> Any:
    return import_package("highspy", "a linear program")


class LinearProgram:
    """Minimise a cost over columns with bounds, under rows with bounds.

        min  c x   such that   row_lower <= A x <= row_upper,   lower <= x <= upper

    Rows can be added and bounds changed after a solution; the next one starts from it.

    Example:
        >>> program = LinearProgram()
        >>> x = program.column(cost=1.0)
        >>> program.row([x], [2.0], lower=6.0)
        >>> round(program.solve(time_limit=1.0), 6)
        3.0

    Attributes:
        values: Of the columns, in the best solution that was found; with integers it may be no
            optimum.
        has_solution: Whether there is one.
        bound: No solution costs less.
        proved_optimal: Whether `values` is an optimum.
        proved_infeasible: Whether no solution exists.
        timed_out: Whether the time limit ended the search, so that another machine may find more.
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
        self._solver: Any = None
        self.values: np.ndarray = np.zeros(0)
        self.proved_optimal = False
        self.has_solution = False
        self.proved_infeasible = False
        self.timed_out = False
        self.bound = -_INFINITY

    def column(
        self,
        *,
        cost: float = 0.0,
        lower: float = 0.0,
        upper: float = _INFINITY,
        integer: bool = False,
    ) -> int:
        """Add a column, before the first solution; return its index."""
        assert self._solver is None, "columns come before the first solution"
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
        if self._solver is not None:
            index, values, _ = self._merge_rows([0, len(columns)], columns, factors)
            self._solver.addRow(lower, upper, len(index), index, values)
            return
        self._columns += columns
        self._factors += factors
        self._starts.append(len(self._columns))
        self._row_lower.append(lower)
        self._row_upper.append(upper)

    def set_bounds(self, column: int, lower: float, upper: float) -> None:
        """Change the bounds of a column."""
        self._lower[column], self._upper[column] = lower, upper
        if self._solver is not None:
            self._solver.changeColBounds(column, lower, upper)

    def solve(
        self, *, time_limit: float, relative_gap: float = 0.0, max_nodes: int | None = None
    ) -> float | None:
        """Return the optimum; None if it is not known within the limits or does not exist.

        Args:
            time_limit: Seconds.
            relative_gap: With integers, a solution counts as the optimum if it is so close to
                `bound`.
            max_nodes: With integers, nodes of branch and bound after which the search ends: unlike
                a time, a limit that gives the same result on every machine. None: no limit.
        """
        highspy = _import_solver()
        if self._solver is None:
            self._solver = self._make_solver()
        solver = self._solver
        solver.setOptionValue("time_limit", float(time_limit))
        solver.setOptionValue("mip_rel_gap", relative_gap)
        if max_nodes is not None:
            solver.setOptionValue("mip_max_nodes", max_nodes)
        solver.run()
        status, solution = solver.getModelStatus(), solver.getSolution()
        self.proved_infeasible = status == highspy.HighsModelStatus.kInfeasible
        self.proved_optimal = status == highspy.HighsModelStatus.kOptimal
        self.timed_out = status == highspy.HighsModelStatus.kTimeLimit
        self.values, self.has_solution = np.array(solution.col_value), bool(solution.value_valid)
        if any(self._integer):
            self.bound = solver.getInfo().mip_dual_bound
        else:
            self.bound = solver.getObjectiveValue() if self.proved_optimal else -_INFINITY
        return solver.getObjectiveValue() if self.proved_optimal else None

    def _make_solver(self) -> Any:
        highspy = _import_solver()
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = len(self._cost), len(self._row_lower)
        program.col_cost_ = np.array(self._cost)
        program.col_lower_, program.col_upper_ = np.array(self._lower), np.array(self._upper)
        program.row_lower_ = np.array(self._row_lower)
        program.row_upper_ = np.array(self._row_upper)
        matrix = program.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.index_, matrix.value_, matrix.start_ = self._merge_rows(
            self._starts, self._columns, self._factors
        )
        if any(self._integer):
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            program.integrality_ = [kinds[integer] for integer in self._integer]
        solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        solver.passModel(program)
        return solver

    def _merge_rows(
        self, starts: Sequence[int], columns: Sequence[int], factors: Sequence[float]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return columns, factors and starts of rows that have each column at most once."""
        num_columns = max(len(self._cost), 1)
        rows = np.repeat(np.arange(len(starts) - 1), np.diff(np.array(starts, dtype=np.int64)))
        keys = rows * num_columns + np.array(columns, dtype=np.int64)
        unique, inverse = np.unique(keys, return_inverse=True)
        merged = np.bincount(inverse, weights=factors, minlength=len(unique))
        rows, indices = np.divmod(unique, num_columns)
        counts = np.bincount(rows, minlength=len(starts) - 1)
        first = np.concatenate([[0], np.cumsum(counts)])
        return indices.astype(np.int32), merged, first.astype(np.int32)
