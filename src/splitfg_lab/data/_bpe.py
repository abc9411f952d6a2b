"""GPT-2's byte-pair encoding, built from its two published files without network access."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

import numpy as np
import tiktoken
from numpy.typing import NDArray

from splitfg.errors import DataError

END_OF_TEXT = "<|endoftext|>"
# The word pattern of the GPT-2 release: contractions, then letters, digits or other signs with the space before
# them, then the remaining white space.
_PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def read_encoding(folder: Path) -> tiktoken.Encoding:
    """Build the encoding from ``encoder.json`` and ``vocab.bpe`` in a folder.

    Raises:
        DataError: The two files disagree or cannot be parsed.
    """
    try:
        merges = [line.split() for line in (folder / "vocab.bpe").read_text("utf-8").split("\n")[1:-1]]
        listed = json.loads((folder / "encoder.json").read_bytes())
        ranks = _ranks(merges)
        expected = {_to_bytes(token): number for token, number in listed.items() if token != END_OF_TEXT}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise DataError(f"{folder} does not hold GPT-2's encoder.json and vocab.bpe: {error}") from error
    if ranks != expected:
        raise DataError(f"{folder}: encoder.json and vocab.bpe disagree")
    return tiktoken.Encoding("gpt2", pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: len(ranks)})


def _alphabet() -> list[int]:
    """Return all bytes in GPT-2's order: the printable ones of Latin-1 first."""
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    return printable + [b for b in range(256) if b not in printable]


_PRINTABLE = sum(chr(b).isprintable() and chr(b) != " " for b in range(256))
_BYTE = {chr(b if i < _PRINTABLE else 256 + i - _PRINTABLE): b for i, b in enumerate(_alphabet())}
"""Byte of each letter in the two files, which write unprintable bytes as letters from U+0100 on."""


def _to_bytes(token: str) -> bytes:
    return bytes(_BYTE[letter] for letter in token)


def _ranks(merges: Iterable[list[str]]) -> dict[bytes, int]:
    """Number the tokens in order of creation: single bytes, then merges; the id is the merge's priority."""
    tokens = chain(
        (bytes([b]) for b in _alphabet()), (_to_bytes(first) + _to_bytes(second) for first, second in merges)
    )
    return {token: rank for rank, token in enumerate(tokens)}


def encode_lines(lines: Iterable[bytes], encoding: tiktoken.Encoding) -> Iterator[NDArray[np.uint16]]:
    """Encode lines as in the paper: every non-empty line with its newline, then one ``<|endoftext|>``.

    Lines of white space alone are skipped (WikiText's blank lines are a space and a newline).

    Raises:
        DataError: The text is not UTF-8.
    """
    texts = _non_empty(lines)
    while block := list(islice(texts, 4096)):
        encoded = encoding.encode_ordinary_batch(block)
        yield np.fromiter(chain.from_iterable((*ids, encoding.eot_token) for ids in encoded), dtype=np.uint16)


def _non_empty(lines: Iterable[bytes]) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"line {number:,} is not UTF-8 text: {error}") from error
        if text.strip():
            yield text
