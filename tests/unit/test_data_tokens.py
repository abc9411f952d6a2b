"""Token files and raw lines to one stream, with a small vocabulary; the token reader is fuzzed."""

import json
import lzma
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from splitfg.errors import DataError
from splitfg_lab.data import TextSet, TextSplit, _tokens as tokens_module, load_tokens, prepare, verify
from splitfg_lab.data._bpe import encode_lines, read_encoding
from splitfg_lab.data._catalogue_text import WIKIPEDIA, WIKITEXT103
from splitfg_lab.data._text import _validate_digest, build_split


def corpus(count=None, vocabulary=1000, splits=("train",)):
    entries = tuple(TextSplit(s, (f"wiki.{s}.raw",), (f"small-{s}*.u16*",), count) for s in splits)
    return TextSet(name="small", title="Small", vocabulary=vocabulary, splits=entries)


def write_ids(path, ids, dtype="<u2"):
    blob = np.asarray(ids, dtype=dtype).tobytes()
    path.write_bytes(lzma.compress(blob) if path.name.lower().endswith(".xz") else blob)
    return path


IDS = [5, 999, 0, 7, 7, 256, 1]


@pytest.mark.parametrize(
    "name", ["small-train.u16", "small-train.u16.xz", "anything.bin", "x.train.bin.xz", "X.TRAIN.BIN.XZ"]
)
def test_one_file(tmp_path, name):
    prepare(corpus(7), write_ids(tmp_path / name, IDS), tmp_path)
    tokens = load_tokens(corpus(7), "train", tmp_path)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == IDS
    assert not tokens.flags.writeable
    assert verify(corpus(7), tmp_path) == []


