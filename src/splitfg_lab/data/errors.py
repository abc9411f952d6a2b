"""Warnings of this package; errors are :class:`splitfg.errors.DataError`."""

from __future__ import annotations


class PreparedAgainWarning(UserWarning):
    """Raw files changed since data was prepared from them, so the data is prepared again."""
