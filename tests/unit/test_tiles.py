"""Tiles of outputs: every output in one of them, none too large, whole rows where they fit."""

from itertools import pairwise

from hypothesis import given, strategies as st

from splitfg.heads._tiles import aligned, padded, tiles


@given(n=st.integers(0, 5000), width=st.integers(1, 60_000), limit=st.integers(1, 2**25))
def test_tiles_cover_everything_once_within_the_limit(n, width, limit):
    cut = tiles(n, width, limit)
    for slices, count in ((cut.rows, n), (cut.columns, width)):
        assert slices[0].start == 0
        assert slices[-1].stop == count
        assert all(a.stop == b.start for a, b in pairwise(slices))
    largest = max(r.stop - r.start for r in cut.rows) * max(c.stop - c.start for c in cut.columns)
    assert largest <= limit
    if 0 < n * width <= limit:
        assert len(cut.rows) == len(cut.columns) == 1


def test_few_outputs_come_in_whole_rows_and_many_in_square_tiles():
    assert [(r.stop - r.start) for r in tiles(10**6, 10, 2**22).rows][:2] == [2**22 // 10] * 2
    small8 = tiles(512, 50_257, 2**24)
    assert (len(small8.rows), len(small8.columns)) == (1, 2)
    long = tiles(32_768, 50_257, 2**24)
    assert {r.stop - r.start for r in long.rows} == {4096}


@given(start=st.integers(0, 10**6), width=st.integers(1, 60_000))
def test_aligned_parts_make_up_the_block(start, width):
    parts = aligned(slice(start, start + width))
    assert (parts[0].start, parts[-1].stop) == (start, start + width)
    assert sum(p.stop - p.start for p in parts) == width
    if width >= 1024:
        assert (parts[0].stop - parts[0].start) % 64 == 0
        assert width <= padded(width) < width + 64
        assert padded(width) % 64 == 0
    else:
        assert len(parts) == 1
        assert padded(width) == width
