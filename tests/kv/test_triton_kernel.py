"""Triton kernels of attention over records: interpreted, compiled for GPUs, and run on one."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from record_layer import BRAIN, FLOAT, HALF, Layer, assert_close
from triton_tests import compile_well, needs_triton, run_interpreted, run_without

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TOLERANCES = {FLOAT: 4e-6, HALF: 2e-3, BRAIN: 2e-2}
"""Records are exact; in float32 sums of some hundred products are rounded by 2**-24 each, else
weights below 1 by 2**-11 and 2**-8, which multiply values near 1 or 2."""


@needs_triton
@pytest.mark.slow
def test_values_under_the_interpreter():
    run_interpreted(HERE / "interpreted_attention.py", at_least=83)


def test_nothing_imports_triton_before_a_gpu_is_used():
    code = (
        "import torch\nfrom penstock import kv\n"
        "pool = kv.BlockPool(device_memory='1MiB')\n"
        "pool.append(0, torch.rand(1, 2, 100, 16), torch.rand(1, 2, 100, 16))\n"
    )
    run_without("penstock.kv.triton", code)


def record_launches(dtype: torch.dtype, shape: dict[str, int], *, masked: bool) -> list[Any]:
    """The launches of a call over a long context of two KV heads."""
    from penstock.kv.triton._launch import RecordCall, attend

    group, num_tokens, dim = shape["group"], shape["num_tokens"], shape["dim"]
    width = 1024 * 64
    found: list[Any] = []
    call = RecordCall(
        query=torch.empty(1, 2 * group, num_tokens, dim, dtype=dtype),
        addresses=torch.empty(1, 2, 1024, dtype=torch.int64),
        counts=torch.empty(1, 2, 1024, dtype=torch.int32),
        block_tokens=64,
        value_dim=dim,
        scale=0.1,
        softcap=30.0 if masked else 0.0,
        visible=torch.empty(1, 2, num_tokens, width, dtype=torch.bool) if masked else None,
        bias=torch.empty(1, 1, 1, width).expand(1, 2 * group, num_tokens, width)
        if masked
        else None,
        is_aligned=True,
    )
    attend(call, with_block_lse=masked, run=found.append)
    return found


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", [BRAIN, FLOAT])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_kernels_compile_without_spills_or_atomics(dim, dtype, target):
    for group, num_tokens in ((4, 1), (8, 16)):
        for masked in (False, True):
            shape = {"group": group, "num_tokens": num_tokens, "dim": dim}
            launches = record_launches(dtype, shape, masked=masked)
            assert [each.kernel.__name__ for each in launches] == ["attend_tasks", "merge_tasks"]
            for launch in launches:
                stages = launch.num_stages if target == "sm_90" else min(launch.num_stages, 2)
                text, _ = compile_well(dataclasses.replace(launch, num_stages=stages), target)
                case = (shape, masked, launch.kernel.__name__)
                if launch.kernel.__name__ == "attend_tasks":
                    assert dtype == FLOAT or re.search(r"wgmma|mma\.sync|mfma", text), case
                    if target == "sm_90" and num_tokens == 1:
                        assert "cp.async.cg.shared.global" in text, case


@needs_triton
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_copies_compile_to_wide_words(target):
    from penstock.kv.triton._copy import copy_launch

    table = torch.empty(2, 100, dtype=torch.int64)
    text, resources = compile_well(copy_launch(table, 32768, 16), target)
    assert resources.registers <= 128, resources  # four programs to a processor
    wide = {
        "sm_90": r"ld\.global\.v4\.b32.*st\.global\.v4\.b32",
        "gfx942": r"(global|buffer)_load_dwordx4.*(global|buffer)_store_dwordx4",
    }
    assert re.search(wide[target], text, re.DOTALL)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FLOAT, HALF, BRAIN])
@pytest.mark.parametrize("where", ["device", "registered"])
def test_on_a_device_results_are_those_of_the_formula_and_the_same_in_every_run(dtype, where):
    from penstock.kv.triton import attend_records
    from penstock.memory.pages import map_anonymous, round_up
    from penstock.memory.pinned import pin, unpin
    from penstock.memory.raw_memory import address_of

    for group, num_tokens, dim in ((1, 1, 64), (4, 1, 128), (8, 16, 128), (4, 3, 80), (8, 16, 256)):
        layer = Layer(
            group=group, num_tokens=num_tokens, key_dim=dim, value_dim=dim, dtype=dtype,
            num_records=70, block_tokens=64,
        )  # fmt: skip
        bias = torch.randn(layer.batch, layer.query.shape[1], num_tokens, layer.num_scores())
        visible = torch.rand(layer.batch, layer.kv_heads, num_tokens, layer.num_scores()) < 0.9
        layer.query = layer.query.to(dtype)
        masks = {"bias": bias, "visible": visible}
        plain, masked = layer.formula(), layer.formula(**masks, softcap=5.0)
        offsets = layer.addresses - layer.memory.data_ptr()
        mapping = map_anonymous(round_up(layer.memory.nbytes))
        base = address_of(mapping)
        on_device = layer.memory.cuda()
        if where == "registered":
            pin(base, len(mapping), remedy="free memory")
            torch.frombuffer(mapping, dtype=torch.uint8)[: layer.memory.nbytes].copy_(
                layer.memory.view(-1).view(torch.uint8)
            )
        first = base if where == "registered" else on_device.data_ptr()
        layer.query, layer.addresses = layer.query.cuda(), (offsets + first).cuda()
        assert layer.counts is not None
        layer.counts = layer.counts.cuda()
        try:
            for expected, options in (
                (plain, {}),
                (masked, {**{k: v.cuda() for k, v in masks.items()}, "softcap": 5.0}),
            ):
                runs = [
                    layer.attend(attend_records, **options, with_block_lse=True, is_aligned=True)
                    for _ in range(2)
                ]
                assert_close(runs[0], expected, TOLERANCES[dtype])
                assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
        finally:
            torch.cuda.synchronize()
            if where == "registered":
                unpin(base)
