"""The traversals of a program as the source of one Python module of Triton kernels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from penstock.rgnn.backends.triton._body import Inexpressible, KernelBody, Parameter
from penstock.rgnn.backends.triton._traversal_writers import (
    GroupedWriter,
    RowwiseWriter,
    remove_unused,
)
from penstock.rgnn.ir import describe
from penstock.rgnn.lowering import Kernel, KernelKind, LoweredProgram

MAX_FEATURES = 16384
"""Features in a block beyond which registers would not do."""
_HEADER = '''"""Traversals of a relational program, written by Penstock for Triton.

{program}
"""

import triton
import triton.language as tl

from penstock.rgnn.backends.triton._kernels import sigmoid, tanh
'''


@dataclasses.dataclass(frozen=True, slots=True)
class KernelSource:
    """The source of a Triton kernel and what it takes to launch it."""

    name: str
    text: str
    parameters: tuple[Parameter, ...]
    """The pointers that it takes, in order."""
    num_features: int
    """The most features in a block."""
    fewest_summed: int
    """The fewest features of what is summed or normalised."""
    reduced: tuple[int, ...] = ()
    """Of a stage for pieces of groups: the values of which it leaves something for each."""


@dataclasses.dataclass(frozen=True, slots=True)
class TraversalSource:
    """The kernels of a traversal."""

    whole: KernelSource
    stages: tuple[KernelSource, ...]
    """The same, one stage after another, for groups that are cut; none without groups."""
    epilogue: KernelSource | None
    """The kernel that follows the stages."""
    stored: tuple[int, ...]
    """The values that it writes to memory."""
    row_features: int
    """The most features of a row that it stores."""

    def functions(self) -> list[KernelSource]:
        """Return all of them."""
        epilogue = [] if self.epilogue is None else [self.epilogue]
        return [self.whole, *self.stages, *epilogue]


@dataclasses.dataclass(frozen=True, slots=True)
class TritonSource:
    """A module of Triton kernels."""

    text: str
    traversals: Mapping[int, TraversalSource]
    """By the kernel's number in the schedule."""
    reasons: Mapping[int, str]
    """For the traversals that are no Triton kernels: why."""


def write_source(lowered: LoweredProgram) -> TritonSource:
    """Write the traversals of a program."""
    traversals: dict[int, TraversalSource] = {}
    reasons: dict[int, str] = {}
    for number, kernel in enumerate(lowered.schedule.kernels):
        if kernel.kind is not KernelKind.TRAVERSAL:
            continue
        try:
            traversals[number] = _write_traversal(lowered, kernel, f"traversal_{number}")
        except Inexpressible as reason:
            reasons[number] = str(reason)
    program = "\n".join(
        f"%{position} = {describe(node)}"
        for position, node in enumerate(lowered.optimized.program.nodes)
    )
    functions = [
        function.text for traversal in traversals.values() for function in traversal.functions()
    ]
    text = "\n\n".join([_HEADER.format(program=_escape(program)), *functions])
    return TritonSource(text, traversals, reasons)


def _escape(text: str) -> str:
    """Return text that cannot end the docstring it is put into: names are a user's."""
    return text.encode("ascii", "backslashreplace").decode().replace("\\", "/").replace('"', "'")


def _write_traversal(lowered: LoweredProgram, kernel: Kernel, name: str) -> TraversalSource:
    program = lowered.optimized.program
    shapes = [program.nodes[value].shape for value in kernel.values]
    if any(0 in shape for shape in shapes):
        raise Inexpressible("rows have no features")
    stored = tuple(value for value in kernel.values if value in lowered.schedule.materialised)
    said = [f"%{value} = {_escape(describe(program.nodes[value]))}" for value in kernel.values]
    lengths = [math.prod(program.nodes[value].shape) for value in stored]
    if kernel.grouped_by is None:
        rowwise = RowwiseWriter(program, kernel, stored)
        whole = _write_kernel(name, said, rowwise.write(), rowwise.body, rowwise.arguments)
        return TraversalSource(whole, (), None, stored, max(lengths))
    grouped = GroupedWriter(program, kernel, stored)
    whole = _write_kernel(name, said, grouped.write(), grouped.body, grouped.arguments)
    stages = []
    for number in range(len(grouped.stages)):
        writer = GroupedWriter(program, kernel, stored)
        lines = writer.write_stage(number)
        comment = [f"Stage {number} of {name}, for pieces of groups."]
        arguments = (f"{name}_stage_{number}", comment, lines, writer.body)
        function = _write_kernel(*arguments, writer.arguments_of_stage)
        stages.append(dataclasses.replace(function, reduced=writer.find_reduced(number)))
    epilogue = None
    if kernel.epilogue:
        writer = GroupedWriter(program, kernel, stored)
        lines = writer.write_epilogue()
        comment = [f"What follows the stages of {name}, for groups that are cut."]
        arguments = (f"{name}_epilogue", comment, lines, writer.body)
        epilogue = _write_kernel(*arguments, writer.arguments_of_epilogue)
    return TraversalSource(whole, tuple(stages), epilogue, stored, max(lengths, default=1))


def _write_kernel(
    name: str, comments: Sequence[str], lines: list[str], body: KernelBody, arguments: Sequence[str]
) -> KernelSource:
    """Write a kernel from its statements; `arguments` come after the pointers."""
    if body.num_features > MAX_FEATURES:
        raise Inexpressible(f"a block would have {body.num_features} features")
    (count,) = {"num_rows", "num_items"}.intersection(arguments)
    text = [
        *(f"# {comment}" for comment in comments),
        f'@triton.jit(do_not_specialize=["{count}"])',
        f"def {name}(",
        *(f"    {argument}," for argument in [*body.parameters.values(), *arguments]),
        "):",
        *(f"    {line}" for line in remove_unused(lines)),
        "",
    ]
    parameters, sizes = tuple(body.parameters), (body.num_features, body.fewest_summed)
    return KernelSource(name, "\n".join(text), parameters, *sizes)
