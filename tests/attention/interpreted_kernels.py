"""What `test_triton.py` runs in a process of its own, where Triton interprets its kernels.

The interpreter has to be chosen before Triton is imported, and is wrong to have for other tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attention_cases import Pattern, blocks, causal, documents, operands, relative_error, tree
from kernel_bytes.attention import BlockBytes
from penstock.attention import Layout, _paths, _torch, blocksparse, blocksparse_report
from penstock.attention import triton as kernels
from penstock.attention._operands import BlockOperands
from penstock.attention.triton import _launch
from penstock.attention.triton._launch import BlockTile
from penstock.codegen import count_bytes

assert os.environ.get("TRITON_INTERPRET") == "1", "test_triton.py runs this"

FLOAT, HALF = torch.float32, torch.float16
TOLERANCES = {FLOAT: 2e-6, HALF: 2e-3}
"""Of norms, relative: sums of tens of products are off by 1e-7 each; weights and their changes are
rounded to 11 bits before they are multiplied."""

pytestmark = [
    pytest.mark.usefixtures("interpreter_of_triton"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2"),
]

PATTERNS: dict[str, Callable[[], Pattern]] = {
    "causal": lambda: causal(37, 16),
    "documents": lambda: documents([20, 1, 12], 16, True, None),
    "window": lambda: documents([40], 16, True, 9),
    "both sides": lambda: documents([23, 12], 16, False, 7),
    "random by head": lambda: blocks(3, 4, 40, 50, 16, 0.4, False),
    "random and causal": lambda: blocks(1, 1, 40, 24, 16, 0.7, True),
    "tree": lambda: tree(5, 35, 16),
    "empty": lambda: blocks(0, 1, 20, 20, 16, 0.0, False),
}


def run_both(pattern: Pattern, given: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return output, log-sum-exp and gradients by the kernels, and by torch in float64."""
    results = []
    shape = (*given[0].shape[:3], given[2].shape[3])
    dout = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(given[0].dtype)
    scale = 1.2 * given[0].shape[3] ** -0.5  # scores of one size, and errors of it, in all dims
    for module, dtype in ((kernels, given[0].dtype), (_torch, torch.float64)):
        q, k, v = (each.detach().to(dtype) for each in given[:3])
        bias = given[3].detach().to(_torch.sum_dtype(q)) if len(given) > 3 else None
        call = BlockOperands(q, k, v, pattern.layout, bias, scale)
        out, lse = module.forward(call)
        grads = module.backward(dout.to(dtype), call, out, lse)
        results.append([out, lse, *(each for each in grads if each is not None)])
    return results[0], results[1]


