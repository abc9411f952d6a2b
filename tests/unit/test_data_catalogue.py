"""The catalogue against the paper's tables, and the promise that listing imports nothing heavy."""

import re
import subprocess
import sys

import pytest

from splitfg.errors import DataError
from splitfg_lab.data import CATALOGUE, find_dataset, names
from splitfg_lab.data.specs import FileSet, ImageSet, TableSet, TextSet

# The paper's summary of tabular data sets: samples, features, classes.
PAPER_TABLES = {
    "adult": (48_842, 14, 2),
    "higgs_small": (98_050, 28, 2),
    "otto": (61_878, 93, 9),
    "covertype": (581_012, 54, 7),
    "california": (20_640, 8, None),
    "house_16h": (22_784, 16, None),
    "diamond": (53_940, 9, None),
    "black_friday": (166_821, 9, None),
}


@pytest.mark.parametrize("name", PAPER_TABLES)
def test_tables_have_the_papers_counts(name):
    entry = find_dataset(name)
    assert isinstance(entry, TableSet)
    assert (entry.rows, entry.features, entry.classes) == PAPER_TABLES[name]
    tasks = {None: "regression", 2: "binary"}
    assert entry.task == tasks.get(entry.classes, "multiclass")
    assert len(entry.categorical) < entry.features


def test_corpora_have_the_papers_counts():
    wikitext = find_dataset("wikitext103")
    assert isinstance(wikitext, TextSet)
    assert {split.name: split.count for split in wikitext.splits} == {
        "train": 119_085_169,
        "valid": 249_750,
        "test": 286_178,
    }
    assert find_dataset("wikipedia").splits[0].count == 119_085_169
    assert wikitext.vocabulary == 50_257


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_image_sets_hold_fifty_and_ten_thousand(name, classes):
    entry = find_dataset(name)
    assert isinstance(entry, ImageSet)
    assert entry.classes == classes
    rows = {split: sum(f.rows for f in entry.files if f.split == split) for split in ("train", "test")}
    assert rows == {"train": 50_000, "test": 10_000}
    assert all(file.known for file in entry.files)


def test_every_digest_is_well_formed_and_none_is_shared():
    digests = [d.digest for entry in CATALOGUE for d in entry.downloads if d.digest]
    digests += [k.digest for e in CATALOGUE if isinstance(e, ImageSet) for f in e.files for k in f.known]
    assert all(re.fullmatch(r"sha256:[0-9a-f]{64}|md5:[0-9a-f]{32}", digest) for digest in digests)
    assert len(set(digests)) == len(digests)


def test_downloads_are_https_and_land_where_they_are_recognised():
    for entry in CATALOGUE:
        for file in entry.downloads:
            assert all(url.startswith("https://") for url in file.urls)
            assert any(file.path.startswith(pattern) for pattern in entry.raw)
        assert entry.downloads or entry.by_hand
        assert entry.licence
        assert entry.verified


def test_openml_addresses_follow_the_id():
    (file,) = find_dataset("house_16h").downloads
    assert file.urls == ("https://data.openml.org/datasets/0000/0574/dataset_574.pq",)
    (file,) = find_dataset("diamond").downloads
    assert file.urls == ("https://data.openml.org/datasets/0004/42225/dataset_42225.pq",)


def test_names_are_unique_and_suggested():
    assert len(set(names())) == len(names()) == len(CATALOGUE)
    with pytest.raises(DataError, match="did you mean covertype"):
        find_dataset("covertpe")
    with pytest.raises(DataError, match="known: adult"):
        find_dataset("no such thing")


def test_own_data_sets_pass_through_but_must_name_a_folder():
    own = FileSet(name="mine", title="", files=())
    assert find_dataset(own) is own
    with pytest.raises(ValueError, match="must be a valid folder name"):
        FileSet(name="../mine", title="", files=())


def test_listing_imports_nothing_heavy(tmp_path):
    code = (
        "import sys, splitfg_lab.data as d; d.names(); d.status(sys.argv[1])\n"
        "d.find_dataset('adult'); d.fetch; d.prepare\n"
        "print([m for m in ('torch', 'numpy', 'pandas', 'tiktoken', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_can_be_imported():
    import splitfg_lab.data

    assert all(getattr(splitfg_lab.data, name) is not None for name in splitfg_lab.data.__all__)
    assert sorted(splitfg_lab.data.__all__) == splitfg_lab.data.__all__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        splitfg_lab.data.nothing  # noqa: B018


def test_files_in_another_format_name_the_download():
    for entry in CATALOGUE:
        if entry.unsupported is not None:
            assert entry.downloads[0].urls[0] in entry.unsupported.reason
            assert not set(entry.unsupported.patterns) & set(entry.raw)
