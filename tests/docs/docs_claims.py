"""Every number in the prose of the README and of ``docs/notes``, with the recorded value it must equal.

A claim is a piece of a page with ``{}`` for each number and as many values. ``fixed`` names pieces whose numbers are
settings of a protocol, not results; a test demands that no other number stands in the prose.
"""

from __future__ import annotations

from dataclasses import dataclass

from docs_networks import (
    BACKPROP_10,
    LEAN,
    LEANEST,
    TUNED_10,
    accuracies,
    bench_feedback,
    bench_ratio,
    cost,
    eager_ratio,
    epochs_s,
    frozen_torch,
    image_cost,
    image_mib,
    jump,
    ladder_mib,
    layer_mib,
    mean_top1,
    mib,
    over_frozen,
    over_tuned,
    paper_ppl,
    paper_share,
    peak,
    ppl,
    seeds,
    share,
    step_ratio,
    steps_of,
    top1,
    toy,
)
from docs_records import Value, recorded, reports, runs_of
from docs_tabular import (
    CLASSES,
    LOCAL,
    REGRESSION,
    TANGENT,
    above,
    behind,
    best_at_one,
    covertype_leads,
    diamond_folds,
    diamond_other_seeds,
    diamond_rmse,
    future_gain,
    gains,
    gap_closed,
    holm_p,
    memory,
    rows_of,
    saved,
    searches_at_least_as_good,
    step_rmse,
)

from splitfg_lab.experiments.images import EXPERIMENT as IMAGES
from splitfg_lab.experiments.tabular._sets import DATA

PULLED = ("pull-maps-rho0.1", "pull2-maps-rho0.1", "pull4-maps-rho0.1")


@dataclass(frozen=True)
class Claim:
    """A piece of prose, and the values of its numbers in order."""

    text: str
    values: tuple[Value, ...] = ()


def claim(text: str, *values: Value) -> Claim:
    assert text.count("{}") == len(values), text
    return Claim(text, values)


def fixed(*pieces: str) -> tuple[Claim, ...]:
    return tuple(Claim(piece) for piece in pieces)


