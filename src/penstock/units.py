"""Counts, byte counts, bandwidths and durations as users write them, to numbers and back.

Every size that a user passes to Penstock goes through this file, so that `"8GiB"` means the same
everywhere and a wrong size is refused with the name of the argument that carried it.
"""

from __future__ import annotations

import math
import numbers
import operator
import re
from fractions import Fraction

_QUANTITY = re.compile(r"\s*(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(?P<unit>[A-Za-z]*)\s*")
_PREFIXES = "kmgtp"
_UNIT_BYTES: dict[str, int] = (
    {"": 1, "b": 1}
    | {f"{prefix}b": 1000 ** (power + 1) for power, prefix in enumerate(_PREFIXES)}
    | {f"{prefix}ib": 1024 ** (power + 1) for power, prefix in enumerate(_PREFIXES)}
)
_ACCEPTED_BYTES = 'a whole number of bytes >= 0, or a string such as "4096", "1.5 MB" or "8GiB"'
_ACCEPTED_BANDWIDTH = (
    'a number of bytes per second > 0, or a string such as "200MB/s" or "1.5 GiB/s"'
)


def parse_bytes(value: int | str, *, name: str = "value") -> int:
    """Turn a size as a user writes it into a number of bytes.

    Example:
        >>> parse_bytes("8GiB"), parse_bytes("1.5 MB"), parse_bytes(4096)
        (8589934592, 1500000, 4096)

    Args:
        value: Whole number of bytes, or a number with a unit: `B`, `KB` `MB` `GB` `TB` `PB` (powers
            of 1000), `KiB` `MiB` `GiB` `TiB` `PiB` (powers of 1024), in any case. Fractions are
            rounded to the nearest byte.
        name: The argument that carried the value, for the error message.

    Returns:
        Bytes, at least 0.

    Raises:
        TypeError: `value` is neither an integer nor a string (a bool is not a size).
        ValueError: `value` is negative, or the text is not a size.
    """
    if isinstance(value, str):
        return _parse_text(value, name=name, whole=value, accepted=_ACCEPTED_BYTES)
    is_tensor = hasattr(value, "requires_grad")  # it has an `__index__`, and may be on a GPU
    if isinstance(value, bool) or is_tensor or not hasattr(value, "__index__"):
        raise TypeError(
            f"{name} must be {_ACCEPTED_BYTES}; got {value!r} of type {type(value).__name__}"
        )
    num_bytes = operator.index(value)
    if num_bytes < 0:
        raise ValueError(f"{name} must be {_ACCEPTED_BYTES}; got {value!r}")
    return num_bytes


def parse_count(value: object, *, name: str = "value", least: int = 0) -> int:
    """Turn a number of things into an int, whatever type of whole numbers it has.

    Example:
        >>> parse_count(3, name="groups", least=1)
        3

    Args:
        value: An int, or a whole number of another library, such as `numpy.int64`.
        name: The argument that carried the value, for the error message.
        least: The least number that is accepted.

    Raises:
        TypeError: `value` is no whole number; a float is none, whatever its value, and no bool.
        ValueError: It is less than `least`.
    """
    try:
        # An int stays the one it is, which may be a symbol of a graph that is traced.
        count = value if isinstance(value, int) else operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        count = None
    if count is None or isinstance(value, bool):
        raise TypeError(
            f"{name} is {value!r} of type {type(value).__name__}, but must be a whole number: "
            "pass an int"
        )
    if count < least:
        raise ValueError(f"{name} is {value}, but must be at least {least}")
    return count


def parse_seconds(value: object, *, name: str = "value", may_be_zero: bool = False) -> float:
    """Turn a time limit into a float, whatever type of numbers it has.

    Example:
        >>> parse_seconds(3, name="time_limit")
        3.0

    Args:
        value: A number of seconds above 0.
        name: The argument that carried the value, for the error message.
        may_be_zero: Whether 0 is accepted, too.

    Raises:
        ValueError: `value` is something else.
    """
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        seconds = float(value)
        if seconds > 0 or (may_be_zero and seconds == 0):
            return seconds
    least = "0 or above" if may_be_zero else "above 0"
    raise ValueError(f"{name}={value!r}: must be a number of seconds, {least}")


