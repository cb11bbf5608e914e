"""Built-in machines are whole profiles, in the order in which they were built."""

import json

import pytest

from penstock.memory import Link, MachineProfile, Tier, machine

NAMES = ["v100-16gb-pcie3", "a100-80gb", "h100-80gb", "h200"]


@pytest.mark.parametrize("name", NAMES)
def test_a_built_in_machine_survives_json(name):
    profile = machine(name)
    assert MachineProfile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile
    assert "0 runs" in str(profile)


def test_later_machines_are_faster():
    profiles = list(map(machine, NAMES))
    for rate in (
        lambda profile: profile.compute.flops_per_second["float16"],
        lambda profile: profile.compute.memory_bytes_per_second,
        lambda profile: profile.links[Link.HOST_TO_DEVICE].bytes_per_second,
        lambda profile: profile.tiers[Tier.DEVICE].capacity_bytes,
    ):
        rates = list(map(rate, profiles))
        assert rates == sorted(rates)
        assert rates[0] < rates[-1]


def test_the_v100_of_the_paper():
    profile = machine("v100-16gb-pcie3")
    assert 12e9 <= profile.links[Link.DEVICE_TO_HOST].bytes_per_second <= 13e9
    assert profile.compute.flops_per_second["float32"] == pytest.approx(0.7 * 15.7e12)
    # A product of two matrices of 4096 rows is bound by arithmetic, an addition by memory.
    assert profile.compute.seconds(2 * 4096**3, 3 * 4 * 4096**2, "float32") == pytest.approx(
        4e-6 + 2 * 4096**3 / (0.7 * 15.7e12)
    )
    assert profile.compute.seconds(10**6, 12 * 10**6, "float32") == pytest.approx(
        4e-6 + 12e6 / (0.85 * 900e9)
    )


def test_an_unknown_machine_is_refused():
    with pytest.raises(ValueError, match=r"'b200'.*'v100-16gb-pcie3'"):
        machine("b200")


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("links", "device->host", "bytes_per_second"), -5.0, "bytes_per_second is -5.0"),
        (("links", "device->host", "bytes_per_second"), float("nan"), "bytes_per_second is nan"),
        (("tiers", "device", "capacity_bytes"), -1, "capacity_bytes is -1"),
        (("compute", "memory_bytes_per_second"), 0, "memory_bytes_per_second is 0"),
        (("compute", "flops_per_second", "float16"), -1.0, "flops_per_second of float16"),
        (("compute", "flops_per_second"), {}, "none of float32"),
    ],
)
def test_a_profile_of_rates_that_are_none_is_refused(path, value, text):
    data = json.loads(json.dumps(machine("h200").to_dict()))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=text):
        MachineProfile.from_dict(data)