def check(pattern: Pattern, given: list[Tensor]) -> list[Tensor]:
    found, expected = run_both(pattern, given)
    assert torch.equal(found[1] == -torch.inf, expected[1] == -torch.inf)
    for each, wanted in zip(found, expected, strict=True):
        each, wanted = (of.masked_fill(of == -torch.inf, 0.0) for of in (each, wanted))
        assert each.isfinite().all()
        assert relative_error(each, wanted) < TOLERANCES[given[0].dtype]
    assert [each.dtype for each in found[2:5]] == [given[0].dtype] * 3
    return found


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, FLOAT) for name in PATTERNS), ("documents", HALF), ("random by head", HALF)],
)
def test_values_and_gradients_of_every_layout(name: str, dtype: torch.dtype):
    pattern = PATTERNS[name]()
    heads = max(2, len(pattern.mask))
    given = operands(pattern, heads=heads, kv_heads=heads // 2, has_bias=True, dtype=dtype)
    check(pattern, given)


@pytest.mark.parametrize(("kv_heads", "dtype"), [(1, HALF), (4, FLOAT)])
def test_groups_of_heads_without_a_bias(kv_heads: int, dtype: torch.dtype):
    pattern = blocks(2, 4, 20, 40, 16, 0.6, False)
    check(pattern, operands(pattern, batch=2, kv_heads=kv_heads, dtype=dtype))


@pytest.mark.parametrize("dims", [(16, 40), (33, 16), (80, 96), (128, 64), (256, 200), (16, 300)])
def test_dims_and_values_of_another_width(dims: tuple[int, int]):
    pattern = documents([18], 16, True, None)
    dtype = HALF if dims[0] % 16 else FLOAT
    shape = {"heads": 2, "kv_heads": 1, "dim": dims[0], "value_dim": dims[1]}
    check(pattern, operands(pattern, **shape, has_bias=True, dtype=dtype))


@pytest.mark.parametrize(
    ("block", "tile"),
    [(32, BlockTile(16, 32, 4, 1)), (64, BlockTile(32, 16, 4, 1)), (128, BlockTile(64, 32, 4, 1))],
)
def test_blocks_of_several_tiles(block: int, tile: BlockTile, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_launch, "choose_tile", lambda *_: tile)
    pattern = documents([30, 40, 3], block, True, None)
    check(pattern, operands(pattern, heads=2, kv_heads=1, has_bias=True, dtype=FLOAT))


def test_a_block_that_is_not_partial_is_not_compared():
    """Flags say which blocks are: of a layout that is not Penstock's, the flags count."""
    pattern = causal(48, 16)
    pattern.layout.is_partial.zero_()
    pattern.layout.is_partial_of_column.zero_()
    query, key = torch.arange(48)[:, None], torch.arange(48)
    wanted = Layout.from_blocks((key[::16] <= query[::16]), 16)
    given = operands(pattern, heads=2, kv_heads=1, dtype=FLOAT)
    found = run_both(pattern, given)[0]
    for each, exact in zip(found, run_both(Pattern(wanted, pattern.mask), given)[1], strict=True):
        assert relative_error(each, exact) < TOLERANCES[FLOAT]


def test_rows_without_keys_are_zero_and_have_no_gradient():
    listed = torch.tensor([[True, False], [False, False], [True, False]])
    layout = Layout.from_blocks(listed, 16)
    pattern = Pattern(layout, layout.token_mask(40, 32))
    out, lse, dq, dk, dv = check(pattern, operands(pattern, dtype=FLOAT))
    for each in (out[:, :, 16:32], dq[:, :, 16:32], dk[:, :, 16:], dv[:, :, 16:]):
        assert not each.any()
    assert (lse[:, :, 16:32] == -torch.inf).all() and bool((dk[:, :, :16] != 0).any())


def test_a_bias_of_minus_infinity_hides_a_key():
    pattern = documents([40], 16, False, None)
    given = [each.detach() for each in operands(pattern, has_bias=True, dtype=FLOAT)]
    given[3][:, :, 16:] = -torch.inf
    given[3][:, 1] = -torch.inf  # a head that sees nothing
    found, expected = run_both(pattern, given)
    assert not found[0][:, 1].any() and not found[2][:, 1].any()
    for each, wanted in zip(found[2:] + found[:1], expected[2:] + expected[:1], strict=True):
        assert relative_error(each, wanted.nan_to_num()) < TOLERANCES[FLOAT]


def test_a_number_that_is_none_is_not_hidden():
    pattern = documents([40, 24], 16, True, None)
    q, k, v = (each.detach() for each in operands(pattern, dtype=FLOAT))
    k[0, 0, 50] = torch.nan
    out, _ = kernels.forward(BlockOperands(q, k, v, pattern.layout, None, 0.2))
    assert bool(out[0, :2, 50:].isnan().all())
    assert bool(out[0, :2, :48].isfinite().all()) and bool(out[0, 2:].isfinite().all())


def test_strides_of_operands_do_not_change_bits():
    pattern = documents([11, 13], 16, True, None)
    given = [
        each.detach() for each in operands(pattern, batch=2, heads=2, has_bias=True, dtype=FLOAT)
    ]
    q, k, v, bias = given
    moved = [
        q.transpose(1, 2).contiguous().transpose(1, 2),
        torch.cat([k, k], 3)[..., 16:],
        v.mT.contiguous().mT,
        torch.stack([bias, bias], 3)[..., 1],
    ]
    for left, right in zip(run_both(pattern, given)[0], run_both(pattern, moved)[0], strict=True):
        assert torch.equal(left, right)
    check(pattern, [q, k, v, bias[:1, :1, :1].expand(bias.shape)])


def test_the_operator_takes_the_kernels(monkeypatch: pytest.MonkeyPatch):
    """As on a GPU: its path, its output and its gradients by autograd."""
    monkeypatch.setattr(_paths, "name_kernels", lambda _: "Triton")
    pattern = PATTERNS["documents"]()
    given = operands(pattern, has_bias=True, dtype=FLOAT)
    q, k, v, bias = given
    out = blocksparse(q, k, v, pattern.layout, bias=bias)
    exact = [each.detach().double().requires_grad_() for each in given]
    wanted = _torch.attend(*exact[:3], pattern.layout, exact[3], 0.25)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, given, dout)
    for each, gradient in zip(
        (out, *found), (wanted, *torch.autograd.grad(wanted, exact, dout.double())), strict=True
    ):
        assert relative_error(each.detach(), gradient.detach()) < TOLERANCES[FLOAT]
    report = blocksparse_report(q, k, v, pattern.layout)
    assert report.path == "Triton" and "GPU" in report.reason


def test_nothing_is_launched_for_an_empty_batch():
    layout = Layout.window(20, 9, 16)
    q = torch.zeros(0, 4, 20, 16)
    call = BlockOperands(q, q, q, layout, None, 0.2)
    out, lse = kernels.forward(call)
    grads = kernels.backward(out, call, out, lse)
    assert [each.shape for each in (out, *grads[:3]) if each is not None] == [q.shape] * 4


@pytest.mark.parametrize(
    ("dtype", "has_bias", "tile"),
    [
        (FLOAT, True, None),
        (HALF, False, None),
        (HALF, True, BlockTile(16, 32, 4, 1)),
        (FLOAT, False, BlockTile(32, 16, 4, 1)),
    ],
)
def test_bytes_are_those_of_the_formula(dtype, has_bias, tile, monkeypatch):
    if tile is not None:
        monkeypatch.setattr(_launch, "choose_tile", lambda *_: tile)
        monkeypatch.setattr("kernel_bytes.attention.choose_tile", lambda *_: tile)
    for pattern in (documents([30, 11], 32, True, None), blocks(3, 4, 40, 70, 64, 0.7, False)):
        heads = max(2, len(pattern.mask))
        shape = {"heads": heads, "kv_heads": heads // 2, "dim": 24, "value_dim": 16}
        given = operands(pattern, **shape, has_bias=has_bias, dtype=dtype)
        q, k, v, bias = (*(each.detach() for each in given), None)[:4]
        bias = None if bias is None else bias.float()
        model = BlockBytes(q=q, k=k, v=v, layout=pattern.layout, has_bias=has_bias)
        call = BlockOperands(q, k, v, pattern.layout, bias, 0.3)
        assert count_bytes(lambda: kernels.forward(call)) == model.forward()  # noqa: B023
        out, lse = torch.zeros(*q.shape[:3], 16, dtype=dtype), torch.zeros(q.shape[:3])
        found = count_bytes(
            lambda: kernels.backward(out, call, out, lse)  # noqa: B023
        )
        assert found == model.backward()
