"""Hosts that share runs over a simulated NFS: no run at two places at a time, none lost, whoever dies or sleeps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from _nfs import OS, NfsPath, World, replacing

from splitfg_lab.runs import lease
from splitfg_lab.runs.lease import BEAT_S, NAME, TTL_S, BusyError, Holder, Lease, LostLeaseError

RUNS, PIECES = 200, 4


@dataclass
class Table:
    """What was done to the runs, by whom, as one who sees everything knows it."""

    world: World
    pieces: Counter = field(default_factory=Counter)
    by: Counter = field(default_factory=Counter)
    done: Counter = field(default_factory=Counter)
    lost: int = 0

    def work(self, run, own):
        """Do a piece of a run; only its holder may."""
        there = self.world.files.get(f"/{run}/{NAME}")
        assert there is not None, f"run {run} is worked on without a lease"
        assert lease._holder(there.data) == own, f"two hosts work on run {run}"
        self.pieces[run] += 1
        self.by[own.host] += 1

    def host(self, host):
        """Do all runs that are left and that no other host has, as ``splitfg run --share`` does."""
        left = [f"run{i}" for i in range(RUNS)]
        while left:
            host.world.rng.shuffle(left)
            left = [run for run in left if not self._finished(host, NfsPath(host, f"/{run}"), run)]
            host.sleep(5.0)

    def _finished(self, host, folder, run):
        return (folder / "DONE").exists() or self._take(host, folder, run)

    def _take(self, host, folder, run):
        """Take a run, if it is free, and do it; returns whether it is finished."""
        own = Holder(host.name, host.pid, f"{host.name}-{host.pid}-{host.world.rng.random()}")
        try:
            if not lease._create(folder / NAME, own):
                lease._take_over(folder / NAME, own, TTL_S)
            return self._do(host, folder, run, Lease(folder / NAME, own))
        except BusyError:
            return False
        except LostLeaseError:
            self.lost += 1
            return False

    def _do(self, host, folder, run, held):
        if not (folder / "DONE").exists():
            renewed = host.world.now
            while self.pieces[run] < PIECES:
                host.sleep(host.world.rng.uniform(1, 6))
                if host.world.now - renewed > BEAT_S:
                    held.renew()
                    renewed = host.world.now
                held.require()
                self.work(run, held._own)
            held.require()
            self.done[run] += 1
            host.world.files[f"/{run}/DONE"] = object.__new__(type("Done", (), {"data": b"", "mtime": 0.0}))
        held.release()
        return True


def simulated(monkeypatch, *, seed, hosts=2, stale=30.0, deaths=0.003, pauses=0.03):
    monkeypatch.setattr(lease, "os", OS)
    monkeypatch.setattr(lease, "replacing", replacing)
    table = Table(World(seed, stale=stale, deaths=deaths, pauses=pauses))
    table.world.run(table.host, [f"host{i}" for i in range(hosts)])
    return table


@pytest.mark.parametrize(("seed", "hosts"), [(0, 2), (1, 2), (2, 4)])
def test_every_run_is_done_once_whoever_dies_or_sleeps(monkeypatch, seed, hosts):
    table = simulated(monkeypatch, seed=seed, hosts=hosts)
    assert set(table.done.values()) == {1}
    assert len(table.done) == RUNS
    assert min(table.by.values()) > RUNS * PIECES / hosts / 4  # all hosts worked
    assert table.world.died > 10
    assert table.world.paused > 5
    assert table.lost > 0  # some woke up too late, and noticed


def test_the_simulation_finds_hosts_that_trust_their_cache(monkeypatch):
    monkeypatch.setattr(Lease, "holds", lambda self: lease.holder(self._path.parent) == self._own)
    with pytest.raises(AssertionError, match="work"):
        simulated(monkeypatch, seed=0, stale=10 * TTL_S, deaths=0.0)
