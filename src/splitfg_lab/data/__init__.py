"""Find, fetch, prepare, verify and load data.

The data folder is ``SPLITFG_DATA``, else ``data`` in the user's cache folder. It contains:

- raw files, fetched or copied by hand: ``tabular/NAME.parquet`` (or csv), ``images/`` with CIFAR's official binary
  archives, ``text/`` with WikiText's raw lines, token shards and ``gpt2_bpe/``. ``DataSet.raw`` lists the file names
  of every data set;
- ``prepared/NAME/`` with plain arrays and ``meta.json``. :func:`prepare` or the first call of a loader writes it, and
  loaders write it again if a raw file changed. If the data folder is read-only, prepared data goes to the cache folder.

Importing this package imports neither torch nor numpy nor pandas: names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitfg_lab.data._digest import data_digest
    from splitfg_lab.data._fetch import fetch
    from splitfg_lab.data._folder import cache_folder, data_folder
    from splitfg_lab.data._load import Images, Table, load_images, load_table, load_tokens
    from splitfg_lab.data._prepare import load_encoding, prepare
    from splitfg_lab.data._verify import Status, status, verify
    from splitfg_lab.data._writing import OnProgress
    from splitfg_lab.data.catalogue import CATALOGUE, find_dataset, names
    from splitfg_lab.data.errors import PreparedAgainWarning
    from splitfg_lab.data.specs import DataSet, FileSet, ImageSet, TableSet, TextSet, TextSplit
    from splitfg_lab.data.windows import Windows

_HOMES = {
    "_digest": ("data_digest",),
    "_fetch": ("fetch",),
    "_writing": ("OnProgress",),
    "_folder": ("cache_folder", "data_folder"),
    "_load": ("Images", "Table", "load_images", "load_table", "load_tokens"),
    "_prepare": ("load_encoding", "prepare"),
    "_verify": ("Status", "status", "verify"),
    "catalogue": ("CATALOGUE", "find_dataset", "names"),
    "errors": ("PreparedAgainWarning",),
    "specs": ("DataSet", "FileSet", "ImageSet", "TableSet", "TextSet", "TextSplit"),
    "windows": ("Windows",),
}
_HOME_OF = {name: home for home, held in _HOMES.items() for name in held}

__all__ = [
    "CATALOGUE",
    "DataSet",
    "FileSet",
    "ImageSet",
    "Images",
    "OnProgress",
    "PreparedAgainWarning",
    "Status",
    "Table",
    "TableSet",
    "TextSet",
    "TextSplit",
    "Windows",
    "cache_folder",
    "data_digest",
    "data_folder",
    "fetch",
    "find_dataset",
    "load_encoding",
    "load_images",
    "load_table",
    "load_tokens",
    "names",
    "prepare",
    "status",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
