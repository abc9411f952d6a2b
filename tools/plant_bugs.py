"""Plants one-line bugs in a copy of the package, one at a time, and demands that the tests notice each of them.

A suite that stays green with a sign turned round, a 1/K lost, a stale u or a tangent reused proves nothing. Every bug
names the quick tests that should catch it; they must pass on the untouched copy and fail on the spoilt one.

    python tools/plant_bugs.py            # all bugs
    python tools/plant_bugs.py sign tied  # those whose name contains one of the words
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "splitfg"
TESTS_FAILED = 1  # pytest's exit code; others mean that nothing was really run

GIVEN = "tests/oracle/test_estimator_formulas.py::TestGivenTangents"
BASIS = "tests/oracle/test_estimators.py::TestFullBasis"
PARTS = "tests/oracle/test_estimator_formulas.py::TestParts"
HEADS = "tests/oracle/test_heads.py"
CONTRACT = "tests/contract/test_estimator_contract.py"
MEMORY = "tests/contract/test_no_backward.py::TestMemory"
LAWS = "tests/statistical/test_tangent_laws.py"
TRAINING = "tests/unit/test_training.py"
PULLS = "tests/oracle/test_pulls.py"
SEARCH = "tests/unit/test_line_search.py"
RELAYED = "tests/oracle/test_learned_feedback.py::test_relayed_feedback_becomes_the_gradient"


@dataclass(frozen=True)
class Bug:
    """One line, spoilt: ``old`` occurs once in the file and becomes ``new``."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The file in the repository."""
        return PACKAGE / self.file

    def spoilt(self) -> str:
        """The file's text with the bug in it."""
        text = self.path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise SystemExit(f"{self.name}: {self.old!r} occurs {text.count(self.old)} times in {self.file}, not once")
        return text.replace(self.old, self.new)


