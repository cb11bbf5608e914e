"""Curvature of a model: products with the Hessian of its loss and with its Fisher matrix."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.compat.autograd import outlive_inference
from penstock.spectral._sources import SymmetricOperator
from penstock.units import parse_count


def hessian(
    loss: Callable[[], Tensor], parameters: Iterable[Tensor], *, num_batches: int = 1
) -> SymmetricOperator:
    """Return the Hessian of a loss by the parameters of a model, as an operator.

    A product is a backward pass through the gradient (Pearlmutter 1994), whose graph is built anew
    each time, so that no more than one is in memory. In training mode, dropout has to be off.

    Example:
        >>> import torch
        >>> w = torch.ones(3, requires_grad=True)
        >>> operator = hessian(lambda: (w**4).sum() / 12, [w])
        >>> operator.function(torch.ones(3))
        tensor([1., 1., 1.])

    Args:
        loss: Returns the loss, a scalar with its graph; called `num_batches` times for a product,
            and the mean is taken: it may go through the batches of a loader in their order. Some
            hundred calls change what a call changes: statistics of batch norms in training mode.
        parameters: Tensors that the loss depends on, each once, of one dtype and on one device.
        num_batches: Batches of a product.

    Returns:
        The operator over all parameters, flattened and concatenated in their order.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: No parameter requires a gradient, one is given twice, or `num_batches` is below
            1.
    """
    leaves = _check_arguments("loss", loss, parameters, num_batches)

    def multiply(vector: Tensor) -> Tensor:
        total, is_reached = torch.zeros_like(vector), False
        for _ in range(num_batches):
            product = _multiply_hessian(_check_loss(loss()), leaves, vector)
            if product is not None:
                total, is_reached = total + product, True
        _check_reached(is_reached, "loss")
        return total / num_batches

    return _as_operator(multiply, leaves)


def fisher(
    losses: Callable[[], Tensor], parameters: Iterable[Tensor], *, num_batches: int = 1
) -> SymmetricOperator:
    """Return the empirical Fisher matrix, the mean of g g^T over examples, as an operator.

    Example:
        >>> import torch
        >>> w = torch.ones(2, requires_grad=True)
        >>> operator = fisher(lambda: torch.stack([w[0], 2 * w[1]]), [w])
        >>> operator.function(torch.ones(2))
        tensor([0.5000, 2.0000])

    Args:
        losses: Returns the losses of a batch's examples, (num_examples,), with their graph; called
            `num_batches` times for a product.
        parameters: As for `hessian`.
        num_batches: Batches of a product.

    Returns:
        The operator over all parameters, flattened and concatenated in their order.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: No parameter requires a gradient, one is given twice, or `num_batches` is below
            1.
    """
    leaves = _check_arguments("losses", losses, parameters, num_batches)

    def multiply(vector: Tensor) -> Tensor:
        total, count, is_reached = torch.zeros_like(vector), 0, False
        for _ in range(num_batches):
            each = _check_losses(losses())
            count += len(each)
            product = _multiply_fisher(each, leaves, vector)
            if product is not None:
                total, is_reached = total + product, True
        if count == 0:
            raise ValueError("losses: returned no losses, (0,); a batch has at least one example")
        _check_reached(is_reached, "losses")
        return total / count

    return _as_operator(multiply, leaves)


def _as_operator(
    multiply: Callable[[Tensor], Tensor], leaves: Sequence[Tensor]
) -> SymmetricOperator:
    """Return the operator of a product that builds graphs, whatever the mode of its caller."""

    def function(vector: Tensor) -> Tensor:
        vector = outlive_inference(vector)
        with torch.inference_mode(False), torch.enable_grad(), _name_missing_derivatives():
            return multiply(vector)

    length = sum(each.numel() for each in leaves)
    return SymmetricOperator(function, length, leaves[0].dtype, leaves[0].device)


def _multiply_hessian(loss: Tensor, leaves: Sequence[Tensor], vector: Tensor) -> Tensor | None:
    """Return the product with a batch's Hessian; None if its loss reaches no parameter."""
    gradients = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    if all(each is None for each in gradients):
        return None
    parts = zip(gradients, _split(vector, leaves), strict=True)
    reached = [(g, p) for g, p in parts if g is not None and g.requires_grad]
    if not reached:  # by a graph that the parameters leave linearly
        return torch.zeros_like(vector)
    products = torch.autograd.grad(
        [g for g, _ in reached],
        leaves,
        grad_outputs=[p for _, p in reached],
        materialize_grads=True,
    )
    return _flatten(products)


