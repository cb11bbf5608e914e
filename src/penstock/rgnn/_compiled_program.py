"""Compiled programs: a lowered program and its back end, as one autograd function.

A back end computes values of a program; everything around that is the same for all of them and
stands here. The backward is the program's own, in one `autograd.Function`; what it needs of the
forward is kept, but never a gather, which is read again from its source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from penstock.compat.autograd import find_leaves, has_tangent
from penstock.compat.dispatch import are_functorch_transforms_active, is_batched
from penstock.rgnn.backends import Backend, Invocation, Results, choose_dtype, load_backend
from penstock.rgnn.graph import Graph
from penstock.rgnn.passes import OptimizedProgram, name_seed

Tensors = tuple[torch.Tensor, ...]


class CompiledProgram:
    """A program, lowered for a back end and run by it."""

    def __init__(self, optimized: OptimizedProgram, backend: str) -> None:
        self._optimized, self._backend_name = optimized, backend
        self._backend: type[Backend] = load_backend(backend)
        self.lowered = self._backend.lower(optimized)
        self.run_direction: Callable[[Invocation], Results] = self._backend(self.lowered)
        of_name = optimized.program.inputs()
        self.wrt = optimized.wrt
        self.names = tuple(optimized.traced.inputs())
        """The inputs, in the order in which `forward` takes them."""
        self.saved = tuple(
            place for place, name in enumerate(self.names) if of_name[name] in optimized.kept
        )
        """Places of the inputs that the backward reads."""
        seeds = map(name_seed, range(optimized.num_outputs))
        self.seeds = tuple(seed if seed in of_name else None for seed in seeds)
        """The input with the gradient of each output; None of one that no gradient depends on."""
        self._without_seeds: dict[frozenset[str], CompiledProgram] = {}

    def __call__(self, graph: Graph, tensors: Sequence[torch.Tensor]) -> Tensors:
        """Run the program on a tensor for each of `names`, with gradients for its inputs `wrt`."""
        if not self.wrt:
            return self.forward(graph, tensors)[0]
        return _ProgramFunction.apply(self, graph, *tensors)

    def forward(self, graph: Graph, tensors: Sequence[torch.Tensor]) -> tuple[Tensors, Tensors]:
        """Return the outputs, and the values that the backward needs beside the saved inputs."""
        arguments = dict(zip(self.names, tensors, strict=True))
        direction = self.lowered.forward
        results, kept = self._run(Invocation(direction, graph, arguments, {}))
        return results, tuple(kept[at] for at in direction.keep)

    def backward(
        self,
        graph: Graph,
        saved: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of each input; None for those outside `wrt`.

        The gradient of an output is None where nothing depends on it: so may then be those of
        inputs.
        """
        by_seed = {s: g for s, g in zip(self.seeds, gradients, strict=True) if s is not None}
        arguments = {seed: gradient for seed, gradient in by_seed.items() if gradient is not None}
        program = self
        if missing := frozenset(by_seed.keys() - arguments.keys()):
            program = self._find_program_without(missing)
        inputs = dict(zip(self.saved, saved, strict=True))
        arguments = {self.names[place]: inputs[place] for place in program.saved} | arguments
        values = dict(zip(self.lowered.forward.keep, kept, strict=True))
        given = {at: values[at] for at in program.lowered.forward.keep}
        results, _ = program._run(Invocation(program.lowered.backward, graph, arguments, given))
        found = dict(zip(program.wrt, results, strict=True))
        return tuple(found.get(name) for name in self.names)

    def _find_program_without(self, seeds: frozenset[str]) -> CompiledProgram:
        """Return the program for losses that do not use the outputs of these seeds."""
        found = self._without_seeds.get(seeds)
        if found is None:
            found = CompiledProgram(self._optimized.without_seeds(seeds), self._backend_name)
        return self._without_seeds.setdefault(seeds, found)

    def _run(self, invocation: Invocation) -> Results:
        """Run a direction; half precision is computed in float32 where the back end has none.

        A sum of bfloat16 numbers in bfloat16 stops growing at 256 times what is added, so no sum,
        mean or softmax may be kept in the dtype of the arguments. Results are rounded once, at the
        end; what is kept for the backward stays in float32.
        """
        dtype = invocation.dtype
        computed = choose_dtype(self._backend, dtype)
        if computed is dtype:
            return self.run_direction(invocation)
        wide = {name: tensor.to(computed) for name, tensor in invocation.arguments.items()}
        results, kept = self.run_direction(dataclasses.replace(invocation, arguments=wide))
        return tuple(result.to(dtype) for result in results), kept


def refuse_transforms(values: Sequence[Any]) -> None:
    """Refuse a call that something else than autograd differentiates, batches or records.

    Args:
        values: The arguments of the call; tensors and others.

    Raises:
        RuntimeError: A transform of `torch.func`, a derivative in forward mode or `torch.jit.trace`
            is active, each of which would see none of the program.
    """
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if are_functorch_transforms_active() or any(map(is_batched, tensors)):
        found = "transformed by torch.func (grad, vmap, jacrev, ...) or batched by autograd"
    elif any(map(has_tangent, tensors)):
        found = "differentiated in forward mode (torch.autograd.forward_ad)"
    elif torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        found = "traced by torch.jit"
    else:
        return
    raise RuntimeError(
        f"a compiled program cannot be {found}; use what the function's to_torch() returns"
    )


class _ProgramFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, program: CompiledProgram, graph: Graph, *tensors: torch.Tensor
    ) -> Tensors:
        results, kept = program.forward(graph, tensors)
        # Inputs are saved as autograd has them, so that a change in place is noticed.
        ctx.save_for_backward(*(tensors[place] for place in program.saved), *kept)
        ctx.program, ctx.graph = program, graph
        ctx.set_materialize_grads(False)
        unused = (result for result, seed in zip(results, program.seeds, strict=True) if not seed)
        ctx.mark_non_differentiable(*unused)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_transforms(gradients)
        program: CompiledProgram = ctx.program
        tensors, num_saved = ctx.saved_tensors, len(program.saved)  # a checkpoint unpacks them once
        with torch.no_grad():
            found = program.backward(ctx.graph, tensors[:num_saved], tensors[num_saved:], gradients)
        if torch.is_grad_enabled():  # create_graph=True: an error at its use
            of = (*gradients, *tensors[:num_saved], *find_leaves(ctx))
            found = [None if one is None else _Once.apply(one, *of) for one in found]
        return None, None, *found


class _Once(torch.autograd.Function):
    """A gradient that can be used, but not differentiated.

    It takes what it was computed from, so that no search for a derivative passes it by.
    """

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, *of: torch.Tensor | None) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(
            "a compiled program is differentiable once, not twice; for second derivatives use what "
            "the function's to_torch() returns"
        )
