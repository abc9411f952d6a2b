"""Maps that follow the scale of the stream's value, against Jacobians that depend on it and a formula by hand."""

import pytest
import torch
from _learning import assert_captured_and_resumed
from _toolkit import DOUBLE, generator, noise
from test_gated_maps import gpt

from splitfg import Backprop, DirectPath, MeanJacobian, ParallelPull, SplitError
from splitfg.feedback import NormedMaps
from splitfg.recipes import NormedMapsFeedback

ROWS, WIDTH = 64, 4


def values(seed=0):
    """Rows whose standard deviations differ by a factor of four."""
    scale = torch.linspace(0.5, 2.0, ROWS, dtype=DOUBLE)[:, None]
    x = noise(ROWS, 6, seed=5)
    unit = (x - x.mean(-1, keepdim=True)) / x.std(-1, correction=0, keepdim=True)
    return (3 + scale * unit)[torch.randperm(ROWS, generator=generator(seed))]


def measured(maps, x, e, dx):
    seen = maps.seeing({"block": x})
    maps.apply(seen.change(seen.correlate({"block": [e]}, dx), rows=len(x), noises=e.shape[-1]))


def sigma(x, *, centred=True):
    return x.std(-1, correction=0) if centred else x.square().mean(-1).sqrt()


@pytest.mark.parametrize("centred", [True, False])
def test_the_jacobian_of_a_normed_branch_is_found(centred):
    """dx = e (I + A / σ(x)): normed maps become it, one mean map cannot."""
    branch, r = noise(WIDTH, WIDTH, seed=9), noise(ROWS, WIDTH, seed=8)
    normed, plain = NormedMaps(1.0, bound=50, centred=centred), MeanJacobian(1.0)
    for step in range(400):
        x, e = values(step), noise(ROWS, WIDTH, seed=step + 100)
        dx = e + e @ branch / sigma(x, centred=centred)[:, None]
        measured(normed, x, e, dx)
        measured(plain, x, e, dx)
    x = values(1000)
    expected = r + r @ branch.T / sigma(x, centred=centred)[:, None]
    torch.testing.assert_close(normed.seeing({"block": x}).at("block", r), expected, rtol=1e-8, atol=1e-8)
    mean_error = (plain.at("block", r) - expected).norm() / expected.norm()
    assert mean_error > (0.2 if centred else 0.02)


def started():
    """Maps with moments of σ, and a copy of their state."""
    maps = NormedMaps(0.5, bound=1.5)
    maps.load_state_dict(
        {
            "block": noise(WIDTH, WIDTH, seed=1),
            "block/scaled": noise(1, WIDTH, WIDTH, seed=2),
            "block/moments": torch.tensor([1.2, 1.9], dtype=DOUBLE),
        }
    )
    return maps, {name: value.clone() for name, value in maps.state_dict().items()}


def z_by_hand(x, before):
    mean, square = before["block/moments"].tolist()
    spread = (square / mean**2 - 1 + 0.05**2) ** 0.5
    return torch.tensor([max(-1.5, min(1.5, (mean / s - 1) / spread)) for s in sigma(x).tolist()], dtype=DOUBLE)


@pytest.mark.parametrize("size", [1.0, 0.5])
def test_one_measurement_is_the_formula(size):
    maps, before = started()
    x, e, dx = size * values(), noise(ROWS, WIDTH, seed=3), noise(ROWS, WIDTH, seed=4)
    z = z_by_hand(x, before)
    assert z.max() == 1.5  # some rows reach the bound
    assert (z.square().mean() > 1) == (size < 1)
    jacobians = before["block"] + z[:, None, None] * before["block/scaled"]
    rest = dx - torch.einsum("nf,nft->nt", e, jacobians)
    scale, squares = 0.5 / (ROWS + 2 * WIDTH), max(1.0, float(z.square().mean()))
    measured(maps, x, e, dx)
    after = maps.state_dict()
    torch.testing.assert_close(after["block"], before["block"] + scale * e.T @ rest)
    torch.testing.assert_close(
        after["block/scaled"][0], before["block/scaled"][0] + scale / squares * (z[:, None] * e).T @ rest
    )
    found = torch.stack([sigma(x).mean(), sigma(x).square().mean()])
    torch.testing.assert_close(after["block/moments"], 0.95 * before["block/moments"] + 0.05 * found)


def test_predictions_are_the_formula():
    maps, before = started()
    x, r = values(), noise(ROWS, WIDTH, seed=3)
    jacobians = before["block"] + z_by_hand(x, before)[:, None, None] * before["block/scaled"]
    expected = torch.einsum("nt,nft->nf", r, jacobians)
    torch.testing.assert_close(maps.seeing({"block": x}).at("block", r), expected)
    rows_and_tokens = maps.seeing({"block": x.reshape(8, 8, 6)}).at("block", r.reshape(8, 8, WIDTH))
    torch.testing.assert_close(rows_and_tokens, expected.reshape(8, 8, WIDTH))


