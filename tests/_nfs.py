"""A file server and hosts that cache its folders, in virtual time: what NFS promises, and no more.

Creating, linking, renaming and deleting are atomic at the server, and times of files are the server's. A host may use
what it has read of a folder for some seconds, whatever other hosts do to it, unless it changes the folder itself. There
are no file locks. Hosts die and pause between any two operations.
"""

from __future__ import annotations

import errno
import random
import threading
from contextlib import contextmanager
from types import SimpleNamespace


class Death(BaseException):
    """Ends a process in the middle of what it does."""


class File:
    """An inode."""

    def __init__(self, data, now):
        self.data, self.mtime, self.links = data, now, 1


class World:
    """The server, its clock, and the hosts, of which one runs at a time."""

    def __init__(self, seed, *, stale, deaths, pauses):
        self.rng, self.now, self.files = random.Random(seed), 0.0, {}
        self.stale, self.deaths, self.pauses = stale, deaths, pauses
        self.hosts, self.turn = [], threading.Semaphore(0)
        self.errors, self.died, self.paused = [], 0, 0

    def run(self, program, names):
        """Run a program on every host until all have ended."""
        self.hosts = [Host(self, name, program) for name in names]
        while running := [host for host in self.hosts if host.thread.is_alive() and not host.ended]:
            host = min(running, key=lambda h: h.wakes)
            self.now = max(self.now, host.wakes)
            host.go.release()
            self.turn.acquire()
        for host in self.hosts:
            host.thread.join()
        if self.errors:
            raise self.errors[0]


class Host:
    """A host with a cache, whose process starts anew after every death."""

    def __init__(self, world, name, program):
        self.world, self.name, self.pid, self.cache = world, name, 1, {}
        self.wakes, self.ended, self.go = 0.0, False, threading.Semaphore(0)
        self.thread = threading.Thread(target=self._live, args=(program,), daemon=True)
        self.thread.start()

    def sleep(self, seconds):
        """Let other hosts run for so long."""
        self.wakes = self.world.now + seconds
        self.world.turn.release()
        self.go.acquire()

    def operate(self, pid):
        """Take the time of one operation, in which the process may pause or die."""
        world = self.world
        if pid != self.pid:
            raise Death  # of a process that is dead: its clean-up does not happen
        chance = world.rng.random()
        if chance < world.deaths:
            world.died += 1
            self.pid += 1
            raise Death
        pauses = chance < world.deaths + world.pauses
        world.paused += pauses
        self.sleep(world.rng.uniform(40, 200) if pauses else world.rng.uniform(0.001, 0.02))

    def file(self, path):
        """Look a name up, perhaps in the cache."""
        known = self.cache.get(path)
        if known is None or self.world.now - known[0] > self.world.stale:
            there = self.world.files.get(path)
            snapshot = None if there is None else (there, there.data, there.mtime)
            known = self.cache[path] = (self.world.now, snapshot)
        return known[1]

    def changed(self, path):
        """Forget what is known of the folder of a path."""
        folder = path.rpartition("/")[0]
        self.cache = {name: known for name, known in self.cache.items() if name.rpartition("/")[0] != folder}

    def _live(self, program):
        self.go.acquire()
        try:
            while True:
                try:
                    program(self)
                    break
                except Death:
                    self.cache = {}
                    self.sleep(self.world.rng.uniform(0, 100))
        except BaseException as error:
            self.world.errors.append(error)
        self.ended = True
        self.world.turn.release()


class NfsPath:
    """The operations of :class:`pathlib.Path` that leases use."""

    def __init__(self, host, text):
        self.host, self.text, self.pid = host, text, host.pid

    def __str__(self):
        return self.text

    def __truediv__(self, name):
        return NfsPath(self.host, f"{self.text}/{name}")

    @property
    def name(self):
        return self.text.rpartition("/")[2]

    @property
    def parent(self):
        return NfsPath(self.host, self.text.rpartition("/")[0])

    def with_name(self, name):
        return self.parent / name

    @contextmanager
    def open(self, mode="rb"):
        self.host.operate(self.pid)
        found = self.host.file(self.text)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", self.text)
        handle = SimpleNamespace(file=found[0], mtime=found[2], path=self, read=lambda: found[1])
        handle.fileno = lambda: handle
        yield handle

    def read_bytes(self):
        with self.open() as handle:
            return handle.read()

    def exists(self):
        self.host.operate(self.pid)
        return self.host.file(self.text) is not None

    def stat(self):
        with self.open() as handle:
            return SimpleNamespace(st_mtime=handle.mtime)

    def write_text(self, text, encoding=None):
        self._change(lambda files: files.__setitem__(self.text, File(text.encode(), self.host.world.now)))

    def touch(self, exist_ok=True):
        def create(files):
            if self.text in files and not exist_ok:
                raise FileExistsError(errno.EEXIST, "exists", self.text)
            files.setdefault(self.text, File(b"", self.host.world.now)).mtime = self.host.world.now

        self._change(create)

    def unlink(self, missing_ok=False):
        def delete(files):
            there = files.pop(self.text, None)
            if there is None and not missing_ok:
                raise FileNotFoundError(errno.ENOENT, "no such file", self.text)
            if there is not None:
                there.links -= 1

        self._change(delete)

    def link_to(self, other):
        def link(files):
            if other.text in files:
                raise FileExistsError(errno.EEXIST, "exists", other.text)
            files[other.text] = files[self.text]
            files[self.text].links += 1

        self._change(link)

    def replace(self, other):
        def rename(files):
            if other.text in files:
                files[other.text].links -= 1
            files[other.text] = files.pop(self.text)

        self._change(rename)

    def _change(self, operation):
        self.host.operate(self.pid)
        try:
            operation(self.host.world.files)
        finally:
            self.host.changed(self.text)


@contextmanager
def replacing(path):
    """Write a file beside another one, and rename it."""
    temporary = path.with_name(f".{path.name}.new.{path.host.name}.{path.pid}")
    yield temporary
    temporary.replace(path)


def utime(handle):
    """Set the time of an open file at the server."""
    handle.path.host.operate(handle.path.pid)
    if not handle.file.links:
        raise OSError(errno.ESTALE, "stale file handle")
    handle.file.mtime = handle.path.host.world.now
    handle.path.host.changed(handle.path.text)


OS = SimpleNamespace(
    link=lambda first, second: first.link_to(second),
    fstat=lambda handle: SimpleNamespace(st_mtime=handle.mtime),
    utime=utime,
    supports_fd={utime},
)
