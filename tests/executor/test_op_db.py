"""Every operator that PyTorch lists trains as planned as it does eagerly, bit for bit.

`op_db` is PyTorch's own table of operators with sample inputs. Each sample is a module whose
parameters are its inputs, as they are and lying transposed in memory; the samples of some operators
are one model, as long as a graph can hold them all. Freed bytes are poisoned. What a graph cannot
hold has to be refused as such.
"""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import random
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from _planned import MACHINE
from _steps import same_bits
from penstock.errors import CaptureError
from penstock.executor import bind
from penstock.graph import capture
from penstock.planner import plan

pytest.importorskip("expecttest", reason="torch.testing._internal needs it")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal import common_methods_invocations
    from torch.testing._internal.common_methods_invocations import op_db

pytestmark = pytest.mark.usefixtures("one_thread", "quick_samples")

NUM_SAMPLES = 2  # of each operator and layout
NUM_STEPS = 2
SEED = 0
NUM_PARTS = 8
NUM_TOGETHER = 8  # operators of one model: captures, plans and steps have costs of their own
LEAST_COMPARED = 55  # operators of a part

OTHER_BITS = {
    "masked.prod": "autograd takes another formula where it cannot look for zeros",
    "prod": "as masked.prod",
    "cumprod": "as masked.prod",
    "masked.cumprod": "as masked.prod",
}
"""Operators that are equal to 1e-5 only, and why."""

REFUSED_BY_TORCH = {
    "nn.functional.multilabel_margin_loss": "its decomposition wants no targets without dimensions",
}
"""Operators with samples that no fake kernel takes."""

HAVE_REFUSED_SAMPLES = {
    *("cdouble", "cfloat", "combinations", "complex", "corrcoef", "cov", "linalg.eigvals"),
    *("linalg.lstsq", "masked_select", "narrow", "polar", "stft", "tensor_split", "to_sparse"),
    *("nn.functional.ctc_loss", "nn.functional.gaussian_nll_loss", "view_as_complex"),
}
"""Operators with samples that no graph can hold, beside those of `torch.fft`: these are models of
their own, or all samples of their models would be captured again to find them."""

WANT_ROWS = {"torch.ops.aten._scaled_dot_product_flash_attention_for_cpu"}
"""Operators that read what was never written where the last dimension is not contiguous."""

if torch.__version__ < "2.12":  # compared as a version
    OTHER_BITS["linalg.vander"] = "as masked.prod: in torch 2.11 its powers are a cumprod"
    REFUSED_BY_TORCH["view_copy"] = "in torch 2.11 its fake kernel takes no transposed tensors"


def is_trained(leaf: Any) -> bool:
    """Return whether an input of a sample is differentiable."""
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_floating_point()


def may_be_swapped(sample: Any) -> bool:
    """Return whether a differentiable input has two dimensions: others have one layout only."""
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return any(leaf.dim() > 1 for leaf in leaves if is_trained(leaf))


class Sample(nn.Module):
    """A sample of an operator as a model: differentiable inputs are parameters.

    Args:
        op: The operator.
        sample: Its inputs.
        transposed: Whether parameters lie in memory with their last two dimensions swapped.
    """

    def __init__(self, op: Any, sample: Any, *, transposed: bool) -> None:
        super().__init__()
        self.op = op
        self.transposed = transposed
        leaves, self.form = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.leaves: list[Any] = []
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                self.leaves.append(leaf)
                continue
            self.leaves.append(name := f"tensor_{number}")
            content = leaf.detach().clone()
            if is_trained(leaf):
                swap = transposed and content.dim() > 1
                content = content.transpose(-1, -2).contiguous() if swap else content
                self.register_parameter(name, nn.Parameter(content))
            else:
                self.register_buffer(name, content)

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        leaves = [self.leaf(each, scale) for each in self.leaves]
        first, args, kwargs = pytree.tree_unflatten(leaves, self.form)
        parts = [
            result.sum().to(scale.dtype)
            for result in pytree.tree_leaves(self.op(first, *args, **kwargs))
            if isinstance(result, torch.Tensor) and result.dtype != torch.bool
        ]
        return functools.reduce(operator.add, parts) if parts else scale.sum() * 0

    def leaf(self, leaf: Any, scale: torch.Tensor) -> Any:
        if not (isinstance(leaf, str) and leaf.startswith("tensor_")):
            return leaf
        tensor = getattr(self, leaf)
        if not isinstance(tensor, nn.Parameter):
            return tensor
        swap = self.transposed and tensor.dim() > 1
        return (tensor.transpose(-1, -2) if swap else tensor) * scale


@pytest.fixture(autouse=True)
def _unseeded(monkeypatch):
    """Samples of random operators seed the generator in the middle of the step; not here."""
    monkeypatch.setattr(
        common_methods_invocations, "wrapper_set_seed", lambda op, *args, **kw: op(*args, **kw)
    )


class Case(NamedTuple):
    """A sample of an operator, and how its parameters lie in memory."""

    op: Any
    sample: Any
    transposed: bool


class Samples(nn.Module):
    """Samples of some operators, one after the other; the loss is the sum of theirs.

    Each adds few operators of its own: time goes by the operators that are captured and planned.
    """

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__()
        self.samples = nn.ModuleList(
            Sample(op, sample, transposed=transposed) for op, sample, transposed in cases
        )
        self.register_buffer("totals", torch.zeros(len(cases)))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        totals = torch.stack([sample(scale) for sample in self.samples])
        self.totals.copy_(totals.detach())
        return totals.sum()


