"""Images on a device: standardised, cropped and mirrored as numpy does it, in batches that depend on the step alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from splitfg.errors import DataError
from splitfg_lab.data.augment import PAD, VIEWS, ChannelScale, crop_and_mirror
from splitfg_lab.data.device_images import AugmentedBatches, DeviceImages

CPU = torch.device("cpu")
COUNT, HEIGHT, WIDTH = 50, 9, 12


def pixels(count=COUNT, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, 3, HEIGHT, WIDTH), dtype=np.uint8)


def images(count=COUNT):
    """Images whose label is their number."""
    return DeviceImages(pixels(count), np.arange(count), scale=ChannelScale.fit(pixels(count)), device=CPU)


def batches(*, batch=8, steps=30, seed=0):
    return AugmentedBatches(images(), batch=batch, steps=steps, seed=seed)


def numpy_view(image, down, right, mirrored):
    """The textbook's way: pad, cut out, turn around."""
    padded = np.pad(image, ((0, 0), (PAD, PAD), (PAD, PAD)), mode="reflect")
    cut = padded[:, down : down + HEIGHT, right : right + WIDTH]
    return cut[:, :, ::-1] if mirrored else cut


class TestScale:
    def test_is_that_of_the_pixels(self):
        scale = ChannelScale.fit(pixels())
        flat = pixels().astype(np.float64).transpose(1, 0, 2, 3).reshape(3, -1)
        np.testing.assert_allclose(scale.mean, flat.mean(1), rtol=1e-12)
        np.testing.assert_allclose(scale.deviation, flat.std(1), rtol=1e-12)

    def test_sums_do_not_overflow(self):
        white = np.full((40_000, 1, 4, 4), 255, dtype=np.uint8)
        white[0, 0, 0, 0] = 0
        scale = ChannelScale.fit(white)
        assert scale.mean[0] == pytest.approx(255 * (1 - 1 / white.size), rel=1e-12)
        assert scale.deviation[0] == pytest.approx(255 * np.sqrt((1 - 1 / white.size) / white.size), rel=1e-9)

    def test_a_constant_channel_becomes_zero(self):
        grey = np.full((5, 1, HEIGHT, WIDTH), 99, dtype=np.uint8)
        x, _ = DeviceImages(grey, np.zeros(5, np.int64), scale=ChannelScale.fit(grey), device=CPU).take(torch.arange(5))
        assert torch.equal(x, torch.zeros(5, 1, HEIGHT, WIDTH))


class TestViews:
    def test_each_is_what_numpy_pads_cuts_and_turns_around(self):
        image = pixels(1)[0]
        rows, columns = crop_and_mirror(torch.arange(VIEWS), HEIGHT, WIDTH)
        expected = [numpy_view(image, d, r, m) for m in (False, True) for d in range(9) for r in range(9)]
        assert len(expected) == VIEWS == 162
        for view, wanted in enumerate(expected):
            found = image[:, rows[view].numpy()][:, :, columns[view].numpy()]
            np.testing.assert_array_equal(found, wanted, err_msg=str(view))

    def test_of_images_are_standardised_and_keep_their_labels(self):
        data, scale = images(), ChannelScale.fit(pixels())
        numbers, views = torch.tensor([7, 3, 3, 49]), torch.tensor([0, 161, 80, 100], dtype=torch.uint8)
        x, y = data.augmented(numbers, views)
        assert x.dtype == torch.float32
        assert torch.equal(y, numbers)
        for found, number, view in zip(x, numbers, views.long(), strict=True):
            wanted = numpy_view(pixels()[number], view % 81 // 9, view % 9, view >= 81).astype(np.float64)
            wanted = (wanted - scale.mean[:, None, None]) / scale.deviation[:, None, None]
            np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5, atol=1e-6)

    def test_the_middle_one_is_the_image_itself(self):
        numbers = torch.arange(COUNT)
        augmented, _ = images().augmented(numbers, torch.full((COUNT,), 4 * 9 + 4))
        taken, _ = images().take(numbers)
        assert torch.equal(augmented, taken)


