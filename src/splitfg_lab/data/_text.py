"""Convert one split of a corpus, from text or token files, to ``tokens.u16``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from splitfg.errors import DataError, shorten
from splitfg_lab.data._catalogue_text import WIKIPEDIA
from splitfg_lab.data._prepared import Built, Meta, Stored, open_array
from splitfg_lab.data._source import Member, members, reading
from splitfg_lab.data._tokens import TOKEN_SUFFIXES, TokenWriter, copy_tokens, in_order
from splitfg_lab.data._writing import HashingWriter, OnProgress
from splitfg_lab.data.specs import TextSet, TextSplit

if TYPE_CHECKING:
    import tiktoken

TOKENS = "tokens.u16"
_LINE_SUFFIXES = (".raw", ".txt")
_SPLIT_WORDS = {"train": "train", "valid": "valid", "validation": "valid", "val": "valid", "test": "test"}


def splits_in(data: TextSet, paths: Sequence[Path]) -> list[TextSplit]:
    """Return the splits that the given files contain.

    Raises:
        DataError: They contain none.
    """
    with members(paths) as found:
        present = [split for split in data.splits if _belonging(data, split, found)]
    if present:
        return present
    patterns = [pattern for split in data.splits for pattern in (*split.lines, *split.tokens)]
    raise DataError(
        f"{shorten(paths)} contains no file of {data.name}",
        hint=f"rename the files: {', '.join(patterns)}; a single file may have any name with the word train, valid or "
        f"test, and an ending among {', '.join((*_LINE_SUFFIXES, *TOKEN_SUFFIXES))}",
    )


def build_split(
    data: TextSet,
    split: TextSplit,
    paths: Sequence[Path],
    folder: Path,
    encoding: Callable[[], tiktoken.Encoding],
    progress: OnProgress,
) -> Built:
    """Write the token stream of one split into an empty folder.

    Raises:
        DataError: The files are missing, damaged, or not this corpus.
    """
    with _naming(data, split), members(paths) as found, HashingWriter(folder / TOKENS) as file:
        parts = _belonging(data, split, found)
        writer = TokenWriter(file, data.vocabulary, split.count)
        for part in parts:
            if part.ends_with(*_LINE_SUFFIXES):
                _copy_lines(part, writer, encoding(), progress)
            else:
                copy_tokens(part, writer, progress)
        writer.finish()
        _validate_digest(data, split, file.sha256)
    stored = Stored("<u2", (writer.count,), file.bytes, file.sha256)
    return Built({TOKENS: stored}, {"tokens": writer.count}, "", sorted({part.path for part in parts}))


def _belonging(data: TextSet, split: TextSplit, found: Sequence[Member]) -> list[Member]:
    """Return the files of a split: one text file, or token shards in order."""
    if len(found) == 1:
        return [found[0]] if _split_of_one(data, found[0]) == split.name else []
    lines = [m for m in found if _is_named(m, split.lines)]
    shards = [m for m in found if _is_named(m, split.tokens)]
    if len(lines) > 1:
        raise DataError(f"more than one file for {data.name} {split.name}: {shorten([m.path for m in lines])}")
    return lines or (in_order(shards) if shards else [])


def _is_named(member: Member, patterns: Sequence[str]) -> bool:
    return any(fnmatch(member.name.lower(), pattern.lower()) for pattern in patterns)


def _split_of_one(data: TextSet, member: Member) -> str | None:
    """Return the split that a single file belongs to, judged by its name."""
    if not member.ends_with(*_LINE_SUFFIXES, *TOKEN_SUFFIXES):
        return None
    words = {_SPLIT_WORDS[word] for word in re.findall(r"[a-z]+", member.name.lower()) if word in _SPLIT_WORDS}
    if not words and len(data.splits) == 1:
        return data.splits[0].name
    return words.pop() if len(words) == 1 else None


def _copy_lines(member: Member, writer: TokenWriter, encoding: tiktoken.Encoding, progress: OnProgress) -> None:
    from splitfg_lab.data._bpe import encode_lines

    done = 0

    def lines() -> Iterator[bytes]:
        nonlocal done
        for line in stream:
            done += len(line)
            yield line

    with reading(member.path), member.open() as stream:
        for ids in encode_lines(lines(), encoding):
            writer.write(ids)
            progress(member.name, done, member.size)


@contextmanager
def _naming(data: TextSet, split: TextSplit) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise DataError(f"{data.name} {split.name} cannot be prepared", error.problems, error.hint) from error


def _validate_digest(data: TextSet, split: TextSplit, sha256: str) -> None:
    """Raise an error for other tokens; the stand-in has as many tokens as WikiText-103's training split."""
    if split.sha256 is not None and sha256 != split.sha256:
        raise DataError(f"these are other tokens: their sha256 is {sha256}; expected {split.sha256}")
    if data.name != WIKIPEDIA.name and sha256 in [known.sha256 for known in WIKIPEDIA.splits]:
        raise DataError(
            f"these are the tokens of {WIKIPEDIA.title}", hint=f"prepare them as {WIKIPEDIA.name}, not {data.name}"
        )


def recount_text(data: TextSet, folder: Path, meta: Meta) -> list[str]:
    """Count the tokens of a prepared split again, and return every difference from the catalogue."""
    tokens = open_array(folder, meta, TOKENS)
    split = data.split(meta.split)
    problems = []
    if split is None:
        return [f"{data.name} has no split {meta.split!r}"]
    if split.count is not None and len(tokens) != split.count:
        problems.append(f"{split.name} has {len(tokens):,} tokens; expected {split.count:,}")
    if int(tokens.max(initial=0)) >= data.vocabulary:
        problems.append(f"{split.name} has the token id {tokens.max()}; the vocabulary has {data.vocabulary:,}")
    return problems
