"""CIFAR's binary layout: the arrays that come out, and errors for wrong files before their pixels are read."""

import dataclasses
import gzip
import hashlib
import io
import tarfile
import tracemalloc

import numpy as np
import pytest

from splitfg.errors import DataError
from splitfg_lab.data import ImageSet, find_dataset, load_images, prepare, status, verify
from splitfg_lab.data.specs import ImageFile, Known, Unsupported

GENERATOR = np.random.default_rng(0)
TRAIN = [(GENERATOR.integers(0, 256, (4, 3072), np.uint8), np.array(labels)) for labels in ([0, 1, 2, 1], [2, 2, 0, 1])]
TEST = (GENERATOR.integers(0, 256, (3, 3072), np.uint8), np.array([2, 0, 1]))
FILES = {"one": TRAIN[0], "two": TRAIN[1], "last": TEST}


def binary_batch(pixels, labels, label_bytes):
    coarse = np.full((len(labels), label_bytes - 1), 77, np.uint8)
    return np.concatenate([coarse, labels[:, None].astype(np.uint8), pixels], axis=1).tobytes()


def image_set(label_bytes=1, known=()):
    files = [("one", "train", 4), ("two", "train", 4), ("last", "test", 3)]
    return ImageSet(
        name="tiny",
        title="Tiny",
        unsupported=Unsupported(("tiny-python",), "the python version: use tiny-binary.tar.gz"),
        classes=3,
        label_bytes=label_bytes,
        files=tuple(ImageFile(f"{name}.bin", split, rows, known) for name, split, rows in files),
    )


def write_binary(folder, label_bytes=1):
    folder.mkdir(exist_ok=True)
    for name, (pixels, labels) in FILES.items():
        (folder / f"{name}.bin").write_bytes(binary_batch(pixels, labels, label_bytes))
    return folder


def write_tar(path, contents):
    with tarfile.open(path, "w:gz") as archive:
        for name, data in contents.items():
            info = tarfile.TarInfo(f"tiny/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def check(data, folder):
    images = load_images(data, folder)
    assert images.train_x.dtype == np.uint8
    np.testing.assert_array_equal(images.train_x.reshape(8, -1), np.concatenate([TRAIN[0][0], TRAIN[1][0]]))
    np.testing.assert_array_equal(images.train_y, np.concatenate([TRAIN[0][1], TRAIN[1][1]]))
    np.testing.assert_array_equal(images.test_x[1, 2, 31, 30], TEST[0][1, 2 * 1024 + 31 * 32 + 30])
    np.testing.assert_array_equal(images.test_y, TEST[1])
    assert images.classes == 3
    assert not images.train_x.flags.writeable
    assert verify(data, folder) == []


@pytest.mark.parametrize("label_bytes", [1, 2])
def test_binary_folder(tmp_path, label_bytes):
    source = write_binary(tmp_path / "source", label_bytes)
    (folder,) = prepare(image_set(label_bytes), source, tmp_path)
    assert folder == tmp_path / "prepared" / "tiny"
    check(image_set(label_bytes), tmp_path)


def test_binary_archive(tmp_path):
    contents = {f"{name}.bin": binary_batch(*batch, 1) for name, batch in FILES.items()}
    prepare(image_set(), write_tar(tmp_path / "tiny.tar.gz", contents), tmp_path)
    check(image_set(), tmp_path)


def test_only_known_contents_are_accepted_and_their_note_is_kept(tmp_path):
    source = write_binary(tmp_path / "source")
    known = tuple(
        Known("sha256:" + hashlib.sha256(path.read_bytes()).hexdigest(), "in another order")
        for path in source.iterdir()
    )
    prepare(image_set(known=(Known("md5:" + "0" * 32), *known)), source, tmp_path)
    assert load_images(image_set(), tmp_path).note == "in another order"
    blob = bytearray((source / "two.bin").read_bytes())
    blob[5000] ^= 1
    (source / "two.bin").write_bytes(blob)
    with pytest.raises(DataError, match=r"two\.bin is not the official file"):
        prepare(image_set(known=known), source, tmp_path)
    check(image_set(), tmp_path)  # data prepared before is unchanged


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda blob: blob[:-1], "it is truncated, or its images have another size"),
        (lambda _blob: bytes(4 * (1 + 3 * 28 * 28)), "it is truncated, or its images have another size"),
        (lambda blob: blob[:3073], "it holds 1 images"),
        (lambda _blob: b"", "it holds 0 images"),
        (lambda blob: blob[:3073] + b"\x03" + blob[3074:], r"label 3 \(image 1\).*numbered 0 to 2"),
    ],
)
def test_wrong_batches(tmp_path, change, complaint):
    source = write_binary(tmp_path / "source")
    (source / "one.bin").write_bytes(change((source / "one.bin").read_bytes()))
    with pytest.raises(DataError, match=complaint):
        prepare(image_set(), source, tmp_path)
    assert not (tmp_path / "prepared" / "tiny").exists()


