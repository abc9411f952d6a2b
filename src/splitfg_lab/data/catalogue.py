"""Every data set of the paper: source, licence, what it must contain, and the checksums that are public.

A checksum is recorded only where its publisher or a well-kept library pins it; ``verified`` says what is counted
instead where none is public.
"""

from __future__ import annotations

import difflib

from splitfg.errors import DataError
from splitfg_lab.data._catalogue_images import CIFAR10, CIFAR100
from splitfg_lab.data._catalogue_tables import TABLES
from splitfg_lab.data._catalogue_text import GPT2_BPE, WIKIPEDIA, WIKITEXT103
from splitfg_lab.data.specs import DataSet

CATALOGUE: tuple[DataSet, ...] = (*TABLES, CIFAR10, CIFAR100, WIKITEXT103, WIKIPEDIA, GPT2_BPE)


def names() -> tuple[str, ...]:
    """The names of all data sets."""
    return tuple(entry.name for entry in CATALOGUE)


def find_dataset(data: str | DataSet) -> DataSet:
    """The data set of that name; a data set of your own passes through.

    Raises:
        DataError: The name is unknown; close names are suggested.
    """
    if isinstance(data, DataSet):
        return data
    for entry in CATALOGUE:
        if entry.name == data:
            return entry
    close = difflib.get_close_matches(data, names(), n=2)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise DataError(f"there is no data set {data!r}; {hint}known: {', '.join(names())}")
