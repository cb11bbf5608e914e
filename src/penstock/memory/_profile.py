"""What `probe` found out about a machine, as plain data."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.memory._tiers import Link, Tier
from penstock.tables import report_table
from penstock.units import format_bandwidth, format_bytes


@dataclass(frozen=True, slots=True)
class TierProfile:
    """How much a tier holds.

    Attributes:
        capacity_bytes: Of the device: its memory; of the host: the RAM, within the limit of the
            control group; of a file store: what is free beyond the reserve, within its limit.
    """

    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """How fast a link was, over several runs.

    Attributes:
        bytes_per_second: Median.
        quartiles: First and third quartile, in bytes per second.
        num_runs: Number of runs.
    """

    bytes_per_second: float
    quartiles: tuple[float, float]
    num_runs: int

    @classmethod
    def of(cls, rates: Sequence[float]) -> LinkProfile:
        """Sum up the rates of several runs.

        Example:
            >>> LinkProfile.of([1.0, 2.0, 3.0])
            LinkProfile(bytes_per_second=2.0, quartiles=(1.5, 2.5), num_runs=3)

        Args:
            rates: Bytes per second of each run, at least two.

        Returns:
            Their median and quartiles.
        """
        first, median, third = statistics.quantiles(rates, n=4, method="inclusive")
        return cls(median, (first, third), len(rates))

    def __str__(self) -> str:
        first, third = self.quartiles
        return (
            f"{format_bandwidth(self.bytes_per_second)}  "
            f"(quartiles {format_bandwidth(first)} to {format_bandwidth(third)}, "
            f"{self.num_runs} runs)"
        )


@dataclass(frozen=True, kw_only=True)
class MachineProfile:
    """Tiers and links of a machine, measured by `probe`.

    Attributes:
        name: Host name.
        device: `"cuda"`, or `"cpu"` where the device tier is RAM.
        device_name: Name of the GPU or of the processor.
        num_cores: CPU cores that this process may use.
        tiers: What each tier holds. `Tier.HOST` only with a GPU, `Tier.FILE` only with a store.
        links: How fast each link is. With a GPU they meet in the host, without one they join
            device and file.
        memcpy: How fast one thread copies within RAM: what a staging copy costs.
        store: Directory of the file tier; None without one.
        direct_io: Whether the store's file is read and written past the page cache; None without
            a store.
    """

    name: str
    device: str
    device_name: str
    num_cores: int
    tiers: dict[Tier, TierProfile]
    links: dict[Link, LinkProfile]
    memcpy: LinkProfile
    store: str | None = None
    direct_io: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as plain data for JSON.

        Returns:
            The fields by name, tiers and links by their values.
        """
        return {
            "name": self.name,
            "device": self.device,
            "device_name": self.device_name,
            "num_cores": self.num_cores,
            "tiers": {
                tier.value: {"capacity_bytes": profile.capacity_bytes}
                for tier, profile in self.tiers.items()
            },
            "links": {link.value: _link_to_dict(profile) for link, profile in self.links.items()},
            "memcpy": _link_to_dict(self.memcpy),
            "store": self.store,
            "direct_io": self.direct_io,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MachineProfile:
        """Make a profile from what `to_dict` returned.

        Args:
            data: The dictionary, also after a way through JSON.

        Returns:
            An equal profile.

        Raises:
            ValueError: Something is missing, or is not what it should be.
        """
        try:
            return cls(
                name=str(data["name"]),
                device=str(data["device"]),
                device_name=str(data["device_name"]),
                num_cores=int(data["num_cores"]),
                tiers={
                    Tier(tier): TierProfile(int(profile["capacity_bytes"]))
                    for tier, profile in data["tiers"].items()
                },
                links={Link(link): _link_from_dict(p) for link, p in data["links"].items()},
                memcpy=_link_from_dict(data["memcpy"]),
                store=data["store"],
                direct_io=data["direct_io"],
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"data is not a machine profile ({type(error).__name__}: {error}); "
                "pass what MachineProfile.to_dict returned"
            ) from error

    def __str__(self) -> str:
        rows: list[tuple[str, object]] = [
            ("machine", self.name),
            ("device", f"{self.device_name} ({self.device})"),
            ("cores", str(self.num_cores)),
        ]
        if self.store is not None:
            kind = "direct I/O" if self.direct_io else "through the page cache"
            rows.append(("store", f"{self.store} ({kind})"))
        rows += [
            (f"{tier} capacity", format_bytes(profile.capacity_bytes))
            for tier, profile in self.tiers.items()
        ]
        rows += [(link.value, profile) for link, profile in self.links.items()]
        rows.append(("memcpy, one thread", self.memcpy))
        return report_table(rows, title="penstock.probe")


def _link_to_dict(profile: LinkProfile) -> dict[str, Any]:
    return {
        "bytes_per_second": profile.bytes_per_second,
        "quartiles": list(profile.quartiles),
        "num_runs": profile.num_runs,
    }


def _link_from_dict(data: Mapping[str, Any]) -> LinkProfile:
    first, third = data["quartiles"]
    return LinkProfile(
        float(data["bytes_per_second"]), (float(first), float(third)), int(data["num_runs"])
    )
