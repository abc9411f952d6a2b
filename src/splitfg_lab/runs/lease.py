"""Leases on run folders, for hosts that share a file system without reliable locks.

``.lease.json`` names the holder of a folder, who sets its time anew every few seconds. Another host may take the lease
over once it is older than its time to live. Ages are differences of times that the file server has set, so the clocks
of hosts need not agree. Only atomic operations of NFS are used: hard links, exclusive creation and renaming. A host may
read old contents from its cache for a while; before it relies on a lease, it creates a file in the folder, which makes
it read the folder again.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from splitfg_lab.files import TEMPORARY, replacing
from splitfg_lab.runs._errors import RunError

NAME: Final = ".lease.json"
BEAT_S: Final = 10.0
"""Seconds between two signs of life."""
TTL_S: Final = 60.0
"""Seconds without a sign of life after which another host may take over."""


WAIT = "wait for it or stop it; with --share, other runs come first"
"""The cure where a run is in use."""


class BusyError(RunError):
    """Another process, here or on another host, runs in the folder."""


class LostLeaseError(RunError):
    """Another host took the folder over, because this process gave no sign of life for too long."""


@dataclass(frozen=True)
class Holder:
    """The contents of a lease.

    Attributes:
        host: Name of the host.
        pid: Process on that host.
        token: Identifies the lease.
    """

    host: str
    pid: int
    token: str


@contextmanager
def leased(folder: Path, *, ttl: float = TTL_S, beat: float = BEAT_S) -> Iterator[Lease]:
    """Hold the lease of a folder during the block, with signs of life from a thread.

    The caller holds the folder's lock, so a lease of this host is one of a dead process.

    Raises:
        BusyError: A process of another host holds it, and has given a sign of life within ``ttl`` seconds.
    """
    path = folder / NAME
    own = Holder(socket.gethostname(), os.getpid(), secrets.token_hex(8))
    if not _create(path, own):
        _take_over(path, own, ttl)
    lease = Lease(path, own)
    done = threading.Event()
    thread = threading.Thread(target=_keep, args=(lease, done, beat), daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        done.set()
        thread.join()
        lease.release()


class Lease:
    """A lease that this process holds, or held."""

    def __init__(self, path: Path, own: Holder) -> None:
        self._path, self._own = path, own
        self.lost = False
        self._sure = _uptime()

    def renew(self) -> None:
        """Give a sign of life, unless another host has taken the folder over.

        It sets the time of the file that was read: if another host replaces the lease meanwhile, that of the old one.
        """
        try:
            with self._path.open("rb") as file:
                if _holder(file.read()) == self._own:
                    os.utime(file.fileno() if os.utime in os.supports_fd else self._path)
                else:
                    self.lost = True
        except FileNotFoundError:
            self.lost = True
        except OSError:  # a network that is away for a moment: the next sign may succeed
            return

    def require(self) -> None:
        """Raise :class:`LostLeaseError` if another host has taken the folder over; call it before writing to it."""
        if self.lost or not self.holds():
            raise LostLeaseError(
                f"another host took over {self._path.parent}, since this one gave no sign of life: nothing more is"
                " written here"
            )
        self._sure = _uptime()

    def check(self, *, after: float = TTL_S / 2) -> None:
        """Call :meth:`require` if it was not called for some seconds, as after a pause of the whole process."""
        if self.lost or _uptime() - self._sure > after:
            self.require()

    def holds(self) -> bool:
        """Whether the lease still names this process, by the file server's present contents."""
        with suppress(OSError):  # a full disk: the cache may be old
            _now_of(self._path.parent)
        return holder(self._path.parent) == self._own

    def release(self) -> None:
        """Delete the lease if it is still this process's."""
        if self.holds():
            self._path.unlink(missing_ok=True)


def holder(folder: Path) -> Holder | None:
    """Return the holder of a folder's lease; ``None`` if there is none, or it cannot be read."""
    try:
        return _holder((folder / NAME).read_bytes())
    except OSError:
        return None


def _holder(text: bytes) -> Holder | None:
    try:
        found = json.loads(text)
        return Holder(found["host"], found["pid"], found["token"])
    except (ValueError, TypeError, KeyError):
        return None


def _uptime() -> float:
    """Return seconds of a clock that goes on while the machine sleeps, where there is one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def is_held_elsewhere(folder: Path, *, ttl: float = TTL_S) -> bool:
    """Whether a process of another host holds the lease, or died with it less than ``ttl`` seconds ago."""
    there = holder(folder)
    return there is not None and there.host != socket.gethostname() and _age(folder / NAME) <= ttl


def _age(path: Path) -> float:
    """Return the seconds since a file was written, by the file server's clock; infinite if there is none."""
    try:
        now = _now_of(path.parent)
        with path.open("rb") as file:  # opening asks the server for the time, where looking may use a cached one
            return now - os.fstat(file.fileno()).st_mtime
    except OSError:
        return float("inf")


def _now_of(folder: Path) -> float:
    """Return the file server's time, from a file that is written now."""
    probe = folder / f".now.{secrets.token_hex(4)}{TEMPORARY}"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _create(path: Path, own: Holder) -> bool:
    """Create the lease with its contents in one atomic step: a hard link fails if the name exists."""
    temporary = path.with_name(f".{path.name}.{own.token[:8]}{TEMPORARY}")
    temporary.write_text(json.dumps(asdict(own)), encoding="utf-8")
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _take_over(path: Path, own: Holder, ttl: float) -> None:
    """Replace a lease whose holder is dead; of several hosts that try, one succeeds."""
    there = holder(path.parent)
    if there is not None and there.host != own.host and _age(path) <= ttl:
        raise _busy(path, there)
    # one host at a time claims the place of a given holder, and only while that holder is still named
    claim = path.with_name(f"{path.name}.{there.token if there is not None else 'none'}")
    try:
        claim.touch(exist_ok=False)
    except FileExistsError:
        if _age(claim) > ttl:  # its host died between claiming and writing: the next attempt may succeed
            claim.unlink(missing_ok=True)
        raise _busy(path, holder(path.parent)) from None
    try:
        if holder(path.parent) != there:
            raise _busy(path, holder(path.parent))
        _write(path, own)
    finally:
        claim.unlink(missing_ok=True)


def _busy(path: Path, there: Holder | None) -> BusyError:
    who = "another host" if there is None else f"process {there.pid} on {there.host}"
    return BusyError(f"{who} is running in {path.parent}; {WAIT}")


def _write(path: Path, own: Holder) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(asdict(own)), encoding="utf-8")


def _keep(lease: Lease, done: threading.Event, beat: float) -> None:
    while not done.wait(beat) and not lease.lost:
        lease.renew()
