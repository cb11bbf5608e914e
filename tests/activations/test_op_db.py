"""Every operator that PyTorch lists gives the same gradients, bit for bit, when offloaded.

`op_db` is PyTorch's own table of operators with sample inputs. Each is differentiated twice,
without Penstock and under `policy="all", min_bytes="0B"`, with a pause before either backward
pass, until all that was saved has been written, so that bytes are read and not handed back.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

import penstock
from _waiting import wait_until_written

pytest.importorskip("expecttest", reason="torch.testing._internal needs it")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.autograd_function_db import autograd_function_db
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.custom_op_db import custom_op_db

OPERATORS = [op for op in (*op_db, *autograd_function_db, *custom_op_db) if op.supports_autograd]
DTYPES = (torch.float64, torch.complex128)
MAX_SAMPLES = 40  # per operator and dtype
MAX_SECONDS = 0.02  # of CPU time for the stock runs of an operator and dtype, past the first few
MIN_RUNS = 5
NUM_VARIED = 2  # samples that are also run with leaves as inputs, and in place
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}  # to compare bits, by element size

MIN_COMPARED = 550
MIN_MOVED = 350  # the others save nothing: views, sums, scalings

EXCEPTIONS = {
    "nn_functional_batch_norm_without_cudnn": "has sample inputs for CUDA only",
    "nn_functional_one_hot": "from integers to integers: it has no gradient",
    "torch_ops_aten__efficient_attention_forward": "has a CUDA kernel only",
    "torch_ops_aten__flash_attention_forward": "has a CUDA kernel only",
}
"""Operators by `op.formatted_name` that are not compared, and why. None is nondeterministic."""


@dataclasses.dataclass
class Tally:
    """Count of what was compared, so that the test cannot pass without comparing."""

    tried: set[str] = dataclasses.field(default_factory=set)
    compared: set[str] = dataclasses.field(default_factory=set)
    moved: set[str] = dataclasses.field(default_factory=set)  # bytes went out and came back
    num_runs: int = 0


@pytest.fixture(scope="module")
def tally():
    return Tally()


@pytest.fixture(scope="module")
def everything(real_disk):
    """One Offload for all operators, which run on one thread: their tensors are tiny."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    offload = penstock.offload(real_disk, policy="all", min_bytes="0B")
    yield offload
    offload.close()
    torch.set_num_threads(num_threads)


