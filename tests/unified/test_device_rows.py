"""Kernels that move rows: their values under Triton's interpreter, their code for an H100."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

HERE = Path(__file__).resolve().parent
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, which comes with CUDA"
)


@needs_triton
@pytest.mark.slow
def test_values_under_the_interpreter():
    """In a process of its own: what is interpreted is chosen when Triton is imported."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
            str(HERE / "interpreted_device_rows.py"),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE.parent.parent,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > 300


# ------------------------------------------------------------------------ compiled


def compiled(kernel, types, constants):
    """The kernel's machine code for compute capability 9.0, without a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(at,): aligned for at, name in enumerate(names) if signature[name][0] == "*"},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def copy_kernel(row_bytes: int, address: int = 0, *, host_is_source: bool = True):
    from penstock.unified import _device_rows, _row_kernels

    tile = _device_rows._tile(row_bytes, address, address, 0)
    kernel, constants = _row_kernels.copy_words, {}
    word = str(_device_rows._WORDS[tile.word_bytes])
    source = word
    if tile.word_bytes < 4 and host_is_source:
        tile = _device_rows._narrow_tile(row_bytes, address, tile.word_bytes)
        kernel, source = _row_kernels.gather_narrow, "int32"
        constants["UNIT"] = tile.word_bytes
    else:
        constants |= {"VECTOR": tile.vector, "HOST_IS_SOURCE": host_is_source}
    constants |= {"HAS_SOURCE_INDEX": True, "HAS_TARGET_INDEX": True, "NEGATIVE": True}
    constants |= {"CHECK": host_is_source, "ROW": tile.row, "LINE": tile.line, "BASE": tile.base}
    constants |= {"SPAN": tile.span, "ROWS": tile.rows, "COLUMNS": tile.columns}
    names = {"int8": "*i8", "int16": "*i16", "int32": "*i32", "int64": "*i64"}
    types = {"source": names[source], "target": names[word], "source_index": "*i64"}
    types |= {"target_index": "*i64", "num_places": "i64", "num_source_rows": "i64"}
    if host_is_source:
        types["first_wrong"] = "*i64"
    else:
        constants["first_wrong"] = None
    return compiled(kernel, types, constants)


WIDEST = {
    # Four words at once wherever rows are a multiple of 16 bytes, even if not of a line.
    512: "ld.global.v4.b32",
    1024: "ld.global.v4.b32",
    2064: "ld.global.v4.b32",
    400: "ld.global.v4.b32",
    64: "ld.global.v4.b32",
    # Else one word: a warp still asks for whole lines.
    2056: "ld.global.b64",
    2052: "ld.global.b32",
    132: "ld.global.b32",
    # Rows that are no multiple of four bytes are read in words of four all the same.
    602: "ld.global.b32",
    129: "ld.global.b32",
}


@needs_triton
@pytest.mark.parametrize("row_bytes", WIDEST)
def test_the_gather_compiled_for_hopper_loads_the_widest_words(row_bytes):
    kernel = copy_kernel(row_bytes)
    assert kernel.asm["cubin"][:4] == b"\x7fELF" and len(kernel.asm["cubin"]) > 1000
    loads = set(re.findall(r"ld\.global[.\w]*", kernel.asm["ptx"]))
    # Beside those of rows there are loads of indices, 64 bits each.
    assert WIDEST[row_bytes] in loads
    assert loads <= {WIDEST[row_bytes], "ld.global.b64", "ld.global.v2.b64"}


@needs_triton
@pytest.mark.parametrize("row_bytes", [512, 2064, 602, 3])
def test_the_put_compiled_for_hopper(row_bytes):
    kernel = copy_kernel(row_bytes, host_is_source=False)
    assert kernel.asm["cubin"][:4] == b"\x7fELF"
    widest = {512: "st.global.v4.b32", 2064: "st.global.v4.b32", 602: "b16", 3: "b8"}[row_bytes]
    assert widest in kernel.asm["ptx"]


@needs_triton
@pytest.mark.parametrize("dtype", ["fp32", "fp64", "fp16", "bf16", "i8", "i64"])
def test_the_sum_compiled_for_hopper(dtype):
    import triton.language as tl

    from penstock.unified import _row_kernels

    total = {"fp16": tl.float32, "bf16": tl.float32, "fp32": tl.float32, "fp64": tl.float64}
    types = {"table": f"*{dtype}", "source": f"*{dtype}", "rows": "*i64", "order": "*i64"}
    constants = {"SUM": total.get(dtype, getattr(tl, dtype.replace("i", "int"), None))}
    constants |= {"ROW": 130, "COLUMNS": 256}
    kernel = compiled(_row_kernels.add_runs, {**types, "num_places": "i64"}, constants)
    assert kernel.asm["cubin"][:4] == b"\x7fELF"
    assert ".shared" not in kernel.asm["ptx"] and "atom" not in kernel.asm["ptx"]


# --------------------------------------------------------------------------- tiles


@needs_triton
@given(
    row_bytes=st.integers(1, 20_000),
    host=st.integers(0, 512),
    other=st.sampled_from([0, 1, 2, 4, 8, 16, 256]),
)
def test_a_tile_holds_every_row_wherever_it_begins(row_bytes, host, other):
    from penstock.unified._device_rows import _narrow_tile, _tile

    tile = _tile(row_bytes, host, host, other)
    unit = tile.word_bytes // tile.vector
    assert math.gcd(16, row_bytes, host, other) == tile.word_bytes
    assert tile.row * unit == row_bytes
    for row in range(200):
        lead = (row * tile.row + tile.base) % tile.line
        assert lead + tile.row <= tile.span
        assert lead % tile.vector == 0
        if tile.line > tile.vector:  # laid on the grid: word `-lead` begins a line
            assert (host + row * row_bytes - lead * unit) % 128 == 0
    assert tile.columns & (tile.columns - 1) == 0 and tile.rows & (tile.rows - 1) == 0
    narrow = _narrow_tile(row_bytes, host // 4 * 4, 1)
    for row in range(200):
        lead = (row * row_bytes + narrow.base) % narrow.line
        assert lead + row_bytes <= 4 * narrow.span


def test_nothing_imports_triton_before_a_gpu_is_used():
    code = (
        "import sys, torch, penstock.unified as p\n"
        "u = p.unify(torch.ones(4, 2), device='cpu'); u[torch.tensor([1])]; u.report()\n"
        "assert 'penstock.unified._row_kernels' not in sys.modules\n"
        "assert not torch.cuda.is_initialized()"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
