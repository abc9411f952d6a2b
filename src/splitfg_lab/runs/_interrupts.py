"""Ctrl-C and SIGTERM as a request that a loop answers when it is ready."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether somebody asked to stop. A second Ctrl-C does not wait: it raises ``KeyboardInterrupt``."""

    def __init__(self) -> None:
        self.made = False

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.made and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.made = True


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Collect SIGINT and SIGTERM instead of dying of them; only the main thread ever gets any."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
