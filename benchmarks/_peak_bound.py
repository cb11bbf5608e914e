"""How low the peak of a training step can be while two layers' activations are resident.

Gradients must be there, every operator needs its operands and results at once, and to hide
transfers one layer computes while another one moves: the sum of the three is what the peak of an
offloaded step is held against. `benchmarks/offload.py` runs this once per model, in a process of
its own, and reads the one JSON line that it prints.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _train import arguments, model_and_batch


class LargestOperator(TorchDispatchMode):
    """Remembers the operator whose operands and results are the most bytes, storages once each."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self.name = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        num_bytes = sum(
            {
                leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes()
                for leaf in tree_leaves((args, kwargs, results))
                if isinstance(leaf, torch.Tensor)
            }.values()
        )
        if num_bytes > self.num_bytes:
            self.num_bytes, self.name = num_bytes, str(func)
        return results


class SavedBytes:
    """Bytes that autograd saves inside each layer (a member of a ModuleList), and in all."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.by_layer: dict[int, int] = {}
        self.total = 0
        own = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
        self._own = {id(storage): storage for storage in own}
        self._seen: dict[int, torch.UntypedStorage] = {}
        self._layer: int | None = None
        lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
        inner = {id(module) for each in lists for layer in each for module in layer.modules()}
        for layer in (layer for each in lists if id(each) not in inner for layer in each):
            layer.register_forward_pre_hook(self._enter)
            layer.register_forward_hook(self._leave)

    def _enter(self, layer: torch.nn.Module, inputs: Any) -> None:
        self._layer = id(layer)

    def _leave(self, layer: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._layer = None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count the storage of a tensor that is being saved."""
        storage = tensor.untyped_storage()
        if id(storage) not in self._own and id(storage) not in self._seen:
            self._seen[id(storage)] = storage  # alive, so that no other one gets its identity
            self.total += storage.nbytes()
            if self._layer is not None:
                known = self.by_layer.get(self._layer, 0)
                self.by_layer[self._layer] = known + storage.nbytes()
        return tensor


def main() -> None:
    model, batch = model_and_batch(arguments())
    saved, largest = SavedBytes(model), LargestOperator()
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        loss = model(**batch).loss
    del saved._seen
    with largest:
        model(**batch).loss.backward()
    del loss
    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    layer = sum(saved.by_layer.values()) // len(saved.by_layer)
    print(
        json.dumps(
            {
                "gradient_bytes": gradients,
                "largest_operator_bytes": largest.num_bytes,
                "largest_operator": largest.name,
                "saved_bytes": saved.total,
                "saved_bytes_per_layer": layer,
                "num_layers": len(saved.by_layer),
                "bound_bytes": gradients + largest.num_bytes + 2 * layer,
            }
        )
    )


if __name__ == "__main__":
    main()