def test_shards_are_joined_by_number_not_by_name(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for i in range(12):
        write_ids(source / f"small-train.{i}.u16.xz", [i, i + 1])
    write_ids(source / "small-valid.u16", [9, 9])
    prepare(corpus(), source, tmp_path)
    assert load_tokens(corpus(), "train", tmp_path).tolist() == [n for i in range(12) for n in (i, i + 1)]


def test_endings_of_shards_may_be_in_capitals(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for i in range(2):
        write_ids(source / f"small-train.{i}.U16.XZ", [i, i + 5])
    prepare(corpus(), source, tmp_path)
    assert load_tokens(corpus(), "train", tmp_path).tolist() == [0, 5, 1, 6]


@pytest.mark.parametrize("numbers", [(0, 2), (2, 3), ("a", "b"), (1, "01")])
def test_shards_with_gaps_or_without_numbers_are_errors(tmp_path, numbers):
    source = tmp_path / "source"
    source.mkdir()
    for number in numbers:
        write_ids(source / f"small-train.{number}.u16", IDS)
    with pytest.raises(DataError, match="numbered without gaps"):
        prepare(corpus(), source, tmp_path)


def test_splits_are_prepared_one_by_one_and_kept(tmp_path):
    entry = corpus(splits=("train", "valid"))
    prepare(entry, write_ids(tmp_path / "my.train.u16", IDS), tmp_path)
    with pytest.raises(DataError, match="small valid is not in"):
        load_tokens(entry, "valid", tmp_path)
    prepare(entry, write_ids(tmp_path / "my-validation.bin", IDS[:3]), tmp_path)
    assert load_tokens(entry, "train", tmp_path).tolist() == IDS
    assert load_tokens(entry, "valid", tmp_path).tolist() == IDS[:3]
    with pytest.raises(DataError, match="has no split 'test'; it has train, valid"):
        load_tokens(entry, "test", tmp_path)


@pytest.mark.parametrize("name", ["tokens.u16", "train-and-test.u16", "train.tokens", "train.npy"])
def test_a_file_of_no_split_is_an_error(tmp_path, name):
    with pytest.raises(DataError, match="contains no file of small\nrename the files"):
        prepare(corpus(splits=("train", "test")), write_ids(tmp_path / name, IDS), tmp_path)


@pytest.mark.parametrize(
    ("blob", "complaint"),
    [
        (struct.pack("<3H", 5, 1000, 7), "token id 1000 at position 1 is outside the vocabulary of 1,000"),
        (b"\x01\x00\x02", "odd number of bytes"),
        (b"", "no tokens"),
        (np.array([3, 1, 2], "<i4").tobytes(), "32-bit"),
        (np.array([3, 1, 2], "<i8").tobytes(), "32-bit"),
        (b"\x93NUMPY\x01\x00", "npy file"),
        (b"PK\x03\x04....", "zip archive"),
        (lzma.compress(b"\x01\x00"), "without the ending"),
    ],
)
def test_what_is_no_token_file(tmp_path, blob, complaint):
    (tmp_path / "train.u16").write_bytes(blob)
    with pytest.raises(DataError, match=complaint):
        prepare(corpus(), tmp_path / "train.u16", tmp_path)
    assert not (tmp_path / "prepared" / "small" / "train").exists()


@pytest.mark.parametrize("count", [3, 6, 8])
def test_a_wrong_number_of_tokens_is_an_error(tmp_path, count):
    with pytest.raises(DataError, match=f"7 tokens; expected {count}|more than the expected {count} tokens"):
        prepare(corpus(count), write_ids(tmp_path / "train.u16", IDS), tmp_path)


def test_twice_the_number_hints_at_the_width(tmp_path):
    path = write_ids(tmp_path / "train.u16", IDS, "<u4")
    with pytest.raises(DataError, match="save them as uint16"):
        prepare(corpus(7), path, tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 20, 40])
def test_truncated_xz(tmp_path, keep):
    blob = lzma.compress(np.arange(500, dtype="<u2").tobytes())
    (tmp_path / "train.u16.xz").write_bytes(blob[:keep])
    with pytest.raises(DataError, match="truncated or damaged"):
        prepare(corpus(), tmp_path / "train.u16.xz", tmp_path)


def is_token_stream(blob):
    """Whether bytes are acceptable as uint16 ids of any size: whole, not empty, not another format, not 32-bit."""
    foreign = blob.startswith((b"\x93NUMPY", b"PK\x03\x04", b"\xfd7zXZ", b"\x1f\x8b"))
    ids = np.frombuffer(blob[: len(blob) // 2 * 2], "<u2")
    return len(blob) % 2 == 0 and len(ids) > 0 and not foreign and (len(ids) == 1 or ids[1::2].any())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(blob=st.binary(max_size=64), compressed=st.booleans(), block=st.integers(1, 9))
def test_exactly_the_token_streams_are_read(tmp_path, monkeypatch, blob, compressed, block):
    monkeypatch.setattr(tokens_module, "_BLOCK", block)
    path = tmp_path / ("train.u16.xz" if compressed else "train.u16")
    path.write_bytes(lzma.compress(blob) if compressed else blob)
    if not is_token_stream(blob):
        with pytest.raises(DataError):
            prepare(corpus(vocabulary=2**16), path, tmp_path)
        return
    prepare(corpus(vocabulary=2**16), path, tmp_path)
    assert load_tokens(corpus(), "train", tmp_path).tobytes() == blob


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(blob=st.binary(min_size=2, max_size=64), position=st.integers(0, 1000), bit=st.integers(0, 7))
def test_a_flipped_bit_in_an_xz_file_is_an_error_or_without_effect(tmp_path, blob, position, bit):
    data = bytearray(lzma.compress(blob))
    data[position % len(data)] ^= 1 << bit
    (tmp_path / "train.u16.xz").write_bytes(data)
    try:
        prepare(corpus(vocabulary=2**16), tmp_path / "train.u16.xz", tmp_path)
    except DataError:
        return
    assert load_tokens(corpus(), "train", tmp_path).tobytes() == blob


def test_the_stand_in_never_passes_for_the_real_corpus():
    known = WIKIPEDIA.splits[0]
    with pytest.raises(DataError, match="stand-in"):
        _validate_digest(WIKITEXT103, WIKITEXT103.splits[0], known.sha256)
    with pytest.raises(DataError, match="these are other tokens"):
        _validate_digest(WIKIPEDIA, known, "0" * 64)
    _validate_digest(WIKIPEDIA, known, known.sha256)


# -- Raw lines, with an encoding small enough to check by hand. ----------------------------------------------------


def letters():
    """GPT-2's letters for bytes: Latin-1's printable ones stand for themselves, the rest follow from U+0100."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in own]
    return {**{b: chr(b) for b in own}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def write_encoding(folder, merges):
    folder.mkdir(parents=True, exist_ok=True)
    spelled = [[letters()[byte] for byte in half] for merge in merges for half in merge]
    pairs = list(zip(map("".join, spelled[::2]), map("".join, spelled[1::2]), strict=True))
    tokens = [*letters().values(), *(a + b for a, b in pairs), "<|endoftext|>"]
    (folder / "encoder.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "vocab.bpe").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in pairs), "utf-8")
    return folder


MERGES = [(b"t", b"h"), (b"th", b"e"), (b" ", b"the")]
NUMBER = {byte: i for i, byte in enumerate(letters())}
TH, THE, SPACE_THE, END = 256, 257, 258, 259


def test_lines_become_tokens_as_in_the_paper(tmp_path):
    encoding = read_encoding(write_encoding(tmp_path, MERGES))
    lines = [b" = the = \n", b" \n", b"\n", b" the tha\n", b"\t \n", b"\xc3\xa9"]
    b = NUMBER
    expected = [
        *[b[32], b[61], SPACE_THE, b[32], b[61], b[32], b[10], END],
        *[SPACE_THE, b[32], TH, b[97], b[10], END],
        *[b[0xC3], b[0xA9], END],
    ]
    assert np.concatenate(list(encode_lines(lines, encoding))).tolist() == expected


def test_a_file_of_lines_becomes_a_counted_stream(tmp_path):
    encoding = read_encoding(write_encoding(tmp_path / "bpe", MERGES))
    path = tmp_path / "wiki.train.raw"
    path.write_bytes(b" the\n \n the the\n" * 5000)  # several blocks of lines
    events = []
    (tmp_path / "out").mkdir()
    entry = corpus(count=35_000)
    built = build_split(
        entry, entry.splits[0], [path], tmp_path / "out", lambda: encoding, lambda *event: events.append(event)
    )
    ids = np.fromfile(tmp_path / "out" / "tokens.u16", "<u2")
    line = [SPACE_THE, NUMBER[10], END, SPACE_THE, SPACE_THE, NUMBER[10], END]
    assert ids.tolist() == line * 5000
    assert built.counts == {"tokens": 35_000}
    assert events[-1] == ("wiki.train.raw", path.stat().st_size, path.stat().st_size)


def test_text_that_looks_like_the_separator_stays_text(tmp_path):
    encoding = read_encoding(write_encoding(tmp_path, MERGES))
    (ids,) = encode_lines([b"<|endoftext|>\n"], encoding)
    assert ids.tolist().count(END) == 1
    assert len(ids) == len("<|endoftext|>\n") + 1


def test_text_must_be_utf8(tmp_path):
    encoding = read_encoding(write_encoding(tmp_path, MERGES))
    with pytest.raises(DataError, match="line 2 is not UTF-8"):
        list(encode_lines([b"fine\n", b"\xff\n"], encoding))


def test_files_of_the_encoding_must_agree(tmp_path):
    folder = write_encoding(tmp_path, MERGES)
    listed = json.loads((folder / "encoder.json").read_text())
    listed["th"], listed["the"] = listed["the"], listed["th"]
    (folder / "encoder.json").write_text(json.dumps(listed))
    with pytest.raises(DataError, match="disagree"):
        read_encoding(folder)
    (folder / "encoder.json").write_text("[]")
    with pytest.raises(DataError, match="does not hold"):
        read_encoding(folder)
    with pytest.raises(DataError, match="does not hold"):
        read_encoding(Path("nowhere"))
