"""Saved graphs and plans that are damaged, of another version or for another model are refused."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_cases import chain_step, in_units, machine, request
from penstock.errors import GraphFileError
from penstock.graph import StepGraph
from penstock.planner import Budget, Plan
from penstock.planner.paging import plan_by_paging

UNIT = 256


def small_graph() -> StepGraph:
    return in_units(chain_step(3, weight_bytes=UNIT, activation_bytes=2 * UNIT), UNIT)


def small_plan() -> Plan:
    graph = small_graph()
    return plan_by_paging(
        request(
            graph,
            budget=Budget(device_bytes=8 * UNIT, host_bytes=1 << 20),
            profile=machine(out=UNIT, back=UNIT),
            seconds=[1.0] * len(graph.operators),
        ),
        policy="belady",
    )


ORIGINAL: dict[Any, Any] = {StepGraph: small_graph(), Plan: small_plan()}
PLAIN: dict[Any, dict[str, Any]] = {
    kind: json.loads(json.dumps(original.to_dict())) for kind, original in ORIGINAL.items()
}
FIELDS = [(kind, name) for kind, plain in PLAIN.items() for name in plain]
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["device", "parameter", "aten.add.Tensor", "device->host"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["value", "view", "bytes", "name", "links", "tiers", "scalar"]), inner
        )
    ),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything within plain data."""
    items = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    return [path, *(each for key, item in items for each in places(item, (*path, key)))]


def with_another(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[path[0]] = with_another(value[path[0]], path[1:], new)
    return changed


def read(kind: Any, plain: dict[str, Any]) -> Any:
    """What is read, or None if it is refused; any other exception is an error of the test."""
    try:
        return kind.from_dict(plain)
    except GraphFileError:
        return None


@pytest.mark.parametrize(("kind", "name"), FIELDS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_other_content_of_a_field_is_refused(kind, name, data):
    plain = PLAIN[kind]
    path = data.draw(st.sampled_from(places(plain[name])), label="path")
    new = data.draw(ANYTHING, label="content")
    damaged = plain | {name: with_another(plain[name], path, new)}
    found = read(kind, damaged)
    # Some other content says the same, as 1.0 for 1 or an empty mapping for an empty list.
    assert found is None or found == ORIGINAL[kind]
    if json.dumps(damaged) == json.dumps(plain):
        assert found is not None


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_a_missing_field_is_refused(kind, name):
    plain = {key: value for key, value in PLAIN[kind].items() if key != name}
    assert read(kind, plain) is None


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("version", [True, 1.0, 2.0, "1", None])
def test_a_version_that_is_no_whole_number_is_refused(kind, version):
    plain = PLAIN[kind] | {"version": type(version)(PLAIN[kind]["version"]) if version else None}
    assert read(kind, plain) is None


def test_a_plan_with_its_order_reversed_and_no_checksum_is_refused():
    plain = {key: value for key, value in PLAIN[Plan].items() if key != "checksum"}
    with pytest.raises(GraphFileError, match="checksum, which is missing"):
        Plan.from_dict(plain | {"order": plain["order"][::-1]})


@pytest.mark.parametrize("kind", PLAIN)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_without_a_checksum_nothing_else_than_a_refusal_is_raised(kind, data):
    """Numbers that are none, and the like, are found where they stand."""
    plain = {key: value for key, value in PLAIN[kind].items() if key != "checksum"}
    path = data.draw(st.sampled_from(places(plain)[1:]), label="path")
    new = data.draw(ANYTHING | st.just(math.inf) | st.just(math.nan), label="content")
    read(kind, with_another(plain, path, new))


@pytest.mark.parametrize("kind", PLAIN)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_file_with_other_bytes_is_refused(kind, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    path = folder / ("graph.json.gz" if kind is StepGraph else "plan.json")
    ORIGINAL[kind].save(path)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1), label="at")
    byte = data.draw(st.integers(0, 255).filter(lambda each: each != content[at]), label="byte")
    content[at] = byte
    path.write_bytes(bytes(content))
    try:
        found = kind.load(path)
    except GraphFileError:
        return
    assert found == ORIGINAL[kind]  # a space, or what compression says of the file


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff\xfe", b"", b"1e999", b"null"])
@pytest.mark.parametrize("kind", PLAIN)
def test_what_is_no_such_file_is_refused(kind, content, tmp_path):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(GraphFileError):
        kind.load(tmp_path / "file")


def test_another_graph_is_refused():
    other = chain_step(4, weight_bytes=UNIT, activation_bytes=2 * UNIT)
    with pytest.raises(GraphFileError, match="not for"):
        Plan.from_dict(PLAIN[Plan], graph=other)
    assert Plan.from_dict(PLAIN[Plan], graph=small_graph()) == ORIGINAL[Plan]


def test_a_plan_is_printed_as_a_table():
    plan = small_plan()
    text = str(plan)
    assert "penstock.plan" in text and "lower bound" in text and "device->host" in text
    assert len(text.splitlines()) < 20 < len(repr(plan)) / 100
