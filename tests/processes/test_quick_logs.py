"""Handlers of pytest are where they would be without `quick_logs`."""

import logging

import pytest
from _pytest.logging import LogCaptureHandler, catching_logs

import quick_logs

# One that passes nothing on from before the tests, as those of libraries do.
logging.getLogger(f"{__name__}.before").propagate = False


@pytest.fixture
def loggers():
    """A logger that passes records on, one that does not, and one below that."""
    made = [logging.getLogger(f"{__name__}.{name}") for name in ("open", "closed", "closed.below")]
    made[1].propagate = False
    yield made
    made[1].propagate = True


def test_each_record_is_caught_once(loggers, caplog):
    assert catching_logs.__enter__ is quick_logs._enter
    for number, logger in enumerate(loggers):
        logger.warning("record %d", number)
    assert caplog.messages == ["record 0", "record 1", "record 2"]


def test_handlers_and_levels_are_as_before_afterwards(loggers):
    root, handler = logging.getLogger(), LogCaptureHandler()
    before = root.level, *(list(each.handlers) for each in (root, *loggers))
    with catching_logs(handler, level=logging.DEBUG):
        loggers[0].debug("open")
        loggers[1].handlers.remove(handler)  # as a test may
    assert [each.getMessage() for each in handler.records] == ["open"]
    assert before == (root.level, *(list(each.handlers) for each in (root, *loggers)))
