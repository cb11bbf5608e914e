"""Rates at which bytes can get out of the device and into it."""

from __future__ import annotations

from typing import NamedTuple


class LinkRates(NamedTuple):
    """Bytes per second of links that a plan may use.

    Attributes:
        outward: Out of the device.
        inward: Into the device.
    """

    outward: float
    inward: float
