"""Archives: read as streams, with errors for hostile and damaged ones."""

import io
import random
import tarfile
import zipfile

import pytest

from splitfg.errors import DataError
from splitfg_lab.data import _source as source
from splitfg_lab.data._source import members, reading


def make_tar(path, entries, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, data in entries.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def make_zip(path, entries):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return path


def contents(*paths):
    found = {}
    with members(paths) as listed:
        for member in listed:
            with reading(member.path), member.open() as stream:
                found[member.name] = stream.read()
    return found


ENTRIES = {"top/a.txt": b"first", "top/b.bin": bytes(range(256))}


@pytest.mark.parametrize("kind", ["folder", "tar.gz", "tar", "zip", "files"])
def test_the_same_members_whatever_they_come_in(tmp_path, kind):
    (tmp_path / "top").mkdir()
    for name, data in ENTRIES.items():
        (tmp_path / name).write_bytes(data)
    paths = {
        "folder": lambda: [tmp_path],
        "tar.gz": lambda: [make_tar(tmp_path / "x.tar.gz", ENTRIES)],
        "tar": lambda: [make_tar(tmp_path / "x.tar", ENTRIES, "w")],
        "zip": lambda: [make_zip(tmp_path / "x.zip", ENTRIES)],
        "files": lambda: [tmp_path / name for name in ENTRIES],
    }[kind]()
    assert contents(*paths) == {"a.txt": b"first", "b.bin": bytes(range(256))}


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil"])
def test_names_that_point_outside_are_errors(tmp_path, name):
    for path in (make_tar(tmp_path / "x.tar.gz", {name: b"x"}), make_zip(tmp_path / "x.zip", {name: b"x"})):
        with pytest.raises(DataError, match="points outside"):
            contents(path)
    assert {path.name for path in tmp_path.rglob("*")} == {"x.tar.gz", "x.zip"}


def test_links_and_devices_in_a_tar_are_not_members(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE):
            info = tarfile.TarInfo(f"entry{kind!r}")
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
    assert contents(tmp_path / "x.tar") == {}


@pytest.mark.parametrize("make", [make_tar, make_zip])
def test_bombs_are_an_error_before_any_member_is_read(tmp_path, monkeypatch, make):
    path = make(tmp_path / ("x.zip" if make is make_zip else "x.tar.gz"), {f"{i}": bytes(400) for i in range(4)})
    with (
        pytest.raises(DataError, match="unpacks to 1,200 bytes or more; the limit is 1,000"),
        members([path], most_bytes=1000),
    ):
        pass
    monkeypatch.setattr(source, "MOST_MEMBERS", 3)
    with pytest.raises(DataError, match="more than 3 files"):
        contents(path)


def test_an_encrypted_zip_is_an_error(tmp_path):
    path = make_zip(tmp_path / "x.zip", {"a": b"secret"})
    blob = bytearray(path.read_bytes())
    blob[blob.index(b"PK\x01\x02") + 8] |= 1  # the flag in the central directory
    path.write_bytes(blob)
    with pytest.raises(DataError, match="encrypted"):
        contents(path)


@pytest.mark.parametrize("maker", [make_tar, make_zip])
@pytest.mark.parametrize("keep", [0.0, 0.3, 0.6, 0.9])
def test_truncated_archives_are_one_clear_error(tmp_path, maker, keep):
    data = {"a": random.Random(0).randbytes(5000), "b": b"x" * 50}
    path = maker(tmp_path / ("x.zip" if maker is make_zip else "x.tar.gz"), data)
    blob = path.read_bytes()
    path.write_bytes(blob[: int(keep * len(blob))])
    with pytest.raises(DataError, match="truncated or damaged"):
        contents(path)


def test_a_flipped_byte_in_a_member_is_found_while_reading(tmp_path):
    path = make_zip(tmp_path / "x.zip", {"a": bytes(i * 7 % 251 for i in range(5000))})
    blob = bytearray(path.read_bytes())
    blob[200] ^= 0xFF
    path.write_bytes(blob)
    with pytest.raises(DataError, match="damaged"):
        contents(path)


def test_everything_missing_is_listed(tmp_path):
    with pytest.raises(DataError) as caught, members([tmp_path / "a", tmp_path / "b", tmp_path]):
        pass
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize("name", ["x.ZIP", "x.Zip", "x.TGZ", "x.TAR.GZ"])
def test_endings_of_archives_may_be_in_capitals(tmp_path, name):
    make = make_zip if name.lower().endswith("zip") else make_tar
    assert contents(make(tmp_path / name, ENTRIES)) == {"a.txt": b"first", "b.bin": bytes(range(256))}


@pytest.mark.parametrize("kind", ["folder", "zip", "tar.gz"])
def test_what_macos_adds_is_no_member(tmp_path, kind):
    entries = {"a.txt": b"mine", "._a.txt": b"x", ".DS_Store": b"x", "__MACOSX/._a.txt": b"x", "__MACOSX/b.txt": b"x"}
    path = tmp_path / f"x.{kind}"
    if kind == "folder":
        (path / "__MACOSX").mkdir(parents=True)
        for name, data in entries.items():
            (path / name).write_bytes(data)
    else:
        (make_zip if kind == "zip" else make_tar)(path, entries)
    assert contents(path) == {"a.txt": b"mine"}


def test_links_in_a_circle_add_nothing(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"mine")
    for name, target in {"self": "self", "there": "back", "back": "there", "folder": "."}.items():
        (tmp_path / name).symlink_to(target)
    with members([tmp_path]) as found:
        assert [member.path for member in found] == [tmp_path / "a.txt"]
    with pytest.raises(DataError, match="does not exist"):
        contents(tmp_path / "self")


def test_a_zip_with_an_unknown_compression_is_an_error(tmp_path):
    path = make_zip(tmp_path / "x.zip", {"a": b"text" * 50})
    blob = bytearray(path.read_bytes())
    blob[8] = blob[blob.index(b"PK\x01\x02") + 10] = 9  # "enhanced deflating", in both headers
    path.write_bytes(blob)
    with pytest.raises(DataError, match="compression") as caught:
        contents(path)
    assert "unpack it" in caught.value.hint