def parse_share(text: object) -> Fraction | None:
    """Read a share above 0, such as `"1/8"` or `"25%"`; None if it is none.

    Example:
        >>> parse_share("1/8"), parse_share("25%"), parse_share("8GiB")
        (Fraction(1, 8), Fraction(1, 4), None)
    """
    if not isinstance(text, str):
        return None
    if re.fullmatch(r"\d+/[1-9]\d*", text):
        share = Fraction(text)
    elif re.fullmatch(r"\d+(\.\d+)?%", text):
        share = Fraction(text[:-1]) / 100
    else:
        return None
    return share or None


def parse_bandwidth(value: int | float | str, *, name: str = "value") -> float:
    """Turn a bandwidth as a user writes it into bytes per second.

    Example:
        >>> parse_bandwidth("200MB/s"), parse_bandwidth(1e9)
        (200000000.0, 1000000000.0)

    Args:
        value: Bytes per second, or a size (see `parse_bytes`) followed by `/s`.
        name: The argument that carried the value, for the error message.

    Returns:
        Bytes per second, finite and above 0.

    Raises:
        TypeError: `value` is neither a number nor a string.
        ValueError: `value` is not above 0, not finite, or the text is not a bandwidth.
    """
    if isinstance(value, str):
        size, slash, second = value.rpartition("/")
        if not slash or second.strip() != "s":
            raise ValueError(f"{name} must be {_ACCEPTED_BANDWIDTH}; got {value!r}")
        number = float(_parse_text(size, name=name, whole=value, accepted=_ACCEPTED_BANDWIDTH))
    elif isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(
            f"{name} must be {_ACCEPTED_BANDWIDTH}; got {value!r} of type {type(value).__name__}"
        )
    else:
        number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be {_ACCEPTED_BANDWIDTH}; got {value!r}")
    return number


def format_bytes(num_bytes: int) -> str:
    """Write a number of bytes, perhaps negative, with two decimals, whole below 1 KiB.

    The unit is the largest binary one that keeps it at 1 or more.

    Example:
        >>> format_bytes(1610612736), format_bytes(512)
        ('1.50 GiB', '512 B')
    """
    if abs(num_bytes) < 1024:
        return f"{num_bytes:.0f} B"
    scaled = float(num_bytes)
    unit = "B"
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        scaled /= 1024
        # Compare what will be shown, so that 1023.999 KiB reads 1.00 MiB and not 1024.00 KiB.
        if round(abs(scaled), 2) < 1024:
            break
    return f"{scaled:.2f} {unit}"


def ceil_bytes(num_bytes: int) -> str:
    """Write a number of bytes as `format_bytes`, rounded up: read again, it is at least as much.

    Example:
        >>> ceil_bytes(2**20 + 1), ceil_bytes(2**20), ceil_bytes(1000)
        ('1.01 MiB', '1.00 MiB', '1000 B')
    """
    unit = 1
    while num_bytes >= 1024 * unit and unit < 1024**5:
        unit *= 1024
    hundredths = -(-100 * num_bytes // unit)
    return format_bytes(-(-hundredths * unit // 100))


def format_bandwidth(bytes_per_second: float) -> str:
    """Write a number of bytes per second, with the units of `format_bytes`.

    Example:
        >>> format_bandwidth(1610612736.0)
        '1.50 GiB/s'
    """
    return f"{format_bytes(round(bytes_per_second))}/s"


def format_seconds(seconds: float) -> str:
    """Write a duration, perhaps negative, with three significant digits; minutes and hours whole.

    Example:
        >>> format_seconds(0.0123), format_seconds(200)
        ('12.3 ms', '3 min 20 s')
    """
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if seconds == 0:
        return "0 s"
    if seconds >= 7200:
        minutes = round(seconds / 60)
        return f"{minutes // 60} h {minutes % 60} min"
    if seconds >= 120:
        whole = round(seconds)
        return f"{whole // 60} min {whole % 60} s"
    scaled, unit = seconds * 1e9, "ns"
    for larger in ("us", "ms", "s"):
        if scaled < 999.5:
            break
        scaled, unit = scaled / 1000, larger
    digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
    return f"{scaled:.{digits}f} {unit}"


def _parse_text(text: str, *, name: str, whole: str, accepted: str) -> int:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{name} must be {accepted}; got {whole!r}")
    unit = match["unit"].lower()
    if unit not in _UNIT_BYTES:
        hint = ""
        if unit in _PREFIXES:
            letter = unit.upper()
            hint = f"; write {letter}B for powers of 1000 or {letter}iB for powers of 1024"
        raise ValueError(
            f"{name} must be {accepted}; got {whole!r} with unknown unit {match['unit']!r}{hint}"
        )
    return round(Fraction(match["number"]) * _UNIT_BYTES[unit])
