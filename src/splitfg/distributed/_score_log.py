"""A file of scores, from which a trunk's training can be repeated."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from splitfg.distributed._replicas import digest
from splitfg.errors import SplitError, raise_if
from splitfg.splitting import Split
from splitfg.types import Estimate

_MAGIC: Final = b"splitfg scores 2\n"
_FORMATS: Final = {torch.float32: "f", torch.float64: "d"}


class ScoreLog:
    """A file of scores: a header with the generator's state, then K scores, a norm and a checksum for every step.

    With the initial parameters it is a checkpoint of the trunk: :func:`replay` draws the tangents again and repeats
    every update. A step takes 4 (K + 2) bytes in float32, whatever the trunk's size. The checksum of a step covers the
    file up to it, the generator's state after it, and at every ``check_every``-th step the trunk before it: a replay
    finds a damaged file, and another training than the logged one.

    Pass it as ``log`` to a :class:`~splitfg.GradientLearner`; it appends every step. Among several processes, one
    writes the file. To resume, restore the generator from the checkpoint, create the log, and call :meth:`truncate`
    with the checkpoint's number of steps.

    Args:
        path: The file; created, or continued if it exists.
        split: The network, at the beginning of training if the file is created.
        K: Scores a step.
        generator: The generator of the steps, in the state of the next one; nothing else may draw from it.
        check_every: Steps between two checksums of the trunk, which read all of its parameters.

    Raises:
        SplitError: If the file belongs to another network, K, dtype or kind of device. At the first step, if the
            generator is not in the state after the file's last step, or that step is incomplete.

    Example:
        >>> import copy, tempfile, torch
        >>> from pathlib import Path
        >>> import splitfg
        >>> from splitfg.distributed import ScoreLog, replay
        >>> from splitfg.testing import example_split
        >>> def learner(log=None):
        ...     split, x, y = example_split()
        ...     optimizer = torch.optim.Adam(split.model.parameters())
        ...     return splitfg.GradientLearner(split, splitfg.SplitFG(K=4), optimizer, log=log), x, y
        >>> path = Path(tempfile.mkdtemp()) / "scores"
        >>> generator = torch.Generator().manual_seed(0)
        >>> log = ScoreLog(path, learner()[0].split, K=4, generator=generator)
        >>> trained, x, y = learner(log)
        >>> for _ in range(3):
        ...     stats = trained.step(x, y, generator=generator)
        >>> again, _, _ = learner()
        >>> replay(again, path)
        3
        >>> name = "trunk.layers.0.weight"
        >>> torch.equal(*(dict(one.split.model.named_parameters())[name] for one in (trained, again)))
        True
    """

    def __init__(self, path: Path, split: Split, *, K: int, generator: torch.Generator, check_every: int = 100) -> None:
        self.path, self._split, self._generator = path, split, generator
        dtype = torch.promote_types(next(iter(split.trained_params().values())).dtype, torch.float32)
        own = {"K": K, "dtype": str(dtype), "device": generator.device.type, "parameters": shapes(split)}
        raise_if([] if check_every >= 1 else [f"check_every must be at least 1 step, got {check_every}"])
        if path.exists():
            known = LogFile.read(path).header
            raise_if([f"{path} has another {k}: start a new log" for k, v in own.items() if known.get(k) != v])
        else:
            state = bytes(generator.get_state().tolist()).hex()
            header = own | {"check_every": check_every, "state": state, "start": digests(split)}
            _write_whole(path, _MAGIC + json.dumps(header).encode() + b"\n")
        self._file = LogFile.read(path)
        self._state = generator.get_state()
        self._steps: int | None = None

    def __call__(self, estimate: Estimate) -> None:
        """Append the scores of a step, and the norm by which it was clipped."""
        if self._steps is None:
            self._steps, self._before = self._continued()
        clipped = estimate.stats.norms.get("before_clip", torch.zeros(()))
        values = torch.cat([estimate.stats.scores.double().cpu(), clipped.double().reshape(1).cpu()])
        data = struct.pack(self._file.form, *values.tolist())
        self._before = self._file.checksum(self._before, data, self._generator, self._steps, self._split)
        with self.path.open("ab") as file:
            if file.tell() != self._file.position(self._steps):
                raise SplitError([f"another program writes to {self.path}: let one process keep the log"])
            file.write(data + struct.pack("<I", self._before))
        self._steps += 1

    def truncate(self, steps: int) -> None:
        """Drop everything after the first ``steps`` steps, on resuming from a checkpoint.

        Raises:
            SplitError: If the file has fewer steps.
        """
        size = self._file.position(steps)
        raise_if([] if self.path.stat().st_size >= size else [f"{self.path} has fewer than {steps} steps"])
        with self.path.open("r+b") as file:
            file.truncate(size)
        self._steps, self._state = None, self._generator.get_state()

    def _continued(self) -> tuple[int, int]:
        """Return the number of steps in the file and the checksum of the last one.

        Raises:
            SplitError: If the next step does not follow the last one.
        """
        steps, rest = self._file.steps()
        cure = "restore network and generator from one checkpoint, and call truncate(steps) with its number of steps"
        raise_if([f"the last step in {self.path} is incomplete: {cure}"] if rest else [])
        records = list(self._file.records(first=max(0, steps - 2)))
        checksums = [self._file.begins, *(record.checksum for record in records)]
        state = bytes(self._state.tolist())
        if not records:
            fits = state.hex() == self._file.header["state"]
        else:  # a checksum of the trunk cannot be computed again: the trunk has moved on
            found = zlib.crc32(state, zlib.crc32(records[-1].data, checksums[-2]))
            fits = self._file.checks_trunk(steps - 1) or found == checksums[-1]
        raise_if([] if fits else [f"the generator is not in the state after {steps} steps of {self.path}: {cure}"])
        return steps, checksums[-1]


class Record(NamedTuple):
    """One step of a log: its bytes and its checksum."""

    data: bytes
    checksum: int


class LogFile(NamedTuple):
    """The layout of a log: a line with its kind, a line with the header in JSON, then one record for every step.

    Attributes:
        path: The file.
        header: Settings of the training and its beginning.
        start: Position of the first step.
        begins: Checksum of the header.
    """

    path: Path
    header: dict[str, Any]
    start: int
    begins: int

    @classmethod
    def read(cls, path: Path) -> LogFile:
        """Read the header of a log.

        Raises:
            SplitError: If the file is no log of scores.
        """
        with path.open("rb") as file:
            magic, line = file.readline(), file.readline()
            try:
                header = json.loads(line) if magic == _MAGIC and line.endswith(b"\n") else None
            except ValueError:
                header = None
            if not isinstance(header, dict):
                raise SplitError([f"{path} is no log of scores of this version: start a new log"])
            return cls(path, header, file.tell(), zlib.crc32(line))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the scores."""
        return {str(known): known for known in _FORMATS}[self.header["dtype"]]

    @property
    def form(self) -> str:
        """K scores and a norm, for :mod:`struct`."""
        return f"<{self.header['K'] + 1}{_FORMATS[self.dtype]}"

    def position(self, step: int) -> int:
        """Return where a step begins."""
        return self.start + step * (struct.calcsize(self.form) + 4)

    def steps(self) -> tuple[int, int]:
        """Return the number of whole steps, and the bytes after them."""
        return divmod(self.path.stat().st_size - self.start, self.position(1) - self.start)

    def records(self, first: int = 0) -> Iterator[Record]:
        """Read whole steps, from the first one on."""
        size = struct.calcsize(self.form)
        with self.path.open("rb") as file:
            file.seek(self.position(first))
            while len(data := file.read(size + 4)) == size + 4:
                yield Record(data[:size], struct.unpack("<I", data[size:])[0])

    def values(self, record: Record) -> tuple[Tensor, Tensor]:
        """Return the scores and the norm of a step."""
        found = torch.tensor(struct.unpack(self.form, record.data), dtype=self.dtype, device=self.header["device"])
        return found[:-1], found[-1]

    def checks_trunk(self, step: int) -> bool:
        """Whether the checksum of a step covers the trunk before it."""
        return bool(step % int(self.header["check_every"]) == 0)

    def checksum(self, before: int, data: bytes, generator: torch.Generator, step: int, split: Split) -> int:
        """Return the checksum of a step, from that of the step before it, the generator after it, and the trunk."""
        found = zlib.crc32(data, before)
        found = zlib.crc32(bytes(generator.get_state().tolist()), found)
        return zlib.crc32(json.dumps(digests(split)).encode(), found) if self.checks_trunk(step) else found


def shapes(split: Split) -> dict[str, list[int]]:
    """Return the shapes of all trained parameters."""
    return {name: list(p.shape) for name, p in split.trained_params().items()}


def digests(split: Split) -> dict[str, int]:
    """Return a hash of every parameter of the trunk."""
    return {name: int(digest(p)) for name, p in split.trunk_params().items()}


def _write_whole(path: Path, data: bytes) -> None:
    """Write a file that exists with all of its content or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_bytes(data)
    part.replace(path)
