"""Walks over nested containers give what torch's pytree gives."""

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from splitfg.sites import leaves
from splitfg.sites._nested import mapped, tensors_in

Pair = namedtuple("Pair", "first second")
ONE, TWO = torch.ones(2), torch.zeros(3, dtype=torch.long)
NESTED: dict[str, Any] = {
    "a tensor": ONE,
    "a parameter": torch.nn.Parameter(torch.ones(2)),
    "nothing": None,
    "empty containers": ((), [], {}),
    "arguments": ((ONE, 2, None), {"dim": -1, "other": [TWO, (ONE, ...)]}),
    "a named tuple": Pair(ONE, [TWO]),
    "an ordered dict": OrderedDict(b=ONE, a=(TWO, "x")),
    "a default dict": defaultdict(list, a=[ONE]),
    "sizes and slices": (ONE.shape, slice(0, 2), torch.float32, torch.device("cpu")),
    "the result of a reduction": torch.ones(2, 3).max(1),
    "an object": (object, ONE),
}


def _same(one: Any, other: Any) -> bool:
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return pytree.tree_structure(one) == pytree.tree_structure(other) and all(a is b or a == b for a, b in pairs)


@pytest.mark.parametrize("value", NESTED.values(), ids=NESTED)
def test_leaves_are_those_of_pytree(value: Any) -> None:
    expected = pytree.tree_leaves(value)
    found = leaves(value)
    assert len(found) == len(expected)
    assert all(a is b or a == b for a, b in zip(found, expected, strict=True))
    assert [id(t) for t in tensors_in(value)] == [id(t) for t in expected if isinstance(t, Tensor)]


@pytest.mark.parametrize("value", NESTED.values(), ids=NESTED)
def test_mapped_changes_leaves_as_pytree_does(value: Any) -> None:
    changed: dict[int, str] = {}

    def name(t: Tensor) -> str:
        return changed.setdefault(id(t), f"tensor {len(changed)}")

    assert _same(mapped(Tensor, name, value), pytree.tree_map_only(Tensor, name, value))


def test_mapped_copies_lists_that_are_appended_to_later() -> None:
    given = [ONE]
    copy = mapped(Tensor, lambda t: t, {"parts": given})
    given.append(TWO)
    assert len(copy["parts"]) == 1
