"""Descriptions of data sets: sources, expected contents, and the file names that loaders recognise.

This module imports the standard library alone, so that listing data sets is fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Task: TypeAlias = Literal["binary", "multiclass", "regression"]


@dataclass(frozen=True)
class Download:
    """One file of a public source.

    Attributes:
        path: Path of the file below the data folder, downloaded or copied by hand.
        urls: Public addresses, tried in this order.
        digest: ``sha256:...`` or ``md5:...`` as published by its author or a maintained library; ``None`` if no
            checksum is published, in which case the contents are counted instead.
    """

    path: str
    urls: tuple[str, ...]
    digest: str | None = None


@dataclass(frozen=True)
class Unsupported:
    """Files of a data set in a format that splitfg does not read.

    Attributes:
        patterns: Patterns of their names below the data folder.
        reason: The format, and the file to use instead, for error messages.
    """

    patterns: tuple[str, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """Attributes of every data set.

    Attributes:
        name: Name in commands, configs and run folders.
        title: One line for listings.
        origin: Authors or publisher.
        licence: Licence or terms of use.
        verified: Which checks the contents pass, and which are impossible.
        downloads: Public files; empty if downloading needs an account.
        raw: Patterns of file names below the data folder that hold this data set, best first.
        unsupported: Files of this data set in another format, so that errors can name the right one.
        by_hand: How to get the data set if it cannot be downloaded.
    """

    name: str
    title: str
    origin: str = ""
    licence: str = ""
    verified: str = ""
    downloads: tuple[Download, ...] = ()
    raw: tuple[str, ...] = ()
    unsupported: Unsupported | None = None
    by_hand: str = ""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"name {self.name!r} must be a valid folder name: use letters, digits and underscores")


@dataclass(frozen=True, kw_only=True)
class TableSet(DataSet):
    """A table with one target column. Column names match regardless of case and punctuation.

    Attributes:
        task: Kind of prediction.
        targets: Possible names of the target column; they differ between sources.
        drop: Columns that are not features (identifiers, split marks); dropped if present.
        categorical: Columns with categories; all other columns must be numeric.
        rows: Rows of the complete set; a table with fewer rows is noted as a subset.
        features: Number of features after ``drop``.
        classes: Number of target classes; ``None`` for regression.
        openml: Data id at openml.org.
    """

    task: Task
    targets: tuple[str, ...]
    drop: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    rows: int | None = None
    features: int | None = None
    classes: int | None = None
    openml: int | None = None


@dataclass(frozen=True)
class Known:
    """A known content of a file: its digest, and a note for results obtained with it."""

    digest: str
    note: str = ""


@dataclass(frozen=True)
class ImageFile:
    """One official batch of images; an empty ``known`` accepts any content of the right size."""

    name: str
    split: Literal["train", "test"]
    rows: int
    known: tuple[Known, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ImageSet(DataSet):
    """Colour images of 32 x 32 pixels in CIFAR's binary layout.

    Attributes:
        classes: Number of (fine) classes.
        label_bytes: Label bytes before the pixels of a record; the last one is the label.
        files: The files, in order.
    """

    classes: int
    label_bytes: int
    files: tuple[ImageFile, ...]


@dataclass(frozen=True)
class TextSplit:
    """One split of a corpus.

    Attributes:
        name: ``train``, ``valid`` or ``test``.
        lines: Patterns of text files.
        tokens: Patterns of token files (little-endian uint16), plain or xz, possibly in numbered shards.
        count: Tokens, separators included; ``None`` accepts any number.
        sha256: Digest of the token stream as little-endian uint16, if known.
    """

    name: str
    lines: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    count: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class TextSet(DataSet):
    """A corpus as a stream of token ids below ``vocabulary``."""

    vocabulary: int
    splits: tuple[TextSplit, ...]

    def split(self, name: str) -> TextSplit | None:
        """Return the split of that name, or ``None``."""
        return next((split for split in self.splits if split.name == name), None)


@dataclass(frozen=True, kw_only=True)
class FileSet(DataSet):
    """Files copied unchanged.

    Attributes:
        files: Name and digest of each file.
    """

    files: tuple[tuple[str, str], ...]
