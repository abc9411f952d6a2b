"""Compiled functions raise the errors of what they run."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from splitfg.compiled import whole


def test_a_traced_function_raises_its_own_error():
    ones = torch.ones(3, 3)
    product = whole(make_fx(lambda a, b: [a @ b])(ones, ones))
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        product(ones)
