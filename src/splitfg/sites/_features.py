"""The dimension of a stream that holds its features."""

from __future__ import annotations

from torch import Tensor

from splitfg.errors import SplitError


class FeatureDimension:
    """Base of paths: moves the features of a stream, which maps mix, to the last dimension and back.

    Attributes:
        features: The dimension that holds features; ``None`` for the channels of images (dimension 1 of 4) and the last
            of anything else.
    """

    features: int | None

    def features_last(self, stream: Tensor) -> Tensor:
        """Move the features of a tensor of the stream to the last dimension."""
        return stream.movedim(self._features(stream), -1)

    def features_back(self, moved: Tensor) -> Tensor:
        """Invert :meth:`features_last`."""
        return moved.movedim(-1, self._features(moved))

    def _features(self, stream: Tensor) -> int:
        if self.features is None:
            return 1 if stream.ndim == 4 else -1
        if not -stream.ndim <= self.features < stream.ndim:
            words = f"features={self.features} is no dimension of the stream, whose values are {tuple(stream.shape)}"
            raise SplitError([f"{words}: give the one that holds features, or None for images and rows of features"])
        return self.features
