"""Rows to tune a network on: tables, arrays, folders of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from splitfg.errors import DataError, shorten

Shape = tuple[int | None, ...]

_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")


@dataclass(frozen=True)
class Reading:
    """Options for reading files as numbers.

    Attributes:
        target: Column of a table, or name of an array.
        size: Height and width of images, if the network leaves them free.
        mean: Subtracted from pixels in [0, 1], one number or one per channel.
        std: Pixels are divided by it.
    """

    target: str = ""
    size: tuple[int, int] | None = None
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class Examples:
    """Inputs by name and one target per row."""

    x: Mapping[str, NDArray[Any]]
    y: NDArray[Any]

    def part(self, rows: NDArray[Any]) -> Examples:
        """Return some of the rows."""
        return Examples({name: array[rows] for name, array in self.x.items()}, self.y[rows])


def read_examples(path: Path, inputs: Mapping[str, Shape], how: Reading) -> Examples:
    """Read a data set for a network with these inputs.

    Args:
        path: A ``.parquet`` or ``.csv`` table, an ``.npz`` file, or a folder with a subfolder of images per class.
        inputs: Shapes of the network's inputs by name.
        how: How files become numbers.

    Raises:
        DataError: If the data cannot be read or does not fit.
    """
    if path.is_dir():
        return _images(path, inputs, how)
    if not path.is_file():
        raise DataError(f"{path} does not exist: give a table, an .npz file or a folder of images")
    if path.suffix == ".npz":
        return _arrays(path, inputs, how)
    if path.suffix in (".parquet", ".csv"):
        return _table(path, inputs, how)
    raise DataError(f"{path}: unknown kind of file; expected .parquet, .csv, .npz or a folder of images")


def _table(path: Path, inputs: Mapping[str, Shape], how: Reading) -> Examples:
    import pandas as pd

    try:
        table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except UnicodeDecodeError as error:
        raise DataError(f"cannot read {path}: {error}; save it as UTF-8") from error
    except (ValueError, OSError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if not how.target or how.target not in table:
        what = f"{path} has no column {how.target!r}" if how.target else f"{path}: no target column given"
        raise DataError(f"{what}: choose one of {shorten(list(table.columns), 12)} with --target")
    if table.empty:
        raise DataError(f"{path} has no rows")
    y = table.pop(how.target)
    problems = [f"column {how.target} has missing values: drop those rows"] if y.isna().any() else []
    text = [str(c) for c in table.columns if not pd.api.types.is_numeric_dtype(table[c])]
    problems += [f"columns {shorten(text)} hold no numbers: encode them as the network expects"] if text else []
    shape = _only(inputs)
    width = shape[-1] if shape else None
    if len(shape) > 2:
        rows = ", ".join("any" if d is None else str(d) for d in shape[1:])
        problems.append(f"the network reads rows of shape ({rows}): give an .npz file or a folder of images")
    elif width is not None and table.shape[1] != width:
        problems.append(f"the table has {table.shape[1]} columns besides the target, the network reads {width}")
    if problems:
        raise DataError(f"{path} does not fit the network", problems)
    return Examples({next(iter(inputs)): table.to_numpy(dtype=np.float32)}, y.to_numpy())


def _only(inputs: Mapping[str, Shape]) -> Shape:
    if len(inputs) != 1:
        raise DataError(f"the network has {len(inputs)} inputs: give an .npz file with {', '.join(inputs)}")
    return next(iter(inputs.values()))


def _arrays(path: Path, inputs: Mapping[str, Shape], how: Reading) -> Examples:
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as found:
            arrays = {name: found[name] for name in found.files}
    except (ValueError, OSError, KeyError, BadZipFile, EOFError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if how.target not in arrays:
        raise DataError(f"{path} has no array {how.target!r}: choose one of {', '.join(arrays)} with --target")
    y = arrays.pop(how.target)
    counts = {name: len(a) if a.ndim else 0 for name, a in {how.target: y, **arrays}.items()}
    if len(inputs) == 1 == len(arrays) and len(set(counts.values())) > 1:
        raise DataError(f"{path}: arrays have different numbers of rows", [f"{n}: {c}" for n, c in counts.items()])
    if len(inputs) == 1 and len(arrays) == 1:
        return Examples({next(iter(inputs)): next(iter(arrays.values()))}, y)
    missing = [name for name in inputs if name not in arrays]
    if missing:
        raise DataError(f"{path} lacks the inputs {', '.join(missing)}: it has {', '.join(arrays)}")
    return Examples({name: arrays[name] for name in inputs}, y)


def _images(folder: Path, inputs: Mapping[str, Shape], how: Reading) -> Examples:
    shape = _only(inputs)
    if len(shape) != 4:
        raise DataError(f"the network reads rows of shape {shape[1:]}, not images of (channels, height, width)")
    channels = shape[1] if shape[1] in (1, 3) else None
    if channels is None:
        raise DataError(f"the network reads images with {shape[1]} channels: expected 1 or 3")
    size = how.size or (shape[2], shape[3])
    if None in size:
        raise DataError("the network leaves the size of images free: give --size HEIGHTxWIDTH")
    found = _labelled(folder)
    mean, std = (np.asarray(v, np.float32).reshape(-1, 1, 1) for v in (how.mean, how.std))
    pixels = [_pixels(path, channels, size) for path, _ in found]
    x = (np.stack(pixels) - mean) / std
    return Examples({next(iter(inputs)): x.astype(np.float32)}, np.array([label for _, label in found]))


def _labelled(folder: Path) -> list[tuple[Path, str]]:
    found = [
        (path, label.name)
        for label in sorted(folder.iterdir())
        if label.is_dir()
        for path in sorted(label.iterdir())
        if path.suffix.lower() in _IMAGES
    ]
    if len({label for _, label in found}) < 2:
        raise DataError(f"{folder} must have a subfolder of images for every class, at least two")
    return found


def _pixels(path: Path, channels: int, size: Sequence[Any]) -> NDArray[np.float32]:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            plain = image.convert("L" if channels == 1 else "RGB").resize((size[1], size[0]))
            array = np.asarray(plain, np.float32) / np.float32(255)
    except (OSError, UnidentifiedImageError) as error:
        raise DataError(f"{path} is not a readable image: {error}") from error
    return array[None] if channels == 1 else array.transpose(2, 0, 1)
