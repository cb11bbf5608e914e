"""Events of workers come as xdist sends them, in order, and those of tests that fail at once."""

import marshal
from types import SimpleNamespace
from typing import Any

import pytest

import quick_events

EVENTS = [
    ("logstart", {"nodeid": "a", "location": ("a.py", None, "a")}),
    ("testreport", {"data": {"outcome": "passed", "when": "setup", "duration": 0.1}}),
    ("testreport", {"data": {"outcome": "failed", "longrepr": "\udcff", "sections": [("x", "y")]}}),
    ("testreport", {"data": {"outcome": "passed", "when": "teardown"}}),
    ("logfinish", {"nodeid": "a", "location": ("a.py", None, "a")}),
    ("runtest_protocol_complete", {"item_index": 2**40, "duration": 1e-9}),
]


class Channel:
    def __init__(self):
        self.sent: list[Any] = []

    def send(self, item):
        self.sent.append(item)


def test_what_a_test_reports_leaves_when_it_fails_or_has_ended():
    channel = Channel()
    sender = quick_events.Sender(channel)
    num_sent = []
    for name, values in EVENTS:
        sender.send(name, **values)
        num_sent.append(len(channel.sent))
    assert num_sent == [1, 1, 2, 2, 2, 3]
    assert [each for content in channel.sent for each in marshal.loads(content)] == EVENTS


def test_what_marshal_does_not_know_is_left_to_xdist():
    channel = Channel()
    sender = quick_events.Sender(channel)
    report = {"data": {"outcome": "passed", "user_properties": [("path", object())]}}
    sender.send("testreport", **report)
    sender.send("runtest_protocol_complete", item_index=0, duration=0.0)
    assert channel.sent == [
        ("testreport", report),
        ("runtest_protocol_complete", {"item_index": 0, "duration": 0.0}),
    ]


def test_both_forms_are_read(monkeypatch):
    from xdist.workermanage import WorkerController

    read = []
    monkeypatch.setattr(WorkerController, "process_from_remote", lambda _, each: read.append(each))
    quick_events.quicken_controller()
    node: Any = SimpleNamespace()
    end = object()
    for content in (EVENTS[0], marshal.dumps(EVENTS[1:]), end):
        WorkerController.process_from_remote(node, content)
    assert read == [*EVENTS, end]


def test_a_worker_of_this_run_sends_so(request):
    workers = [
        each
        for each in request.config.pluginmanager.get_plugins()
        if type(each).__name__ == "WorkerInteractor"
    ]
    if not workers:
        pytest.skip("no worker runs this test")
    assert isinstance(workers[0].sendevent.__self__, quick_events.Sender)
