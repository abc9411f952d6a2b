"""What a data set is, as data: where it comes from, what it must contain, and how files are recognised.

Nothing here imports more than the standard library, so that listing starts at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Task: TypeAlias = Literal["binary", "multiclass", "regression"]


@dataclass(frozen=True)
class Download:
    """One file of a public source.

    Attributes:
        path: Where the file lies below the data folder, fetched or put there by hand.
        urls: Public addresses, tried in this order.
        digest: ``sha256:...`` or ``md5:...`` as its publisher or a well-kept library pins it; ``None`` where no
            checksum is published, in which case the contents are counted instead.
    """

    path: str
    urls: tuple[str, ...]
    digest: str | None = None


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """What every data set has.

    Attributes:
        name: The name used everywhere: commands, configs, run folders.
        title: One line for people.
        origin: Who made it.
        licence: What may be done with it.
        verified: What is checked, and what cannot be.
        downloads: Public files; empty where there is none to fetch without an account.
        raw: Patterns of file names below the data folder that are recognised as this set, best first.
        by_hand: How to get it where it cannot be fetched.
    """

    name: str
    title: str
    origin: str
    licence: str
    verified: str
    downloads: tuple[Download, ...] = ()
    raw: tuple[str, ...] = ()
    by_hand: str = ""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"{self.name!r} names a folder: use letters, digits and underscores")


@dataclass(frozen=True, kw_only=True)
class TableSet(DataSet):
    """A table with one target column. Names of columns are compared without case and punctuation.

    Attributes:
        targets: Names the target column goes by, depending on the source.
        drop: Columns that are no features (identifiers, split marks); dropped where present.
        categorical: Columns that hold categories; every other column must be numeric.
        rows: Rows of the complete set; fewer are accepted and noted as a subset.
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
    """A known content of a file: its digest, and what to note where that content is used."""

    digest: str
    note: str = ""


@dataclass(frozen=True)
class ImageFile:
    """One official batch of images; an empty ``known`` accepts any content of the right shape."""

    name: str
    split: Literal["train", "test"]
    rows: int
    known: tuple[Known, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ImageSet(DataSet):
    """Small colour images in CIFAR's layouts.

    Attributes:
        classes: Number of (fine) classes.
        label_bytes: Label bytes before the pixels of a binary record; the last one is the label used.
        label_key: Key of the label list in a python batch.
        binary: Files of the binary layout, in order.
        python: Files of the python layout, in order.
    """

    classes: int
    label_bytes: int
    label_key: str
    binary: tuple[ImageFile, ...]
    python: tuple[ImageFile, ...]


@dataclass(frozen=True)
class TextSplit:
    """One split of a corpus.

    Attributes:
        name: ``train``, ``valid`` or ``test``.
        lines: Patterns of raw-lines files (one line of text per line).
        tokens: Patterns of token files (little-endian uint16), plain or xz, possibly in numbered shards.
        count: Tokens, separators included; ``None`` where any number will do.
        sha256: Of the token stream as little-endian uint16, where known.
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
        """The split of that name, if there is one."""
        return next((split for split in self.splits if split.name == name), None)


@dataclass(frozen=True, kw_only=True)
class FileSet(DataSet):
    """Files kept byte for byte: name and digest of each."""

    files: tuple[tuple[str, str], ...]
