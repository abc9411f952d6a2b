"""CIFAR's two layouts: the safe pickle reader (fuzzed) and the arrays that come out."""

import contextlib
import hashlib
import io
import pickle
import struct
import tarfile

import numpy as np
import pytest
from hypothesis import given, strategies as st

from splitfg.errors import DataError
from splitfg_lab.data import ImageSet, find_dataset, load_images, prepare, verify
from splitfg_lab.data._literal_pickle import Array, read_literals
from splitfg_lab.data.specs import ImageFile, Known

# -- A writer of Python 2's protocol-2 pickles, opcode by opcode, as cPickle wrote the official batches. ------------


def p2_string(value):
    long = len(value) > 255
    return (b"T" + struct.pack("<I", len(value)) if long else b"U" + bytes([len(value)])) + value


def p2_int(value):
    if 0 <= value < 256:
        return b"K" + bytes([value])
    return b"M" + struct.pack("<H", value) if 0 <= value < 65536 else b"J" + struct.pack("<i", value)


def p2_array(array):
    rows, columns = array.shape
    head = b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\x09"
    dtype = b"cnumpy\ndtype\nq\nU\x02u1K\x00K\x01\x87Rq\x0b(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = b"(K\x01" + p2_int(rows) + p2_int(columns) + b"\x86"
    return head + shape + dtype + b"\x89" + p2_string(array.tobytes()) + b"tb"


def p2_value(value):
    if isinstance(value, np.ndarray):
        return p2_array(value)
    if isinstance(value, bytes):
        return p2_string(value)
    if isinstance(value, int):
        return p2_int(value)
    return b"]q\x05(" + b"".join(map(p2_value, value)) + b"e"


def p2_dict(value):
    items = b"".join(p2_string(key) + p2_value(item) for key, item in value.items())
    return b"\x80\x02}q\x01(" + items + b"u."


BATCH = {
    b"batch_label": b"training batch 1 of 5",
    b"labels": [3, 0, 9],
    b"data": np.arange(9216, dtype=np.int64).astype(np.uint8).reshape(3, 3072),
    b"filenames": [b"frog_s_000001.png", b"truck.png", b"x" * 300],
}


def test_a_batch_as_python_2_wrote_it():
    value = read_literals(p2_dict(BATCH))
    assert value == {**BATCH, b"data": Array((3, 3072), BATCH[b"data"].tobytes())}


def test_the_writer_writes_what_pickle_reads():
    plain = {key: value for key, value in BATCH.items() if key != b"data"}
    blob = p2_dict(plain)
    assert pickle.loads(blob, encoding="bytes") == plain == read_literals(blob)


class Evil:
    """Would run a command when unpickled."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('executed')",))


@pytest.mark.parametrize("protocol", range(6))
def test_pickles_that_would_run_something_are_refused(protocol):
    with pytest.raises(DataError, match=r"refused|protocol"):
        read_literals(pickle.dumps({b"data": Evil()}, protocol=protocol))


@pytest.mark.parametrize(
    "blob",
    [
        b"cos\nsystem\n(U\x02lstR.",
        b"\x80\x02cposix\nsystem\nU\x02ls\x85R.",
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x05\x85U\x01b\x87R.",
        b"\x80\x02cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R.",
        b"\x80\x02cnumpy\ndtype\n.extra",
        b"\x80\x02}q\x01(U\x01a",
        b"\x80\x02}U\x01ab.",
        b"",
        b".",
        b"\x80\x02((.",
    ],
)
def test_what_is_no_literal_is_refused(blob):
    with pytest.raises(DataError):
        read_literals(blob)


def test_arrays_must_be_plain_unsigned_bytes_of_their_shape():
    good = p2_dict({b"data": BATCH[b"data"]})
    for old, new in [
        (b"u1K", b"i1K"),
        (b"U\x01|", b"U\x01<"),
        (b"\x89T", b"\x88T"),
        (b"K\x03M\x00\x0c", b"K\x04M\x00\x0c"),
    ]:
        assert good.count(old) == 1
        with pytest.raises(DataError):
            read_literals(good.replace(old, new))


@given(st.binary(max_size=400))
def test_random_bytes_never_do_anything_else_than_fail_cleanly(blob):
    with contextlib.suppress(DataError):
        read_literals(blob)


@given(st.data())
def test_damaged_batches_never_do_anything_else_than_fail_cleanly(data):
    small = {b"labels": [1, 700, 70000], b"data": np.zeros((2, 3), np.uint8), b"name": b"n"}
    blob = bytearray(p2_dict(small))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(blob) - 1))
        blob[position : position + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        value = read_literals(bytes(blob))
    except DataError:
        return
    _assert_literal(value)


def _assert_literal(value, depth=0):
    assert type(value).__name__ in (
        "dict",
        "list",
        "tuple",
        "bytes",
        "int",
        "bool",
        "NoneType",
        "Array",
        "_Name",
        "_Dtype",
    )
    if isinstance(value, list | tuple | dict) and depth < 20:
        for item in value.values() if isinstance(value, dict) else value:
            _assert_literal(item, depth + 1)


@given(
    st.dictionaries(
        st.binary(max_size=300),
        st.recursive(st.integers(0, 2**31 - 1) | st.binary(max_size=300), st.lists, max_leaves=10),
    )
)
def test_any_literal_survives(value):
    assert read_literals(p2_dict(value)) == value


# -- Whole sets, small ones. ----------------------------------------------------------------------------------------

GENERATOR = np.random.default_rng(0)
TRAIN = [(GENERATOR.integers(0, 256, (4, 3072), np.uint8), np.array(labels)) for labels in ([0, 1, 2, 1], [2, 2, 0, 1])]
TEST = (GENERATOR.integers(0, 256, (3, 3072), np.uint8), np.array([2, 0, 1]))
FILES = {"one": TRAIN[0], "two": TRAIN[1], "last": TEST}


def binary_batch(pixels, labels, label_bytes):
    coarse = np.full((len(labels), label_bytes - 1), 77, np.uint8)
    return np.concatenate([coarse, labels[:, None].astype(np.uint8), pixels], axis=1).tobytes()


def python_batch(pixels, labels):
    return p2_dict({b"labels": [int(i) for i in labels], b"data": pixels})


def image_set(label_bytes=1, known=()):
    files = [("one", "train", 4), ("two", "train", 4), ("last", "test", 3)]
    return ImageSet(
        name="tiny",
        title="Tiny",
        origin="",
        licence="",
        verified="",
        classes=3,
        label_bytes=label_bytes,
        label_key="labels",
        binary=tuple(ImageFile(f"{name}.bin", split, rows, known) for name, split, rows in files),
        python=tuple(ImageFile(name, split, rows, known) for name, split, rows in files),
    )


def write_binary(folder, label_bytes=1):
    folder.mkdir(exist_ok=True)
    for name, (pixels, labels) in FILES.items():
        (folder / f"{name}.bin").write_bytes(binary_batch(pixels, labels, label_bytes))
    return folder


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


@pytest.mark.parametrize("python", [True, False])
def test_archives(tmp_path, python):
    with tarfile.open(tmp_path / "tiny.tar.gz", "w:gz") as archive:
        for name, (pixels, labels) in FILES.items():
            data = python_batch(pixels, labels) if python else binary_batch(pixels, labels, 1)
            info = tarfile.TarInfo(f"tiny/{name}" + ("" if python else ".bin"))
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    prepare(image_set(), tmp_path / "tiny.tar.gz", tmp_path)
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
    check(image_set(), tmp_path)  # what was prepared before is intact


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda blob: blob[:-1], "truncated"),
        (lambda blob: blob[:3073], "holds 1 images; 4 belong there"),
        (lambda blob: b"\x03" + blob[1:], "label 3"),
    ],
)
def test_wrong_binary_batches(tmp_path, change, complaint):
    source = write_binary(tmp_path / "source")
    (source / "one.bin").write_bytes(change((source / "one.bin").read_bytes()))
    with pytest.raises(DataError, match=complaint):
        prepare(image_set(), source, tmp_path)
    assert not (tmp_path / "prepared" / "tiny").exists()


@pytest.mark.parametrize(
    ("batch", "complaint"),
    [
        ({b"labels": [0]}, "holds no 'data' array"),
        ({b"data": TRAIN[0][0], b"labels": [0, 1]}, "for 2 labels"),
        ({b"data": TRAIN[0][0], b"labels": [0, 1, 2, 3000]}, "no small integers"),
        ({b"data": TRAIN[0][0], b"labels": [0, 1, 2, b"x"]}, "no small integers"),
    ],
)
def test_wrong_python_batches(tmp_path, batch, complaint):
    source = tmp_path / "source"
    source.mkdir()
    for name, (pixels, labels) in FILES.items():
        (source / name).write_bytes(python_batch(pixels, labels))
    (source / "one").write_bytes(p2_dict(batch))
    with pytest.raises(DataError, match=complaint):
        prepare(image_set(), source, tmp_path)


def test_missing_batches_are_listed_for_both_layouts(tmp_path):
    source = write_binary(tmp_path / "source")
    (source / "two.bin").unlink()
    with pytest.raises(DataError) as caught:
        prepare(image_set(), source, tmp_path)
    assert "binary version it lacks two.bin" in str(caught.value)
    assert "python version it lacks one, two, last" in str(caught.value)


def test_cifar_is_recognised_where_the_archives_unpack(tmp_path):
    (tmp_path / "cifar-10-batches-bin").mkdir()
    with pytest.raises(DataError, match=r"lacks data_batch_1\.bin"):
        load_images("cifar10", tmp_path)
    with pytest.raises(DataError, match="not what this loader reads"):
        load_images("adult", tmp_path)
    assert find_dataset("cifar10").label_bytes == 1
