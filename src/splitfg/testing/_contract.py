"""Checks of an estimator against the contract, on a small network or on one of yours."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from splitfg.errors import SplitError
from splitfg.estimators import Backprop, Estimator, LearningEstimator
from splitfg.heads import CrossEntropy, LinearHead
from splitfg.models import MLP
from splitfg.splitting import Split
from splitfg.types import Estimate, Inputs, Target

_ROWS, _FEATURES, _CLASSES = 12, 5, 3


def example_split(*, dtype: torch.dtype = torch.float64) -> tuple[Split, Tensor, Tensor]:
    """Return a small ReLU network with a linear head, inputs and classes.

    Args:
        dtype: Of parameters and inputs.

    Example:
        >>> from splitfg.testing import example_split
        >>> split, x, y = example_split()
        >>> x.shape, y.shape
        (torch.Size([12, 5]), torch.Size([12]))
    """
    generator = torch.Generator().manual_seed(0)
    trunk = MLP(_FEATURES, widths=(6, 6), generator=generator).to(dtype)
    readout = nn.Linear(6, _CLASSES, dtype=dtype)
    with torch.no_grad():
        readout.weight.normal_(generator=generator)
        readout.bias.normal_(generator=generator)
    x = torch.randn(_ROWS, _FEATURES, dtype=dtype, generator=generator)
    y = torch.randint(0, _CLASSES, (_ROWS,), generator=generator)
    return Split(trunk, LinearHead(readout, loss=CrossEntropy())), x, y


def check_estimator(
    estimator: Estimator | Callable[[], Estimator],
    split: Split | None = None,
    x: Inputs | None = None,
    y: Target | None = None,
    *,
    draws: int = 400,
) -> None:
    """Check that an estimator keeps the contract; all failures are listed at once.

    An estimate changes nothing but the generator, depends on nothing else, has gradients that fit the parameters, the
    loss of the batch, statistics that tell the truth about reverse mode and bias, and rejects bad batches. An estimator
    that does not call itself biased is compared with backpropagation over a fixed number of draws.

    Args:
        estimator: The estimator, of which every check takes a copy; or a class or function that returns a new one.
        split: The network; a small ReLU network by default.
        x: Inputs, of at least two rows.
        y: Target.
        draws: Estimates that the test of unbiasedness averages over; 0 leaves it out.

    Raises:
        AssertionError: The contract is broken.

    Example:
        >>> from splitfg import SplitFG
        >>> from splitfg.testing import check_estimator
        >>> check_estimator(SplitFG(K=4))
    """
    if split is None or x is None or y is None:
        split, x, y = example_split()
    make, found = _factory(estimator), []
    for check in (_is_pure, _is_reproducible, _fits, _tells_the_truth, _rejects, _restores):
        found += [f"{check.__name__[1:].replace('_', ' ')}: {problem}" for problem in check(make, split, x, y)]
    if draws and not found:
        found += _unbiased(make, split, x, y, draws)
    if found:
        raise AssertionError("the estimator breaks the contract:\n" + "\n".join(f"- {problem}" for problem in found))


def _factory(estimator: Estimator | Callable[[], Estimator]) -> Callable[[], Estimator]:
    """Return a function that makes estimators; one that takes no arguments is such a function itself."""
    try:
        inspect.signature(estimator).bind()
    except TypeError:
        return partial(copy.deepcopy, cast(Estimator, estimator))
    return cast("Callable[[], Estimator]", estimator)


def _estimate(make: Callable[[], Estimator], split: Split, x: Inputs, y: Target, seed: int = 0) -> Estimate:
    device = next(split.model.parameters()).device
    return make()(split, x, y, generator=torch.Generator(device).manual_seed(seed))


def _is_pure(make: Callable[[], Estimator], split: Split, x: Inputs, y: Target) -> Iterator[str]:
    before = copy.deepcopy((split.model.state_dict(), x, y))
    grads = [p.grad for p in split.model.parameters()]
    flags, state = split.training_flags(), torch.get_rng_state()
    _estimate(make, split, x, y)
    if not _same(before, (split.model.state_dict(), x, y)):
        yield "parameters, buffers or the batch changed"
    if any(p.grad is not g for p, g in zip(split.model.parameters(), grads, strict=True)):
        yield "it wrote to .grad, which is for write_grads alone"
    if split.training_flags() != flags:
        yield "training flags changed"
    if not torch.equal(torch.get_rng_state(), state):
        yield "it drew from torch's global generator instead of the one it was given"


def _is_reproducible(make: Callable[[], Estimator], split: Split, x: Inputs, y: Target) -> Iterator[str]:
    first, again = (_estimate(make, split, x, y, seed=3) for _ in range(2))
    if not _same((first.loss, first.grads), (again.loss, again.grads)):
        yield "two estimates with the same seed differ"


def _fits(make: Callable[[], Estimator], split: Split, x: Inputs, y: Target) -> Iterator[str]:
    estimate, params = _estimate(make, split, x, y), split.trained_params()
    for name, g in estimate.grads.items():
        if name not in params:
            yield f"there is a gradient for {name}, which is not trained"
        elif (g.shape, g.device) != (params[name].shape, params[name].device):
            yield f"the gradient of {name} is {tuple(g.shape)} on {g.device}, the parameter {tuple(params[name].shape)}"
        elif g.requires_grad or not bool(g.isfinite().all()):
            yield f"the gradient of {name} has an autograd graph or is not finite"
    exact = Backprop()(split, x, y).loss
    if not torch.allclose(estimate.loss, exact, rtol=1e-4, atol=1e-6):
        yield f"the loss is {float(estimate.loss):.6g}, that of the batch is {float(exact):.6g}"


def _tells_the_truth(make: Callable[[], Estimator], split: Split, x: Inputs, y: Target) -> Iterator[str]:
    make()(split, x, y, generator=torch.Generator(next(split.model.parameters()).device))  # validates the first batch
    with _counting_saved() as saved:
        estimate = _estimate(make, split, x, y)
    if estimate.stats.forward_only and saved[0]:
        counts = "stats.trunk_backward and stats.block_backward are 0"
        yield f"{counts}, and autograd saved {saved[0]} tensors for a backward pass"


def _rejects(make: Callable[[], Estimator], split: Split, x: Inputs, y: Target) -> Iterator[str]:
    if not isinstance(x, Tensor):
        return
    batches = {"an empty batch": (x[:0], y[:0]), "different numbers of rows": (x, y[:-1])}
    if x.is_floating_point():
        batches["NaN inputs"] = (torch.full_like(x, float("nan")), y)
    for what, (bad_x, bad_y) in batches.items():
        try:
            _estimate(make, split, bad_x, bad_y)
        except SplitError:
            continue
        except Exception as error:
            yield f"{what} raised {type(error).__name__}, not SplitError: call check_batch first"
        else:
            yield f"{what} passed: call check_batch first"


def _restores(make: Callable[[], Estimator], split: Split, x: Inputs, y: Target) -> Iterator[str]:
    estimator = make()
    if not isinstance(estimator, LearningEstimator):
        return
    generator = torch.Generator(next(split.model.parameters()).device).manual_seed(5)
    for _ in range(3):
        estimator.update_state(split, estimator(split, x, y, generator=generator))
    other = make()
    assert isinstance(other, LearningEstimator)
    for name, part in estimator.learned_state().items():
        other.learned_state()[name].load_state_dict(copy.deepcopy(part.state_dict()))
    ours, theirs = (_estimate(lambda e=e: e, split, x, y, seed=6) for e in (estimator, other))  # type: ignore[misc]
    if not _same(ours.grads, theirs.grads):
        yield "an estimator restored from its learned state gives other estimates"


def _unbiased(make: Callable[[], Estimator], split: Split, x: Inputs, y: Target, draws: int) -> list[str]:
    """Compare the mean of a fixed number of estimates with the gradient, coordinate by coordinate."""
    first = _estimate(make, split, x, y)
    if first.stats.biased:
        return []
    estimator, generator = make(), torch.Generator(next(split.model.parameters()).device).manual_seed(7)
    exact = Backprop(readout_only=split.tied is not None)(split, x, y).grads
    names = [name for name in first.grads if name in exact]
    drawn = [estimator(split, x, y, generator=generator).grads for _ in range(draws)]
    stack = torch.stack([torch.cat([g[n].flatten().double() for n in names]) for g in drawn])
    gradient = torch.cat([exact[n].flatten().double() for n in names])
    error = stack.std(0) / draws**0.5 + 1e-6 * gradient.norm()
    worst = float(((stack.mean(0) - gradient).abs() / error).max())
    # the largest of as many standard normal numbers is below this bound in all but 1 of 10,000 cases
    tail = torch.tensor(1 - 1e-4 / (2 * len(gradient)), dtype=torch.float64)
    if worst < float(torch.special.ndtri(tail)):
        return []
    return [f"stats.biased is False, and the mean of {draws} estimates is {worst:.1f} errors off"]


@contextmanager
def _counting_saved() -> Iterator[list[int]]:
    count = [0]

    def pack(t: Tensor) -> Tensor:
        count[0] += 1
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield count


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same(v, second[k]) for k, v in first.items())
    if isinstance(first, tuple | list):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)
