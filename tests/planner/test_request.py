"""What planners are given: times by default, links by the budget, deadlines."""

import math
import time

import pytest

import graph_cases
from penstock.memory import Link
from penstock.planner import Budget, PlanRequest

HOST = (Link.DEVICE_TO_HOST, Link.HOST_TO_DEVICE)
FILE = (Link.DEVICE_TO_FILE, Link.FILE_TO_DEVICE)


def request(**fields):
    return graph_cases.request(graph_cases.chain_step(2), fields.pop("budget", Budget()), **fields)


@pytest.mark.parametrize(
    ("budget", "links"),
    [
        (Budget(), ()),
        (Budget(host_bytes=0), ()),
        (Budget(host_bytes=1), (HOST,)),
        (Budget(file_bytes=0), (FILE,)),
        (Budget(host_bytes=1, file_bytes=1), (HOST, FILE)),
    ],
)
def test_links_lead_to_the_tiers_of_the_budget(budget, links):
    assert request(budget=budget).links == links


def test_times_are_the_graphs_unless_they_are_given():
    graph = graph_cases.chain_step(2)
    timed = [5.0] * len(graph.operators)
    given = graph_cases.request(graph, Budget(), seconds=timed)
    assert given.operator_seconds == tuple(timed)
    assert given.compute_seconds == sum(timed)
    with pytest.raises(ValueError, match=f"has 1 times and the graph {len(timed)} operators"):
        PlanRequest(
            graph=graph, budget=Budget(), machine=graph_cases.machine(), operator_seconds=[1.0]
        )


def test_a_part_of_the_time_is_never_more_than_the_whole():
    whole = request(time_limit=100)
    assert 9 < whole.within(10).seconds_left() <= 10
    assert whole.within(1000).deadline == whole.deadline
    assert 999 < whole.ending_in(1000).seconds_left() <= 1000


def test_a_default_is_for_requests_without_a_deadline():
    endless = request()
    assert endless.seconds_left() == math.inf
    assert 9 < endless.ending(10).seconds_left() <= 10
    limited = request(time_limit=100)
    assert limited.ending(10) is limited
    assert request(time_limit=-1).seconds_left() == 0
    assert time.monotonic() < limited.deadline
