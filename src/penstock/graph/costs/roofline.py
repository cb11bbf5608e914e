"""Seconds that operators take: as measured, else by a roofline over a machine's profile.

Roofline: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009. With the attainable rates of
arithmetic P and of memory traffic B, an operator takes

    seconds = start + max(flops / P, bytes / B).
"""

from __future__ import annotations

from penstock.graph.step_graph import Operator, StepGraph, views_in
from penstock.memory import MachineProfile, machine

_FLOATS = ("float64", "float32", "bfloat16", "float16")
_FREE = {  # they run on the host, or are only a place
    "penstock.empty",
    "penstock.scalar",
    "penstock.get_rng_state",
    "penstock.set_rng_state",
}


def operator_seconds(graph: StepGraph, machine_profile: MachineProfile | str) -> tuple[float, ...]:
    """Return the seconds that each operator of a step takes on a machine.

    Example:
        >>> operator_seconds(StepGraph(storages=(), storage_of_value=(), operators=()), "h200")
        ()

    Args:
        graph: The step; operators with measured `seconds` keep them.
        machine_profile: A profile, with `compute` unless every operator was measured or is free; or
            the name of a built-in machine.

    Returns:
        Seconds, in the order of `graph.operators`.

    Raises:
        ValueError: An operator was not measured, and the profile does not say how fast the machine
            computes.
    """
    profile = machine(machine_profile) if isinstance(machine_profile, str) else machine_profile
    return tuple(_seconds(operator, profile) for operator in graph.operators)


def _seconds(operator: Operator, profile: MachineProfile) -> float:
    """Return the measured time, or that of a roofline."""
    if operator.seconds is not None:
        return operator.seconds
    if operator.target in _FREE:
        return 0.0
    if profile.compute is None:
        raise ValueError(
            f"operator {operator.name!r} was not measured and the profile of {profile.name!r} does "
            "not say how fast it computes; measure it anew with penstock.probe(refresh=True), or "
            "use a built-in machine"
        )
    num_bytes = operator.bytes_read + operator.bytes_written
    return profile.compute.seconds(operator.flops, num_bytes, _dtype(operator))


def _dtype(operator: Operator) -> str:
    """Name the narrowest float among the operands: products are as fast as their factors allow."""
    found = {view.dtype for view in views_in(operator.args)}
    found |= {view.dtype for view in operator.outputs if view is not None}
    return max(found & set(_FLOATS), key=_FLOATS.index, default="float32")
