"""The wrapper of HiGHS: optima, proofs that there is none, and limits."""

import doctest
import sys

import pytest

from penstock.solvers import LinearProgram, _linear_program, can_solve


def test_a_linear_program_without_solution_has_no_optimum():
    program = LinearProgram()
    column = program.column(upper=1.0)
    program.row([column], [1.0], lower=2.0)
    assert program.solve(time_limit=5.0) is None
    assert program.proved_infeasible and not program.has_solution


def test_the_example_runs():
    failed, attempted = doctest.testmod(_linear_program)
    assert attempted > 0 and failed == 0


def knapsacks(num_items: int, num_bins: int) -> LinearProgram:
    """Fill bins of one cap with as much as possible: no optimum without many nodes."""
    program = LinearProgram()
    sizes = [1000 + (index * 7919) % 997 for index in range(num_items)]
    columns = [
        [program.column(cost=-float(size), upper=1.0, integer=True) for _ in range(num_bins)]
        for size in sizes
    ]
    for each in columns:
        program.row(each, [1.0] * num_bins, upper=1.0)
    for number in range(num_bins):
        chosen = [each[number] for each in columns]
        program.row(chosen, [float(size) for size in sizes], upper=7321.0)
    return program


def test_a_limit_of_nodes_ends_the_search_at_the_same_solution():
    runs = []
    for _ in range(2):
        program = knapsacks(24, 5)
        assert program.solve(time_limit=60.0, max_nodes=1) is None
        assert program.has_solution and not program.proved_optimal and not program.timed_out
        runs.append(program.values.tolist())
    assert runs[0] == runs[1]


def test_a_time_that_is_up_is_said():
    program = knapsacks(24, 5)
    assert program.solve(time_limit=0.0) is None
    assert program.timed_out and not program.proved_optimal


@pytest.mark.parametrize("installed", [True, False])
def test_a_missing_solver_is_noticed(monkeypatch: pytest.MonkeyPatch, installed: bool):
    monkeypatch.setattr(_linear_program, "is_installed", lambda name: installed)
    assert can_solve() is installed


def test_without_the_solver_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "highspy", None)
    program = LinearProgram()
    program.column(cost=1.0)
    with pytest.raises(ImportError, match="pip install highspy"):
        program.solve(time_limit=1.0)