def _multiply_fisher(losses: Tensor, leaves: Sequence[Tensor], vector: Tensor) -> Tensor | None:
    """Return J^T J v of a batch; None if its losses reach no parameter."""
    # J v by the derivative of u -> J^T u (double backward), then J^T (J v).
    probe = torch.zeros_like(losses, requires_grad=True)
    turned = torch.autograd.grad(losses, leaves, probe, create_graph=True, allow_unused=True)
    parts = zip(turned, _split(vector, leaves), strict=True)
    along = [(t * p).sum() for t, p in parts if t is not None]
    if not along:
        return None
    (scores,) = torch.autograd.grad(torch.stack(along).sum(), probe, retain_graph=True)
    return _flatten(torch.autograd.grad(losses, leaves, scores, materialize_grads=True))


def _check_arguments(
    name: str, function: Any, parameters: Iterable[Tensor], num_batches: int
) -> list[Tensor]:
    """Return the parameters that require a gradient."""
    if not callable(function):
        raise TypeError(
            f"{name}: got {type(function).__name__}; expected a function without arguments, as "
            "each product builds the graph anew"
        )
    parse_count(num_batches, name="num_batches", least=1)
    if isinstance(parameters, Tensor) or not isinstance(parameters, Iterable):
        raise TypeError(
            f"parameters: got {type(parameters).__name__}; expected tensors, such as "
            "model.parameters() or [weight]"
        )
    leaves = list(parameters)
    for each in leaves:
        if not isinstance(each, Tensor):
            raise TypeError(
                f"parameters: holds a {type(each).__name__}; expected tensors, such as "
                "model.parameters(), without their names"
            )
    leaves = [each for each in leaves if each.requires_grad]
    if not leaves:
        raise ValueError("parameters: none of them requires a gradient")
    if len({id(each) for each in leaves}) < len(leaves):
        raise ValueError("parameters: one of them is given twice; give each once")
    if len({(each.dtype, each.device) for each in leaves}) > 1:
        raise ValueError("parameters: have several dtypes or devices; give those of one only")
    return leaves


def _check_loss(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"loss: returned a {type(loss).__name__}; it must return one tensor, the loss alone"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"loss: returned a tensor of shape {tuple(loss.shape)}; it must return a scalar, such "
            "as its mean"
        )
    return _check_graph(loss, "loss")


def _check_losses(losses: Any) -> Tensor:
    if not isinstance(losses, Tensor):
        raise TypeError(
            f"losses: returned a {type(losses).__name__}; it must return one tensor of shape "
            "(num_examples,)"
        )
    if losses.dim() != 1:
        raise ValueError(
            f"losses: returned a tensor of shape {tuple(losses.shape)}; it must return the loss of "
            'each example, (num_examples,), as with reduction="none", summed over other dimensions'
        )
    return _check_graph(losses, "losses")


def _check_graph(found: Tensor, name: str) -> Tensor:
    if not found.requires_grad:
        raise ValueError(
            f"{name}: returned a tensor without a graph; compute it from the parameters, without "
            "detach() or torch.no_grad()"
        )
    return found


def _check_reached(is_reached: bool, name: str) -> None:
    if not is_reached:
        raise ValueError(
            f"{name}: does not depend on any of the parameters; give those of the model that "
            "computes it"
        )


@contextlib.contextmanager
def _name_missing_derivatives() -> Iterator[None]:
    """Say what to do about an operator that torch differentiates only once."""
    try:
        yield
    except RuntimeError as error:
        if "derivative for" not in str(error) or "not implemented" not in str(error):
            raise
        raise NotImplementedError(
            f"an operator of the loss has no second derivative in torch ({error}); compute it "
            "otherwise: attention with torch.nn.attention.sdpa_kernel(SDPBackend.MATH), or "
            'attn_implementation="eager" of Transformers'
        ) from error


def _split(vector: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    parts = vector.split([each.numel() for each in leaves])
    return [part.view_as(leaf) for part, leaf in zip(parts, leaves, strict=True)]


def _flatten(parts: Sequence[Tensor]) -> Tensor:
    """Return gradients as one vector; those of sparse embeddings are sparse."""
    return torch.cat([each.to_dense().reshape(-1) for each in parts]).detach()
