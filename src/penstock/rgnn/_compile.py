"""`@compile`: a function in the language becomes one that runs on a graph.

A call is traced once for each set of argument shapes. The traced program is planned once for each
bucket of graph statistics, so that mini-batches of one kind share their plans; the plan is made for
the bucket, not for the first graph in it, and so does not depend on which came first.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from penstock.rgnn._backends import BACKENDS, choose, resolve
from penstock.rgnn._explain import Explanation, explain
from penstock.rgnn._frontend import Argument, Trace, TracedGraph, Value
from penstock.rgnn._graph import Graph
from penstock.rgnn._interpreter import interpret
from penstock.rgnn._ir import Program
from penstock.rgnn._plan import REWRITES, Plan, make_plan
from penstock.rgnn._rows import Counts, Space
from penstock.rgnn._run import run
from penstock.rgnn._where import TraceError

_NUM_KEPT = 256  # traces and plans of a function that are remembered
_STEPS_PER_OCTAVE = 8  # counts within 9 % of each other share a plan
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


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
        backend: What runs the plans, of `penstock.rgnn.BACKENDS`; "auto" takes the fastest.

    Returns:
        A `CompiledFunction`.

    Raises:
        ValueError: `without` names no rewrite, or `backend` no backend.
    """
    if function is None:
        return functools.partial(compile, without=without, backend=backend)
    return CompiledFunction(function, without=without, backend=backend)


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A traced program and how its outputs make up the function's result."""

    program: Program
    is_tuple: bool


