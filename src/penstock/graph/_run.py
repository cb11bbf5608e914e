"""Execution of a step graph operator by operator, without a plan: the reference for all others.

It reads nothing but the graph's data, so it also proves that the data is complete.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from penstock.graph.bindings import bind_batch, bind_group_tensors, bind_numbers, find_entries
from penstock.graph.fsdp.shards import ShardedModel
from penstock.graph.reference import ReferenceRun
from penstock.graph.step_graph import StepGraph


def run(
    graph: StepGraph,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    *,
    loss: object = None,
) -> torch.Tensor:
    """Run one captured training step with the real parameters, in program order.

    Parameters, buffers and the optimizer's state are updated in place, as
    `loss.backward(); optimizer.step()` would; gradients are not kept.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> batch = (torch.ones(3, 4),)
        >>> from penstock.graph import capture
        >>> graph = capture(model, optimizer, batch, loss=lambda output, batch: output.sum())
        >>> run(graph, model, optimizer, batch) > run(graph, model, optimizer, batch)
        tensor(True)

    Args:
        graph: The step, captured or loaded.
        model: The model that it was captured of, or one of the same kind.
        optimizer: Its optimizer; state that does not exist yet is made.
        batch: A batch of the captured form.
        loss: The loss, if it is a module with parameters or buffers.

    Returns:
        The loss, detached.

    Raises:
        GraphFileError: The graph is of another model or optimizer.
        ValueError: The batch has another form.
    """
    if graph.captured is not None:
        graph.captured.check_outside()
    sharded = ShardedModel(model, loss)  # puts the shards into the model
    entries = find_entries(graph, model, loss, optimizer, sharded)
    tensors = bind_batch(graph, batch) | {each.name: each.take(graph) for each in entries}
    tensors |= bind_group_tensors(graph, optimizer)
    return ReferenceRun(graph, tensors, bind_numbers(graph, optimizer)).run()
