"""Tiers and the links between them: the words that every report uses."""

from __future__ import annotations

import enum


class Tier(enum.StrEnum):
    """Memory with a capacity, in which bytes can be resident.

    On a machine without a GPU `DEVICE` is the RAM that a budget allows, and there is no `HOST`.

    Example:
        >>> Tier("file"), str(Tier.DEVICE)
        (<Tier.FILE: 'file'>, 'device')
    """

    DEVICE = "device"
    HOST = "host"
    FILE = "file"


class Link(enum.StrEnum):
    """Direction in which bytes can move between two tiers.

    `DEVICE_TO_FILE` and `FILE_TO_DEVICE` are for machines where the device tier is RAM (or where
    the GPU reads and writes files itself).

    Example:
        >>> Link.HOST_TO_FILE.source, Link.HOST_TO_FILE.destination
        (<Tier.HOST: 'host'>, <Tier.FILE: 'file'>)
    """

    DEVICE_TO_HOST = "device->host"
    HOST_TO_DEVICE = "host->device"
    HOST_TO_FILE = "host->file"
    FILE_TO_HOST = "file->host"
    DEVICE_TO_FILE = "device->file"
    FILE_TO_DEVICE = "file->device"

    @property
    def source(self) -> Tier:
        """The tier that the bytes come from."""
        return Tier(self.value.partition("->")[0])

    @property
    def destination(self) -> Tier:
        """The tier that the bytes go to."""
        return Tier(self.value.partition("->")[2])
