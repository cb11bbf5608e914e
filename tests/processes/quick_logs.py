"""Handlers of pytest without the time that attaching them takes.

For each phase of a test pytest attaches two handlers to the root logger and to each of the hundred
that pass nothing on to it, torch's above all, each under the lock of `logging`, and takes them off
again: more than a millisecond for each test. Finding these among thousands takes another: it is
done once in a test. Until others are found the two handlers, which pytest empties before each
phase, stay where they are.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
from _pytest.logging import catching_logs


def quicken(config: pytest.Config) -> None:
    """Have pytest attach handlers by the functions of this module."""
    global _plugins
    _plugins = config.pluginmanager
    logging.PlaceHolder.propagate = True  # pyright: ignore[reportAttributeAccessIssue] (as a logger)
    catching_logs.__enter__, catching_logs.__exit__ = _enter, _exit


_plugins: pytest.PytestPluginManager
_attached: dict[logging.Handler, list[Any]] = {}  # pytest's two handlers, and where they stay


def _enter(self: Any) -> logging.Handler:
    """Attach the handler to the loggers that pytest chooses, without the lock for each."""
    root = logging.getLogger()
    if self.level is not None:
        self.handler.setLevel(self.level)
        self.orig_level = root.level
        root.setLevel(min(self.orig_level, self.level))
    self.attached_loggers.append(root)
    loggers = _find_loggers()
    with logging._lock:
        if self.handler not in root.handlers:
            root.handlers.append(self.handler)
        if _attached.get(self.handler) is not loggers:
            if _is_pytests(self.handler):
                _detach(self.handler, _attached.get(self.handler, []))
                _attached[self.handler] = loggers
            else:
                self.attached_loggers += loggers
            for each in loggers:
                if self.handler not in each.handlers:
                    each.handlers.append(self.handler)
    return self.handler


def _is_pytests(handler: logging.Handler) -> bool:
    plugin: Any = _plugins.get_plugin("logging-plugin")
    return handler in (plugin.caplog_handler, plugin.report_handler)


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
        loggers: Any = logging.getLogger().manager.loggerDict.values()
        closed = [each for each in loggers if not each.propagate and each.name != "torch.__trace"]
        gone = [each for each in closed for own in _attached if own not in each.handlers]
        _found = test, closed if gone or closed != _found[1] else _found[1]
    return _found[1]


def _exit(self: Any, *_: object) -> None:
    """Undo what `_enter` did, but for what stays."""
    if self.level is not None:
        logging.getLogger().setLevel(self.orig_level)
    with logging._lock:
        _detach(self.handler, self.attached_loggers)
    self.attached_loggers.clear()


def _detach(handler: logging.Handler, loggers: list[Any]) -> None:
    for each in loggers:
        if handler in each.handlers:
            each.handlers.remove(handler)
