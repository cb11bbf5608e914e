"""Inference graphs as an accelerator sees them: 8-bit activations, norms and activations fused.

Modules run once on the meta device and every operator of torch is written down. Views are free. An
elementwise operator without a second operand (a norm, an activation, a scale) belongs to the
convolution, product or sum before it if nobody else reads what that makes, as TFLite and compilers
for accelerators fuse them. Parameters are not in the memory that is planned ("activations only").
What the network is called with comes from an operator of its own, which may run when it is needed.
Tensors take multiples of the bytes at which Penstock's plans align them, for all planners alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from _cosma_models import Network
from penstock.graph import Kind, Operator, Phase, StepGraph, Storage, TensorView

UNIT_BYTES = 512  # what plans of networks with large tensors align addresses to

_FUSED = {
    "_native_batch_norm_legit_no_training",
    "native_batch_norm",
    "_softmax",
    "relu",
    "gelu",
    "hardswish",
    "hardsigmoid",
    "sigmoid",
    "mul",
}
_HOSTS = {
    "convolution",
    "addmm",
    "mm",
    "bmm",
    "add",
    "mul",
    "native_batch_norm",
}  # what others may be fused into
_COPIES = {"clone", "_to_copy", "alias", "detach", "native_dropout"}  # only another layout


@dataclasses.dataclass
class _Node:
    target: str
    reads: list[int]  # nodes
    num_elements: int
    fusable: bool


class _Writer(TorchDispatchMode):
    """Writes down what runs; storages are told apart by identity and kept alive."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.nodes: list[_Node] = []
        self._node_of: dict[int, int] = {}
        self._alive: list[Any] = list(parameters)
        self._constants = {self._key(each) for each in parameters}

    def given(self, tensor: torch.Tensor) -> None:
        """An input: made by an operator of its own."""
        self._adopt(tensor, _Node("input", [], tensor.numel(), False))

    def node_of(self, tensor: torch.Tensor) -> int:
        """Which operator made a tensor."""
        return self._node_of[self._key(tensor)]

    def _adopt(self, tensor: torch.Tensor, node: _Node) -> None:
        self._alive.append(tensor)
        self._node_of[self._key(tensor)] = len(self.nodes)
        self.nodes.append(node)

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        operands = [each for each in tensors if self._key(each) in self._node_of]
        out = next(each for each in tree_leaves(result) if isinstance(each, torch.Tensor))
        key, name = self._key(out), func._schema.name.removeprefix("aten::")
        if key in self._node_of or key in self._constants:
            return result  # a view
        reads = list(dict.fromkeys(self.node_of(each) for each in operands))
        if not reads:  # made of parameters alone
            self._constants.add(key)
            self._alive.append(out)
        elif name in _COPIES:
            self._alive.append(out)
            self._node_of[key] = reads[0]
        else:
            fusable = name in _FUSED and len(reads) == 1 and name != "_softmax"
            self._adopt(out, _Node(name, reads, out.numel(), fusable))
        return result


def inference_graph(network: Network) -> StepGraph:
    """Write down one call of a network.

    Args:
        network: With the shapes of its inputs.

    Returns:
        A graph without parameters, with a byte for each element, aligned.
    """
    with torch.device("meta"):
        model: nn.Module = network.model().eval()
        inputs = [torch.empty(shape) for shape in network.inputs]
    writer = _Writer([*model.parameters(), *model.buffers()])
    for each in inputs:
        writer.given(each)
    with torch.no_grad(), writer:
        result = model(*inputs)
    return _graph(*_fused(writer.nodes, writer.node_of(result)))


def _fused(nodes: list[_Node], last: int) -> tuple[list[_Node], int]:
    """Nodes of which the ones that can be are part of the node before them."""
    num_readers = [0] * len(nodes)
    for node in nodes:
        for read in node.reads:
            num_readers[read] += 1
    num_readers[last] += 1
    kept: list[_Node] = []
    number: dict[int, int] = {}
    for index, node in enumerate(nodes):
        before = node.reads[0] if node.reads else -1
        if node.fusable and num_readers[before] == 1:
            host = kept[number[before]]
            if host.target.split("+")[0] in _HOSTS:
                host.target += f"+{node.target}"
                host.num_elements = node.num_elements
                number[index] = number[before]
                continue
        number[index] = len(kept)
        kept.append(dataclasses.replace(node, reads=[number[read] for read in node.reads]))
    return kept, number[last]


def _graph(nodes: list[_Node], last: int) -> StepGraph:
    read = {index for node in nodes for index in node.reads} | {last}
    assert len(read) == len(nodes), "every result is used"
    storages = tuple(
        Storage(
            name=f"{index}.{node.target}",
            num_bytes=-(-node.num_elements // UNIT_BYTES) * UNIT_BYTES,
            kind=Kind.ACTIVATION,
            final=index if index == last else None,
        )
        for index, node in enumerate(nodes)
    )
    operators = tuple(
        Operator(
            name=f"{index}.{node.target}",
            target=f"aten.{node.target}",
            reads=tuple(node.reads),
            creates=(index,),
            phase=Phase.FORWARD,
            recomputable=False,
        )
        for index, node in enumerate(nodes)
    )
    return StepGraph(
        storages=storages,
        storage_of_value=tuple(range(len(nodes))),
        operators=operators,
        loss=TensorView(last, "int8", (), ()),
    )
