"""Rates at which bytes can get into the device and out of it."""

from __future__ import annotations

from typing import NamedTuple


class LinkRates(NamedTuple):
    """Bytes per second of links that a plan may use.

    Attributes:
        inward: Into the device.
        outward: Out of the device.
    """

    inward: float
    outward: float
