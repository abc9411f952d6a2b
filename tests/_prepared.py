"""A small corpus in a data folder, raw and about to be prepared."""

import numpy as np

from splitfg_lab.data import TextSet, TextSplit, load_tokens

IDS = np.arange(1000, dtype="<u2")
CORPUS = TextSet(
    name="small",
    title="Small",
    raw=("text/small-{split}.u16",),
    vocabulary=1000,
    splits=(TextSplit("train", tokens=("small-train*.u16",), count=1000),),
)


def data_folder(path):
    """A data folder with the corpus's raw file."""
    (path / "data" / "text").mkdir(parents=True)
    (path / "data" / "text" / "small-train.u16").write_bytes(IDS.tobytes())
    return path / "data"


def place(folder):
    """Where the corpus is prepared."""
    return folder / "prepared" / "small" / "train"


def load_sum(folder):
    """The sum of all tokens; found by its name in another process."""
    return int(load_tokens(CORPUS, "train", folder).sum(dtype=np.int64))


def listed(folder):
    """The names in a folder, without lock files, which stay."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")
