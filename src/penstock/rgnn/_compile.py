"""`@compile`: a function in the language becomes one that runs on a graph.

A call is traced once for each set of row shapes. The traced program is planned once for each bucket
of graph statistics, so that mini-batches of one kind share their plans; the plan is made for the
bucket, not for the first graph in it, and so does not depend on which came first. A call like one
before, on a graph with the same counts, skips all that.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from penstock.rgnn import _custom_ops
from penstock.rgnn._arguments import (
    Kind,
    TensorKind,
    bind,
    check_rows,
    check_tensors,
    describe,
    parameters,
)
from penstock.rgnn._backends import BACKENDS, choose, computed_dtype, resolve
from penstock.rgnn._explain import Explanation, explain
from penstock.rgnn._graph import Graph
from penstock.rgnn._graph_tensors import GraphTensors
from penstock.rgnn._interpreter import interpret
from penstock.rgnn._plan import REWRITES, Plan, make_plan
from penstock.rgnn._rows import Counts, Space
from penstock.rgnn._run import Runner, run
from penstock.rgnn._traces import State, Traced, Traces
from penstock.rgnn._where import TraceError

_NUM_KEPT = 256  # plans of a function, and kinds of calls, that are remembered
_STEPS_PER_OCTAVE = 4  # rows for each edge within 19 % of each other share a plan


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
        TypeError: `function` takes no graph, or any number of arguments.
        ValueError: `without` names no rewrite, or `backend` no backend.
    """
    if function is None:
        return functools.partial(compile, without=without, backend=backend)
    return CompiledFunction(function, without=without, backend=backend)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Call:
    """What calls of one kind have in common."""

    traced: Traced
    runner: Runner
    places: tuple[int, ...]
    """Where among the arguments the runner's tensors are."""
    dtype: torch.dtype | None
    """What the tensors are converted to, if to anything."""


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
        self._signature = parameters(function)
        self._names = tuple(self._signature.parameters)[1:]
        self._without = frozenset(without)
        self._backend = backend
        self._traces = Traces(function)
        self._plan = functools.lru_cache(_NUM_KEPT)(self._make_plan)
        self._runner = functools.lru_cache(_NUM_KEPT)(self._make_runner)
        self._call = functools.lru_cache(_NUM_KEPT)(self._make_call)
        self.registered = _custom_ops.register(self, function.__name__)
        """The name by which compiled code calls it."""
        self.programs: dict[str, Any] = {}
        """What the code that torch.compile makes refers to by digest."""

    def __call__(self, graph: Graph, *args: Any, **kwargs: Any) -> Any:
        """Run on a graph.

        Args:
            graph: On the device of the tensors.
            args: What the function takes. Tensors of one floating dtype (under autocast they may
                differ, and are converted to the widest); node tensors have `graph.num_nodes` rows,
                edge tensors `graph.num_edges` in the order in which the graph was given, typed
                weights one row for each type.
            kwargs: Likewise.

        Returns:
            A tensor, or a tuple of tensors if the function returns one; differentiable once.

        Raises:
            TraceError: The function does what cannot be compiled; the message shows the line.
            ValueError: A tensor's rows, dtype or device do not fit the graph.
            RuntimeError: A transform of `torch.func` is active.
        """
        arguments = bind(self._signature, args, kwargs)
        if torch.compiler.is_dynamo_compiling():
            return _custom_ops.call(self.registered, graph, arguments)
        _check_graph(graph)
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                "a compiled program cannot be transformed by torch.func (grad, vmap, jacrev, ...); "
                "use what the function's to_torch() returns"
            )
        device = graph.device
        is_autocast = torch.is_autocast_enabled(device.type)
        kinds = describe(arguments)
        state = self._state(kinds)
        call = self._call(graph.counts, device, torch.is_grad_enabled(), is_autocast, kinds, state)
        tensors = _converted([arguments[place] for place in call.places], call.dtype)
        return call.traced.result(run(call.runner, graph, tensors))

    def to_torch(self) -> Callable[..., Any]:
        """The function as a readable reference: one torch expression per operator.

        It takes what the compiled function takes, is differentiable by autograd any number of
        times, and makes every value for every edge, weights included: use it on small graphs.
        """

        @functools.wraps(self._function)
        def reference(graph: Graph, *args: Any, **kwargs: Any) -> Any:
            tensors, traced = self._traced(graph, args, kwargs)
            return traced.result(interpret(traced.program, graph, tensors))

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
        wrt = tuple(name for name in tensors if tensors[name].requires_grad)
        plan = self._plan(traced, _bucket(graph.counts), wrt)
        dtype = next(iter(tensors.values())).dtype if tensors else torch.get_default_dtype()
        backend = resolve(self._backend, graph.device.type)
        return explain(
            plan,
            graph,
            name=self._function.__name__,
            element_bytes=computed_dtype(backend, dtype).itemsize,
            backend=backend,
        )

    @property
    def num_plans(self) -> int:
        """How many plans have been made so far; graphs that are alike share them."""
        return self._plan.cache_info().misses

    @property
    def options(self) -> tuple[tuple[str, ...], str]:
        """The rewrites that are left out, and the name of the backend."""
        return tuple(sorted(self._without)), self._backend

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        raise TypeError(
            f"{self._function.__name__} is compiled as a method; compile a plain function and pass "
            f"it the module's parameters"
        )

    def __reduce__(self) -> str:
        return self._function.__qualname__  # pickled and copied by name, as functions are

    def traced_symbolic(
        self, graph: GraphTensors, arguments: tuple[Any, ...]
    ) -> tuple[Traced, list[torch.Tensor], Callable[[], None] | None]:
        """The trace of a call on tensors that may have no data, and the tensors that it takes.

        Numbers of rows may be symbolic. Numbers of features are taken as they are. Last comes
        a check that raises if what the function reads besides its arguments has changed since.
        """
        kinds = {}
        for name, kind in zip(self._names, describe(arguments), strict=True):
            if isinstance(kind, TensorKind):
                features = tuple(int(length) for length in kind.shape[1:])
                kind = kind._replace(shape=(*kind.shape[:1], *features))
            kinds[name] = kind
        is_autocast = torch.is_autocast_enabled(graph.device.type)
        state = self._state(tuple(kinds.values()))
        traced, dtype = self._trace(kinds, graph.device, graph.rows, is_autocast, state)
        by_name = dict(zip(self._names, arguments, strict=True))
        tensors = [by_name[name] for name in traced.program.inputs()]
        check = self._traces.check(traced, state, kinds)
        return traced, _converted(tensors, dtype), check

    def runner(self, traced: Traced, counts: Counts, wrt: tuple[str, ...]) -> Runner:
        """What runs a traced program on graphs with such counts."""
        return self._runner(traced, _bucket(counts), wrt)

    def _make_call(
        self,
        counts: Counts,
        device: torch.device,
        is_grad_enabled: bool,
        is_autocast: bool,
        kinds: tuple[Kind, ...],
        state: State,
    ) -> _Call:
        by_name = dict(zip(self._names, kinds, strict=True))
        traced, dtype = self._trace(by_name, device, counts.rows, is_autocast, state)
        traced.warn_of_missing_index(counts.num_relations)
        places = tuple(self._names.index(name) for name in traced.program.inputs())
        tensors = {self._names[place]: kinds[place] for place in places}
        wrt: tuple[str, ...] = ()
        if is_grad_enabled:
            wrt = traced.differentiable(
                name
                for name, kind in tensors.items()
                if isinstance(kind, TensorKind) and kind.requires_grad
            )
        return _Call(traced, self.runner(traced, counts, wrt), places, dtype)

    def _traced(
        self, graph: Graph, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, torch.Tensor], Traced]:
        """The program of a call and the tensors that it takes, by name."""
        _check_graph(graph)
        arguments = bind(self._signature, args, kwargs)
        by_name = dict(zip(self._names, arguments, strict=True))
        kinds = dict(zip(self._names, describe(arguments), strict=True))
        is_autocast = torch.is_autocast_enabled(graph.device.type)
        state = self._state(tuple(kinds.values()))
        traced, dtype = self._trace(kinds, graph.device, graph.counts.rows, is_autocast, state)
        names = list(traced.program.inputs())
        tensors = _converted([by_name[name] for name in names], dtype)
        return dict(zip(names, tensors, strict=True)), traced

    def _trace(
        self,
        kinds: Mapping[str, Kind],
        device: torch.device,
        rows: Callable[[Space], int],
        is_autocast: bool,
        state: State,
    ) -> tuple[Traced, torch.dtype | None]:
        """The trace for these arguments, checked, and the dtype to convert the tensors to."""
        dtype = check_tensors(kinds, device, is_autocast=is_autocast)
        traced = self._traces.get(kinds, state)
        check_rows(traced.program, kinds, rows)
        return traced, dtype

    def _state(self, kinds: tuple[Kind, ...]) -> State:
        """What beside the arguments decides the program; see `Traces.state`."""
        return self._traces.state(self._names, kinds)

    def _make_plan(self, traced: Traced, counts: Counts, wrt: tuple[str, ...]) -> Plan:
        return make_plan(traced.program, counts, wrt=wrt, without=self._without)

    def _make_runner(self, traced: Traced, counts: Counts, wrt: tuple[str, ...]) -> Runner:
        return Runner(self._plan(traced, counts, wrt), choose(self._backend))


