"""Handlers of pytest without the time that attaching them takes.

For each phase of a test pytest attaches two handlers to the root logger and to each of the hundred
that pass nothing on to it, torch's above all, each under the lock of `logging`, and takes them off
again: more than a millisecond for each test. Finding these among thousands takes another: it is
done once in a test.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from _pytest.logging import catching_logs


def quicken() -> None:
    """Have pytest attach handlers by the functions of this module."""
    catching_logs.__enter__, catching_logs.__exit__ = _enter, _exit


def _enter(self: Any) -> logging.Handler:
    """Attach the handler to the loggers that pytest chooses, without the lock for each."""
    root = logging.getLogger()
    if self.level is not None:
        self.handler.setLevel(self.level)
        self.orig_level = root.level
        root.setLevel(min(self.orig_level, self.level))
    self.attached_loggers += [root, *_find_loggers()]
    with logging._lock:
        for each in self.attached_loggers:
            if self.handler not in each.handlers:
                each.handlers.append(self.handler)
    return self.handler


_found: tuple[str, list[Any]] = "", []  # the test, and the loggers that pass nothing on


def _find_loggers() -> list[Any]:
    """Return the loggers that pass nothing on to the root logger, but for torch's trace.

    With a handler it would write down each graph, guard and event of the compiler.
    They are looked for once in a test, when it is to be called: its fixtures have run, and the
    phase that the environment names is still theirs.
    """
    global _found
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if (test.endswith("(setup)") and test != _found[0]) or not _found[1]:
        loggers = logging.getLogger().manager.loggerDict.values()
        _found = (
            test,
            [
                each
                for each in loggers
                if not getattr(each, "propagate", True) and each.name != "torch.__trace"
            ],
        )
    return _found[1]


def _exit(self: Any, *_: object) -> None:
    """Undo what `_enter` did."""
    if self.level is not None:
        logging.getLogger().setLevel(self.orig_level)
    with logging._lock:
        for each in self.attached_loggers:
            if self.handler in each.handlers:
                each.handlers.remove(self.handler)
    self.attached_loggers.clear()