Outcome = list[torch.Tensor | type[Exception] | None]
Graph = tuple[list[GradientEdge], list[torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Run:
    """One way to call an operator on one sample."""

    label: str
    sample: Any
    function: Callable[..., Any]
    leaves_as_inputs: bool = False


@pytest.mark.usefixtures("quick_samples")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.formatted_name)
def test_gradients_are_bit_equal(op, everything, tally):
    name = op.formatted_name
    tally.tried.add(name)
    if name in EXCEPTIONS:
        pytest.skip(EXCEPTIONS[name])
    before = everything.report()
    runs = [each for dtype in DTYPES for each in stock_runs(op, dtype)]
    with everything:
        for run, expected in runs:
            found = differentiate(op, run, lambda: let_all_leave(everything))
            if difference := compare(found, expected):
                again = compare(differentiate(op, run, lambda: None), expected)
                hint = "stock differs from itself, too" if again else "stock does not vary"
                pytest.fail(f"{name}, {run.label}: {difference} ({hint})")
            tally.num_runs += 1
            if any(isinstance(gradient, torch.Tensor) for gradient in expected):
                tally.compared.add(name)
    after = everything.report()
    if after.offloaded_bytes > before.offloaded_bytes and after.bytes_read > before.bytes_read:
        tally.moved.add(name)
    for thread in threading.enumerate():  # the next test is to find none of ours
        if thread.name.startswith("penstock"):
            thread.join(10)


def test_enough_was_compared(everything, tally, record_testsuite_property):
    """Without this, the test above could pass by comparing nothing."""
    if len(tally.tried) < len(OPERATORS):
        pytest.skip("only some of the operators were selected")
    record_testsuite_property("operators_compared", len(tally.compared))
    record_testsuite_property("operators_whose_bytes_moved", len(tally.moved))
    record_testsuite_property("runs_compared", tally.num_runs)
    assert tally.tried - tally.compared == EXCEPTIONS.keys() & tally.tried
    assert len(tally.compared) >= MIN_COMPARED
    assert len(tally.moved) >= MIN_MOVED
    assert tally.num_runs >= 2 * len(tally.compared)
    report = everything.report()
    assert report.offloaded_bytes >= 0.8 * report.saved_bytes > 0
    assert report.bytes_read > 0


def stock_runs(op: Any, dtype: torch.dtype) -> list[tuple[Run, Outcome]]:
    """As many runs as the time allows, with what they give without Penstock."""
    runs: list[tuple[Run, Outcome]] = []
    if dtype not in op.supported_backward_dtypes("cpu"):
        return runs
    started = time.thread_time()
    for run in runs_of(op, dtype):
        runs.append((run, differentiate(op, run, lambda: None)))
        if len(runs) >= MIN_RUNS and time.thread_time() - started > MAX_SECONDS:
            break
    return runs


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
    """Gradients of first and second order; where an error came instead, its type."""
    inputs = (run.sample.input, run.sample.args, run.sample.kwargs)
    leaves = list(differentiable(inputs))
    outcome: Outcome = []
    seed(0)
    try:
        edges, cotangents = forward(run, copied(inputs, leaves=run.leaves_as_inputs))
        for create_graph in (op.supports_gradgrad, False):
            if not edges:
                break
            pause()
            gradients = torch.autograd.grad(
                edges, leaves, cotangents, allow_unused=True, create_graph=create_graph
            )
            edges, cotangents = seeded_cotangents(gradients)
            outcome += [None if item is None else item.detach() for item in gradients]
            del gradients
    except Exception as error:
        outcome.append(type(error))
    return outcome


def forward(run: Run, inputs: tuple[Any, Any, Any]) -> Graph:
    """Call the operator. Only the graph is left, so that nothing but it holds what was saved."""
    argument, args, kwargs = inputs
    output = run.function(argument, *args, **kwargs)
    if run.sample.output_process_fn_grad is not None:
        output = run.sample.output_process_fn_grad(output)
    return seeded_cotangents(output)


def seeded_cotangents(outputs: Any) -> Graph:
    """The graph's edges at the differentiable tensors in `outputs`, and cotangents for them."""
    tensors = list(differentiable(outputs))
    seed(1)
    cotangents = [
        torch.randn_like(tensor) if tensor.layout is torch.strided else torch.ones_like(tensor)
        for tensor in tensors
    ]
    return [get_gradient_edge(tensor) for tensor in tensors], cotangents


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
    """Return what differs, or None."""
    if len(found) != len(expected):
        return f"found {found}, stock gives {expected}"
    for index, (ours, stock) in enumerate(zip(found, expected, strict=True)):
        if isinstance(ours, torch.Tensor) and isinstance(stock, torch.Tensor):
            if not identical(ours, stock):
                return f"gradient {index} differs: {ours} instead of {stock}"
        elif ours is not stock:
            return f"gradient {index} is {ours}, stock gives {stock}"
    return None


def identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether every bit agrees, or both are NaN."""
    if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
        return False
    if a.layout is torch.strided and a.stride() != b.stride():
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


LEAF = torch.ones(1, requires_grad=True)


def let_all_leave(offload: penstock.activations.Offload) -> None:
    """Block until what has been saved is in the file; call it with `offload` entered."""
    # What has no history of its own (an index, a mask) leaves when the engine is called after the
    # next operator was recorded.
    _ = LEAF.neg()
    engine = offload._engine
    with engine._lock:
        engine._queue_deferred()
    wait_until_written(offload)