BUGS = (
    Bug(
        "sign of the score",
        "estimators/split_fg.py",
        "return widened(dh.flatten(1)) @ widened(u.flatten())",
        "return -widened(dh.flatten(1)) @ widened(u.flatten())",
        (f"{GIVEN}::test_mean_of_scores_on_tangents",),
    ),
    Bug(
        "lost 1/K",
        "estimators/_combine.py",
        "mean = self._sum.div_(self._source.count)",
        "mean = self._sum.clone()",
        (f"{GIVEN}::test_mean_of_scores_on_tangents",),
    ),
    Bug(
        "1/K of a chunk",
        "estimators/_combine.py",
        "mean = self._sum.div_(self._source.count)",
        "mean = self._sum.div_(self._source.chunk)",
        ("tests/oracle/test_estimator_formulas.py::TestChunks::test_same_estimate",),
    ),
    Bug(
        "stale u",
        "estimators/_head_pass.py",
        "return self._us[part]",
        "return self._us[0]",
        (f"{PARTS}::test_micro_batches_are_the_whole",),
    ),
    Bug(
        "lean: gradients of the last part only",
        "estimators/_head_pass.py",
        "for h, target in self._waiting if self._split.head_params() else ():",
        "for h, target in self._waiting[-1:] if self._split.head_params() else ():",
        (f"{PARTS}::test_lean_is_the_same",),
    ),
    Bug(
        "tangents copied on their way",
        "engines/_forward_mode.py",
        "tangents = {name: _with_own_storage(v) for name, v in tangents.items()}",
        "tangents = dict(tangents)",
        (f"{MEMORY}::test_tangents_and_sum_are_the_only_vectors_as_long_as_the_trunk",),
    ),
    Bug(
        "tangent reused across k",
        "tangents/_laws.py",
        "            row.normal_(generator=generator)\n        return rows\n",
        "            row.normal_(generator=generator)\n        return rows[:1].repeat(count, 1)\n",
        (f"{CONTRACT}::test_tangents_of_one_estimate_differ",),
    ),
    Bug(
        "tangents from the global generator",
        "tangents/_laws.py",
        "row.normal_(generator=generator)",
        "row.normal_()",
        (f"{CONTRACT}::test_same_generator_same_estimate",),
    ),
    Bug(
        "chunk drawn again from the wrong state",
        "tangents/_source.py",
        "generator.set_state(self._states[index])",
        "generator.set_state(self._states[0])",
        (f"{GIVEN}::test_projection_is_least_squares",),
    ),
    Bug(
        "all tangents at once whatever the chunk",
        "tangents/_source.py",
        "self.chunk = min(chunk or count, count)",
        "self.chunk = count",
        (f"{MEMORY}::test_one_tangent_at_a_time_is_flat_in_k",),
    ),
    Bug(
        "orthogonal tangents of length one",
        "tangents/_laws.py",
        "frame * float(layout.total**0.5)",
        "frame",
        (f"{BASIS}::test_split_fg_is_the_gradient[plain]",),
    ),
    Bug(
        "Rademacher tangents of zeros and ones",
        "tangents/_laws.py",
        "return rows.mul_(2).sub_(1)",
        "return rows",
        (f"{LAWS}::TestMoments::test_rademacher_is_signs",),
    ),
    Bug(
        "precision of conditioned tangents dropped",
        "estimators/_combine.py",
        "return mean if precision is None else mean.mul_(precision)",
        "return mean",
        ("tests/statistical/test_estimates.py::test_conditioned_split_fg",),
    ),
    Bug(
        "prediction not added back",
        "estimators/split_fg.py",
        "return flat if guess is None else flat + guess, torch.cat(scores)",
        "return flat, torch.cat(scores)",
        (f"{GIVEN}::test_prediction_is_a_control_variate",),
    ),
    Bug(
        "prediction not taken off the scores",
        "estimators/split_fg.py",
        "d if guess is None else d - (tangents @ guess).to(d.dtype)",
        "d",
        (f"{BASIS}::test_prediction_is_added_back_exactly",),
    ),
    Bug(
        "each part divided by its own normaliser",
        "estimators/_head_pass.py",
        "part = self._split.head(h, target, self._normaliser)",
        "part = self._split.head(h, target)",
        (f"{PARTS}::test_micro_batches_are_the_whole",),
    ),
    Bug(
        "head's bias gradient a mean",
        "heads/_linear.py",
        "delta.sum(dim=0)",
        "delta.mean(dim=0)",
        (f"{HEADS}::test_squared_error_head_is_autograd",),
    ),
    Bug(
        "factored head pulled back from the wrong input",
        "heads/_linear.py",
        "slice(0, weight.shape[0]), pulled, read[i])",
        "slice(0, weight.shape[0]), pulled, read[i].flip(0))",
        (f"{HEADS}::test_squared_error_head_is_autograd",),
    ),
    Bug(
        "smoothing not divided by the classes",
        "heads/_losses.py",
        "weights * (self.label_smoothing / width)",
        "weights * self.label_smoothing",
        (f"{HEADS}::test_cross_entropy_head_is_autograd",),
    ),
    Bug(
        "softmax over the last block of columns alone",
        "heads/_losses.py",
        "total if statistics is None else total + statistics[1] * (statistics[0] - peak).exp()",
        "total",
        (f"{HEADS}::test_cross_entropy_head_is_autograd",),
    ),
    Bug(
        "label counted from the block's own first column",
        "heads/_losses.py",
        "column = labels.label - first",
        "column = labels.label",
        (f"{HEADS}::test_cross_entropy_head_is_autograd",),
    ),
    Bug(
        "tied table left out under INCLUDE",
        "splitting/_split.py",
        "[Role.TIED] if self.tied is Tied.INCLUDE else []",
        "[]",
        (f"{BASIS}::test_tied_table",),
    ),
    Bug(
        "tied table's lookup differentiated under EXCLUDE",
        "splitting/_split.py",
        "for name, p in params.items() if name not in excluded",
        "for name, p in params.items()",
        (f"{BASIS}::test_tied_table",),
    ),
    Bug(
        "central difference over half its width",
        "engines/_finite_difference.py",
        "/ (2 * e)",
        "/ e",
        ("tests/oracle/test_engines.py::test_differences_never_differentiate",),
    ),
    Bug(
        "parameters moved in place",
        "engines/_finite_difference.py",
        "name: p + step * tangent[name]",
        "name: p.add_(step * tangent[name])",
        (f"{CONTRACT}::test_is_pure",),
    ),
    Bug(
        "rho forgotten in the update",
        "training/_groups.py",
        '"lr": rho * lr, "rho": rho',
        '"lr": lr, "rho": rho',
        (f"{TRAINING}::TestRho::test_scales_the_update_and_nothing_else",),
    ),
    Bug(
        "clipping that also stretches",
        "training/_grads.py",
        ".clamp(max=1.0)",
        "",
        (f"{TRAINING}::TestClip::test_is_torchs",),
    ),
    Bug(
        "preconditioner without its bound",
        "training/_lagged.py",
        'return inverse.clamp(group["a_min"], group["a_max"])',
        "return inverse",
        ("tests/unit/test_optimizers.py::TestLaggedRMS",),
    ),
    Bug(
        "activities scored by the batch",
        "estimators/activity_fg.py",
        "d = (response * r).flatten(1 + rows).sum(-1) if r.ndim > rows else response * r",
        "d = (response * r).flatten(1).sum(-1).view(-1, *[1] * rows)",
        ("tests/statistical/test_estimates.py::test_activity_tangents",),
    ),
    Bug(
        "activities without 1/K",
        "estimators/activity_fg.py",
        "* e).sum(0) / self.K",
        "* e).sum(0)",
        ("tests/statistical/test_estimates.py::test_activity_tangents",),
    ),
    Bug(
        "pullback of a norm without its mean",
        "sites/_pullback.py",
        "    if not _is_rms(module):",
        "    if _is_rms(module) and True:",
        ("tests/oracle/test_feedback.py::test_norms_are_pulled_back_as_autograd_does",),
    ),
    Bug(
        "adapters of an ensemble mixed up",
        "models/tabm.py",
        "adapted, scaled = a * self.r, delta * self.s",
        "adapted, scaled = a, delta * self.s",
        ("tests/contract/test_activity_fg.py::test_layers_of_a_table_know_their_gradients",),
    ),
    Bug(
        "mean Jacobian the wrong way round",
        "feedback/_maps.py",
        "return r @ self._map(writer, r, features or r.shape[-1], r.shape[-1]).to(r.dtype).T",
        "return r @ self._map(writer, r, features or r.shape[-1], r.shape[-1]).to(r.dtype)",
        ("tests/oracle/test_feedback.py::TestMeanJacobian",),
    ),
    Bug(
        "ReLU at the top of the stream that lets everything through",
        "sites/_pullback.py",
        "return (u * (x > 0)).to(narrow), {}",
        "return u.to(narrow), {}",
        ("tests/oracle/test_feedback.py::test_norms_are_pulled_back_as_autograd_does",),
    ),
    Bug(
        "norms pulled back in a narrow dtype",
        "numerics.py",
        "return x.to(wide(x.dtype))",
        "return x",
        ("tests/oracle/test_feedback.py::test_narrow_norms_are_as_exact_as_their_dtype",),
    ),
    Bug(
        "traced passes that keep a buffer that was replaced",
        "compiled/_recorder.py",
        "dtypes, tuple(map(id, held)))",
        "dtypes)",
        ("tests/unit/test_captured.py::TestTheSameSteps::test_a_replaced_buffer_is_read",),
    ),
    Bug(
        "a stream whose writes need not add up",
        "sites/_validate.py",
        "if found or not path.strict:",
        "if True:",
        ("tests/contract/test_direct_path.py::TestRefusals",),
    ),
    Bug(
        "maps that do not take off what they predict",
        "feedback/_maps.py",
        "rest = rest - e @ self._map(name, e, e.shape[-1], response.shape[-1]).to(e.dtype)",
        "pass",
        ("tests/oracle/test_feedback.py::TestMeanJacobian",),
    ),
    Bug(
        "lookup of a tied table trained against its policy",
        "splitting/_split.py",
        "return {name: g for name, g in found.items() if name in wanted}",
        "return found",
        ("tests/oracle/test_feedback.py::test_a_tied_table_is_looked_up_untrained_under_exclude",),
    ),
    Bug(
        "shared modules called as if they were single",
        "calling/_call.py",
        "if not places:",
        "if places is not None:",
        ("tests/oracle/test_shared_modules.py::test_parameters_stay_what_they_were",),
    ),
    Bug(
        "learned feedback through a transposed map",
        "feedback/_routes.py",
        "return (delta @ m[0]).sum_to_size(a.shape)",
        "return (delta @ m[0].mT).sum_to_size(a.shape)",
        (f"{RELAYED}[relu-difference]",),
    ),
    Bug(
        "learned feedback past the gate of an activation",
        "sites/_rules.py",
        "return [(operation.input, delta * derivative(function, operation.input))]",
        "return [(operation.input, delta)]",
        (f"{RELAYED}[gelu-difference]",),
    ),
    Bug(
        "learned feedback with a stale map",
        "feedback/_routes.py",
        "self._maps[name].add_(step)",
        "self._maps[name].add_(0 * step)",
        (f"{RELAYED}[relu-difference]",),
    ),
    Bug(
        "captured rates deaf to schedulers",
        "training/capture.py",
        "if not self._scheduled:",
        "if self._scheduled:",
        ("tests/unit/test_captured_rates.py",),
    ),
    Bug(
        "a pull that stops one block early",
        "estimators/_pull_pass.py",
        "deltas = levels[: min(self._pulls, last)]",
        "deltas = levels[: max(1, min(self._pulls, last) - 1)]",
        (f"{PULLS}::TestAsManyPullsAsBlocks::test_are_backprop",),
    ),
    Bug(
        "writers learn from the prediction",
        "estimators/_pull_pass.py",
        "delta = levels[0 if self._own_block else -1]",
        "delta = levels[0]",
        (f"{PULLS}::test_one_pull_is_the_formula",),
    ),
    Bug(
        "own block learns from the sum",
        "estimators/_pull_pass.py",
        "delta = levels[0 if self._own_block else -1]",
        "delta = levels[-1] + 0 * levels[0] if not self._own_block else self._r",
        (f"{PULLS}::test_own_block_takes_the_prediction_for_the_writers_too",),
    ),
    Bug(
        "pulls not added to the stream",
        "estimators/_pull_pass.py",
        "below = [s + c for s, c in zip(levels[1:], shares, strict=True)] if self._path.residual else shares",
        "below = list(shares)",
        (f"{PULLS}::test_one_pull_is_the_formula",),
    ),
    Bug(
        "pooled prediction without its pixels",
        "estimators/_pull_pass.py",
        "return (found / x[0, 0].numel())",
        "return (found / 1)",
        (f"{PULLS}::test_pooled_maps_learn_the_gradient_summed_over_pixels",),
    ),
    Bug(
        "reverse passes inside blocks not counted",
        "estimators/_pull_pass.py",
        "self.reverse_passes += len(deltas) if to_input else 1",
        "self.reverse_passes += 0",
        ("tests/contract/test_parallel_pull.py::test_keeps_to_the_protocol",),
    ),
    Bug(
        "a block's graph kept until the end",
        "sites/_pulls.py",
        "found = _grads(y, wanted, deltas[-1], last=True)",
        "found = _grads(y, wanted, deltas[-1]); trunk.__dict__.setdefault('kept', []).append(y)",
        ("tests/contract/test_parallel_pull.py::test_no_more_is_saved_for_backward_than_one_block_needs",),
    ),
    Bug(
        "compiled blocks share their constants",
        "compiled/_pulls.py",
        "named = dict(zip(every, params, strict=True))",
        "named = {n: trunk.get_parameter(n).detach() for n in every}",
        ("tests/contract/test_parallel_pull.py::test_equal_blocks_share_compiled_code_and_none_of_their_values",),
    ),
    Bug(
        "line search: the step does not wait",
        "learners/line_search.py",
        "params[n].copy_(before[n])",
        "pass",
        (f"{SEARCH}::test_finds_the_step_that_minimises_a_quadratic",),
    ),
    Bug(
        "line search: curvature of a shortened step",
        "learners/line_search.py",
        "slope.curvature.clamp_min(0) / factor**2",
        "slope.curvature.clamp_min(0) / factor",
        (f"{SEARCH}::test_a_schedules_factor_does_not_change_rho",),
    ),
    Bug(
        "line search: no cap",
        "learners/line_search.py",
        "rho.clamp(0, self.cap)",
        "rho.clamp(0, None)",
        (f"{SEARCH}::test_scales_the_trunk_alone_and_keeps_to_its_cap",),
    ),
)


