"""Where data is looked for and where it is written."""

from pathlib import Path

import pytest

from splitfg.errors import DataError
from splitfg_lab.data import cache_folder, data_folder, find_dataset
from splitfg_lab.data._folder import DataFolder


@pytest.fixture(autouse=True)
def own_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("SPLITFG_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.platform", "linux")


def test_variable_wins_over_cache(monkeypatch, tmp_path):
    assert data_folder() == tmp_path / "cache" / "splitfg" / "data"
    monkeypatch.setenv("SPLITFG_DATA", str(tmp_path / "mine"))
    assert data_folder() == tmp_path / "mine"


def test_the_cache_folder_of_linux(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "splitfg"


@pytest.fixture
def macos(monkeypatch, tmp_path):
    """macOS, with a cache folder that platformdirs takes from XDG_CACHE_HOME and splitfg used to take from HOME."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("platformdirs.user_cache_path", lambda *_, **__: tmp_path / "cache" / "splitfg")
    return tmp_path / "Library" / "Caches" / "splitfg"


def test_a_cache_folder_of_an_earlier_release_is_still_found(macos, tmp_path):
    assert cache_folder() == tmp_path / "cache" / "splitfg"
    macos.mkdir(parents=True)
    assert cache_folder() == macos


def test_the_cache_folder_of_platformdirs_wins_over_an_earlier_one(macos, tmp_path):
    macos.mkdir(parents=True)
    (tmp_path / "cache" / "splitfg").mkdir(parents=True)
    assert cache_folder() == tmp_path / "cache" / "splitfg"


def test_the_cache_folder_of_windows_stays(monkeypatch):
    from platformdirs.windows import Windows

    monkeypatch.setattr("platformdirs.windows.get_win_folder", lambda _name: "/local")
    monkeypatch.setattr("platformdirs.PlatformDirs", Windows)
    assert cache_folder() == Path("/local/splitfg")


def test_a_named_folder_must_exist(monkeypatch, tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        DataFolder.at(tmp_path / "nowhere")
    monkeypatch.setenv("SPLITFG_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="SPLITFG_DATA"):
        DataFolder.at(None)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="is not a folder"):
        DataFolder.at(tmp_path / "file")


def test_the_default_folder_need_not_exist_yet(tmp_path):
    place = DataFolder.at(None)
    assert place.root == place.work == tmp_path / "cache" / "splitfg" / "data"
    assert place.raw(find_dataset("adult")) == []


def test_an_empty_variable_counts_as_unset(monkeypatch, tmp_path):
    monkeypatch.setenv("SPLITFG_DATA", "")
    assert DataFolder.at(None).root == tmp_path / "cache" / "splitfg" / "data"


def test_a_read_only_folder_is_left_alone_and_has_its_own_place(tmp_path):
    first, second = tmp_path / "a" / "data", tmp_path / "b" / "data"
    for folder in (first, second):
        folder.mkdir(parents=True)
        folder.chmod(0o555)
    places = [DataFolder.at(folder) for folder in (first, second)]
    assert all(place.work.is_relative_to(tmp_path / "cache") for place in places)
    assert places[0].work != places[1].work
    assert DataFolder.at(first) == places[0]


def test_raw_files_are_found_by_the_first_pattern_that_matches(tmp_path):
    (tmp_path / "tabular").mkdir()
    for name in ("adult.csv", "adult.parquet", "adult_other.parquet"):
        (tmp_path / "tabular" / name).touch()
    place = DataFolder.at(tmp_path)
    assert place.raw(find_dataset("adult")) == [tmp_path / "tabular" / "adult.parquet"]


@pytest.mark.parametrize("name", ["adult.CSV", "adult.Parquet"])
def test_raw_files_may_have_endings_in_capitals(tmp_path, name):
    (tmp_path / "tabular").mkdir()
    (tmp_path / "tabular" / name).touch()
    (tmp_path / "tabular" / "adult.csv").symlink_to("adult.csv")  # leads nowhere: not there
    assert DataFolder.at(tmp_path).raw(find_dataset("adult")) == [tmp_path / "tabular" / name]


def test_small_endings_go_before_capitals(tmp_path):
    (tmp_path / "images").mkdir()
    for name in ("cifar-10-binary.TAR.GZ", "cifar-10-binary.tar.gz"):
        (tmp_path / "images" / name).touch()
        assert DataFolder.at(tmp_path).raw(find_dataset("cifar10")) == [tmp_path / "images" / name]


def test_a_default_folder_that_links_to_itself_is_no_bare_error(monkeypatch, tmp_path):
    monkeypatch.setattr("splitfg_lab.data._folder._writable", lambda _root: False)
    (tmp_path / "cache" / "splitfg").mkdir(parents=True)
    (tmp_path / "cache" / "splitfg" / "data").symlink_to("data")
    assert DataFolder.at(None).raw(find_dataset("adult")) == []


def test_raw_shards_come_together_and_splits_apart(tmp_path):
    (tmp_path / "text").mkdir()
    for name in ("wiki-train.1.u16.xz", "wiki-train.0.u16.xz", "wiki.valid.raw"):
        (tmp_path / "text" / name).touch()
    place = DataFolder.at(tmp_path)
    shards = place.raw(find_dataset("wikipedia"), "train")
    assert [path.name for path in shards] == ["wiki-train.0.u16.xz", "wiki-train.1.u16.xz"]
    assert [path.name for path in place.raw(find_dataset("wikitext103"), "valid")] == ["wiki.valid.raw"]
    assert place.raw(find_dataset("wikitext103"), "train") == []
