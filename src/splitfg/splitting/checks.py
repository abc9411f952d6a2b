"""Validation of a split and a batch before any computation: lists every problem with its cure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from splitfg.calling import Traits, preserved
from splitfg.errors import NonFiniteError, SplitError, raise_if, shorten
from splitfg.splitting._backward_rules import warn_of_hooks, warn_unreached
from splitfg.splitting._batches import has_rows, parts
from splitfg.splitting._black_box import ForwardOnlyTrunk
from splitfg.splitting._dtypes import dtype_problem
from splitfg.splitting._duals import without_graph
from splitfg.splitting._lookup_checks import lookup_problems
from splitfg.splitting._module_checks import micro_batch_problems, mode_problems, table_problems
from splitfg.splitting._passes import same_parameters, skip_checks
from splitfg.splitting._row_checks import draws, head_hooks, hook_problems, mixing_problems
from splitfg.splitting._split import FIRST_BATCH, HOOKS, LOOKUPS, ROWS, Split, require_split
from splitfg.types import Inputs, Target

__all__ = [
    "batch_problems",
    "begin_step",
    "check_batch",
    "check_finite",
    "check_gradients",
    "check_h",
    "check_loss",
    "has_rows",
    "skip_checks",
    "warn_unreached",
]

_RANDOM = (
    "the trunk draws random numbers, as F.dropout does in training mode, and this estimator does not fix them for a"
    " step: call .eval() on the model, or begin the estimator with splitfg.splitting.checks.begin_step"
)
_UNKNOWN = Traits()


def check_batch(
    split: Split, x: Inputs, y: Target, generator: torch.Generator | None = None, *, tangents: bool = True
) -> None:
    """Validate a batch before any computation, for estimators without support for dropout and batch statistics.

    Takes the arguments of :func:`begin_step`, and raises if the trunk draws random numbers or mixes samples.

    Raises:
        SplitError: Listing every problem.
    """
    require_split(split)
    if skip_checks():
        return
    found = mode_problems(split.trunk) or ([_RANDOM] if _traits(split, x).random else [])
    begin_step(split, x, y, generator, tangents=tangents, further=found)


def begin_step(
    split: Split,
    x: Inputs,
    y: Target,
    generator: torch.Generator | None = None,
    *,
    tangents: bool = True,
    micro_batch: int | None = None,
    reverse: bool = False,
    further: Sequence[str] = (),
) -> Split:
    """Validate a batch before any computation, and fix the random numbers of the step.

    The first batch of a split, and the first after modules have changed between training and evaluation mode, also
    validates that the trunk is a function of its parameters and that trunk and head compute the model's outputs.

    Args:
        split: The network.
        x: Inputs.
        y: Target.
        generator: Source of randomness, if the estimator or the trunk draws.
        tangents: Whether the estimator perturbs the trunk's parameters.
        micro_batch: Rows per part of the batch; ``None`` for the whole batch.
        reverse: Whether the estimator makes a backward pass through the trunk, which runs its hooks.
        further: Problems that the estimator has found by itself.

    Returns:
        The split for this step: its passes draw the same random numbers. Use it in place of ``split``.

    Raises:
        SplitError: Listing every problem.
    """
    require_split(split)
    if skip_checks():
        return split
    split = split.at_present(x)
    found = [*further, *mode_problems(split.head), *table_problems(split, tangents)]
    found += batch_problems(split, x, y, generator)
    if not found:
        found += micro_batch_problems(split, y, micro_batch)
    if found:
        raise SplitError(found + _further_problems(split, x, y))
    part, target = next(parts(x, y, micro_batch))
    if not split.check or _traits(split, part) is not _UNKNOWN:
        split = split.for_step(part, generator)
    with _explained_part(split, x, micro_batch):
        split.validate_once(FIRST_BATCH, lambda: _first_use_problems(split, part))
    if tangents and not isinstance(split.trunk, ForwardOnlyTrunk):
        split.validate_once(LOOKUPS, lambda: lookup_problems(split, part))
    if not isinstance(split.trunk, ForwardOnlyTrunk):
        divided = micro_batch is not None and micro_batch < y.shape[0]
        split.validate_once((ROWS, divided), lambda: mixing_problems(split, part, target, divided=divided))
    hooks = head_hooks(split.head)
    if hooks:
        split.validate_once(hooks, lambda: hook_problems(split, part))
    if not reverse and not isinstance(split.trunk, ForwardOnlyTrunk):
        split.validate_once(HOOKS, lambda: warn_of_hooks(split, part))
    return split


@contextmanager
def _explained_part(split: Split, x: Inputs, micro_batch: int | None) -> Iterator[None]:
    """Explain the error of a trunk that runs on a whole batch and not on a part of it."""
    try:
        yield
    except RuntimeError as error:
        if micro_batch is None:
            raise
        try:
            split.h(x)
        except Exception:
            raise error from None
        words = f"the trunk runs on the whole batch and not on {micro_batch} of its rows ({error})"
        raise SplitError([f"{words}: pass micro_batch=None"]) from error


def _traits(split: Split, x: Inputs) -> Traits:
    """Return the traits of a split; ``_UNKNOWN`` if its pass fails: the validation of the first batch explains why."""
    try:
        return split.traits(x)
    except SplitError:
        raise
    except Exception:
        return _UNKNOWN


def batch_problems(split: Split, x: Inputs, y: object, generator: object) -> list[str]:
    """List the problems of network, inputs, target and generator that show without running the network."""
    found = split.name_problems()
    if not split.trained_params():
        found.append("no parameter requires a gradient: set requires_grad on what is to be trained")
    if found:
        return found
    found = _tensor_problems(split, x, y)
    device = next(iter(split.trained_params().values())).device
    if not isinstance(generator, torch.Generator | None):
        found.append(f"the generator is {generator!r}: use torch.Generator({device.type!r}).manual_seed(0)")
    elif generator is not None and generator.device.type != device.type:
        found.append(
            f"the generator is on {generator.device}, the parameters on {device}: use torch.Generator({device.type!r})"
        )
    return found


def check_h(split: Split, h: Tensor, y: Target) -> None:
    """Validate h against the head and the target.

    Args:
        split: The network.
        h: Representation of the batch or of a part of it.
        y: Target of the whole batch.

    Raises:
        SplitError: If h does not fit the head or the target.
        NonFiniteError: If h is not finite.
    """
    if skip_checks():
        return
    raise_if(split.head.problems(h, y))
    _require_finite(h, "h")


def check_finite(h: Tensor) -> None:
    """Raise :class:`NonFiniteError` if h is not finite."""
    if not skip_checks():
        _require_finite(h, "h")


def check_loss(loss: Tensor, scores: Tensor | None = None) -> None:
    """Raise :class:`NonFiniteError` if the loss or a score is not finite."""
    if not skip_checks():
        _require_finite(loss, "the loss")
        if scores is not None:
            _require_finite(scores, "a score <u, J v>")


def check_gradients(norms: Mapping[str, Tensor]) -> None:
    """Raise :class:`NonFiniteError` if the norm of a gradient is not finite, which is as narrow as the parameters."""
    if not skip_checks() and not bool(torch.stack(list(norms.values())).isfinite().all()):
        names = shorten([name for name, size in norms.items() if not bool(size.isfinite())])
        words = "is not finite though the loss is: it does not fit the parameters' dtype, or learned maps have diverged"
        raise NonFiniteError([f"a gradient ({names}) {words}. Use bfloat16 or float32, or a lower rate of the maps"])


def _tensor_problems(split: Split, x: Inputs, y: object) -> list[str]:
    if not isinstance(y, Tensor):
        return [f"the target is a {type(y).__name__}, not a tensor: use torch.as_tensor(target)"]
    found = _container_problems(x)
    if found:
        return found
    param = next(iter(split.trained_params().values()))
    arrays = [t for t in pytree.tree_leaves(x) if isinstance(t, Tensor) or has_rows(t)]
    tensors = [t for t in arrays if isinstance(t, Tensor)]
    if len(tensors) < len(arrays) and not isinstance(split.trunk, ForwardOnlyTrunk):
        found.append("the inputs contain an array instead of a tensor: use torch.as_tensor(x)")
    if any(len(t.shape) == 0 for t in (*arrays, y)):
        what = "the target" if y.ndim == 0 else "an input"
        found.append(f"{what} is a single number without rows: store constants in the trunk, as buffers")
    elif any(t.shape[0] == 0 for t in (*arrays, y)):
        found.append("the batch is empty: pass at least one row")
    elif arrays and len({t.shape[0] for t in (*arrays, y)}) > 1:
        sizes = ", ".join(str(t.shape[0]) for t in (*arrays, y))
        cures = (
            "pad sequences of different lengths, and store inputs without rows in the trunk, as buffers or in a closure"
        )
        advice = f"; {cures}" if len(arrays) > 1 else ""
        found.append(f"inputs and target have different numbers of rows ({sizes}): they must match{advice}")
    strangers = {str(t.device) for t in (*tensors, y) if t.device != param.device}
    if param.is_meta:
        found.append(
            "the parameters are on the meta device and hold no values: use model.to_empty(device=...) and load"
        )
    elif strangers:
        found.append(f"the batch is on {', '.join(sorted(strangers))}, the parameters on {param.device}: move one")
    held = {p.dtype for p in split.all_trunk_params().values()} or {param.dtype}
    dtypes = {str(t.dtype) for t in tensors if t.is_floating_point() and t.dtype not in held}
    if dtypes:
        listed = ", ".join(sorted(map(str, held)))
        found.append(f"inputs are {', '.join(sorted(dtypes))}, the parameters {listed}: cast one of them")
    return found


def _container_problems(x: object) -> list[str]:
    if isinstance(x, list):
        return ["the inputs are a list: pass a tuple of positional arguments, a dict of keyword arguments, or a tensor"]
    if any(isinstance(t, Tensor) and t.is_nested for t in pytree.tree_leaves(x)):
        return ["an input is a nested tensor, which most operators do not take: use x.to_padded_tensor(0.0) and a mask"]
    if isinstance(x, PackedSequence):
        return [
            "the inputs are a packed sequence, whose rows are not samples: pass padded sequences and their lengths,"
            " (x, lengths), and mask the padding in the trunk"
        ]
    return []


def _further_problems(split: Split, x: Inputs, y: object) -> list[str]:
    """List further problems of h and the target, as far as the problems found so far allow."""
    head = split.head
    if not isinstance(y, Tensor):
        return []
    try:
        with preserved(split.trunk), same_parameters([split.trunk]):
            return head.problems(split.h(x), y)
    except Exception:  # the problems already found may keep h from being computed
        pass
    return [] if head.out_features is None else head.output_loss.value_problems(head.out_features, y)


def _first_use_problems(split: Split, x: Inputs) -> list[str]:
    if isinstance(split.trunk, ForwardOnlyTrunk):
        return []  # hardware may be noisy, so that two runs differ
    copies = {name: p.detach().clone() for name, p in split.all_trunk_params().items()}
    try:
        with torch.enable_grad():  # builds a graph only of parameters that the copies do not replace
            h: object = without_graph(split, x)(copies)
    except SplitError:
        raise
    except Exception as error:
        problem = dtype_problem(error, split, x) or split.disagreement(x)
        if problem is None:
            raise
        return [problem]
    written = [name for name, p in copies.items() if p._version > 0]
    if written:
        return [f"the trunk writes to its parameters {', '.join(written)} in place: compute new tensors instead"]
    if not isinstance(h, Tensor):
        return [split.disagreement(x) or f"the trunk returns a {type(h).__name__}, not a tensor: return h alone"]
    elsewhere = _read_elsewhere(split, h)
    if elsewhere:
        return [
            split.disagreement(x)
            or f"the trunk reads {shorten(elsewhere)} from elsewhere than a module's attribute, such as a list, a"
            " closure or a stored result, where an estimate cannot replace them: read parameters in forward() as"
            " attributes of the module that registers them"
        ]
    sources = _traits(split, x).foreign
    # a draw that decides whether to skip a layer may come out the same twice
    if not all(_same(h, split.h(x)) for _ in range(8 if sources else 1)):
        return [_changing(sources)]
    # the outputs of other heads may be large, and are a function of h
    opaque = split.head.out_features is None or next(split.head.buffers(), None) is not None
    if opaque and draws(split.head, h):
        return ["the head draws random numbers, as F.dropout does in training mode: call .eval() on it"]
    problem = split.disagreement(x)
    return [] if problem is None else [problem]


def _same(h: Tensor, again: Tensor) -> bool:
    return h.shape == again.shape and torch.allclose(h, again, rtol=1e-4, atol=1e-6, equal_nan=True)


def _changing(sources: Sequence[str]) -> str:
    """Word the problem of a trunk that returns another h for the same inputs."""
    words = "the trunk returns another h for the same inputs, so that h and J·v would come from different functions"
    if sources:
        return (
            f"{words}: it draws random numbers from {' and '.join(sources)}. Draw them from torch's global generators,"
            " whose state a step fixes, switch them off (such as apply_spec_augment=False in the config of a speech"
            " model of transformers), or call .eval() on the model"
        )
    return (
        f"{words}: it is random, or its state lies elsewhere than in attributes and buffers of modules. Draw random"
        " numbers from torch's global generators, whose state a step fixes, and hold state in buffers"
    )


def _read_elsewhere(split: Split, h: Tensor) -> list[str]:
    """Return the trained parameters that h depends on although copies took the place of all of the trunk's."""
    if not h.requires_grad:
        return []
    trained = {name: p for name, p in split.model.named_parameters() if p.requires_grad}
    total = h.abs().sum() if h.is_complex() else h.sum()
    try:
        grads = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
    except RuntimeError:  # a graph of an earlier pass
        return ["parameters"]
    return [name for name, g in zip(trained, grads, strict=True) if g is not None]


def _require_finite(value: Tensor, what: str) -> None:
    if not bool(torch.isfinite(value).all()):
        raise NonFiniteError(
            [f"{what} is not finite: check the inputs, or lower the learning rate or the trunk step scale rho"]
        )
