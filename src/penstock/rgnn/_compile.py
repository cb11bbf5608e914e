"""`compile`: a function in the language becomes one that runs on a graph.

A call is traced once for each set of row shapes. The traced program is compiled once for each
bucket of graph statistics, so that mini-batches of one kind share their programs; it is compiled
for the bucket, not for the first graph in it, and so does not depend on which came first. A call
like one before, on a graph with the same counts, skips all that.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from penstock.compat.dispatch import is_dispatched, is_recorded
from penstock.rgnn import _custom_ops
from penstock.rgnn._compiled_program import CompiledProgram, refuse_transforms
from penstock.rgnn._explain import Explanation, explain
from penstock.rgnn.backends import BACKENDS, choose_dtype, load_backend, resolve
from penstock.rgnn.frontend.arguments import (
    Kind,
    TensorKind,
    bind_arguments,
    check_rows,
    check_tensors,
    describe,
    read_signature,
)
from penstock.rgnn.frontend.traces import State, TracedFunction, Traces
from penstock.rgnn.graph import Graph, GraphTensors, split_graph
from penstock.rgnn.interpreter import interpret
from penstock.rgnn.passes import REWRITES, optimize
from penstock.rgnn.spaces import Counts, Space

_NUM_REMEMBERED = 256  # programs of a function, and kinds of calls
_STEPS_PER_OCTAVE = 4  # rows for each edge within 19 % of each other share a program


def compile(
    function: Callable[..., Any] | None = None,
    *,
    without: Collection[str] = (),
    backend: str = "auto",
) -> Any:
    """Compile a function of a graph and tensors, written in the language of `penstock.rgnn`.

    Example:
        >>> @compile
        ... def rgcn(g, x, W):
        ...     e = g.edges
        ...     return g.sum_to_dst(e.src(x) @ W[e.type])
        >>> graph = Graph(torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 1]))
        >>> rgcn(graph, torch.ones(2, 3), torch.ones(2, 3, 4)).shape
        torch.Size([2, 4])

    Args:
        function: Its first argument is the graph. Tensors among the others are traced; plain
            numbers, strings, None and booleans are constants that it may branch on.
        without: Rewrites to leave out, of `penstock.rgnn.REWRITES`; for measurements.
        backend: The back end that runs the programs, of `penstock.rgnn.BACKENDS`; "auto" takes
            the fastest.

    Returns:
        A `CompiledFunction`.

    Raises:
        TypeError: `function` is no plain function, takes no graph, or any number of arguments.
        ValueError: `without` names no rewrite, or `backend` no backend.
    """
    if function is None:
        return functools.partial(compile, without=without, backend=backend)
    return CompiledFunction(function, without=without, backend=backend)


_Specialization = tuple[TracedFunction, CompiledProgram, tuple[int, ...], torch.dtype | None]
"""Parts that calls of one kind share: trace, program, the places of the program's tensors among
the arguments, and the dtype that they are converted to, if to any."""


class CompiledFunction:
    """A function in the language: call it with a graph and tensors.

    Args:
        function: The plain Python function.
        without: Rewrites to leave out.
        backend: The back end that runs the programs.
    """

    def __init__(
        self, function: Callable[..., Any], *, without: Collection[str] = (), backend: str = "auto"
    ) -> None:
        self._signature = read_signature(function)
        functools.update_wrapper(self, function)
        if unknown := sorted(set(without) - set(REWRITES)):
            raise ValueError(f"without has {unknown}; the rewrites are {list(REWRITES)}")
        if backend not in BACKENDS:
            raise ValueError(f"backend is {backend!r}; the backends are {list(BACKENDS)}")
        self._function = function
        self._names = tuple(self._signature.parameters)[1:]
        self._without = frozenset(without)
        self._backend = backend
        self._traces = Traces(function, self._signature)
        self._compiled = functools.lru_cache(_NUM_REMEMBERED)(self._compile)
        self._specialized = functools.lru_cache(_NUM_REMEMBERED)(self._specialize)
        self._registered = _custom_ops.RegisteredFunction(
            name=f"{function.__name__} {secrets.token_hex(8)}",
            options=f"{(tuple(sorted(without)), backend)}",
            trace=self._trace,
            compile=self._compile_for,
        )

    def __call__(self, graph: Graph, *args: Any, **kwargs: Any) -> Any:
        """Run on a graph.

        Args:
            graph: A graph on the device of the tensors.
            args: Arguments of the function. Tensors of one floating dtype (under autocast they may
                differ, and are converted to the widest); node tensors have `graph.num_nodes` rows,
                edge tensors `graph.num_edges` in the order in which the graph was given, typed
                weights one row for each type.
            kwargs: Arguments of the function by name.

        Returns:
            A tensor, or a tuple of tensors if the function returns one; differentiable once.

        Raises:
            TraceError: The function does what cannot be compiled; the message shows the line.
            ValueError: A tensor's rows, dtype or device do not fit the graph.
            RuntimeError: A transform of `torch.func`, a derivative in forward mode or
                `torch.jit.trace` is active.
        """
        arguments = bind_arguments(self._signature, args, kwargs)
        if torch.compiler.is_dynamo_compiling():
            return _custom_ops.call(self._registered.name, graph, arguments)
        _custom_ops.check_graph(graph)
        refuse_transforms(arguments)
        if is_recorded() or any(map(is_dispatched, arguments)):
            return _custom_ops.call(self._registered.name, graph, arguments)
        device = graph.device
        is_autocast = torch.is_autocast_enabled(device.type)
        kinds = describe(arguments)
        state = self._traces.state(self._names, kinds)
        is_grad_enabled = torch.is_grad_enabled()
        traced, program, places, dtype = self._specialized(
            graph.counts, device, is_grad_enabled, is_autocast, kinds, state
        )
        tensors = _convert([arguments[place] for place in places], dtype)
        return traced.result(program(graph, tensors))

    def to_torch(self) -> Callable[..., Any]:
        """Return the function as a readable reference: one torch expression per operator.

        It takes the arguments of the compiled function, is differentiable by autograd any number
        of times, and materialises every value for every edge, weights included: use it on small
        graphs.
        """

        @functools.wraps(self._function)
        def reference(graph: Graph, *args: Any, **kwargs: Any) -> Any:
            traced, tensors = self._trace_call(graph, args, kwargs)
            return traced.result(interpret(traced.program, graph, tensors))

        return reference

    def explain(self, graph: Graph, *args: Any, **kwargs: Any) -> Explanation:
        """Return the compiled program of a call: kernels, rows, bytes, and the rewrites.

        Example:
            >>> print(rgcn.explain(graph, x, W))  # doctest: +SKIP

        Args:
            graph: The graph of the call.
            args: Arguments of the call; tensors that require gradients get a backward, where
                gradients are recorded.
            kwargs: Arguments of the call by name.

        Returns:
            A report; `print` shows it as text.
        """
        traced, tensors = self._trace_call(graph, args, kwargs)
        wrt: tuple[str, ...] = ()
        if torch.is_grad_enabled():  # as a call
            wrt = tuple(
                name for name in tensors if tensors[name].requires_grad and name in traced.used
            )
        backend = resolve(self._backend, graph.device.type)
        compiled = self._compile_for(traced, graph, wrt)
        dtype = next(iter(tensors.values())).dtype if tensors else torch.get_default_dtype()
        return explain(
            compiled.lowered,
            graph,
            name=self._function.__name__,
            element_bytes=choose_dtype(load_backend(backend), dtype).itemsize,
            backend=backend,
        )

    @property
    def num_plans(self) -> int:
        """Number of programs compiled so far; graphs with similar counts share them."""
        return self._compiled.cache_info().misses

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        raise TypeError(
            f"{self._function.__name__} is compiled as a method; compile a plain function and pass "
            f"it the module's parameters"
        )

    def __reduce__(self) -> str:
        return self._function.__qualname__  # pickled and copied by name, as functions are

    def _trace_call(
        self, graph: Graph, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[TracedFunction, dict[str, torch.Tensor]]:
        """Return the trace of a call and the tensors that its program takes, by name."""
        _custom_ops.check_graph(graph)
        arguments = bind_arguments(self._signature, args, kwargs)
        traced, tensors, _ = self._trace(split_graph(graph), arguments)
        return traced, dict(zip(traced.program.inputs(), tensors, strict=True))

    def _trace(
        self, graph: GraphTensors, arguments: Sequence[Any]
    ) -> tuple[TracedFunction, list[torch.Tensor], Callable[[], None] | None]:
        """Trace a call on tensors that may have no data.

        Returns:
            The trace; the tensors that its program takes; and a check that raises if what the
            function reads besides its arguments has changed since.
        """
        kinds = {}
        for name, kind in zip(self._names, describe(arguments), strict=True):
            if isinstance(kind, TensorKind):
                # Numbers of rows may be symbolic; numbers of features are taken as they are.
                features = tuple(int(length) for length in kind.shape[1:])
                kind = kind._replace(shape=(*kind.shape[:1], *features))
            kinds[name] = kind
        is_autocast = torch.is_autocast_enabled(graph.device.type)
        state = self._traces.state(self._names, kinds.values())
        traced, dtype = self._find_trace(kinds, graph.device, graph.rows, is_autocast, state)
        by_name = dict(zip(self._names, arguments, strict=True))
        tensors = _convert([by_name[name] for name in traced.program.inputs()], dtype)
        return traced, tensors, self._traces.make_check(traced, state, kinds)

    def _find_trace(
        self,
        kinds: Mapping[str, Kind],
        device: torch.device,
        rows: Callable[[Space], int],
        is_autocast: bool,
        state: State,
    ) -> tuple[TracedFunction, torch.dtype | None]:
        """Return the trace for these arguments, checked, and the dtype to convert tensors to."""
        dtype = check_tensors(kinds, device, is_autocast=is_autocast)
        traced = self._traces.get(kinds, state)
        check_rows(traced.program, kinds, rows)
        return traced, dtype

    def _specialize(
        self,
        counts: Counts,
        device: torch.device,
        is_grad_enabled: bool,
        is_autocast: bool,
        kinds: tuple[Kind, ...],
        state: State,
    ) -> _Specialization:
        by_name = dict(zip(self._names, kinds, strict=True))
        traced, dtype = self._find_trace(by_name, device, counts.rows, is_autocast, state)
        traced.warn_of_missing_index(counts.num_relations)
        places = tuple(self._names.index(name) for name in traced.program.inputs())
        tensors = {self._names[place]: kinds[place] for place in places}
        wrt: tuple[str, ...] = ()
        if is_grad_enabled:
            wrt = tuple(
                name
                for name, kind in tensors.items()
                if isinstance(kind, TensorKind) and kind.requires_grad and name in traced.used
            )
        backend = resolve(self._backend, device.type)
        program = self._compiled(traced, _round_counts(counts), wrt, backend)
        return traced, program, places, dtype

    def _compile_for(
        self, traced: TracedFunction, graph: Graph, wrt: tuple[str, ...]
    ) -> CompiledProgram:
        """Compile a traced program for graphs like one, with gradients for some inputs."""
        backend = resolve(self._backend, graph.device.type)
        return self._compiled(traced, _round_counts(graph.counts), wrt, backend)

    def _compile(
        self, traced: TracedFunction, counts: Counts, wrt: tuple[str, ...], backend: str
    ) -> CompiledProgram:
        optimized = optimize(traced.program, counts, wrt=wrt, without=self._without)
        return CompiledProgram(optimized, backend)


def _convert(tensors: list[torch.Tensor], dtype: torch.dtype | None) -> list[torch.Tensor]:
    return tensors if dtype is None else [tensor.to(dtype) for tensor in tensors]


def _round_counts(counts: Counts) -> Counts:
    """Return the counts of a graph that stands for all similar ones, so that those share programs.

    Which rows are the fewest is a matter of rows for each edge; how many edges there are decides
    only whether weights may cost something, so it is rounded to a power of two.
    """
    num_edges = _round(counts.num_edges, 1)

    def round_rows(count: int) -> int:
        if not counts.num_edges:
            return round(_round(count, 1))
        return round(num_edges * _round(count / counts.num_edges, _STEPS_PER_OCTAVE))

    return dataclasses.replace(
        counts,
        num_edges=round(num_edges),
        num_nodes=round_rows(counts.num_nodes),
        num_src_pairs=round_rows(counts.num_src_pairs),
        num_dst_pairs=round_rows(counts.num_dst_pairs),
    )


def _round(number: float, steps_per_octave: int) -> float:
    """Round a number to a geometric series."""
    if not number:
        return 0
    return 2 ** (round(math.log2(number) * steps_per_octave) / steps_per_octave)
