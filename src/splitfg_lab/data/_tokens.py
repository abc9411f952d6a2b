"""Read token files: little-endian uint16, plain or xz, in numbered shards."""

from __future__ import annotations

import lzma
import re
from collections.abc import Iterator, Sequence
from typing import IO

import numpy as np
from numpy.typing import NDArray

from splitfg.errors import DataError
from splitfg_lab.data._source import Member, reading
from splitfg_lab.data._writing import CHUNK, HashingWriter, OnProgress

_BLOCK = 8 * CHUNK
TOKEN_SUFFIXES = (".u16", ".bin", ".u16.xz", ".bin.xz")
_FOREIGN = {
    b"\x93NUMPY": "a .npy file",
    b"PK\x03\x04": "a zip archive (a torch or npz file?)",
    b"\xfd7zXZ": "xz data without the ending .xz",
    b"\x1f\x8b\x08": "gzip data",
}


def in_order(shards: Sequence[Member]) -> list[Member]:
    """Sort shards by number; a single file needs no number.

    Raises:
        DataError: Numbers are missing or repeated.
    """
    if len(shards) == 1:
        return list(shards)
    numbered = [(_number(shard.name), shard) for shard in shards]
    found = sorted(number for number, _ in numbered if number is not None)
    if len(found) != len(shards) or found != list(range(found[0], found[0] + len(found))) or found[0] > 1:
        names = ", ".join(sorted(shard.name for shard in shards))
        raise DataError(f"shards must be numbered without gaps or repeats, from 0 or 1: {names}")
    return [shard for _, shard in sorted(numbered, key=lambda pair: pair[0] or 0)]


def _number(name: str) -> int | None:
    stem = name.lower().removesuffix(".xz").rsplit(".", 1)[0]
    match = re.search(r"(\d+)$", stem)
    return int(match[1]) if match else None


class TokenWriter:
    """Appends token ids to a file as little-endian uint16, and validates them."""

    def __init__(self, file: HashingWriter, vocabulary: int, expected: int | None) -> None:
        self._file = file
        self._vocabulary = vocabulary
        self._expected = expected
        self._odd_are_zero = True
        self.count = 0

    def write(self, ids: NDArray[np.uint16]) -> None:
        """Append ids.

        Raises:
            DataError: An id is outside the vocabulary, or there are more ids than expected.
        """
        if ids.size and int(ids.max()) >= self._vocabulary:
            raise DataError(
                f"token id {ids.max()} at position {self.count + int(ids.argmax()):,} is outside the vocabulary of "
                f"{self._vocabulary:,}",
                hint="use little-endian uint16 ids of GPT-2's tokenizer",
            )
        self._odd_are_zero = self._odd_are_zero and not ids[(self.count + 1) % 2 :: 2].any()
        self.count += ids.size
        if self._expected is not None and self.count > self._expected:
            raise DataError(f"more than the expected {self._expected:,} tokens", hint=self._width_hint())
        self._file.write(ids.astype("<u2").tobytes())

    def finish(self) -> None:
        """Validate the number of tokens.

        Raises:
            DataError: There are too few tokens, or they are wider than 16 bits.
        """
        if self.count == 0:
            raise DataError("the files contain no tokens")
        if self._expected is not None and self.count != self._expected:
            raise DataError(f"{self.count:,} tokens; expected {self._expected:,}", hint=self._width_hint())
        if self.count > 1 and self._odd_are_zero:
            raise DataError("every second token id is 0", hint=self._width_hint())

    def _width_hint(self) -> str:
        return "the ids look like 32-bit or 64-bit integers; save them as uint16" if self._odd_are_zero else ""


def copy_tokens(shard: Member, into: TokenWriter, progress: OnProgress) -> None:
    """Append one shard.

    Raises:
        DataError: The shard is truncated or is not a token file.
    """
    compressed = shard.ends_with(".xz")
    done = 0
    with reading(shard.path), shard.open() as raw, lzma.open(raw) if compressed else raw as stream:
        for ids in _ids(shard.name, stream):
            into.write(ids)
            done += ids.nbytes
            progress(shard.name, done, None if compressed else shard.size)


def _ids(name: str, stream: IO[bytes]) -> Iterator[NDArray[np.uint16]]:
    block = stream.read(_BLOCK)
    for magic, what in _FOREIGN.items():
        if block.startswith(magic):
            raise DataError(f"{name} is {what}, not plain uint16 token ids")
    while block:
        whole = len(block) // 2 * 2
        yield np.frombuffer(block[:whole], dtype="<u2").astype(np.uint16, copy=False)
        more = stream.read(_BLOCK)
        if len(block) % 2 and not more:
            raise DataError(f"{name} has an odd number of bytes: it is truncated, or not uint16")
        block = block[whole:] + more
