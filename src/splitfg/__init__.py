"""Train neural networks without a backward pass through their trunk: split forward gradients.

The names of :mod:`splitfg._api` are public here. They are imported with the first one that is used, so that the
command line can list and explain its presets without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from splitfg._api import *  # noqa: F403

try:
    __version__ = version("splitfg")
except PackageNotFoundError:  # run from a source folder that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> object:
    if name == "__all__":  # for ``from splitfg import *``
        return __dir__()
    if name.startswith("_"):
        raise AttributeError(f"module 'splitfg' has no attribute {name!r}")
    api = vars(import_module("splitfg._api"))
    if name not in api:
        raise AttributeError(f"module 'splitfg' has no attribute {name!r}")
    globals()[name] = api[name]
    return api[name]


def __dir__() -> list[str]:
    public = [name for name in vars(import_module("splitfg._api")) if not name.startswith("_")]
    return sorted(["__version__", *public])
