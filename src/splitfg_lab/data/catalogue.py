"""All data sets of the paper: source, licence, expected contents and published checksums.

A checksum is listed only if its publisher or a maintained library states it; ``verified`` lists the counts that
replace a missing one.
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
    """Return the names of all data sets."""
    return tuple(entry.name for entry in CATALOGUE)


def find_dataset(data: str | DataSet) -> DataSet:
    """Return the data set of that name; return your own data set unchanged.

    Raises:
        DataError: The name is unknown. Suggests close names.
    """
    if isinstance(data, DataSet):
        return data
    for entry in CATALOGUE:
        if entry.name == data:
            return entry
    close = difflib.get_close_matches(data, names(), n=2)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise DataError(f"there is no data set {data!r}; {hint}known: {', '.join(names())}")
