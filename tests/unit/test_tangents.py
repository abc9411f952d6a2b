"""Tangents: the same numbers whatever the chunk, drawn again from remembered states, and laid out by name."""

import pytest
import torch
from _toolkit import DOUBLE, generator, noise
from hypothesis import given, strategies as st

from splitfg import Conditioned, Gaussian, Orthogonal, Rademacher, RunningMagnitude, SplitError
from splitfg.tangents import Layout, TangentSource


def layout(sizes=(3, 4), dtype=DOUBLE):
    return Layout.of({f"p{i}": torch.zeros(n, dtype=dtype) for i, n in enumerate(sizes)})


def conditioned(space):
    magnitude = RunningMagnitude()
    magnitude.update(space.unflatten(noise(space.total, dtype=space.dtype)))
    return Conditioned(magnitude)


LAWS = {
    "gaussian": lambda space: Gaussian(),
    "rademacher": lambda space: Rademacher(),
    "orthogonal": lambda space: Orthogonal(),
    "conditioned": conditioned,
}
every_law = pytest.mark.parametrize("law", LAWS)


class TestSource:
    @every_law
    @given(
        count=st.integers(1, 7),
        chunk=st.none() | st.integers(1, 9),
        size=st.sampled_from([7, 15, 16, 33]),
        seed=st.integers(0, 99),
        dtype=st.sampled_from([torch.float32, DOUBLE]),
    )
    def test_chunks_are_the_whole(self, law, count, chunk, size, seed, dtype):
        """The same rows, the generator left in the same state; odd sizes, since normals come in pairs."""
        space = layout((size,), dtype)
        whole_generator, generator_ = generator(seed), generator(seed)
        (whole,) = TangentSource(LAWS[law](space), space, count, None, whole_generator)
        source = TangentSource(LAWS[law](space), space, count, chunk, generator_)
        chunks = list(source)
        assert torch.equal(torch.cat(chunks), whole)
        assert [len(c) for c in chunks] == source.chunk_sizes
        assert max(source.chunk_sizes) <= (chunk or count)
        assert torch.equal(generator_.get_state(), whole_generator.get_state())
        assert whole.dtype == dtype

    @every_law
    @pytest.mark.parametrize("chunk", [1, 2, 5])
    def test_again_is_the_same_chunk(self, law, chunk):
        """In any order, as often as wanted, without moving the generator."""
        space, g = layout((5, 2)), generator(3)
        g.manual_seed(3)
        torch.randn(3, generator=g)  # an odd number drawn before: half a pair is pending
        source = TangentSource(LAWS[law](space), space, 5, chunk, g, remember=True)
        chunks = [c.clone() for c in source]
        after = g.get_state()
        for index in (len(chunks) - 1, 0, 0, *range(len(chunks))):
            assert torch.equal(source.again(index), chunks[index])
        assert torch.equal(g.get_state(), after)

    @every_law
    def test_next_estimate_draws_anew(self, law):
        space, g = layout(), generator()
        (first,), (second,) = (TangentSource(LAWS[law](space), space, 3, None, g) for _ in range(2))
        assert not torch.allclose(first, second)

    @every_law
    def test_rows_differ(self, law):
        space = layout((20,))
        (rows,) = TangentSource(LAWS[law](space), space, 5, None, generator())
        assert len({tuple(r.tolist()) for r in rows}) == 5

    @every_law
    def test_seed_is_the_only_say(self, law):
        space = layout()
        draws = [next(iter(TangentSource(LAWS[law](space), space, 3, None, generator(7)))) for _ in range(2)]
        assert torch.equal(*draws)
        assert not torch.equal(draws[0], next(iter(TangentSource(LAWS[law](space), space, 3, None, generator(8)))))

    def test_a_law_that_draws_something_else_is_refused(self):
        class Few(Gaussian):
            def draw(self, layout, count, generator):
                return super().draw(layout, count, generator)[:1]

        with pytest.raises(SplitError, match=r"Few\.draw returned tangents of shape \(1, 4\): return shape \(3, 4\)"):
            list(TangentSource(Few(), layout((4,)), 3, None, generator()))

    def test_no_more_than_a_chunk_is_drawn_at_a_time(self):
        """Chunks come when they are asked for: K of them need never fit."""
        space = layout((10**5,))
        source = iter(TangentSource(Gaussian(), space, 10**5, 2, generator()))  # 80 GB, were they all drawn
        assert next(source).shape == (2, 10**5)


class TestLayout:
    @given(
        st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4),
        st.lists(st.integers(1, 2), max_size=2),
    )
    def test_round_trip(self, shapes, lead):
        """Scalars and empty parameters included, with any leading dimensions."""
        params = {f"p{i}": noise(*shape, seed=i) for i, shape in enumerate(shapes)}
        space = Layout.of(params)
        assert space.total == sum(p.numel() for p in params.values())
        flat = space.flatten(params)
        back = space.unflatten(flat.expand(*lead, -1).contiguous())
        assert list(back) == list(params)
        for name, p in params.items():
            assert torch.equal(back[name], p.expand((*lead, *p.shape)))

    def test_views_not_copies(self):
        space = layout()
        flat = torch.zeros(7, dtype=DOUBLE)
        space.unflatten(flat)["p1"].fill_(1)
        assert flat.tolist() == [0, 0, 0, 1, 1, 1, 1]

    def test_order_of_a_dictionary_does_not_matter(self):
        params = {"a": noise(2), "b": noise(3, seed=2)}
        space = Layout.of(params)
        assert torch.equal(space.flatten(dict(reversed(params.items()))), space.flatten(params))


class TestRunningMagnitude:
    def test_root_mean_square_with_bias_correction(self):
        """sqrt(Σ βᵗ⁻ᵏ (1 - β) g_k² / (1 - βᵗ)), written out."""
        space, beta = layout((2,)), 0.8
        magnitude, seen = RunningMagnitude(beta), [noise(2, seed=i) for i in range(4)]
        assert magnitude.of(space) is None
        for g in seen:
            magnitude.update({"p0": g})
        weights = torch.tensor([(1 - beta) * beta ** (3 - k) for k in range(4)], dtype=DOUBLE)
        expected = ((weights @ torch.stack(seen).square()) / (1 - beta**4)).sqrt()
        torch.testing.assert_close(magnitude.of(space), expected)

    def test_constant_gradients_are_read_back(self):
        magnitude, g = RunningMagnitude(), noise(2)
        for _ in range(3):
            magnitude.update({"p0": g})
            torch.testing.assert_close(magnitude.of(layout((2,))), g.abs())

    def test_state_goes_on(self):
        first, second = RunningMagnitude(), RunningMagnitude()
        first.update({"p0": noise(2)})
        second.load_state_dict(first.state_dict())
        kept = {name: value.clone() for name, value in first.state_dict()["mean_square"].items()}
        for m in (first, second):
            m.update({"p0": noise(2, seed=2)})
        assert torch.equal(first.of(layout((2,))), second.of(layout((2,))))
        fresh = RunningMagnitude()
        fresh.load_state_dict({"mean_square": kept, "updates": 1})
        fresh.update({"p0": noise(2, seed=2)})
        assert torch.equal(first.of(layout((2,))), fresh.of(layout((2,))))

    def test_silence_is_no_division_by_zero(self):
        magnitude = RunningMagnitude()
        magnitude.update({"p0": torch.zeros(3, dtype=DOUBLE)})
        law = Conditioned(magnitude)
        assert law.draw(layout((3,)), 2, generator()).isfinite().all()
        assert law.precision(layout((3,))).isfinite().all()