def test_the_first_measurement_is_that_of_mean_jacobians():
    normed, plain = NormedMaps(0.5), MeanJacobian(0.5)
    x, e, dx = values(), noise(ROWS, WIDTH, seed=3), noise(ROWS, WIDTH, seed=4)
    measured(normed, x, e, dx)
    measured(plain, x, e, dx)
    learned = normed.state_dict()
    ratio = (ROWS + 2 * WIDTH) / (ROWS + WIDTH)
    eye = torch.eye(WIDTH, dtype=DOUBLE)
    torch.testing.assert_close(ratio * (learned["block"] - eye), plain.state_dict()["block"] - eye)
    assert not learned["block/scaled"].any()
    torch.testing.assert_close(learned["block/moments"][0], sigma(x).mean())


def test_parts_of_a_batch_add_up():
    x, e, dx = values(), noise(ROWS, WIDTH, seed=3), noise(ROWS, WIDTH, seed=4)
    for maps in (started()[0], NormedMaps()):
        whole = maps.seeing({"block": x}).correlate({"block": [e]}, dx)
        parts = [
            maps.seeing({"block": x[rows]}).correlate({"block": [e[rows]]}, dx[rows])
            for rows in (slice(24), slice(24, None))
        ]
        assert set(whole) == set(parts[0])
        for name, total in whole.items():
            torch.testing.assert_close(parts[0][name] + parts[1][name], total)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_a_constant_row_is_bounded(dtype):
    maps, _ = started()
    x, r = values().to(dtype), noise(ROWS, WIDTH, seed=3).to(dtype)
    x[0] = 7.0
    seen = maps.seeing({"block": x})
    torch.testing.assert_close(seen._columns("block", r)[0], 1.5 * r[0])
    assert seen._columns("block", r).abs().le(1.5 * r.abs() + 1e-6).all()
    assert seen.at("block", r).isfinite().all()


def test_a_stream_of_constant_rows_has_finite_maps():
    maps, x = NormedMaps(), torch.zeros(ROWS, 6, dtype=DOUBLE)
    for seed in range(3):
        measured(maps, x, noise(ROWS, WIDTH, seed=seed), noise(ROWS, WIDTH, seed=seed + 50))
    assert all(value.isfinite().all() for value in maps.state_dict().values())
    assert maps.seeing({"block": x}).at("block", noise(ROWS, WIDTH)).isfinite().all()


def test_state_round_trip():
    (split, x, y), pull = gpt(), ParallelPull(feedback=NormedMaps(every=2))
    for seed in range(3):
        pull.update_state(split, pull(split, x, y, generator=generator(seed)))
    again = ParallelPull(feedback=NormedMaps(every=2))
    again.feedback.load_state_dict(pull.feedback.state_dict())
    assert again.feedback.taken == 3
    assert not again.feedback.due
    kept = again.feedback.state_dict()["blocks.0.mlp"].clone()
    pull.update_state(split, pull(split, x, y, generator=generator(3)))
    pull.update_state(split, pull(split, x, y, generator=generator(4)))
    torch.testing.assert_close(again.feedback.state_dict()["blocks.0.mlp"], kept)  # copies, not views
    for seed in (3, 4):
        again.update_state(split, again(split, x, y, generator=generator(seed)))
    for name, value in pull.feedback.state_dict().items():
        torch.testing.assert_close(again.feedback.state_dict()[name], value, rtol=0, atol=0)


def test_enough_pulls_are_backprop():
    (split, x, y), pull = gpt(), ParallelPull(feedback=NormedMaps(), pulls=4)
    for seed in range(3):
        pull.update_state(split, pull(split, x, y, generator=generator(seed)))
    found, expected = pull(split, x, y, generator=generator()), Backprop()(split, x, y)
    for name, g in expected.grads.items():
        torch.testing.assert_close(found.grads[name], g)


ESTIMATORS = {
    "pull": lambda: ParallelPull(feedback=NormedMaps()),
    "own block": lambda: ParallelPull(feedback=NormedMaps(), own_block=True),
    "groups": lambda: ParallelPull(feedback=NormedMaps(), group=2),
    "every other step": lambda: ParallelPull(feedback=NormedMaps(every=2)),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_captured_and_resumed_steps_are_the_eager_ones(name):
    def build():
        split, x, y = gpt()
        return split, ESTIMATORS[name](), x, y

    metrics = assert_captured_and_resumed(build, steps=4)
    assert [m["jvps"] for m in metrics] == ([1, 0, 1, 0] if name == "every other step" else [1, 1, 1, 1])


def test_recipes_build_them():
    maps = NormedMapsFeedback(0.09, bound=2.0).build()
    assert isinstance(maps, NormedMaps)
    assert (maps.rate, maps.bound) == (0.09, 2.0)
    with pytest.raises(SplitError, match=r"rate must be .*\n?.*bound must be"):
        NormedMapsFeedback(2.0, bound=0.0)


def test_wrong_settings():
    with pytest.raises(SplitError, match=r"rate must be .*\n?.*bound must be"):
        NormedMaps(2.0, bound=0.0)
    with pytest.raises(SplitError, match="ParallelPull"):
        DirectPath(feedback=NormedMaps())
    with pytest.raises(SplitError, match="NormedMaps need the stream's value at block"):
        NormedMaps().correlate({"block": [noise(2, 4)]}, noise(2, 4))