class TestBatches:
    def test_an_epoch_holds_every_image_once_and_batches_run_on_across_epochs(self):
        labels = torch.cat([batches()(step)[1] for step in range(25)])  # 25 batches of 8 are four epochs of 50
        for epoch in labels.split(COUNT):
            assert sorted(epoch.tolist()) == list(range(COUNT))
        assert len({tuple(epoch.tolist()) for epoch in labels.split(COUNT)}) == 4
        assert labels[:COUNT].tolist() != list(range(COUNT))

    def test_depend_on_step_and_seed_alone(self):
        forwards, backwards = batches(), batches()
        ahead = [forwards(step) for step in range(30)]
        for step in reversed(range(30)):
            assert all(torch.equal(a, b) for a, b in zip(backwards(step), ahead[step], strict=True))
        assert not torch.equal(batches(seed=1)(0)[1], ahead[0][1])

    def test_a_longer_run_begins_as_a_shorter_one(self):
        for step in (0, 5):
            for short, long in zip(batches(steps=6)(step), batches(steps=300)(step), strict=True):
                assert torch.equal(short, long)

    def test_a_step_may_be_a_tensor(self):
        for number, tensor in zip(batches()(7), batches()(torch.tensor(7)), strict=True):
            assert torch.equal(number, tensor)

    def test_draw_all_views_alike(self):
        # 162 views of 200,000 images: a chi-square of 161 degrees, whose deviation is about 18
        drawn = AugmentedBatches(images(), batch=50, steps=4000, seed=3)._views
        counts, expected = np.bincount(drawn.numpy(), minlength=VIEWS), len(drawn) / VIEWS
        assert len(counts) == VIEWS
        assert ((counts - expected) ** 2 / expected).sum() < 161 + 5 * np.sqrt(2 * 161)

    def test_draw_views_that_tell_nothing_of_the_order(self):
        drawn = AugmentedBatches(images(), batch=50, steps=4000, seed=0)
        order, views = drawn._order.double(), drawn._views.double()
        correlation = torch.corrcoef(torch.stack([order, views]))[0, 1].item()
        assert abs(correlation) < 5 / np.sqrt(len(order))


class TestBadInput:
    def test_everything_wrong_with_the_arrays_is_listed(self):
        scale = ChannelScale.fit(pixels())
        with pytest.raises(DataError) as caught:
            DeviceImages(pixels()[:, :2], np.zeros(COUNT - 1, np.int64), scale=scale, device=CPU)
        assert len(caught.value.problems) == 2
        assert "2 channels, and the scale has 3" in caught.value.problems[0]
        assert "must be 50 integers, got shape (49,)" in caught.value.problems[1]

    @pytest.mark.parametrize(
        ("changed", "labels", "complaint"),
        [
            (pixels().astype(np.float32), np.arange(COUNT), r"type uint8, got .* float32"),
            (pixels().reshape(COUNT, -1), np.arange(COUNT), r"shape \(N, C, H, W\)"),
            (pixels(), np.arange(COUNT) - 1, "labels must be 0 or more, got -1"),
            (pixels(), np.arange(COUNT) / 2, "must be 50 integers"),
            (pixels()[:0], np.arange(0), "the set is empty"),
        ],
    )
    def test_arrays_of_another_kind(self, changed, labels, complaint):
        with pytest.raises(DataError, match=complaint):
            DeviceImages(changed, labels, scale=ChannelScale.fit(pixels()), device=CPU)

    @pytest.mark.parametrize("batch", [0, COUNT + 1])
    def test_a_batch_must_fit_the_data(self, batch):
        with pytest.raises(DataError, match=f"batch must be 1 to 50, the number of images, got {batch}"):
            batches(batch=batch)

    def test_the_whole_set_may_be_one_batch(self):
        _, labels = batches(batch=COUNT)(0)
        assert sorted(labels.tolist()) == list(range(COUNT))

    def test_images_must_be_larger_than_the_padding(self):
        small = pixels()[:, :, :PAD]
        data = DeviceImages(small, np.arange(COUNT), scale=ChannelScale.fit(small), device=CPU)
        with pytest.raises(DataError, match="larger than 4 x 4"):
            AugmentedBatches(data, batch=2, steps=1, seed=0)
