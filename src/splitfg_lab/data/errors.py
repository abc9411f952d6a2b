"""The warning of this package; its error is :class:`splitfg.errors.DataError`."""

from __future__ import annotations


class PreparedAgainWarning(UserWarning):
    """Raw files were replaced by others since data was prepared from them, so that it is prepared again."""