CLAIMS: dict[str, tuple[Claim, ...]] = {
    "README.md": (
        *fixed("after 300 steps; means over five folds"),
        claim("at most {} points of accuracy and {} of RMSE behind backprop", behind("accuracy"), behind("rmse")),
        *fixed("a GPT with 4 blocks", "Over 60 epochs"),
        *fixed("Apache-2.0"),
    ),
    "docs/notes/toy_variance.md": (
        claim("{} single-tangent draws", lambda: recorded("toy_variance", "ce-c50", "draws")
              if "draws" in reports("toy_variance")[0].metrics else reports("toy_variance")[0].steps / 2),
        *fixed("seed 0"),
        claim("the relative errors are {}, {} and {}%", *(toy(c, "relative_error_percent") for c in (50, 500, 5000))),
        claim("standard errors of {}, {} and {}%", *(toy(c, "standard_error_percent") for c in (50, 500, 5000))),
        *fixed("N(0, 1/fan_in)"),
    ),
    "docs/notes/tabular.md": (
        *fixed("300 steps of Adam at 3e-3, batch 256, K = 8"),
        claim("here: {} of 98,050 rows.", rows_of("higgs_small")),
        claim("all four are {} to {} points better", lambda: covertype_leads()[0], lambda: covertype_leads()[-1]),
        claim("five folds has {} (the others {} to {})", lambda: diamond_folds()[-1], lambda: diamond_folds()[0],
              lambda: diamond_folds()[-2]),
        *fixed("41 standard deviations"),  # of the data, by hand
        claim("it has {} to {}. Two", lambda: diamond_other_seeds()[0], lambda: diamond_other_seeds()[-1]),
        *fixed("corrected for all 44 of them"),  # counted below
        *fixed("`ActivityFG` with K = 8", "p below 0.01"),
        claim("on Diamond {})", lambda: holm_p()[[d.name for d in DATA].index("diamond")]),
        claim("closes {} to {}% of the distance", lambda: gap_closed()[0], lambda: gap_closed()[-1]),
    ),
    "docs/notes/tabular_memory.md": (
        *fixed("300 steps of 256 rows, K = 8", "MemSave = 1 −"),
        claim("Split-FG's peak is {} to {} MiB lower", saved(min), saved(max)),
        *fixed("work spaces of 32 MiB"),
        claim("Split-FG peaks {} to {}% above", above(min), above(max)),
        claim("Split-FG takes {} to {} MiB", memory("split_fg_beyond_mib", min), memory("split_fg_beyond_mib", max)),
        claim("one of backprop {} to {}.", memory("backprop_beyond_mib", min), memory("backprop_beyond_mib", max)),
    ),
    "docs/notes/tabular_future.md": (
        claim("gains {} points on Otto and {} RMSE on California ({} points on Adult",
              future_gain("otto", "accuracy"), future_gain("california", "rmse"), future_gain("adult", "accuracy")),
    ),
    "docs/notes/tabular_step.md": (
        claim("in {} of 12 rows, the search of single steps in {} of 12.", searches_at_least_as_good("horizon"),
              searches_at_least_as_good("adaptive")),
        claim("an RMSE of {} with weight tangents, where the grid's best is {},",
              *step_rmse("diamond", "split_fg", "horizon", "grid")),
        claim("and {} with learned feedback, where it is {}.",
              *step_rmse("diamond", "learned_feedback", "horizon", "grid")),
        claim("in {} of 12 rows: an untuned run", best_at_one),
        *fixed("House 16H", "with K = 1 were run"),
    ),
    "docs/notes/images.md": (
        *fixed("ResNet-20, seed 0", "6,000 steps", "a 1x1 convolution", "60 epochs"),
        *fixed("91.8% on CIFAR-10 with another network ([arXiv:2606.06539])", "ICLR 2026"),  # quoted
        claim("two pulls reach {}%", top1("resnet20-pull2")),
        claim("(one: {}%; backprop: {}%)", top1("resnet20-pull"), top1("resnet20-backprop")),
        claim("one pull has {}%, three have {}%", top1("resnet20-skips1"), top1("resnet20-skips3")),
        claim("two pulls have {}%, four {}%, backprop {}%", top1("cifar10-skips2"), top1("cifar10-skips4"),
              top1("cifar10-backprop")),
        claim("nothing in reverse, {}%", top1("cifar10-learned")),
        claim("{}% and {}% with two seeds (the paper: {}%), and {}% as a mean over five ({}%).",
              *accuracies("flat-backprop", 2), 70.7, mean_top1("flat-split_fg"), 56.9),
        claim("has {}% over four ({}%), no worse", mean_top1("flat-split_fg-single"), 54.4),
        claim("Pure FG has {}% and {}% ({}%), ES {}% and {}% ({}%):", *accuracies("flat-pure_fg", 2), 22.6,
              *accuracies("flat-es", 2), 21.7),
        *fixed("at rho = 1 and with seed 0"),
        claim("the direct path has {}%, with learned maps {}%, and learned feedback {}%.", top1("flat-direct-rho1"),
              top1("flat-maps-rho1"), top1("flat-learned")),
        claim("it ends at {}%, below rho = 1 ({}%) and rho = 0.3 ({}%):", top1("flat-direct-adaptive"),
              top1("flat-direct-rho1"), top1("flat-direct-rho0.3")),
        *fixed("CIFAR-100", "(seed 0) comes out", "With L2 decay", "run with L2 decay only"),
        claim("backprop has {}% (the paper: {}%), the frozen trunk {}% ({}%)", top1("cifar100-backprop"), 65.6,
              top1("cifar100-frozen"), 34.8),
        claim("Split-FG {}% ({}%). The trunk's", top1("cifar100-split_fg"), 35.2),
        claim("as in the paper: {} points here, {} there",
              lambda: top1("cifar100-split_fg")() - top1("cifar100-frozen")(), 35.2 - 34.8),
        claim("The frozen trunk has {}% and {}% with two further seeds", *accuracies("cifar100-frozen", 3)[1:]),
        claim("backprop has {}%, the frozen trunk {}% and Split-FG {}%, less than", top1("cifar100-backprop-l2"),
              top1("cifar100-frozen-l2"), top1("cifar100-split_fg-l2")),
        claim("Clipped apart, Split-FG has {}% there", top1("cifar100-split_fg-l2-apart")),
        claim("on the whole ResNet-20 have {}% and {}% over the full budget (the paper: {}% and {}%)",
              top1("cifar10-pure_fg"), top1("cifar10-es"), 29.5, 29.3),
        claim("has {}% on CIFAR-10 (the paper: {}%)", top1("cifar10-predictive_coding"), 40.7),
        claim("Forward-Forward has {}% ({}%). The Hopfield memory has {}%", top1("cifar10-forward_forward"), 48.8,
              top1("cifar10-hopfield")),
    ),
    "docs/notes/images_cost.md": (
        claim("takes {} ms, so that the {} steps of 60 epochs take {} seconds", image_cost("ms/cifar10-split_fg"),
              lambda: IMAGES.preset("cifar10-split_fg").config.steps, epochs_s),
        claim("takes {} ms. Learned", image_cost("ms/flat-backprop")),
        claim("takes {} times as long as backprop on a", image_cost("ratio/resnet20-learned-layers")),
        claim("ResNet-20, by passes {} times, and two pulls {} times", image_cost("ratio/resnet20-learned"),
              image_cost("ratio/resnet20-pull2")),
        *fixed("TF32", "one H200"),
    ),
    "docs/notes/images_memory.md": (
        claim("one by one peaks at {} MiB on the flat head in a compiled step, backprop on the same network at {},",
              image_mib("split_fg-chunk1"), image_mib("flat-backprop")),
        claim("with checkpointing at {}.", image_mib("flat-checkpointed")),
        claim("whole ResNet-20 backprop peaks at {} MiB, with checkpointing at {}, learned feedback at {},",
              image_mib("backprop"), image_mib("backprop-checkpointed"), image_mib("learned-layers")),
        claim("pure FG one by one at {} and Split-FG at {}.", image_mib("pure_fg-chunk1"), image_mib("naive-chunk1")),
    ),
    "docs/notes/language.md": (
        *fixed("3.2 M trunk, 12.9 M head parameters", "B = 4, T = 128"),
        claim("a tenth of an epoch ({} steps", steps_of("frozen-10")),
        claim("after one epoch ({} steps)", steps_of("frozen")),
        *fixed("seed 0, H200, TF32", "rho = 1,", "rho = 0.1 is the best", "at rho = 0.1 and the 10% budget:"),
        claim("has {} at the 10% budget (the next", ppl(TUNED_10)),
        claim("has {}) and {} after the epoch (the paper: {})", ppl("backprop-adam-lr0.0015-rho0.3-10"),
              ppl("backprop-tuned"), paper_ppl("backprop-tuned")),
        claim("{} against {} after the epoch (the paper: {} against {})", ppl("split_fg-k4-rho1"), ppl("frozen"),
              paper_ppl("split_fg-k4-rho1"), paper_ppl("frozen")),
        claim("at K = 4 and rho = 0.1 it has {} after the epoch (the paper: {})", ppl("split_fg-k4-rho0.1"),
              paper_ppl("split_fg-k4-rho0.1")),
        claim("at K = 8 and rho = 0.03 {} ({})", ppl("split_fg-k8-rho0.03"), paper_ppl("split_fg-k8-rho0.03")),
        claim("At rho = 0.003 it is above its frozen control, {} against {} at the 10% budget",
              ppl("split_fg-k4-rho0.003-10"), ppl("frozen-10")),
        claim("is {} (the paper: {}) at rho = 0.1 and 10%", over_frozen("split_fg-k4-rho0.1-10", "frozen-10"),
              over_frozen("split_fg-k4-rho0.1-10", "frozen-10", paper_ppl)),
        claim("but {} ({}) over the epoch", over_frozen("split_fg-k4-rho0.1", "frozen"),
              over_frozen("split_fg-k4-rho0.1", "frozen", paper_ppl)),
        claim("carries {} of the gradient's energy (the paper: {})", share("init"), paper_share),
        claim("it carries {}.", share("init-torch")),
        claim("the frozen control has {} at the 10% budget", frozen_torch),
        claim("({} if its lookup", ppl("frozen-fixed-torch-10")),
        claim("rho = 0.003, 0.03 and 0.1 have {}, {} and {}:",
              *(ppl(f"split_fg-k4-rho{rho}-torch-10") for rho in ("0.003", "0.03", "0.1"))),
        claim("{} at K = 1, {} at K = 4, {} at K = 32 and {} at K = 128.",
              *(ppl(f"split_fg-k{K}-rho0.1-10") for K in (1, 4, 32, 128))),
        claim("{} at rho = 0.03. Beyond", ppl("light-rho0.03-10")),
        claim("{} at rho = 0.03 after the 10% budget, and {} with maps", ppl("direct-rho0.03-10"),
              ppl("direct-maps-rho0.03-10")),
        claim("own rate ({}), and above tuned backprop ({})", ppl(BACKPROP_10), ppl(TUNED_10)),
        claim("which have {} at the 10% budget, diverge", *seeds("maps-rho0.03-10", 1)),
        claim("and end at {}, above the frozen trunk's {}.", ppl("maps-rho0.03"), ppl("frozen")),
        *fixed("bounded to 4 they"),
        claim("between steps {} and {}, and end at {}.", *jump("maps-limited-rho0.03"), ppl("maps-limited-rho0.03")),
        *fixed("to the writers at rho = 0.03"),
        *fixed("gradient is clipped to 0.0001,", "does not help either: with 0.00001", "At the 10% budget this matters",
               "Split-FG at rho = 0.1 with trunk"),
        claim("beside the noise, has {}, and", ppl("frozen-clipped-10")),
        claim("head clipped apart {}.", ppl("split_fg-k4-rho0.1-apart-10")),
        claim("the frozen control has {} and Split-FG {}.", ppl("frozen-eps1e-05-10"), ppl("split_fg-eps1e-05-10")),
        claim("tuned backprop: {}, {} and {} with three seeds at the 10% budget", *seeds("learned-rho0.3-10", 3)),
        claim("same eps {}, {} and {}.", *seeds("tuned-rho0.3-10", 3)),
        claim("each layer by itself has {} with one seed, and at every fourth step by a pass {}.",
              ppl("learned-layers-rho0.3-10"), ppl("learned-every4-rho0.3-10")),
        claim("A captured step takes {} ms with layers by themselves and {} with passes, one of backprop {} ms",
              cost("ms/learned-layers"), cost("ms/learned"), cost("ms/backprop")),
        claim("at its peak {} MiB against {}.", peak("learned-layers-rho0.3-10"), peak("tuned-rho0.3-10")),
        claim("Over the whole epoch it has {}, with layers measured by themselves;", ppl("learned-layers-rho0.3")),
        *fixed("Adam with an eps of 1e-6 and rho = 0.3", "the usual eps of 1e-8", "12 blocks of width 768"),
        claim("has {}. With AdamW", ppl("tuned-rho0.3")),
        claim("backprop has {} there.", ppl("backprop-tuned")),
        claim("has {} at the 10% budget, two pulls have {}, {} and {}.",
              seeds("pull-maps-rho0.1-10", 1)[0], *seeds("pull2-maps-rho0.1-10", 3)),
        claim("one pull has {}, two have {} and four {}: {}%, {}% and {}% above", *map(ppl, PULLED),
              *map(over_tuned, PULLED)),
        claim("Four pulls take {} reverse passes", lambda: runs_of("language", PULLED[2])[0].block_backward or 0),
        claim("for {} steps at rho = 0.1: the", steps_of("large-frozen")),
        claim("frozen trunk has {}, maps to the writers {}, one pull {}, tuned backprop {} and two pulls {},",
              ppl("large-frozen"), *(ppl(f"large-{m}-rho0.1") for m in ("maps", "pull-maps", "tuned", "pull2-maps"))),
        claim("Split-FG that trains the lookup has {} instead of {}", ppl("split_fg-k4-rho0.1-other-lookup-10"),
              ppl("split_fg-k4-rho0.1-10")),
        claim("a direct path with maps that does not {} instead of {}.", ppl("direct-maps-rho0.03-other-lookup-10"),
              ppl("direct-maps-rho0.03-10")),
    ),
    "docs/notes/language_energy.md": (
        claim("carries {} of the gradient's energy at initialisation (the paper: {}), and {} with", share("init"),
              paper_share, share("init-torch")),
        *fixed("300 annealed steps"),
        claim("stays at {} with Split-FG and falls to {} with backprop", share("split_fg"), share("backprop")),
    ),
    "docs/notes/language_cost.md": (
        *fixed("the head has 2^24 logits"),
        claim("slowdown at K = 1, 2, 4 and 8, one by one, is {}, {}, {} and {} in eager code",
              *(eager_ratio(K) for K in (1, 2, 4, 8))),
        claim("saves {} MiB of backprop's {}: {} are the head's, which backprop can save as well, and {} the trunk's",
              lambda: mib("backprop") - mib(LEANEST), lambda: mib("backprop"),
              lambda: mib("backprop") - mib("backprop-chunked"), lambda: mib("backprop-chunked") - mib(LEANEST)),
        claim("take {} MiB in all of them", lambda: 3 * 4 * (3_192_320 + 12_916_049) / 2**20),
        *fixed("From 32 to 64 layers"),
        claim("At 16 blocks, compiled and captured, one pull peaks at {} MiB", ladder_mib("pull-maps")),
        claim("backprop at {}, with checkpointing and the chunked head at {}", ladder_mib("backprop"),
              ladder_mib("backprop-both")),
        claim("learned feedback at {} and maps to the writers at {}", ladder_mib("learned-layers"), ladder_mib("maps")),
        claim("costs Split-FG (lean, one by one) {} MiB", layer_mib(LEAN)),
        claim("costs plain backprop {} MiB", layer_mib("backprop")),
        claim("and {} MiB of activations", lambda: layer_mib("backprop")() - 0.8 * layer_mib(LEAN)()),  # type: ignore[operator]
        claim("checkpointed backprop {} MiB", layer_mib("backprop-both")),
        *fixed("x86_64, 2 threads"),
        claim("learned feedback takes {} times as long on GPT", bench_feedback("GPT")[0]),
        claim("{} times on the TabM-style model and {} times on a plain MLP", bench_feedback("TabM")[0],
              bench_feedback("MLP")[0]),
        claim("holds {}, {} and {} times the memory, of {}, {} and {} MiB",
              *(bench_feedback(case)[i] for i in (1, 2) for case in ("GPT", "TabM", "MLP"))),
        claim("closed-form head: {}, {} and {} times)", *(bench_feedback(case)[3] for case in ("GPT", "TabM", "MLP"))),
        claim("`small8` takes {} times as long at K = 1, {} at K = 4 and {} at K = 8",
              *(step_ratio("GPT", K) for K in (1, 4, 8))),
        claim("model {}, {} and {} times", *(step_ratio("TabM", K) for K in (1, 4, 8))),
        *fixed("`chunk=1`"),
        claim("holds {} times the memory whatever K is",
              bench_ratio("chunk", "peak_mib", "split_fg_k8_chunk1", "backprop")),
        claim("closed-form head: {})", bench_ratio("chunk", "peak_mib", "backprop_closed_head", "backprop")),
        claim("head takes {} times the time", bench_ratio("head", "ms", "block24", "autograd")),
        *fixed("with 2^20 of the 2^25 logits at once"),
        claim("`block`), {} times the time", bench_ratio("head", "ms", "block20", "autograd")),
    ),
}  # fmt: skip
RESULTS_IN_PROTOCOLS: dict[str, tuple[Claim, ...]] = {
    "src/splitfg_lab/experiments/tabular/README.md": (
        claim("are {} to {} points better than in the paper, in the same order",
              lambda: gains(TANGENT, ("covertype",))[0], lambda: gains(TANGENT, ("covertype",))[-1]),
        claim("an RMSE of {} on it.", lambda: diamond_rmse((0,))[0]),
        claim("it has {} to {}; these runs", lambda: diamond_rmse((1, 2, 3, 4))[0],
              lambda: diamond_rmse((1, 2, 3, 4))[-1]),
        claim("better than in the paper, by {} to {} points and {} to {} RMSE",
              lambda: gains(LOCAL, CLASSES)[0], lambda: gains(LOCAL, CLASSES)[-1],
              lambda: gains(LOCAL, REGRESSION)[0], lambda: gains(LOCAL, REGRESSION)[-1]),
    ),
}  # fmt: skip
"""Recorded numbers in protocols, whose other numbers are settings, or are marked as not recorded."""