def _check_graph(graph: Graph) -> None:
    if not isinstance(graph, Graph):
        raise TypeError(
            f"the first argument must be a penstock.rgnn.Graph; got {type(graph).__name__}"
        )


def _converted(tensors: list[torch.Tensor], dtype: torch.dtype | None) -> list[torch.Tensor]:
    return tensors if dtype is None else [tensor.to(dtype) for tensor in tensors]


def _bucket(counts: Counts) -> Counts:
    """Counts of a graph that stands for all that are alike, so that those share their plans.

    Which rows are the fewest is a matter of rows for each edge; how many edges there are decides
    only whether weights may cost something, so it is rounded to a power of two.
    """
    num_edges = _rounded(counts.num_edges, 1)

    def rounded(count: int) -> int:
        if not counts.num_edges:
            return round(_rounded(count, 1))
        return round(num_edges * _rounded(count / counts.num_edges, _STEPS_PER_OCTAVE))

    return dataclasses.replace(
        counts,
        num_edges=round(num_edges),
        num_nodes=rounded(counts.num_nodes),
        num_src_pairs=rounded(counts.num_src_pairs),
        num_dst_pairs=rounded(counts.num_dst_pairs),
    )


def _rounded(number: float, steps_per_octave: int) -> float:
    """A number rounded to a geometric series."""
    if not number:
        return 0
    return 2 ** (round(math.log2(number) * steps_per_octave) / steps_per_octave)


__all__ = ["CompiledFunction", "TraceError", "compile"]