def main(words: list[str]) -> int:
    """Plant, test, report; 0 if every bug was caught."""
    chosen = [b for b in BUGS if not words or any(w in b.name for w in words)]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "splitfg"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        _require_sound(copy, sorted({t for b in chosen for t in b.tests}))
        survivors = [bug for bug in chosen if not _caught(bug, copy)]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} planted bugs were caught")
    return 1 if survivors else 0


def _require_sound(copy: Path, tests: list[str]) -> None:
    """The tests must be about the copy, and pass on it before anything is spoilt."""
    where = subprocess.run(
        [sys.executable, "-c", "import splitfg; print(splitfg.__file__)"],
        env=_environment(copy),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    if Path(where.strip()).parent.resolve() != copy.resolve():
        raise SystemExit(f"tests would import {where.strip()}, not the copy")
    if _pytest(copy, tests) != 0:
        raise SystemExit("the tests fail without any bug planted: mend that first")


def _caught(bug: Bug, copy: Path) -> bool:
    target, start = copy / bug.file, time.monotonic()
    sound = target.read_text(encoding="utf-8")
    target.write_text(bug.spoilt(), encoding="utf-8")
    caught = _pytest(copy, bug.tests) == TESTS_FAILED
    target.write_text(sound, encoding="utf-8")
    verdict = "caught" if caught else "SURVIVED"
    print(f"{verdict:<9} {time.monotonic() - start:5.1f} s  {bug.name:<52} {bug.file}", flush=True)
    return caught


def _pytest(copy: Path, tests: list[str] | tuple[str, ...]) -> int:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, env=_environment(copy), cwd=ROOT, capture_output=True).returncode


def _environment(copy: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(copy.parent), "PYTHONDONTWRITEBYTECODE": "1"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
