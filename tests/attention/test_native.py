"""The C++ kernels: against float64, with the same bits for any threads and in both ways."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_cases import Pattern, documents, operands, patterns, relative_error
from penstock.attention import Layout, _native, _torch
from penstock.attention._operands import BlockOperands

TOLERANCES = {  # of norms, relative
    torch.float64: 1e-13,
    torch.float32: 1e-5,  # the bar; sums of some hundred products are off by 1e-6
    torch.float16: 2e-3,  # 11 bits of inputs, weights stay in float32
    torch.bfloat16: 2e-2,  # 8 bits
}


@pytest.fixture(params=[True, False], ids=["sweep", "two passes"])
def sweeps(request, monkeypatch) -> bool:
    monkeypatch.setattr(_native, "does_sweep", lambda *_: request.param)
    return request.param


def run_both(
    pattern: Pattern, given: list[Tensor], dout: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return output and gradients by C++, and by torch in float64."""
    results = []
    shape = (*given[0].shape[:3], given[2].shape[3])
    generator = torch.Generator().manual_seed(2)
    dout = torch.randn(shape, generator=generator).to(given[0].dtype) if dout is None else dout
    for kernels, dtype in ((_native, given[0].dtype), (_torch, torch.float64)):
        q, k, v = (each.detach().to(dtype) for each in given[:3])
        bias = given[3].detach().to(_torch.sum_dtype(q)) if len(given) > 3 else None
        call = BlockOperands(q, k, v, pattern.layout, bias, 0.2)
        out, lse = kernels.forward(call)
        grads = kernels.backward(dout.to(dtype), call, out, lse)
        results.append([out, *(each for each in grads if each is not None)])
    return results[0], results[1]


