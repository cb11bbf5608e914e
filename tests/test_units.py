"""A size means the same everywhere, and a wrong one is refused by the name of its argument."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.units import (
    ceil_bytes,
    format_bandwidth,
    format_bytes,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_count,
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0),
        (4096, 4096),
        (np.int64(7), 7),
        ("0B", 0),
        ("4096", 4096),
        ("12 b", 12),
        ("8GiB", 8 * 2**30),
        ("8gib", 8 * 2**30),
        (" 1.5 MB ", 1_500_000),
        ("1.5MiB", 3 * 2**19),
        (".5 KiB", 512),
        ("2.KB", 2000),
        ("3TB", 3 * 10**12),
        ("1 PiB", 2**50),
        ("0.1KiB", 102),
        ("9007199254740993", 9007199254740993),  # exact beyond what a float can hold
    ],
)
def test_parse_bytes(value: int | str, expected: int):
    result = parse_bytes(value)
    assert result == expected
    assert type(result) is int


@pytest.mark.parametrize(
    "value", [-1, "-1GiB", "", "GiB", "8G", "8 XB", "1e9", "8 GiB/s", "inf", "nan", "1,5GB", "1 2"]
)
def test_parse_bytes_refuses_values(value: int | str):
    with pytest.raises(ValueError, match=r"^device_memory must be") as caught:
        parse_bytes(value, name="device_memory")
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [True, False, 1.0, None, b"8GiB", [1]])
def test_parse_bytes_refuses_types(value: object):
    with pytest.raises(TypeError, match=r"^min_bytes must be .* of type"):
        parse_bytes(value, name="min_bytes")


def test_bare_prefix_is_told_what_to_write():
    with pytest.raises(ValueError, match="GB for powers of 1000 or GiB for powers of 1024"):
        parse_bytes("8G")


@pytest.mark.parametrize(
    ("value", "expected"),
    [("200MB/s", 2e8), ("1.5 GiB / s", 1.5 * 2**30), (1000, 1e3), (0.5, 0.5), ("7/s", 7.0)],
)
def test_parse_bandwidth(value: int | float | str, expected: float):
    assert parse_bandwidth(value) == expected


@pytest.mark.parametrize(
    "value",
    [0, -1.0, float("nan"), float("inf"), "0B/s", "200MB", "200MB/h", "fast", "/s", "1GB/s/s"],
)
def test_parse_bandwidth_refuses_values(value: int | float | str):
    with pytest.raises(ValueError, match=r"^write_bytes_per_second must be") as caught:
        parse_bandwidth(value, name="write_bytes_per_second")
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [True, None, [1]])
def test_parse_bandwidth_refuses_types(value: object):
    with pytest.raises(TypeError, match=r"^value must be"):
        parse_bandwidth(value)


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (1024**2 - 6 * 1024, "1018.00 KiB"),
        (3 * 2**29, "1.50 GiB"),
        (5 * 2**60, "5120.00 PiB"),
        (-3 * 2**29, "-1.50 GiB"),
    ],
)
def test_format_bytes(num_bytes: int, expected: str):
    assert format_bytes(num_bytes) == expected


@given(st.integers(min_value=0, max_value=2**59))
def test_formatted_bytes_parse_back_to_nearly_the_same(num_bytes: int):
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.005)


@pytest.mark.parametrize(
    "num_bytes", [0, 1, 1023, 1024, 1025, 2**20 - 1, 13_631_489, 10**12 + 7, 2**60, 2**62 + 1]
)
def test_bytes_rounded_up_are_enough(num_bytes: int):
    assert num_bytes <= parse_bytes(ceil_bytes(num_bytes)) <= num_bytes * 1.011


def test_format_bandwidth():
    assert format_bandwidth(3 * 2**29) == "1.50 GiB/s"
    assert format_bandwidth(0.4) == "0 B/s"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 s"),
        (5e-9, "5.00 ns"),
        (999.6e-9, "1.00 us"),
        (0.0123, "12.3 ms"),
        (0.09996, "100 ms"),
        (0.9996, "1.00 s"),
        (1.5, "1.50 s"),
        (119.6, "120 s"),
        (200, "3 min 20 s"),
        (7200, "2 h 0 min"),
        (7984, "2 h 13 min"),
        (-0.5, "-500 ms"),
    ],
)
def test_format_seconds(seconds: float, expected: str):
    assert format_seconds(seconds) == expected


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_whole_numbers_of_any_type_are_counts(value):
    assert parse_count(value) == 3 and type(parse_count(value)) is int


@pytest.mark.parametrize("value", [3.0, "3", None, np.float64(3), np.array([1, 2])])
def test_what_is_no_whole_number_is_no_count(value):
    with pytest.raises(TypeError, match=r"heads is .* but must be a whole number: pass an int"):
        parse_count(value, name="heads")


def test_counts_below_the_least_are_refused():
    with pytest.raises(ValueError, match="heads is 0, but must be at least 1"):
        parse_count(0, name="heads", least=1)
