"""How fast bytes can get into the device and out of it."""

from __future__ import annotations

from typing import NamedTuple


class Rates(NamedTuple):
    """Bytes per second of all links that a plan may use, together.

    Attributes:
        inward: Into the device.
        outward: Out of the device.
    """

    inward: float
    outward: float