@settings(max_examples=60)
@given(
    patterns(),
    st.sampled_from([1, 2, 4]),
    st.integers(16, 256) | st.sampled_from([16, 64, 128, 256]),
    st.none() | st.sampled_from([16, 40, 128]),
    st.booleans(),
    st.booleans(),
)
def test_output_and_gradients_are_those_of_float64(
    pattern: Pattern,
    kv_heads: int,
    dim: int,
    value_dim: int | None,
    has_bias: bool,
    is_swept: bool,
):
    given = operands(
        pattern,
        batch=2,
        kv_heads=kv_heads,
        dim=dim,
        value_dim=value_dim,
        has_bias=has_bias,
        dtype=torch.float32,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_native, "does_sweep", lambda *_: is_swept)
        found, expected = run_both(pattern, given)
    for each, wanted in zip(found, expected, strict=True):
        assert relative_error(each, wanted) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_every_dtype_and_block(dtype: torch.dtype, block: int, sweeps: bool):
    pattern = documents([70, 1, 33, 96], block, True, None)
    found, expected = run_both(pattern, operands(pattern, dim=40, has_bias=True, dtype=dtype))
    for each, wanted in zip(found[:-1], expected[:-1], strict=True):
        assert each.dtype == dtype
        assert relative_error(each, wanted) < TOLERANCES[dtype]
    assert found[-1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@settings(max_examples=12)
@given(
    patterns(),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([16, 24, 64, 80]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_bits_do_not_depend_on_threads_or_on_the_way(
    pattern: Pattern, kv_heads: int, dim: int, dtype: torch.dtype, has_bias: bool
):
    given = operands(pattern, kv_heads=kv_heads, dim=dim, has_bias=has_bias, dtype=dtype)
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            for is_swept in (True, False):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(_native, "does_sweep", lambda *_, answer=is_swept: answer)
                    results.append(run_both(pattern, given)[0])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for left, right in zip(results[0], other, strict=True):
            assert torch.equal(left, right)


def test_strides_of_operands_do_not_change_bits(sweeps: bool):
    pattern = documents([70, 33, 25], 32, True, None)
    given = [each.detach().float() for each in operands(pattern, batch=2, dim=32, has_bias=True)]
    plain, _ = run_both(pattern, given)
    q, k, v, bias = given
    assert plain[0].shape == (2, 4, 128, 32)
    moved = [
        q.transpose(1, 2).contiguous().transpose(1, 2),
        torch.cat([k, k], 3)[..., 32:],
        v.mT.contiguous().mT,
        bias,
    ]
    strange, _ = run_both(pattern, moved)
    for left, right in zip(plain, strange, strict=True):
        assert torch.equal(left, right)
    ones = torch.ones(1).expand(q.shape)
    whole, _ = run_both(pattern, given, torch.ones(q.shape))
    for left, right in zip(run_both(pattern, given, ones)[0], whole, strict=True):
        assert torch.equal(left, right)


def test_rows_without_keys_are_zero_and_have_no_gradient(sweeps: bool):
    listed = torch.tensor([[True, False], [False, False], [True, False]])
    layout = Layout.from_blocks(listed, 16)
    pattern = Pattern(layout, layout.token_mask(40, 32))
    q, k, v = operands(pattern, dim=16, dtype=torch.float32)
    out, dq, dk, dv = run_both(pattern, [q, k, v])[0]
    assert torch.equal(out[:, :, 16:32], torch.zeros(1, 4, 16, 16))
    assert torch.equal(dq[:, :, 16:32], torch.zeros(1, 4, 16, 16))
    assert torch.equal(dk[:, :, 16:], torch.zeros(1, 2, 16, 16))
    assert torch.equal(dv[:, :, 16:], torch.zeros(1, 2, 16, 16))
    assert bool((out[:, :, :16] != 0).all()) and bool((dk[:, :, :16] != 0).any())


def test_a_bias_of_minus_infinity_hides_a_key(sweeps: bool):
    layout = Layout.from_blocks(torch.ones(2, 3).bool(), 16)
    pattern = Pattern(layout, layout.token_mask())
    q, k, v = operands(pattern, dim=16, dtype=torch.float32)
    bias = torch.zeros(1, 4, 48)
    bias[:, :, 16:] = -torch.inf
    bias[:, 1] = -torch.inf  # a head that sees nothing
    found, expected = run_both(pattern, [q, k, v, bias])
    assert not found[0][:, 1].any() and not found[1][:, 1].any()
    for each, wanted in zip(found, expected, strict=True):
        assert each.isfinite().all()
        assert relative_error(each, wanted.nan_to_num()) < 1e-5


def test_a_number_that_is_none_is_not_hidden():
    pattern = documents([40, 24], 16, True, None)
    q, k, v = operands(pattern, dtype=torch.float32)
    with torch.no_grad():
        k[0, 0, 50] = torch.nan
    out, _ = _native.forward(BlockOperands(q, k, v, pattern.layout, None, 0.2))
    assert bool(out[0, :2, 50:].isnan().all())
    assert bool(out[0, :2, :48].isfinite().all()) and bool(out[0, 2:].isfinite().all())


@pytest.mark.parametrize(
    ("name", "value"),
    [("key_blocks", 9), ("key_blocks", -1), ("query_blocks", 9), ("row_offsets", 1000)],
)
def test_lists_that_lead_out_of_the_operands_are_refused(name: str, value: int):
    layout = Layout.window(64, 9, 16)
    q, k, v = operands(Pattern(layout, layout.token_mask()), dtype=torch.float32)
    getattr(layout, name).view(-1)[-1] = value
    with pytest.raises(ValueError, match="beyond the operands"):
        _native.forward(BlockOperands(q, k, v, layout, None, 0.2))


@pytest.mark.parametrize(
    ("num_heads", "num_threads", "expected"),
    [(1, 1, True), (8, 2, True), (1, 2, False), (3, 2, True), (7, 2, True), (5, 4, False)],
)
def test_heads_are_swept_where_they_fill_the_threads(
    num_heads: int, num_threads: int, expected: bool
):
    assert _native.does_sweep(num_heads, num_threads) is expected
