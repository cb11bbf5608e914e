"""Explanations: bytes of known loops by level, the binding level, and leads that are false."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fork_servers import find_python
from penstock.errors import PenstockError
from penstock.iomodel import IOReport, declare_access, explain
from penstock.memory import CacheProfile, LinkProfile, machine
from penstock.memory import MachineProfile as Profile

KIB, MIB = 2**10, 2**20
HERE = Path(__file__).resolve().parent


def rate(gigabytes_per_second: float) -> LinkProfile:
    each = gigabytes_per_second * 1e9
    return LinkProfile(each, (each, each), 1)


@pytest.fixture(scope="module")
def processor() -> Profile:
    """A processor of round numbers."""
    caches = (
        CacheProfile(name="L1", capacity_bytes=32 * KIB, line_bytes=64, rate=rate(200)),
        CacheProfile(name="L2", capacity_bytes=MIB, line_bytes=64, rate=rate(100)),
    )
    gpu = machine("h100-80gb")
    assert gpu.compute is not None
    compute = dataclasses.replace(
        gpu.compute, flops_per_second={"float32": 1e11}, launch_seconds=1e-6
    )
    return dataclasses.replace(
        gpu,
        device="cpu",
        device_name="a processor",
        caches=caches,
        memory_rates=(rate(10), rate(15)),
        compute=compute,
    )


def explain_here(processor: Profile, function, *args, **options) -> IOReport:
    return explain(function, *args, machine=processor, repetitions=0, **options)


def test_a_sum_of_long_vectors_is_bound_by_memory(processor):
    x, y, out = torch.zeros(3, 2**20)
    report = explain_here(processor, lambda: torch.add(x, y, out=out), num_threads=1)
    of = report.function
    assert of.source == "operators" and of.binding_level == "memory"
    # Each line of the result is loaded before it is written.
    expected = {"L1": 12 * MIB, "L2": 16 * MIB, "memory": 16 * MIB}
    assert of.moved_bytes == pytest.approx(expected, rel=1e-3)
    assert of.predicted_seconds == pytest.approx(16 * MIB / 10e9 + 1e-6, rel=1e-3)
    assert report.predicted_gain is None and not report.false_lead


def test_threads_have_the_caches_of_their_cores_and_share_memory(processor):
    x = torch.zeros(3 * MIB // 8)  # 1.5 MiB
    one = explain_here(processor, x.sum, num_threads=1).function
    two = explain_here(processor, x.sum, num_threads=2).function
    assert one.moved_bytes["memory"] == two.moved_bytes["memory"] > 1.4 * MIB
    assert two.seconds["L1"] == one.seconds["L1"] / 2
    assert two.seconds["memory"] == pytest.approx(one.seconds["memory"] / 1.5)
    small = torch.zeros(48 * KIB // 4)
    assert explain_here(processor, small.sum, num_threads=1).function.moved_bytes["L2"] > 0
    assert explain_here(processor, small.sum, num_threads=2).function.moved_bytes["L2"] == 0


def test_a_product_is_bound_by_arithmetic(processor):
    a = torch.zeros(256, 256)
    report = explain_here(processor, torch.mm, a, a)
    assert report.function.binding_level == "arithmetic"
    assert report.function.operations == 2 * 256**3
    assert report.function.seconds["arithmetic"] == pytest.approx(2 * 256**3 / 1e11)
    assert "arithmetic" in str(report)


def test_views_move_nothing_and_writes_in_place_do(processor):
    x = torch.zeros(1024, 64)
    assert explain_here(processor, lambda: x.t()[1:].unsqueeze(0)).function.num_launches == 0
    report = explain_here(processor, lambda: x.mul_(2), num_threads=1)
    (first, *_) = report.function.levels
    assert (first.loaded_bytes, first.stored_bytes) == (256 * KIB, 256 * KIB)


def test_columns_and_memory_that_nothing_is_written_to_are_not_counted(processor):
    x = torch.zeros(1024, 1024)
    first = explain_here(processor, lambda: x[:, :16].sum()).function.levels[0]
    assert (first.loaded_bytes, first.stored_bytes) == (1024 * 64, 4)
    first = explain_here(processor, lambda: torch.empty_like(x)).function.levels[0]
    assert first.moved_bytes == 0


def test_sparse_operands_are_counted(processor):
    dense = torch.eye(100)
    for sparse, index_bytes in (
        (dense.to_sparse(), 8 * 200),
        (dense.to_sparse_csr(), 8 * 201),
        (dense.to_sparse_csc(), 8 * 201),
        (dense.to_sparse_bsr((1, 1)), 8 * 201),
    ):
        report = explain_here(processor, sparse.clone, num_threads=1)
        (first, *_) = report.function.levels
        lines = first.loaded_bytes, first.stored_bytes
        assert lines == pytest.approx((index_bytes + 400,) * 2, abs=6 * 64)


def test_tensors_without_known_memory_are_refused(processor):
    meta = torch.empty(1000, device="meta")
    with pytest.raises(ValueError, match=r"\(1000,\) is on the device meta"):
        explain_here(processor, torch.relu, meta)
    with pytest.raises(ValueError, match="on the device meta"):
        explain_here(processor, declared(lambda trace, x: trace.stream([x])), meta)
    if torch.backends.mkldnn.is_available():
        with pytest.raises(TypeError, match=r"layout torch\._mkldnn"):
            explain_here(processor, torch.relu, torch.ones(4, 4).to_mkldnn())


def look_up(trace, index, num_loads):
    """Stream indices and results, with loads from tables that stay in the first level."""
    for at in range(0, 4 * index, 4096):
        trace.read(10**9, at, 4096)
        for table in range(num_loads):
            for _ in range(4):
                trace.read(2 * 10**9 + 4096 * table, 0, 1024)
        trace.write(3 * 10**9, at, 4096)


def run_nothing(*_: object) -> None:
    pass


def declared(access):
    return declare_access(access)(functools.partial(run_nothing))


def test_loads_from_a_table_in_the_first_level_are_a_false_lead(processor):
    """Three times the loads save nothing (arXiv:2502.20547), where a stream from memory binds."""
    one = declared(lambda trace: look_up(trace, 2**19, 1))
    three = declared(lambda trace: look_up(trace, 2**19, 3))
    report = explain_here(processor, one, base=three, num_threads=1)
    assert report.base is not None and report.base.binding_level == "memory"
    fall = report.base.moved_bytes["L1"] / report.function.moved_bytes["L1"]
    assert fall > 1.5 and report.false_lead and not report.is_faster
    assert report.predicted_gain == pytest.approx(1, abs=0.01)
    assert "false lead" in str(report) and json.loads(json.dumps(report.to_dict()))["false_lead"]


def test_half_of_the_bytes_from_memory_is_no_false_lead(processor):
    full, half = torch.zeros(2**20), torch.zeros(2**19)
    report = explain_here(processor, half.sum, base=full.sum, num_threads=1)
    assert not report.false_lead and report.is_faster
    assert report.predicted_gain == pytest.approx(2, rel=0.01)


def test_a_measured_time_decides(processor):
    """Bytes fall where nothing binds; the lead is false only if the time does not fall either."""
    one = declared(lambda trace: look_up(trace, 2**18, 1))
    three = declared(lambda trace: look_up(trace, 2**18, 3))
    report = explain_here(processor, one, base=three, num_threads=1)
    assert report.base is not None

    def measured(function: float, base: float) -> IOReport:
        return IOReport(
            dataclasses.replace(report.function, measured_seconds=function),
            dataclasses.replace(report.base, measured_seconds=base),
            "a processor",
        )

    assert measured(1.0, 1.07).false_lead
    assert not measured(1.0, 2.0).false_lead
    assert measured(1.0, 2.0).measured_gain == 2


def test_rates_of_a_busy_machine_are_named(processor):
    busy = dataclasses.replace(processor, load=4.0)
    x = torch.ones(8)
    assert "busy when they" in str(explain_here(busy, torch.add, x, x))
    assert "busy" not in str(explain_here(processor, torch.add, x, x))


def test_times_are_measured_in_turn(processor):
    calls: list[str] = []
    report = explain(
        lambda: calls.append("function"),
        base=lambda: calls.append("base"),
        machine=processor,
        repetitions=2,
    )
    assert report.measured_gain is not None and report.measured_gain > 0
    assert {"function", "base"} == set(calls) and "measured" in str(report)


def test_refusals(processor):
    with pytest.raises(ValueError, match="repetitions is -1"):
        explain(torch.add, machine=processor, repetitions=-1)
    bare = dataclasses.replace(processor, compute=None)
    with pytest.raises(PenstockError, match="no rates"):
        explain(torch.zeros, 3, machine=bare, repetitions=0)


def test_calls_that_cannot_be_explained_are_named(processor):
    def count():
        yield 1

    for function in (count, lambda: count()):
        with pytest.raises(TypeError, match="returned a generator"):
            explain(function, machine=processor, repetitions=0)
    for options, message in (({"num_threads": 0}, "num_threads is 0"),
                             ({"operations": -1}, "operations is -1")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            explain(torch.relu, torch.ones(2), machine=processor, **options)
    for functions in (("torch:add", None), (torch.relu, 3)):
        with pytest.raises(TypeError, match="cannot be called"):
            explain(functions[0], torch.ones(2), base=functions[1], machine=processor)


def test_the_picture_is_a_png(processor, tmp_path):
    pytest.importorskip("matplotlib")
    a = torch.zeros(256, 256)
    explain_here(processor, torch.mm, a, a, base=torch.add).draw(tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").read_bytes()[:4] == b"\x89PNG"


def test_the_picture_has_two_rates_at_least_on_its_axis(processor, tmp_path, monkeypatch):
    """Also where all of them lie within a decade."""
    figures, drawn = pytest.importorskip("matplotlib.figure"), []
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    a = torch.zeros(256, 256)
    explain_here(processor, torch.mm, a, a).draw(tmp_path / "roofline.png")
    axis = drawn[0].axes[0].yaxis
    axis.axes.set_ylim(3, 25)
    assert len([at for at in axis.get_majorticklocs() if 3 <= at <= 25]) >= 2


def test_kernels_are_counted_under_the_interpreter(tmp_path):
    pytest.importorskip("triton")
    done = subprocess.run(
        [find_python("interpreter"), str(HERE / "interpreted_explain.py"), str(tmp_path)],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["function"]["source"] == "interpreter"
    assert found["machine"] == "H100 80 GB"
    (l2, memory) = found["function"]["levels"]
    assert (l2["level"], l2["loaded_bytes"], l2["stored_bytes"]) == ("L2", 2 * 4000, 4000)
    assert (memory["level"], memory["loaded_bytes"]) == ("memory", 0)  # all of it stays in L2
    assert found["predicted_gain"] == 1 and found["function"]["num_launches"] == 1


def test_the_command_prints_a_table_or_json(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from penstock.cli import app

    name = "explained_functions"
    (tmp_path / f"{name}.py").write_text(
        "import torch\nx = torch.zeros(1000)\ndef total(): return x.sum()\nnumber = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)

    def run(*arguments: str):
        return CliRunner().invoke(app, ["explain", *arguments], catch_exceptions=False)

    options = ("--machine", "h100-80gb", "--repetitions", "0")
    shown = run(f"{name}:total", "--base", f"{name}:total", *options)
    assert shown.exit_code == 0 and "predicted gain" in shown.stdout
    data = json.loads(run(f"{name}:total", "--json", *options).stdout)
    assert data["function"]["levels"][0]["loaded_bytes"] == 4000
    for wrong in (f"{name}:number", "no_such_module:f", "no colon"):
        refused = run(wrong, *options)
        assert refused.exit_code == 2 and "module:function" in refused.stderr
