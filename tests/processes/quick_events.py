"""Events of a run's workers, made into bytes by C and sent together.

xdist sends six events for each test, and has Python code make bytes of each value in these and
values of the bytes: one and a half milliseconds for each test, and as many to wake both processes.
What is sent when is as before but for a test that passes: what it reports leaves when it has ended.
"""

from __future__ import annotations

import marshal
import threading
from typing import Any

import pytest

HELD = {"testreport", "logfinish"}  # until an event that is not


class Sender:
    """Sends events in place of a worker's `sendevent`, from any thread.

    Args:
        channel: Where the process that has started the worker listens.
    """

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.held: list[tuple[str, dict[str, Any]]] = []
        self.lock = threading.Lock()

    def send(self, name: str, **values: Any) -> None:
        """Send an event, and those held back before it; hold it back where it can wait."""
        with self.lock:
            self.held.append((name, values))
            has_passed = name != "testreport" or values["data"]["outcome"] == "passed"
            if name in HELD and has_passed:
                return
            events, self.held = self.held, []
            try:
                content = marshal.dumps(events)
            except ValueError:  # a type that xdist may refuse by name
                for each in events:
                    self.channel.send(each)
            else:
                self.channel.send(content)


def quicken_worker(plugins: pytest.PytestPluginManager) -> None:
    """Have this worker send its events by a `Sender`, where xdist has what that takes."""
    for plugin in plugins.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor" and hasattr(plugin, "channel"):
            plugin.sendevent = Sender(plugin.channel).send  # pyright: ignore


def quicken_controller() -> None:
    """Have events of workers read as they are sent."""
    from xdist.workermanage import WorkerController

    process: Any = WorkerController.process_from_remote

    def process_all(self: WorkerController, content: Any) -> None:
        for each in marshal.loads(content) if isinstance(content, bytes) else [content]:
            process(self, each)

    WorkerController.process_from_remote = process_all