def test_every_batch_of_a_wrong_size_is_listed(tmp_path):
    source = write_binary(tmp_path / "source", label_bytes=2)
    with pytest.raises(DataError) as caught:
        prepare(image_set(label_bytes=1), source, tmp_path)
    assert [problem.partition(" ")[0] for problem in caught.value.problems] == ["one.bin", "two.bin", "last.bin"]


def test_a_large_member_is_an_error_before_it_is_read(tmp_path):
    contents = {f"{name}.bin": binary_batch(*batch, 1) for name, batch in FILES.items()}
    bomb = write_tar(tmp_path / "bomb.tar.gz", contents | {"one.bin": bytes(50_000_000)})
    assert bomb.stat().st_size < 200_000
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="has 50,000,000 bytes; 4 images of 3 x 32 x 32 need 12,292"):
            prepare(image_set(), bomb, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_an_archive_larger_than_any_image_set_is_not_decompressed(tmp_path):
    header = tarfile.TarInfo("tiny/one.bin")
    header.size = 3 << 30
    # the header alone: decompressing the member it announces would fail
    (tmp_path / "bomb.tar.gz").write_bytes(gzip.compress(header.tobuf() + bytes(512)))
    with pytest.raises(DataError, match="unpacks to 3,221,225,472 bytes or more; the limit is 1,073,741,824"):
        prepare(image_set(), tmp_path / "bomb.tar.gz", tmp_path)


def test_missing_batches_are_listed_with_the_files_found_instead(tmp_path):
    source = write_binary(tmp_path / "source")
    (source / "two.bin").rename(source / "other.bin")
    with pytest.raises(DataError) as caught:
        prepare(image_set(), source, tmp_path)
    assert caught.value.problems == ("missing: two.bin", "found instead: last.bin, one.bin, other.bin")


def test_the_python_version_is_an_error_that_names_the_binary_one(tmp_path):
    archive = write_tar(tmp_path / "tiny-python.tar.gz", dict.fromkeys((*FILES, "batches.meta"), b"a pickle"))
    with pytest.raises(DataError, match=r"the python version: use tiny-binary\.tar\.gz"):
        prepare(image_set(), archive, tmp_path)


@pytest.mark.parametrize("name", ["images/cifar-10-python.tar.gz", "cifar-10-batches-py"])
def test_the_python_version_in_the_data_folder_is_an_error_that_names_the_download(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    url = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    with pytest.raises(DataError) as caught:
        load_images("cifar10", tmp_path)
    assert str(tmp_path / name) in caught.value.problems[0]
    assert url in caught.value.problems[0]
    assert "splitfg data fetch cifar10" in caught.value.hint
    (found,) = [s for s in status(tmp_path) if s.name == "cifar10"]
    assert found.state == "missing"
    assert url in found.detail


def test_an_archive_of_another_image_set_is_an_error(tmp_path):
    source = write_tar(tmp_path / "cifar-100-binary.tar.gz", {"train.bin": b"", "test.bin": b""})
    with pytest.raises(DataError, match=r"found instead: test\.bin, train\.bin"):
        prepare("cifar10", source, tmp_path)


def test_a_page_instead_of_an_archive_is_an_error(tmp_path):
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"<html>Not found</html>")
    with pytest.raises(DataError, match="truncated or damaged"):
        load_images("cifar10", tmp_path)


def test_cifar_is_recognised_where_the_archives_unpack(tmp_path):
    (tmp_path / "cifar-10-batches-bin").mkdir()
    with pytest.raises(DataError, match=r"missing: data_batch_1\.bin"):
        load_images("cifar10", tmp_path)
    with pytest.raises(DataError, match="is a TableSet; expected a ImageSet"):
        load_images("adult", tmp_path)
    assert find_dataset("cifar10").label_bytes == 1


def test_verify_counts_prepared_images_again(tmp_path):
    prepare(image_set(), write_binary(tmp_path / "source"), tmp_path)
    more = dataclasses.replace(image_set(), classes=4)
    assert verify(more, tmp_path) == ["train has 3 classes; expected 4", "test has 3 classes; expected 4"]
