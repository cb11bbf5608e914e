"""Rows of leads: three times the loads from a table in L1, and half of the bytes from memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from _rows import BenchmarkRow, Limit
from penstock.codegen import load_library
from penstock.iomodel import IOReport, declare_access, explain

NUM_LOOKUPS = 2**22
RECORD = 8  # numbers of 8 bytes, of which the first is looked up
TABLE = 256  # entries of 8 bytes: all tables stay in L1
_SOURCE = """
#include <cstdint>
extern "C" void look_up_once(const int64_t* records, const int64_t* table, int64_t* out,
                             int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = table[records[8 * i]];
}
// Three loads that do not wait for each other, as of an inline cache: key, shape and value.
extern "C" void look_up_thrice(const int64_t* records, const int64_t* table, int64_t* out,
                               int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t at = records[8 * i];
    out[i] = table[at] + table[at + 256] + table[at + 512];
  }
}
"""


def _trace_lookups(trace: Any, records: Any, table: Any, out: Any, loads: int) -> None:
    """A word of each record and results in step; loads from the table by blocks of lookups."""
    step = 4096
    starts = np.arange(0, len(records), step)
    trace.interleave(
        [
            *((records, (starts + at) * 8 * RECORD, 8, False) for at in range(step)),
            *((table, starts * 0 + 2048 * (k % 3), 2048, False) for k in range(16 * loads)),
            (out, starts * 8, step * 8, True),
        ]
    )


def make_lookups() -> tuple[Any, Any, tuple[torch.Tensor, ...]]:
    """The two functions, and their arguments."""
    library = load_library("look_up", _SOURCE, flags=("-O3", "-march=native"))
    operands = (
        torch.randint(0, TABLE, (NUM_LOOKUPS, RECORD)),
        torch.arange(3 * TABLE),
        torch.empty(NUM_LOOKUPS, dtype=torch.int64),
    )

    def declare(name: str, loads: int) -> Any:
        import ctypes

        function = getattr(library, name)
        function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64]

        def run(records: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
            function(records.data_ptr(), table.data_ptr(), out.data_ptr(), len(records))

        run.__qualname__ = name
        return declare_access(functools.partial(_trace_lookups, loads=loads))(run)

    return declare("look_up_once", 1), declare("look_up_thrice", 3), operands


def lead_rows(where: Any, device: str) -> Iterator[BenchmarkRow]:
    """The two leads, explained."""
    once, thrice, operands = make_lookups()
    report = explain(once, *operands, base=thrice, num_threads=1, repetitions=15)
    yield _row(report, "L1 table: a third of the loads", True, where)
    x = torch.rand(2**25)
    half = x.to(torch.bfloat16)
    y, z = torch.empty_like(x), torch.empty_like(half)
    report = explain(
        lambda: torch.neg(half, out=z), base=lambda: torch.neg(x, out=y), repetitions=15
    )
    yield _row(report, "memory: half of the bytes", False, where)


def _row(report: IOReport, case: str, expected: bool, where: Any) -> BenchmarkRow:
    base = report.base
    assert base is not None and report.function.measured_seconds and base.measured_seconds
    return BenchmarkRow.of(
        [report.function.measured_seconds],
        topic="iomodel",
        case=case,
        arm=report.function.name,
        limit=Limit(name="its base", value=base.measured_seconds, unit="s"),
        moved_bytes=report.function.moved_bytes,
        extra={
            "base_bytes": base.moved_bytes,
            "binding_level": base.binding_level,
            "predicted_gain": report.predicted_gain,
            "measured_gain": report.measured_gain,
            "false_lead": report.false_lead,
            "is_right": report.false_lead == expected,
        },
        **where,
    )
