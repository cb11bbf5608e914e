"""Triton kernels compiled for GPUs that are not there, and what they take of a processor."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.rgnn.backends.triton._launch import KernelLaunch

TARGETS = {"sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
"""An H100 or H200, and an MI300: Triton's name of the backend, architecture, lanes of a warp."""
REPORT = "assembler.txt"  # beside a kernel in Triton's cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """What a kernel takes of a processor."""

    num_warps: int
    registers: int
    """Of each thread; on AMD vector registers, accumulators among them."""
    shared_bytes: int
    """Of each program."""
    spill_bytes: int
    """Of each thread: registers that are kept in memory."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A launch, compiled."""

    asm: dict[str, Any]
    """By stage of the compiler: "ttgir", "ptx", "amdgcn", ..."""
    resources: Resources
    seconds: float
    """How long it took."""


def compile_launch(launch: KernelLaunch, target: str) -> Compiled:
    """Compile a launch as it would be on a GPU, from tensors that may be anywhere.

    Args:
        launch: Its kernel must not be interpreted.
        target: A key of `TARGETS`.
    """
    import triton
    from triton import knobs
    from triton._utils import find_paths_if, get_iterable_path
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import create_function_from_signature

    gpu = GPUTarget(*TARGETS[target])
    backend: Any = triton.compiler.make_backend(gpu)
    kernel = launch.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialized, options = bind(*launch.arguments, **launch.constants, **launch.options)
    # As triton.runtime.jit.JITFunction.run has it.
    signature = {name: kind for name, (kind, _) in zip(bound, specialized, strict=False)}
    values, hints = list(bound.values()), [hint for _, hint in specialized[: len(signature)]]
    constants = find_paths_if(list(signature.values()), lambda _, kind: kind == "constexpr")
    constants = {path: get_iterable_path(values, path) for path in constants}
    attributes = find_paths_if(hints, lambda _, hint: isinstance(hint, str))
    attributes = {path: backend.parse_attr(get_iterable_path(hints, path)) for path in attributes}
    source = ASTSource(kernel, signature, constants, attributes)
    said, start = io.StringIO(), time.perf_counter()
    with knobs.nvidia.scope(), contextlib.redirect_stdout(said):
        knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=gpu, options=options)
        seconds = time.perf_counter() - start
        if gpu.backend == "cuda":
            _keep_report(compiled, said, backend, options)
    if gpu.backend == "cuda":
        registers, spill_bytes = _of_nvidia(said.getvalue())
    else:
        registers, spill_bytes = _of_amd(compiled.asm)
    metadata = compiled.metadata
    resources = Resources(
        num_warps=metadata.num_warps,
        registers=registers,
        shared_bytes=metadata.shared,
        spill_bytes=spill_bytes,
    )
    return Compiled(compiled.asm, resources, seconds)


def _keep_report(compiled: Any, said: io.StringIO, backend: Any, options: Any) -> None:
    """Keep what the assembler has said beside the kernel, in Triton's cache, and find it there.

    The name of the kernel in the cache depends on the assembler's version as well.
    """
    from triton.runtime.cache import get_cache_manager

    beside = get_cache_manager(compiled.hash)
    if not said.getvalue():  # the cache had the kernel
        if path := beside.get_file(REPORT):
            said.write(Path(path).read_text())
            return
        parsed = backend.parse_options(options)
        backend.make_cubin(compiled.asm["ptx"], {}, parsed, backend.target.arch)
    beside.put(said.getvalue(), REPORT, binary=False)


def _of_nvidia(said: str) -> tuple[int, int]:
    """Registers and bytes spilled, as the assembler that Triton ships reports them."""
    spilled = [int(each) for each in re.findall(r"(\d+) bytes spill (?:stores|loads)", said)]
    return int(_only(r"Used (\d+) registers", said)), max(spilled)


def _of_amd(asm: dict[str, Any]) -> tuple[int, int]:
    """Registers and bytes spilled to memory, as the assembly says of itself.

    Scalar registers may be spilled to lanes of vector registers, which is no memory.
    """
    text = asm["amdgcn"]
    num_bytes = int(_only(r"\.private_segment_fixed_size: +(\d+)", text))
    return int(_only(r"\.vgpr_count: +(\d+)", text)), num_bytes


def _only(pattern: str, text: str) -> str:
    found = set(re.findall(pattern, text))
    if len(found) != 1:
        raise ValueError(f"{pattern!r} was found {len(found)} times in the compiler's output")
    return found.pop()


def recorded(run: Callable[[Callable[[KernelLaunch], None]], object]) -> list[KernelLaunch]:
    """The launches of a run that launches nothing.

    Args:
        run: Gets what takes the place of a launch.
    """
    launches: list[KernelLaunch] = []
    run(launches.append)
    return launches
