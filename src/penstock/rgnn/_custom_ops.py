"""Compiled functions inside torch.compile: three operators that it does not look into.

While Dynamo traces, a call becomes `penstock::rgnn`. The graph goes into it as the tensors that it
is made from, so compiled code belongs to no graph and serves them all. Where the compiler prepares
the backward, that operator turns into `rgnn_forward`, with `rgnn_backward` as its gradient; they
name the traced program by a digest of its text, so that code that torch keeps on disk fits in any
process.

Compiled code has the numbers that a function read besides its arguments as constants. Where they
have changed since, the operator raises an error, for it cannot have the code compiled again.

The program is chosen when an operator runs, by the counts of its graph. How many tensors the
backward needs depends on the program, so torch cannot know it: `rgnn_forward` returns one tensor
that owns them all, and they live as long as autograd keeps it. A copy of that tensor owns nothing;
the backward then computes them again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from penstock.rgnn._compiled_program import CompiledProgram, Tensors
from penstock.rgnn.frontend.traces import TracedFunction
from penstock.rgnn.graph import Graph, GraphTensors, find_graph, split_graph
from penstock.rgnn.ir import find_dependencies


@dataclasses.dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class RegisteredFunction:
    """A compiled function as the operators call it; it lives as long as the function.

    Attributes:
        name: The name by which compiled code calls it; no other function has it, in this process
            or another.
        options: The rewrites that are left out and the back end, as text.
        trace: Returns the trace of a call, the tensors that its program takes, and a check to make
            before each run, if there is one.
        compile: Compiles a traced program for graphs like one, with gradients for some inputs.
        programs: Its programs by digest.
    """

    name: str
    options: str
    trace: Callable[
        [GraphTensors, tuple[Any, ...]],
        tuple[TracedFunction, list[torch.Tensor], Callable[[], None] | None],
    ]
    compile: Callable[[TracedFunction, Graph, tuple[str, ...]], CompiledProgram]
    programs: dict[str, _RegisteredProgram] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _functions[self.name] = self


_functions: weakref.WeakValueDictionary[str, RegisteredFunction] = weakref.WeakValueDictionary()


def check_graph(graph: object, kind: type = Graph) -> None:
    """Raise unless the first argument of a compiled function is a graph."""
    if not isinstance(graph, kind):
        raise TypeError(
            f"the first argument must be a penstock.rgnn.Graph; got {type(graph).__name__}"
        )


def call(name: str, graph: Graph | GraphTensors, arguments: tuple[Any, ...]) -> Any:
    """Call a registered function while Dynamo traces, with a value for each parameter."""
    if isinstance(graph, Graph):
        graph = split_graph(graph)
    check_graph(graph, GraphTensors)
    tensors, integers, floats, strings, kinds = [], [], [], [], ""
    for value in arguments:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            kinds += "t"
        elif value is None:
            kinds += "n"
        elif isinstance(value, bool):
            kinds += "y" if value else "o"
        elif isinstance(value, int):
            integers.append(value)
            kinds += "i"
        elif isinstance(value, float):
            floats.append(value)
            kinds += "f"
        elif isinstance(value, str):
            strings.append(value)
            kinds += "s"
        else:
            raise TypeError(
                f"a compiled function takes tensors, numbers, strings and None; "
                f"got {type(value).__name__}"
            )
    numbers = [graph.num_nodes, graph.num_relations, graph.num_node_types]
    indices = [graph.edge_index, graph.edge_type]
    if graph.node_type is not None:
        indices.append(graph.node_type)
    outputs = torch.ops.penstock.rgnn(
        name, kinds, tensors, integers, floats, strings, numbers, indices
    )
    return outputs[0] if len(outputs) == 1 else tuple(outputs[:-1])


_library = torch.library.Library("penstock", "FRAGMENT")
_library.define(
    "rgnn(str function, str kinds, Tensor[] tensors, SymInt[] integers, float[] floats, "
    "str[] strings, SymInt[] numbers, Tensor[] graph) -> Tensor[]"
)


def _rgnn(
    function: str,
    kinds: str,
    tensors: list[torch.Tensor],
    integers: list[int],
    floats: list[float],
    strings: list[str],
    numbers: list[int],
    graph: list[torch.Tensor],
) -> list[torch.Tensor]:
    """Return the outputs; and one tensor more if the function returns a tuple."""
    constants: dict[str, Iterator[Any]] = {
        "t": iter(tensors),
        "i": iter([int(value) for value in integers]),
        "f": iter([float(value) for value in floats]),
        "s": iter(strings),
    }
    known = {"n": None, "y": True, "o": False}
    arguments = tuple(known[k] if k in known else next(constants[k]) for k in kinds)
    registered = _functions[function]
    traced, inputs, check = registered.trace(_graph_tensors(numbers, graph), arguments)
    is_wanted = [
        torch.is_grad_enabled() and tensor.requires_grad and name in traced.used
        for name, tensor in zip(traced.program.inputs(), inputs, strict=True)
    ]
    program = _remember(registered, traced, check)
    outputs = torch.ops.penstock.rgnn_forward(program, is_wanted, numbers, graph, inputs)
    del outputs[len(traced.program.outputs) :]
    return [*outputs, inputs[0].new_empty(0)] if traced.is_tuple else outputs


_library.impl("rgnn", _rgnn, "CompositeImplicitAutograd")


@dataclasses.dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class _RegisteredProgram:
    """A traced program of a registered function."""

    function: RegisteredFunction
    traced: TracedFunction
    check: Callable[[], None] | None
    """Raises if what the function reads besides its arguments has changed, if it reads any."""

    def compile(self, graph: Graph, is_wanted: Sequence[bool]) -> CompiledProgram:
        """Compile the program for graphs like one, with gradients for the inputs wanted."""
        names = self.traced.program.inputs()
        wrt = tuple(name for name, wanted in zip(names, is_wanted, strict=True) if wanted)
        return self.function.compile(self.traced, graph, wrt)


_programs: weakref.WeakValueDictionary[str, _RegisteredProgram] = weakref.WeakValueDictionary()
"""By digest; each is held by the functions that it is a program of."""


def _remember(
    function: RegisteredFunction, traced: TracedFunction, check: Callable[[], None] | None
) -> str:
    """Return the digest of a traced program and its options; it names them to the operators."""
    # Functions that read nothing but arguments share what is compiled, also between processes.
    owner = "" if check is None else function.name
    text = f"{traced.program} {list(traced.program.inputs())} {function.options} {owner}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    known, program = _programs.get(digest), _RegisteredProgram(function, traced, check)
    if known is not None:  # code of that function refers to the new program from now on
        known.function.programs[digest] = program
    function.programs[digest] = _programs[digest] = program
    return digest


@torch.library.custom_op(
    "penstock::rgnn_forward",
    mutates_args=(),
    schema="(str program, bool[] is_wanted, SymInt[] numbers, Tensor[] graph, Tensor[] inputs) "
    "-> Tensor[]",
)
def _forward(
    program: str,
    is_wanted: list[bool],
    numbers: list[int],
    graph: list[torch.Tensor],
    inputs: list[torch.Tensor],
) -> list[torch.Tensor]:
    """Return the outputs, and the tensor that owns what the backward needs."""
    on, known = find_graph(_graph_tensors(numbers, graph)), _programs[program]
    if known.check is not None:
        known.check()
    compiled = known.compile(on, is_wanted)
    results, kept = compiled.forward(on, inputs)
    return [*(result.contiguous() for result in results), _make_owner(_Kept(compiled, on, kept))]


@_forward.register_fake
def _(program: str, is_wanted: Any, numbers: Any, graph: Any, inputs: Any) -> list[torch.Tensor]:
    rows = _graph_tensors(numbers, graph).rows
    traced = _programs[program].traced.program
    outputs = [traced.nodes[output] for output in traced.outputs]
    results = [inputs[0].new_empty(rows(node.space), *node.shape) for node in outputs]
    return [*results, torch.empty(1, dtype=torch.uint8, device="cpu")]


@torch.library.custom_op(
    "penstock::rgnn_backward",
    mutates_args=(),
    schema="(str program, bool[] is_wanted, bool[] is_used, bool[] is_found, SymInt[] numbers, "
    "Tensor[] graph, Tensor[] inputs, Tensor owner, Tensor[] gradients) -> Tensor[]",
)
def _backward(
    program: str,
    is_wanted: list[bool],
    is_used: list[bool],
    is_found: list[bool],
    numbers: list[int],
    graph: list[torch.Tensor],
    inputs: list[torch.Tensor],
    owner: torch.Tensor,
    gradients: list[torch.Tensor],
) -> list[torch.Tensor]:
    """Return the gradients of the inputs that have one, of those of the outputs that are used."""
    kept = _owned.get(owner.untyped_storage()._cdata)
    if kept is None:
        on = find_graph(_graph_tensors(numbers, graph))
        compiled = _programs[program].compile(on, is_wanted)
        kept = _Kept(compiled, on, compiled.forward(on, inputs)[1])
    saved, of_used = [inputs[place] for place in kept.program.saved], iter(gradients)
    of_outputs = [next(of_used) if used else None for used in is_used]
    found = kept.program.backward(kept.graph, saved, kept.tensors, of_outputs)
    return [
        torch.zeros_like(tensor) if gradient is None else gradient.contiguous()
        for tensor, gradient, is_one in zip(inputs, found, is_found, strict=True)
        if is_one
    ]


@_backward.register_fake
def _(program: str, is_wanted: Any, is_used: Any, is_found: Any, *tensors: Any) -> list[Any]:
    _, _, inputs, _, _ = tensors
    found = [tensor for tensor, is_one in zip(inputs, is_found, strict=True) if is_one]
    return [tensor.new_empty(tensor.shape) for tensor in found]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    ctx.program, ctx.is_wanted, ctx.numbers, graph, tensors = inputs
    ctx.num_indices = len(graph)
    traced = _programs[ctx.program].traced.program
    ctx.reached = [find_dependencies(traced.nodes, [output]) for output in traced.outputs]
    ctx.positions = traced.inputs().values()
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*graph, *tensors, output[-1])


def _run_backward(ctx: Any, gradients: list[torch.Tensor | None]) -> tuple[Any, ...]:
    *tensors, owner = ctx.saved_tensors
    graph, inputs = tensors[: ctx.num_indices], tensors[ctx.num_indices :]
    *of_outputs, _ = gradients
    is_used = [gradient is not None for gradient in of_outputs]
    reached = frozenset().union(*itertools.compress(ctx.reached, is_used))
    is_found = [
        wanted and position in reached
        for wanted, position in zip(ctx.is_wanted, ctx.positions, strict=True)
    ]
    results: Iterator[torch.Tensor] = iter(())
    if any(is_found):
        used = [gradient for gradient in of_outputs if gradient is not None]
        choice = (ctx.program, ctx.is_wanted, is_used, is_found)
        results = iter(
            torch.ops.penstock.rgnn_backward(*choice, ctx.numbers, graph, inputs, owner, used)
        )
    found = [next(results) if is_one else None for is_one in is_found]
    return None, None, None, [None] * len(graph), found


_forward.register_autograd(_run_backward, setup_context=_setup_context)


@dataclasses.dataclass(frozen=True, eq=False)
class _Kept:
    """Everything that the backward of one forward needs beside its inputs."""

    program: CompiledProgram
    graph: Graph
    tensors: Tensors


class _Array(np.ndarray):
    """An array that owns something: a tensor over its memory keeps it alive."""

    kept: _Kept


_owned: weakref.WeakValueDictionary[int, _Kept] = weakref.WeakValueDictionary()
"""Objects owned by the storages of owners, by their address."""


def _make_owner(kept: _Kept) -> torch.Tensor:
    """Return a tensor of one zero; its memory owns `kept`."""
    array = np.zeros(1, dtype=np.uint8).view(_Array)
    array.kept = kept
    tensor = torch.from_numpy(array)
    _owned[tensor.untyped_storage()._cdata] = kept
    return tensor


def _graph_tensors(numbers: list[int], graph: list[torch.Tensor]) -> GraphTensors:
    edge_index, edge_type, *node_type = graph
    return GraphTensors(edge_index, edge_type, node_type[0] if node_type else None, *numbers)
