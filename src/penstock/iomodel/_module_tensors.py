"""Parameters and buffers as a forward pass used them, for the backward pass that computes again.

A module may have others by then: `torch.func.functional_call` swaps them for the time of a call,
and users replace or freeze them. Tensors are kept as they are, not as saved ones: hooks on saved
tensors may hand out copies, and a chain computes with the memory of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.compat.dispatch import tree_map
from penstock.compat.modules import has_cached_weights
from penstock.iomodel._captured_values import CapturedValues, list_attributes


class TensorVersions:
    """Tensors that share the memory of others, and notice changes of these in place."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self._aliases = [None if each is None else each.detach() for each in tensors]
        self._versions = self._find()

    def _find(self) -> list[int]:
        found = (each for each in self._aliases if each is not None)
        return [each._version for each in found if not each.is_inference()]

    def check(self) -> list[Tensor | None]:
        """Return the tensors, without gradients.

        Raises:
            RuntimeError: One was changed in place since.
        """
        if self._find() != self._versions:
            raise RuntimeError(
                "a weight, a buffer or another tensor of the chain was changed in place between "
                "its forward and its backward pass, which computes it again; call backward() "
                "before the optimizer's step"
            )
        return self._aliases


class ModuleTensors:
    """Parameters and buffers of modules at the time of a forward pass.

    Attributes:
        weights: Those that need gradients.
        dtypes: Those of all parameters and buffers.
    """

    def __init__(self, modules: Sequence[Any], weights: Sequence[Tensor]) -> None:
        self.weights = tuple(weights)
        self._captured = CapturedValues(modules)
        self._submodules: list[tuple[nn.Module, dict[str, nn.Module]]] = []
        self._named: dict[int, dict[str, Tensor]] = {}
        self._training: list[tuple[nn.Module, bool]] = []
        for module in modules:
            if isinstance(module, nn.Module):
                self._submodules.append((module, dict(module.named_modules())))
                self._training += [(each, each.training) for each in module.modules()]
                self._named[id(module)] = dict(
                    [
                        *module.named_parameters(remove_duplicate=False),
                        *module.named_buffers(remove_duplicate=False),
                    ]
                )
        known = {id(each): each for named in self._named.values() for each in named.values()}
        others = [*self._captured.list_tensors(), *list_attributes(modules)]
        self._versions = TensorVersions([*known.values(), *others])
        aliases = zip(known, self._versions.check(), strict=False)
        self._aliases = {key: each for key, each in aliases if each is not None}
        self.dtypes = {each.dtype for each in self._aliases.values()}

    def check(self) -> None:
        """Refuse modules that would compute something else by now.

        Raises:
            RuntimeError: A weight, a buffer or a captured tensor was changed in place since, a
                function would read another value, or a module was replaced, or switched between
                `train()` and `eval()`.
        """
        self._versions.check()
        self._captured.check()
        for module, before in self._submodules:
            if dict(module.named_modules()) != before:
                raise RuntimeError(
                    f"{type(module).__name__} of the chain has other modules in it than in its "
                    "forward pass, which the backward pass computes again; call backward() first"
                )
        for module, was_training in self._training:
            if module.training is not was_training:
                raise RuntimeError(
                    f"{type(module).__name__} of the chain was switched between train() and eval() "
                    "between its forward and its backward pass, which computes it again; call "
                    "backward() first"
                )

    def refuse_caches(self) -> None:
        """Refuse weights that are computed once for all chunks, each of which frees their graph.

        Raises:
            RuntimeError: There are some.
        """
        for module, _ in self._training:
            if has_cached_weights(module):
                raise RuntimeError(
                    f"parametrize.cached() keeps a weight of {type(module).__name__}, and each "
                    "chunk of the chain differentiates it anew; leave that context before "
                    "backward(), and before a chain that returns a number"
                )

    def find(self, module: nn.Module, name: str) -> tuple[int, Tensor | None]:
        """Return the identity of a module's own tensor then, and its alias without gradients."""
        tensor = self._named[id(module)].get(name)
        return id(tensor), None if tensor is None else self._aliases[id(tensor)]

    def call(self, module: Any, args: Sequence[Tensor], leaves: Mapping[int, Tensor]) -> Tensor:
        """Call a module with its tensors of then.

        Args:
            module: The module.
            args: Its arguments.
            leaves: What stands in place of tensors, by their identity: gradients are theirs, and
                no hook of a weight is called.
        """
        named = self._named.get(id(module))
        if not named or isinstance(
            module, torch.jit.ScriptModule
        ):  # whose tensors cannot be swapped
            return module(*args)
        used = {name: leaves.get(id(each), self._aliases[id(each)]) for name, each in named.items()}
        return torch.func.functional_call(module, used, tuple(args))


class LeavesForWeights(TorchFunctionMode):
    """Functions of torch that get leaves in place of weights, whatever module these are of."""

    def __init__(self, leaves: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._leaves = leaves

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function with the leaves."""
        args, kwargs = tree_map(lambda each: self._leaves.get(id(each), each), (args, kwargs or {}))
        return func(*args, **kwargs)


def find_leaves(result: Tensor) -> Iterator[Tensor]:
    """Yield the leaves of a result's graph that need gradients."""
    stack, seen = [result.grad_fn], set()
    while stack:
        node: Any = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        stack += [each for each, _ in node.next_functions]
