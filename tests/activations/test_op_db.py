"""Every operator that PyTorch lists gives the same gradients, bit for bit, when offloaded.

`op_db` is PyTorch's own table of operators with sample inputs. Each is differentiated twice,
without Penstock and under `policy="all", min_bytes="0B"`, with a pause before either backward
pass, until all that was saved has been written, so that bytes are read and not handed back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import penstock
from penstock.activations._engine import _DEFERRED_SAVES

pytest.importorskip("expecttest", reason="torch.testing._internal needs it")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

OPERATORS = [op for op in op_db if op.supports_autograd]
DTYPES = (torch.float64, torch.complex128)
MAX_SAMPLES = 40  # per operator and dtype
MAX_SECONDS = 0.02  # of stock runs per operator and dtype; the first sample is always run
NUM_VARIED = 2  # samples that are also run with leaves as inputs, and in place
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}  # to compare bits, by element size
MIN_OPERATORS = 450
MIN_OPERATORS_OUT = 400  # whose bytes went out and came back

EXCEPTIONS: dict[str, str] = {}
"""Operators by `op.formatted_name` that are not compared, or not bit for bit, and why."""


@dataclasses.dataclass
class Tally:
    """What was really compared, so that the test cannot pass without comparing."""

    tried: set[str] = dataclasses.field(default_factory=set)
    compared: set[str] = dataclasses.field(default_factory=set)
    moved: set[str] = dataclasses.field(default_factory=set)
    both_raise: int = 0
    num_runs: int = 0


@pytest.fixture(scope="module")
def tally():
    return Tally()


@pytest.fixture(scope="module")
def everything(real_disk):
    """One Offload for all operators."""
    offload = penstock.offload(real_disk, policy="all", min_bytes="0B")
    yield offload
    offload.close()


Outcome = list[torch.Tensor | None] | type[Exception]


@dataclasses.dataclass(frozen=True)
class Run:
    """One way to call an operator on one sample."""

    label: str
    sample: Any
    function: Callable[..., Any]
    leaves_as_inputs: bool = False


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.formatted_name)
def test_gradients_are_bit_equal(op, everything, tally):
    tally.tried.add(op.formatted_name)
    if op.formatted_name in EXCEPTIONS:
        pytest.skip(EXCEPTIONS[op.formatted_name])
    before = everything.report()
    for dtype in DTYPES:
        if dtype not in op.supported_backward_dtypes("cpu"):
            continue
        runs = []
        started = time.perf_counter()
        for run in runs_of(op, dtype):
            runs.append((run, differentiate(op, run, lambda: None)))
            if time.perf_counter() - started > MAX_SECONDS:
                break
        with everything:
            for run, expected in runs:
                found = differentiate(op, run, lambda: wait_until_written(everything))
                difference = compare(found, expected)
                assert difference is None, f"{op.formatted_name}, {run.label}: {difference}"
                tally.num_runs += 1
                if isinstance(expected, list):
                    tally.compared.add(op.formatted_name)
                else:
                    tally.both_raise += 1
                del found
    after = everything.report()
    if after.offloaded_bytes > before.offloaded_bytes and after.bytes_read > before.bytes_read:
        tally.moved.add(op.formatted_name)


def runs_of(op: Any, dtype: torch.dtype) -> Iterator[Run]:
    """The samples of an operator, the first of them in several ways."""
    samples = op.sample_inputs("cpu", dtype, requires_grad=True)
    for index, sample in enumerate(itertools.islice(samples, MAX_SAMPLES)):
        label = f"{dtype}, sample {index}"
        yield Run(label, sample, op)
        if index < NUM_VARIED:
            yield Run(f"{label}, leaves as inputs", sample, op, leaves_as_inputs=True)
            in_place = op.get_inplace()
            if in_place is not None and not sample.broadcasts_input:
                yield Run(f"{label}, in place", sample, in_place)


def differentiate(op: Any, run: Run, pause: Callable[[], None]) -> Outcome:
    """Gradients of first and second order, or the type of error that came instead."""
    sample = run.sample
    leaves = list(differentiable((sample.input, sample.args, sample.kwargs)))
    inputs = (sample.input, sample.args, sample.kwargs)
    seed(0)
    try:
        argument, args, kwargs = copied(inputs, leaves=run.leaves_as_inputs)
        output = run.function(argument, *args, **kwargs)
        del argument, args, kwargs
        if sample.output_process_fn_grad is not None:
            output = sample.output_process_fn_grad(output)
        outputs = list(differentiable(output))
        if not outputs:
            return []
        pause()
        first = gradients(outputs, leaves, create_graph=op.supports_gradgrad)
        differentiable_again = list(differentiable(first))
        if not differentiable_again:
            return first
        pause()
        return first + gradients(differentiable_again, leaves)
    except Exception as error:
        return type(error)


def gradients(
    outputs: list[torch.Tensor], leaves: list[torch.Tensor], *, create_graph: bool = False
) -> list[torch.Tensor | None]:
    """Gradients for seeded random cotangents."""
    seed(1)
    cotangents = [
        torch.randn_like(output) if output.layout is torch.strided else torch.ones_like(output)
        for output in outputs
    ]
    return list(
        torch.autograd.grad(
            outputs, leaves, cotangents, allow_unused=True, create_graph=create_graph
        )
    )


def seed(number: int) -> None:
    """`torch.manual_seed` for the CPU alone: it takes 1 ms where CUDA has not been initialised."""
    torch.default_generator.manual_seed(number)


def differentiable(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a nest of containers that require a gradient."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, dict):
        yield from differentiable(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from differentiable(item)


def copied(value: Any, *, leaves: bool) -> Any:
    """The same nest with clones of its tensors, since some operators write to their inputs.

    A clone of a differentiable tensor is no leaf, so its bytes may leave; `leaves` keeps leaves.
    """
    if isinstance(value, torch.Tensor):
        return value if value.requires_grad and leaves else value.clone()
    if isinstance(value, dict):
        return {key: copied(item, leaves=leaves) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(item, leaves=leaves) for item in value)
    return value


def compare(found: Outcome, expected: Outcome) -> str | None:
    """What differs, or None."""
    if not isinstance(found, list) or not isinstance(expected, list):
        return None if found == expected else f"found {found}, stock gives {expected}"
    if len(found) != len(expected):
        return f"found {len(found)} gradients, stock gives {len(expected)}"
    for index, (ours, stock) in enumerate(zip(found, expected, strict=True)):
        if (ours is None) != (stock is None):
            return f"gradient {index} is {ours}, stock gives {stock}"
        if ours is not None and stock is not None and not identical(ours, stock):
            return f"gradient {index} differs: {ours} instead of {stock}"
    return None


def identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether every bit agrees, or both are NaN."""
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        return False
    a, b = plain(a), plain(b)
    bits = WORDS[a.element_size()]
    return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values, contiguous and real."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.contiguous()


def wait_until_written(offload: penstock.activations.Offload) -> None:
    """Block until what has been saved is in the file; call it with `offload` entered."""
    # What has no history of its own (an index, a mask) leaves only after some more saves.
    weight, factor = torch.ones(1, requires_grad=True), torch.ones(1)
    for _ in range(_DEFERRED_SAVES + 1):
        weight * factor
    engine = offload._engine
    with engine._changed:
        assert engine._changed.wait_for(lambda: engine._backlog_bytes == 0, timeout=60)