class CompiledFunction:
    """A function in the language: call it with a graph and tensors.

    Args:
        function: The plain Python function.
        without: Rewrites to leave out.
        backend: What runs the plans.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        without: Collection[str] = (),
        backend: str = "auto",
    ) -> None:
        functools.update_wrapper(self, function)
        if unknown := sorted(set(without) - set(REWRITES)):
            raise ValueError(f"without has {unknown}; the rewrites are {list(REWRITES)}")
        if backend not in BACKENDS:
            raise ValueError(f"backend is {backend!r}; the backends are {list(BACKENDS)}")
        self._function = function
        self._signature = inspect.signature(function)
        self._without = frozenset(without)
        self._backend = backend
        self._trace = functools.lru_cache(_NUM_KEPT)(self._trace_shapes)
        self._plan = functools.lru_cache(_NUM_KEPT)(self._plan_bucket)

    def __call__(self, graph: Graph, *args: Any, **kwargs: Any) -> Any:
        """Run on a graph.

        Args:
            graph: On the device of the tensors.
            args: What the function takes. Tensors of one floating dtype; node tensors have
                `graph.num_nodes` rows, edge tensors `graph.num_edges` in the order in which the
                graph was given, typed weights one row for each type.
            kwargs: Likewise.

        Returns:
            A tensor, or a tuple of tensors if the function returns one; differentiable once.

        Raises:
            TraceError: The function does what cannot be compiled; the message shows the line.
            ValueError: A tensor's rows, dtype or device do not fit the graph.
        """
        tensors, traced = self._traced(graph, args, kwargs)
        wrt = ()
        if torch.is_grad_enabled():
            wrt = tuple(n for n in traced.program.inputs() if tensors[n].requires_grad)
        plan = self._plan(traced.program, _bucket(graph.counts), wrt)
        return _result(traced, run(plan, graph, tensors, choose(self._backend)))

    def to_torch(self) -> Callable[..., Any]:
        """The function as a readable reference: one torch expression per operator.

        It takes what the compiled function takes, is differentiable by autograd any number of
        times, and makes every value for every edge, weights included: use it on small graphs.
        """

        @functools.wraps(self._function)
        def reference(graph: Graph, *args: Any, **kwargs: Any) -> Any:
            tensors, traced = self._traced(graph, args, kwargs)
            return _result(traced, interpret(traced.program, graph, tensors))

        return reference

    def explain(self, graph: Graph, *args: Any, **kwargs: Any) -> Explanation:
        """The plan for a call: what is computed on which rows, and which rewrites were made.

        Example:
            >>> print(rgcn.explain(graph, x, W))  # doctest: +SKIP

        Args:
            graph: As for a call.
            args: As for a call; tensors that require gradients get a backward in the plan.
            kwargs: Likewise.

        Returns:
            A report; `print` shows it as text.
        """
        tensors, traced = self._traced(graph, args, kwargs)
        wrt = tuple(name for name in traced.program.inputs() if tensors[name].requires_grad)
        plan = self._plan(traced.program, _bucket(graph.counts), wrt)
        dtype = next(iter(tensors.values())).dtype if tensors else torch.get_default_dtype()
        return explain(
            plan,
            graph,
            name=self._function.__name__,
            element_bytes=dtype.itemsize,
            backend=resolve(self._backend, graph.device.type, dtype.itemsize),
        )

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        raise TypeError(
            f"{self._function.__name__} is compiled as a method; compile a plain function and pass "
            f"it the module's parameters"
        )

    def _traced(
        self, graph: Graph, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, torch.Tensor], _Traced]:
        """The tensor arguments by name and the program for their shapes, checked on this graph."""
        if not isinstance(graph, Graph):
            raise TypeError(
                f"the first argument must be a penstock.rgnn.Graph; got {type(graph).__name__}"
            )
        bound = self._signature.bind(graph, *args, **kwargs)
        bound.apply_defaults()
        tensors, signature = {}, []
        for name, value in list(bound.arguments.items())[1:]:
            if isinstance(value, torch.Tensor):
                tensors[name] = value
                signature.append((name, tuple(value.shape)))
            else:
                signature.append((name, _Constant(name, value)))
        _check_tensors(graph, tensors)
        traced = self._trace(tuple(signature))
        for name, position in traced.program.inputs().items():
            space = traced.program.nodes[position].space
            num_rows = graph.counts.rows(space)
            if space is not Space.ONE and tensors[name].shape[0] != num_rows:
                raise ValueError(
                    f"{name} is used with one row for each {space.value}, of which the graph has "
                    f"{num_rows:,}; it has shape {tuple(tensors[name].shape)}"
                )
        return tensors, traced

    def _trace_shapes(self, signature: tuple[tuple[str, Any], ...]) -> _Traced:
        shapes = {name: what for name, what in signature if not isinstance(what, _Constant)}
        trace = Trace(shapes)
        arguments = {
            name: what.value
            if isinstance(what, _Constant)
            else Argument(trace, name, functools.partial(trace.bind, name))
            for name, what in signature
        }
        result = self._function(TracedGraph(trace), **arguments)
        values = result if isinstance(result, tuple) else (result,)
        for value in values:
            if not isinstance(value, Value):
                raise TypeError(
                    f"{self._function.__name__} must return values of nodes or edges, one or a "
                    f"tuple; it returns {type(value).__name__} {value!r:.60}"
                )
        program = trace.builder.program(value.position for value in values)
        return _Traced(program, isinstance(result, tuple))

    def _plan_bucket(self, program: Program, counts: Counts, wrt: tuple[str, ...]) -> Plan:
        return make_plan(program, counts, wrt=wrt, without=self._without)


class _Constant:
    """An argument that is no tensor; part of what a trace is remembered by."""

    def __init__(self, name: str, value: Any) -> None:
        if value is not None and not isinstance(value, bool | int | float | str):
            raise TypeError(
                f"{name} must be a tensor, a number, a string or None; got {type(value).__name__}"
            )
        self.value = value

    def __eq__(self, other: object) -> bool:
        # 1, 1.0 and True compare equal, and a function may tell them apart.
        return isinstance(other, _Constant) and (type(self.value), self.value) == (
            type(other.value),
            other.value,
        )

    def __hash__(self) -> int:
        return hash(self.value)


def _check_tensors(graph: Graph, tensors: Mapping[str, torch.Tensor]) -> None:
    first = next(iter(tensors.items()), None)
    for name, tensor in tensors.items():
        assert first is not None
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{name} must be floating-point; it has dtype {tensor.dtype}")
        if tensor.dtype != first[1].dtype:
            raise ValueError(
                f"{name} has dtype {tensor.dtype} and {first[0]} {first[1].dtype}; "
                f"convert one of them with .to()"
            )
        if tensor.device != graph.device:
            raise ValueError(
                f"{name} is on {tensor.device} and the graph on {graph.device}; "
                f"use graph.to({str(tensor.device)!r}) once and keep the result"
            )


def _result(traced: _Traced, outputs: tuple[torch.Tensor, ...]) -> Any:
    return outputs if traced.is_tuple else outputs[0]


def _bucket(counts: Counts) -> Counts:
    """Counts rounded to steps of a geometric series, so that graphs that are alike share plans."""

    def rounded(count: int) -> int:
        if count <= 1:
            return count
        step = round(math.log2(count) * _STEPS_PER_OCTAVE)
        return round(2 ** (step / _STEPS_PER_OCTAVE))

    fields = dataclasses.asdict(counts)
    fields.update({name: rounded(n) for name, n in fields.items() if not isinstance(n, bool)})
    return Counts(**fields)


__all__ = ["CompiledFunction", "TraceError", "compile"]
