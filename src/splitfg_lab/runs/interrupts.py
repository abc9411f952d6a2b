"""Turn Ctrl-C, SIGTERM and SIGHUP into a request that a loop answers between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask a run to save and stop: SIGINT, SIGTERM and SIGHUP.

    A terminal sends SIGHUP when it closes. It is left out under ``nohup``, which ignores it, and on Windows, which does
    not have it.
    """
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is None or signal.getsignal(hangup) is signal.SIG_IGN:
        return signal.SIGINT, signal.SIGTERM
    return signal.SIGINT, signal.SIGTERM, hangup


class StopRequest:
    """Record whether a signal asked to stop; a second Ctrl-C raises ``KeyboardInterrupt`` at once."""

    def __init__(self) -> None:
        self.made = False

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.made and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.made = True


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Collect the stop signals in a request instead of letting them end the process.

    Python delivers signals to the main thread only, so other threads yield a request that is never made.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request) for number in stop_signals()}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