def trainee(cases: Sequence[Case]) -> tuple[Samples, torch.optim.Optimizer]:
    model = Samples(cases)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def eagerly(cases: Sequence[Case]) -> tuple[list[torch.Tensor], Samples] | None:
    """Losses and the model; None if this cannot be trained."""
    try:
        model, optimizer = trainee(cases)
    except (RuntimeError, ValueError):  # sparse tensors, no parameters
        return None
    torch.manual_seed(1)
    losses = []
    try:
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            loss = model(torch.ones(1))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError):
        return None
    return (losses, model) if all(map(torch.isfinite, losses)) else None


def unlike_eager(cases: Sequence[Case], found: Counter[str]) -> list[str]:
    """Name the values that differ; count what has been compared or refused.

    Where a graph cannot hold all cases, or something is wrong, those of each operator are tried,
    and then each.
    """
    expected = eagerly(cases)
    if expected is None:
        assert len(cases) == 1, "samples that train alone do not train together"
        return []
    wrong = []
    try:
        if differing := unlike_planned(cases, *expected):
            wrong = [f"{name_operators(cases)}: {differing}"]
    except CaptureError:
        if len(cases) == 1:
            found["refused"] += 1
            return []
        return [name for each in divide(cases) for name in unlike_eager(each, found)]
    except Exception as error:
        if cases[0].op.name in REFUSED_BY_TORCH:  # these are alone
            return []
        wrong = [f"{name_operators(cases)}: {error!r}"]
    if not wrong:
        found.update({each.op.name for each in cases})
    elif len(cases) > 1:
        wrong = [name for each in divide(cases) for name in unlike_eager(each, found)] or wrong
    return wrong


def divide(cases: Sequence[Case]) -> list[list[Case]]:
    """Return the cases of each operator; each case, if they are of one."""
    by_operator = itertools.groupby(cases, lambda case: case.op.formatted_name)
    parts = [list(some) for _, some in by_operator]
    return parts if len(parts) > 1 else [[each] for each in cases]


def is_refused_in_part(op: Any) -> bool:
    """Return whether a graph cannot hold some of an operator's samples, as far as is known."""
    return op.name in HAVE_REFUSED_SAMPLES or op.name.startswith("fft.")


def name_operators(cases: Sequence[Case]) -> str:
    return " and ".join(dict.fromkeys(each.op.formatted_name for each in cases))


def unlike_planned(cases: Sequence[Case], losses: list[torch.Tensor], eager: Samples) -> list[str]:
    """Name the values that differ after planned steps."""
    model, optimizer = trainee(cases)
    graph = capture(model, optimizer, torch.ones(1))
    with bind(
        plan(graph, machine=MACHINE, time_limit=0.02), model, optimizer, graph=graph, debug=True
    ) as step:
        torch.manual_seed(1)
        planned = [step(torch.ones(1)) for _ in range(NUM_STEPS)]
    has_other_bits = any(each.op.name in OTHER_BITS for each in cases)
    alike = (lambda a, b: torch.allclose(a, b, rtol=1e-5)) if has_other_bits else same_bits
    pairs = [("loss", *pair) for pair in zip(losses, planned, strict=True)]
    state = model.state_dict()
    pairs += [(name, tensor, state[name]) for name, tensor in eager.state_dict().items()]
    return [name for name, one, other in pairs if not alike(one, other)]


def trainable_cases(op: Any) -> list[Case]:
    """Return samples of an operator, as they are and transposed, as far as they can be trained."""
    if torch.float32 not in op.dtypes or not op.supports_autograd:
        return []
    torch.manual_seed(SEED)
    random.seed(SEED)
    try:
        samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=True))
    except RuntimeError:
        return []  # for other devices
    chosen = samples[:: max(1, len(samples) // NUM_SAMPLES)]
    cases = [Case(op, sample, False) for sample in chosen]
    if op.name not in WANT_ROWS:
        cases += [Case(op, sample, True) for sample in chosen if may_be_swapped(sample)]
    if eagerly(cases) is None:
        return [each for each in cases if eagerly([each]) is not None]
    return cases


@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.filterwarnings("ignore")
def test_operators_train_as_they_do_eagerly(part):
    wrong: list[str] = []
    found: Counter[str] = Counter()
    together: list[Case] = []
    for op in op_db[part::NUM_PARTS]:
        cases = trainable_cases(op)
        if op.name in REFUSED_BY_TORCH:
            wrong += [name for each in cases for name in unlike_eager([each], found)]
            continue
        # By itself: others would have to be equal to 1e-5 only, or be captured again.
        if op.name in OTHER_BITS or is_refused_in_part(op):
            wrong += unlike_eager(cases, found) if cases else []
            continue
        together += cases
        if len({each.op.formatted_name for each in together}) >= NUM_TOGETHER:
            # Captures look at all objects that there are, and take a fifth of this test else.
            gc.collect()
            gc.freeze()
            wrong += unlike_eager(together, found)
            together = []
    if together:
        wrong += unlike_eager(together, found)
    assert not wrong, "\n".join(wrong)
    assert len(found) - ("refused" in found) >= LEAST_COMPARED
