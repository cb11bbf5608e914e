"""Grad modes, modes of the user, autocast, and layers with a state of their own."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import grad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from _cases import F64, case, error_of, leaf, wave


@case
def blocks_without_grad():
    x = leaf()
    hidden = x * 1
    with torch.no_grad():
        scale = hidden.exp()
        with torch.enable_grad():
            inside = hidden.sin() * scale
    with torch.set_grad_enabled(False):
        assert not wave(hidden).requires_grad
    return grad((inside * scale).sum(), x)


@case
def inference_mode():
    x = leaf()
    with torch.inference_mode():
        made = torch.linspace(0, 1, 5, dtype=F64)
        with torch.inference_mode(False):
            inside = wave(leaf()).sum()
    return [
        error_of(lambda: x * made),
        grad((x * made.clone()).sum(), x),
        grad((x + made).exp().sum(), x),
        inside,
    ]


@case
def backward_in_inference_mode():
    x = leaf()
    out = wave(x).sum()
    with torch.inference_mode():
        (gradient,) = grad(out, x)
    return gradient.clone(), gradient.is_inference()


@case
def deterministic_algorithms():
    """Deterministic algorithms, which fill fresh memory with NaN, also that of reads."""
    x = leaf()
    torch.use_deterministic_algorithms(True)
    try:
        return grad(wave(x)[[0, 1, 0]].sum(), x)
    finally:
        torch.use_deterministic_algorithms(False)


@case
def modes_of_the_user():
    class Named(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    x = leaf()
    with torch.device("meta"), Named(), Dispatched():
        first = grad(wave(x).sum(), x)
    with FakeTensorMode():
        fake = leaf()
        shape = grad(wave(fake).sum(), fake)[0].shape
    on_meta = torch.ones(3, device="meta", requires_grad=True)
    return first, tuple(shape), grad(wave(on_meta).sum(), on_meta)[0].device.type


@case
def autocast():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    x = leaf(8, 16, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x * 1) + model(x * 2)  # the second use takes cast weights from the cache
        loss = checkpoint(model, x * 1, use_reentrant=False).float().sum() + out.float().sum()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()], x.grad


@case
def layers_that_change_their_own_state():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(5).double()
    spectral = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5).double())
    table = nn.Embedding(10, 5, max_norm=1.0).double()
    x = leaf()
    hidden = norm(x * 2).sin() + norm(spectral(x * 1))  # each twice before one backward pass
    hidden = hidden + spectral(norm(table(torch.tensor([1, 2, 2, 3, 9, 1]))))
    hidden.square().sum().backward()
    modules = (norm, spectral, table)
    gradients = [parameter.grad for m in modules for parameter in m.parameters()]
    return gradients, norm.running_mean, x.grad


@case
def recurrent_and_attention_layers():
    torch.manual_seed(0)
    lstm, attention = nn.LSTM(6, 8, num_layers=2, dropout=0.1), nn.MultiheadAttention(8, 2, 0.1)
    x = leaf(5, 3, 6, dtype=torch.float32)
    packed = nn.utils.rnn.pack_padded_sequence(x * 1, torch.tensor([5, 3, 2]))
    hidden, _ = nn.utils.rnn.pad_packed_sequence(lstm(packed)[0])
    attention(hidden, hidden, hidden)[0].square().sum().backward()
    return [p.grad for m in (lstm, attention) for p in m.parameters()], x.grad


@case
def lists_of_tensors():
    parts = [leaf(3) for _ in range(3)]
    products = torch._foreach_mul([x * 1 for x in parts], [x.sin() for x in parts])
    norms = torch._foreach_norm(torch._foreach_exp(products))
    return grad(torch.stack([*norms, *torch._foreach_norm(products, 1)]).sum(), parts)
