"""Curvature of a model: products with the Hessian of its loss and with its Fisher matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from penstock.compat.autograd import outlive_inference
from penstock.spectral._sources import SymmetricOperator


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
            and the mean is taken: it may go through the batches of a loader in their order.
        parameters: Leaves that the loss depends on, of one dtype and on one device.
        num_batches: Batches of a product.

    Returns:
        The operator over all parameters, flattened and concatenated in their order.

    Raises:
        ValueError: There are no parameters that require a gradient.
    """
    leaves = _check_leaves(parameters)

    def multiply(vector: Tensor) -> Tensor:
        vector = outlive_inference(vector)
        parts = _split(vector, leaves)
        with torch.inference_mode(False), torch.enable_grad():
            total = torch.zeros_like(vector)
            for _ in range(num_batches):
                gradients = torch.autograd.grad(
                    loss(), leaves, create_graph=True, materialize_grads=True
                )
                reached = [(g, p) for g, p in zip(gradients, parts, strict=True) if g.requires_grad]
                if reached:
                    products = torch.autograd.grad(
                        [g for g, _ in reached],
                        leaves,
                        grad_outputs=[p for _, p in reached],
                        materialize_grads=True,
                    )
                    total += _flatten(products)
        return total / num_batches

    return SymmetricOperator(
        multiply, sum(p.numel() for p in leaves), leaves[0].dtype, leaves[0].device
    )


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
        ValueError: There are no parameters that require a gradient.
    """
    leaves = _check_leaves(parameters)

    def multiply(vector: Tensor) -> Tensor:
        vector = outlive_inference(vector)
        parts = _split(vector, leaves)
        with torch.inference_mode(False), torch.enable_grad():
            total, count = torch.zeros_like(vector), 0
            for _ in range(num_batches):
                each = losses()
                count += len(each)
                # J v by the derivative of u -> J^T u (double backward), then J^T (J v).
                probe = torch.zeros_like(each, requires_grad=True)
                turned = torch.autograd.grad(
                    each, leaves, probe, create_graph=True, materialize_grads=True
                )
                along = torch.stack(
                    [(t * p).sum() for t, p in zip(turned, parts, strict=True)]
                ).sum()
                (scores,) = torch.autograd.grad(along, probe, retain_graph=True)
                total += _flatten(torch.autograd.grad(each, leaves, scores, materialize_grads=True))
        return total / count

    return SymmetricOperator(
        multiply, sum(p.numel() for p in leaves), leaves[0].dtype, leaves[0].device
    )


def _check_leaves(parameters: Iterable[Tensor]) -> list[Tensor]:
    leaves = [each for each in parameters if each.requires_grad]
    if not leaves:
        raise ValueError("parameters: none of them requires a gradient")
    if len({(each.dtype, each.device) for each in leaves}) > 1:
        raise ValueError("parameters: have several dtypes or devices; give those of one only")
    return leaves


def _split(vector: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    parts = vector.split([each.numel() for each in leaves])
    return [part.view_as(leaf) for part, leaf in zip(parts, leaves, strict=True)]


def _flatten(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.reshape(-1) for each in parts]).detach()
