"""Leases: of several hosts one holds a folder, and a host that dies gives it back."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from splitfg_lab.runs import RunFolder
from splitfg_lab.runs.lease import (
    NAME,
    BusyError,
    Holder,
    Lease,
    LostLeaseError,
    _create,
    _take_over,
    holder,
    is_held_elsewhere,
    leased,
)

OTHER = Holder("another-host", 1, "token")


def other_host(folder, *, seconds_ago=0.0):
    """Leave the lease of another host, whose last sign of life was some time ago."""
    assert _create(folder / NAME, OTHER)
    then = time.time() - seconds_ago
    os.utime(folder / NAME, (then, then))


def test_a_lease_names_its_holder_and_is_gone_afterwards(tmp_path):
    with leased(tmp_path) as lease:
        assert holder(tmp_path).host == socket.gethostname()
        assert lease.holds()
        assert not is_held_elsewhere(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_living_holder_on_another_host_keeps_the_folder(tmp_path):
    other_host(tmp_path, seconds_ago=5)
    assert is_held_elsewhere(tmp_path)
    with pytest.raises(BusyError, match="process 1 on another-host"), leased(tmp_path):
        pass
    assert holder(tmp_path) == OTHER
    with pytest.raises(BusyError, match="another host"):
        RunFolder(tmp_path).require_free()


def test_a_dead_holder_gives_the_folder_back_and_may_not_write_any_more(tmp_path):
    other_host(tmp_path, seconds_ago=61)
    paused = Lease(tmp_path / NAME, OTHER)
    paused.require()
    assert not is_held_elsewhere(tmp_path)
    with leased(tmp_path) as lease:
        lease.require()
        with pytest.raises(LostLeaseError, match="took over"):
            paused.require()
        paused.renew()
        assert paused.lost
        assert lease.holds()
        paused.release()
        assert lease.holds()


def test_signs_of_life_renew_the_lease(tmp_path):
    with leased(tmp_path, beat=0.01):
        os.utime(tmp_path / NAME, (0, 0))
        until = time.monotonic() + 5
        while (tmp_path / NAME).stat().st_mtime == 0 and time.monotonic() < until:
            time.sleep(0.01)
        assert (tmp_path / NAME).stat().st_mtime > time.time() - 60


def test_a_sign_of_life_does_not_bring_a_lease_back(tmp_path):
    with leased(tmp_path, beat=1000) as lease:
        (tmp_path / NAME).unlink()
        lease.renew()
        assert lease.lost
        assert not (tmp_path / NAME).exists()


def test_a_process_that_slept_asks_before_it_writes(tmp_path):
    with leased(tmp_path, beat=1000) as lease:
        lease.check()  # was sure a moment ago
        (tmp_path / NAME).unlink()
        lease.check()
        with pytest.raises(LostLeaseError):
            lease.check(after=0.0)


def test_of_many_hosts_one_takes_a_dead_lease_over(tmp_path):
    for attempt in range(20):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        other_host(folder, seconds_ago=1000)
        won, together = [], threading.Barrier(8)

        def contend(number, folder=folder, won=won, together=together):
            own = Holder(f"host-{number}", number, f"token-{number}")
            together.wait()
            try:
                _take_over(folder / NAME, own, ttl=60.0)
            except BusyError:
                return
            won.append(own)

        threads = [threading.Thread(target=contend, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert won == [holder(folder)]
        assert [path.name for path in folder.iterdir()] == [NAME]


def test_of_many_processes_one_creates_a_lease(tmp_path):
    made = [_create(tmp_path / NAME, Holder("host", n, f"{n:08x}")) for n in range(4)]
    assert made == [True, False, False, False]
