"""Kernels that move rows: their values under Triton's interpreter, their code for an H100."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.unified import unify
from triton_tests import needs_triton, run_interpreted, run_without

HERE = Path(__file__).resolve().parent


@needs_triton
@pytest.mark.slow
def test_values_under_the_interpreter():
    run_interpreted(HERE / "interpreted_rows.py", at_least=281)


# ------------------------------------------------------------------------ compiled


class Launches:
    """Stands in for a kernel, and compiles each launch of it for compute capability 9.0."""

    def __init__(self, kernel) -> None:
        self.kernel = kernel
        self.compiled = []

    def __getitem__(self, grid):
        return self._compile

    def _compile(self, *args, **kwargs) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.runtime.jit import create_function_from_signature

        target = GPUTarget("cuda", 90, 32)
        backend = triton.compiler.make_backend(target)
        bind = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        bound, specialized, options = bind(*args, **kwargs)
        signature = {
            name: kind for name, (kind, _) in zip(bound, specialized, strict=False)
        }  # as triton.runtime.jit.JITFunction.run has it
        names = list(signature)
        constants = {
            (names.index(name),): bound[name] for name in names if signature[name] == "constexpr"
        }
        attributes = {
            (at,): backend.parse_attr(attribute)
            for at, (_, attribute) in enumerate(specialized[: len(names)])
            if isinstance(attribute, str)
        }
        source = ASTSource(self.kernel, signature, constants, attributes)
        self.compiled.append(triton.compile(source, target=target, options=options))


@pytest.fixture
def launches(monkeypatch):
    """What `_rows` launches, compiled as on a GPU, from tensors that are here."""
    from penstock.unified.device import _kernels

    found = {}
    for name in ("copy_rows", "add_runs"):
        found[name] = Launches(getattr(_kernels, name))
        monkeypatch.setattr(_kernels, name, found[name])
    return lambda: [each for launch in found.values() for each in launch.compiled]


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
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_the_gather_compiled_for_hopper_loads_the_widest_words(row_bytes, index_dtype, launches):
    from penstock.unified.device import _rows as device_rows

    table = unify(torch.zeros(10, row_bytes, dtype=torch.uint8)).cpu()
    index, first = torch.zeros(7, dtype=index_dtype), torch.tensor(torch.iinfo(torch.int64).max)
    out = torch.empty(7, row_bytes, dtype=torch.uint8)
    device_rows.read_rows(table, index, out, first_wrong=first)
    (kernel,) = launches()
    assert kernel.asm["cubin"][:4] == b"\x7fELF" and len(kernel.asm["cubin"]) > 1000
    loads = set(re.findall(r"ld\.global[.\w]*", kernel.asm["ptx"]))
    # Beside those of rows there are loads of indices.
    indices = {"b64", "v2.b64"} if index_dtype == torch.int64 else {"b32", "v2.b32", "v4.b32"}
    assert WIDEST[row_bytes] in loads
    assert loads <= {WIDEST[row_bytes], *(f"ld.global.{each}" for each in indices)}


@needs_triton
@pytest.mark.parametrize("row_bytes", [512, 2064, 602, 3])
def test_the_put_compiled_for_hopper(row_bytes, launches):
    from penstock.unified.device import _rows as device_rows

    table = unify(torch.zeros(10, row_bytes, dtype=torch.uint8)).cpu()
    source = torch.zeros(4, row_bytes, dtype=torch.uint8)
    device_rows.write_rows(table, torch.tensor([1, 2, 1, 3]), source)
    (kernel,) = launches()
    stores = set(re.findall(r"st\.global\.([.\w]*)", kernel.asm["ptx"]))
    assert stores == {{512: "v4.b32", 2064: "v4.b32", 602: "b16", 3: "b8"}[row_bytes]}


@needs_triton
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int8", "int64"])
def test_the_sum_compiled_for_hopper_has_no_atomics(dtype, launches):
    from penstock.unified.device import _rows as device_rows

    table = torch.zeros(10, 130, dtype=getattr(torch, dtype))
    device_rows.add_rows(table, torch.tensor([1, 2, 1]), torch.zeros_like(table[:3]))
    (kernel,) = launches()
    assert kernel.asm["cubin"][:4] == b"\x7fELF"
    assert "atom" not in kernel.asm["ptx"] and "red." not in kernel.asm["ptx"]


@needs_triton
def test_a_gather_of_more_rows_uses_the_same_kernel(launches):
    from penstock.unified.device import _rows as device_rows

    for num_rows, num_indices in ((10, 7), (64, 1), (1000, 16)):
        out = torch.empty(num_indices, 32)
        index = torch.zeros(num_indices, dtype=torch.int64)
        device_rows.read_rows(torch.zeros(num_rows, 32), index, out)
    assert len({kernel.hash for kernel in launches()}) == 1


# --------------------------------------------------------------------------- tiles


@needs_triton
@given(
    row_bytes=st.integers(1, 20_000),
    host=st.integers(0, 512),
    other=st.sampled_from([0, 1, 2, 4, 8, 16, 256]),
)
def test_a_tile_holds_every_row_wherever_it_begins(row_bytes, host, other):
    from penstock.unified.device._rows import _make_narrow_tile, _make_tile

    tile = _make_tile(row_bytes, host, host, other)
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
    narrow = _make_narrow_tile(row_bytes, host // 4 * 4, 1)
    for row in range(200):
        lead = (row * row_bytes + narrow.base) % narrow.line
        assert lead + row_bytes <= 4 * narrow.span


def test_nothing_imports_triton_before_a_gpu_is_used():
    code = (
        "import torch, penstock.unified as p\n"
        "u = p.unify(torch.ones(4, 2), device='cpu'); u[torch.tensor([1])]; u.report()\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    run_without("penstock.unified.device._kernels", code)
