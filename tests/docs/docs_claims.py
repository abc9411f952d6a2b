"""Every number in the prose of the README and of ``docs/notes``, with the recorded value it must equal.

A claim is a piece of a page with ``{}`` for each number and as many values. ``fixed`` names pieces whose numbers are
settings of a protocol, not results; a test demands that no other number stands in the prose.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from docs_networks import (
    BACKPROP_10,
    FAST_SEARCHED,
    LEAN,
    LEANEST,
    MAPS,
    TUNED_10,
    behind_grid,
    bench_feedback,
    bench_ratio,
    best_top1,
    cost,
    eager_ratio,
    epochs_s,
    first_evaluation,
    frozen_torch,
    image_cost,
    image_mib,
    jump,
    ladder_mib,
    layer_mib,
    mean_ppl,
    mean_top1,
    mib,
    over_frozen,
    over_tuned,
    paper_ppl,
    paper_share,
    peak,
    ppl,
    searched,
    seeds,
    share,
    smallest_rho,
    spread,
    step_ratio,
    steps_of,
    top1,
    toy,
    trunk_gain,
)
from docs_records import Value, by_seed, last, recorded, reports, runs_of
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
    search_behind,
    searches_at_least_as_good,
    step_result,
)

from splitfg_lab.experiments.images import EXPERIMENT as IMAGES
from splitfg_lab.experiments.language._ladder import EPSILONS, epsilon
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
        *fixed("Adam's eps is 1e-8 for the frozen trunk and Split-FG, 1e-5 for maps and 1e-6 for the others.",
               "(`tied_share=0.1`)", "Adam at rho = 0.3;"),
        claim("learned feedback and backprop reach {} and {} after a tenth of an epoch, and backprop {} after one.",
              ppl("learned-eps1e-05-10"), ppl("backprop-eps1e-05-10"), ppl("backprop-eps1e-05")),
        *fixed("With 1e-5 and seed 0,"),
        claim("One pull of whole transformer blocks reaches {} after a tenth of an epoch and {} after one.",
              ppl("pull-fastmaps-blocks-rho0.1-10"), ppl("pull-fastmaps-blocks-rho0.1")),
        claim("On CIFAR-100 learned feedback has one seed, with which backprop reaches {}.", top1("cifar100-backprop")),
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
        claim("in {} of 12 rows. The", searches_at_least_as_good),
        claim("activity tangents, {}% worse (an accuracy of {}% where the grid's best is {}%),", search_behind(0),
              *step_result("otto", "activity_fg", "adaptive", "grid")),
        claim("and Split-FG, {}% worse ({}% and {}%),", search_behind(1),
              *step_result("otto", "split_fg", "adaptive", "grid")),
        claim("in {} of 12 rows: an untuned run", best_at_one),
        *fixed("with K = 1 were run"),
    ),
    "docs/notes/images.md": (
        *fixed("ResNet-20, seed 0", "6,000 steps", "a 1x1 convolution", "60 epochs"),
        *fixed("91.8% on CIFAR-10 with another network ([arXiv:2606.06539])", "ICLR 2026"),  # quoted
        claim("two pulls reach {}% after", top1("resnet20-pull2")),
        claim("(one: {}%; backprop: {}%)", top1("resnet20-pull"), top1("resnet20-backprop")),
        claim("one pull reaches {}% and three reach {}%", top1("resnet20-skips1"), top1("resnet20-skips3")),
        claim("two pulls reach {}%, four {}%, backprop {}% and", top1("cifar10-skips2"), top1("cifar10-skips4"),
              top1("cifar10-backprop")),
        claim("nothing in reverse, {}%", top1("cifar10-learned")),
        claim("ES differ by {} points; the paper's means are {} and {} points below our smallest.",
              lambda: max(spread(f"flat-{m}") for m in ("pure_fg", "es")),
              lambda: min(by_seed("images", "flat-pure_fg", "accuracy")) - 22.6,
              lambda: min(by_seed("images", "flat-es", "accuracy")) - 21.7),
        claim("head loses {} points against the factored one here and {} in the paper",
              lambda: mean_top1("flat-split_fg")() - mean_top1("flat-split_fg-single")(), 56.9 - 54.4),
        *fixed("with seed 0. The default search begins at rho = 1 with a calm of 1,000, the fast one at 0.3 with 100"),
        claim("whose rho falls to {} where", lambda: last("images", "flat-activity-adaptive", "rho")),
        *fixed("The 6,000-step runs on CIFAR-100 used L2 decay", "CIFAR-100.", "With L2 decay", "adding L2 decay before",
               "So L2 decay before", "L2 decay is", "whole ResNet-18"),
        claim("backprop reaches {}% ({}%), the frozen trunk {}% ({}%) and Split-FG {}% ({}%).",
              mean_top1("cifar100-backprop"), 65.6, mean_top1("cifar100-frozen"), 34.8,
              mean_top1("cifar100-split_fg"), 35.2),
        claim("frozen control is {} points here and {} in the paper",
              lambda: mean_top1("cifar100-split_fg")() - mean_top1("cifar100-frozen")(), 35.2 - 34.8),
        claim("to {}% with seed 0 (backprop: {}%).", top1("cifar100-learned"), top1("cifar100-backprop")),
        claim("Pure FG and ES reach {}% and {}%, chance ({}% both).", mean_top1("cifar100-pure_fg"),
              mean_top1("cifar100-es"), 1.2),
        claim("backprop reaches {}%, the frozen trunk {}% and Split-FG {}%.", top1("cifar100-backprop-l2"),
              top1("cifar100-frozen-l2"), top1("cifar100-split_fg-l2")),
        claim("Clipped apart, Split-FG reaches {}%.", top1("cifar100-split_fg-l2-apart")),
        claim("the frozen trunk reaches {}%, within {} points of the paper's, and Split-FG {}%, {} points above it",
              top1("cifar100-frozen-l2-unclipped"), 0.5, top1("cifar100-split_fg-l2-unclipped"),
              lambda: top1("cifar100-split_fg-l2-unclipped")() - 35.2),
        claim("whole ResNet-20 reach {}% (two seeds) and {}% (one) over the full budget (the paper: {}% and {}%)",
              mean_top1("cifar10-pure_fg"), mean_top1("cifar10-es"), 29.5, 29.3),
        claim("reaches {}% on CIFAR-10 (the paper: {}%)", mean_top1("cifar10-predictive_coding"), 40.7),
        claim("Forward-Forward reaches {}% ({}%). The Hopfield memory reaches {}%",
              mean_top1("cifar10-forward_forward"), 48.8, mean_top1("cifar10-hopfield")),
    ),
    "docs/notes/images_cost.md": (
        claim("takes {} ms, so that the {} steps of 60 epochs take {} seconds", image_cost("ms/cifar10-split_fg"),
              lambda: IMAGES.preset("cifar10-split_fg").config.steps, epochs_s),
        claim("({} for a whole run", lambda: min(run.wall_s for run in runs_of("images", "cifar10-split_fg"))),
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
        claim("rho = 0.1 has {} after the epoch (the paper: {}), rho = 0.03 has {} ({}), the frozen trunk {} ({}).",
              *(over_frozen(preset, "bigram", of) for preset in ("split_fg-k4-rho0.1", "split_fg-k4-rho0.03", "frozen")
                for of in (ppl, paper_ppl))),
        claim("carries {} of the gradient's energy (the paper: {})", share("init"), paper_share),
        claim("it carries {}.", share("init-torch")),
        claim("the frozen control has {} at the 10% budget", frozen_torch),
        claim("({} if its lookup", ppl("frozen-fixed-torch-10")),
        claim("rho = 0.003, 0.03 and 0.1 have {}, {} and {}:",
              *(ppl(f"split_fg-k4-rho{rho}-torch-10") for rho in ("0.003", "0.03", "0.1"))),
        claim("{} at K = 1, {} at K = 4, {} at K = 32 and {} at K = 128.",
              *(ppl(f"split_fg-k{K}-rho0.1-10") for K in (1, 4, 32, 128))),
        claim("{} at rho = 0.03. Beyond", ppl("light-rho0.03-10")),
        claim("{} at rho = 0.03 after the 10% budget with an eps of 1e-8 and {} with 1e-6.", ppl("direct-rho0.03-10"),
              ppl("direct-eps-rho0.03-10")),
        claim("improve it to {} with an eps of 1e-8 and {} with 1e-5.", ppl("direct-maps-rho0.03-10"),
              *seeds("maps-rho0.03-10", 1)),
        claim("own rate ({}), and above tuned backprop ({})", ppl(BACKPROP_10), ppl(TUNED_10)),
        claim("and end at {}, above the frozen trunk's {}.", ppl("maps-rho0.03"), ppl("frozen")),
        *fixed("(`DirectPath(tied_share=0.1)`)"),
        claim("do not diverge and reach {}:", ppl("maps-tied0.1-rho0.03")),
        claim("the small share costs {}%: {} instead of {}.",
              lambda: 100 * (ppl("maps-tied0.1-rho0.03-10")() / ppl("maps-rho0.03-10")() - 1),
              ppl("maps-tied0.1-rho0.03-10"), ppl("maps-rho0.03-10")),
        *fixed("bounded to 4, maps"),
        claim("between steps {} and {}, and end at {}.", *jump("maps-limited-rho0.03"), ppl("maps-limited-rho0.03")),
        *fixed("gradient is clipped to 0.0001,", "at the 10% budget with seed 0:",
               "At the 10% budget this matters",
               "Split-FG at rho = 0.1 with trunk"),
        claim("beside the noise, reaches {}, and", ppl("frozen-clipped-10")),
        claim("head clipped apart reaches {}.", ppl("split_fg-k4-rho0.1-apart-10")),
        claim("{}% of the gain over the frozen control remains ({} of {}),",
              lambda: 100 * trunk_gain("-apart")() / trunk_gain()(), trunk_gain("-apart"), trunk_gain()),
        claim("the gain over the frozen control is {}.", lambda: ppl("frozen")() - ppl("split_fg-k4-rho0.1")()),
        *fixed("use 1e-6 where not"),
        claim("with an eps of 1e-6 ({}) than with 1e-5 ({}).", ppl("tuned-rho0.3"), ppl("backprop-eps1e-05")),
        claim("tuned backprop: {}, {} and {} with three seeds at the 10% budget", *seeds("learned-rho0.3-10", 3)),
        claim("same eps {}, {} and {}.", *seeds("tuned-rho0.3-10", 3)),
        claim("each layer by itself has {}, {} and {}, and at every fourth step by a pass {}.",
              *seeds("learned-layers-rho0.3-10", 3), ppl("learned-every4-rho0.3-10")),
        claim("A captured step takes {} ms if layers are measured by themselves, {} ms if a second pass measures them,"
              " and {} ms with backprop", cost("ms/learned-layers"), cost("ms/learned"), cost("ms/backprop")),
        claim("Peak memory is {} MiB, and {} MiB for", peak("learned-layers-rho0.3-10"), peak("tuned-rho0.3-10")),
        claim("Over the whole epoch it has {}, with layers measured by themselves;", ppl("learned-layers-rho0.3")),
        *fixed("Adam with an eps of 1e-6 and rho = 0.3", "the usual eps of 1e-8", "12 blocks of width 768"),
        claim("has {}. With AdamW", ppl("tuned-rho0.3")),
        claim("backprop has {} there.", ppl("backprop-tuned")),
        claim("one pull has {} and two have {}; one", ppl("pull-maps-blocks-rho0.1-10"),
              ppl("pull2-maps-blocks-rho0.1-10")),
        claim("pull has {}, {} and {} if its maps follow three times faster, and {} with",
              *seeds("pull-fastmaps-blocks-rho0.1-10", 3), ppl("pull-attention-blocks-rho0.1-10")),
        claim("in place of r has {}, above the", ppl("noise-rho0.03-10")),
        claim("Random maps have {}, and {} with reverse mode", ppl("dfa-rho0.03-10"), ppl("own-random-rho0.03-10")),
        claim("feedback has {} without backprop anchors and {} with", ppl("grape-rho0.03-10"),
              ppl("grape-anchor10-rho0.03-10")),
        claim("have {}, with one score", ppl("activity-k8-rho0.01-10")),
        claim("has {}, {} and {} at the 10% budget, two pulls have {}, {} and {}.",
              *seeds("pull-maps-rho0.1-10", 3), *seeds("pull2-maps-rho0.1-10", 3)),
        claim("one pull has {}, two have {} and four {}: {}%, {}% and {}% above", *map(ppl, PULLED),
              *map(over_tuned, PULLED)),
        claim("One pull is {}% above backprop with the same optimizer after {}% of an epoch,",
              over_tuned(f"{PULLED[0]}-3", "-3"), 3),
        claim("{}% after {}% and {}% after the epoch;", over_tuned(f"{PULLED[0]}-10", "-10"), 10,
              over_tuned(PULLED[0])),
        claim("two pulls are {}%, {}% and {}% above it.", over_tuned(f"{PULLED[1]}-3", "-3"),
              over_tuned(f"{PULLED[1]}-10", "-10"), over_tuned(PULLED[1])),
        claim("After {}% four pulls ({}) and learned feedback ({}) are below backprop ({}).", 3, ppl(f"{PULLED[2]}-3"),
              ppl("learned-layers-rho0.3-3"), ppl("tuned-rho0.3-3")),
        claim("With one pull it is {}% behind: it ends at rho = {}, where {} is better,",
              lambda: 100 * (mean_ppl("pull-maps-adaptive-10") / mean_ppl("pull-maps-rho0.1-10") - 1),
              lambda: last("language", "pull-maps-adaptive-10", "rho"), 0.1),
        claim("falls to {} at step {}, and climbs", *smallest_rho("learned-adaptive-10")),
        claim("back slowly, to {}.", lambda: last("language", "learned-adaptive-10", "rho")),
        claim("of layers ({} for backprop) is", ppl("tuned-adaptive-groups-10")),
        *fixed("rho begins at 1", "backprop with seed 0 and", "which begins at 0.3", "rho climbs past 0.03"),
        claim("is about {}% behind", lambda: fmean(behind_grid(n, "adaptive-fast")() for n in FAST_SEARCHED)),  # type: ignore[misc,operator]
        claim("{} for Split-FG, {} for one pull, {} for learned feedback and {} for backprop. It fails",
              *(ppl(f"{name}-adaptive-fast-10") for name in FAST_SEARCHED)),
        claim("ends at {}. Activity", ppl("maps-adaptive-fast-10")),
        claim("have {}, {} and {} with three seeds; carried", *seeds("maps-rho0.03-10", 3)),
        claim("attention weights {}, with a falling rate {}, gated by cluster {}, and with a JVP at every fourth step"
              " only {}.", *(ppl(f"{name}-rho0.03-10") for name in MAPS)),
        claim("One pull at rho = 0.1 ({}, {} and {}) has {} with gated maps and {} with a falling rate,",
              *seeds("pull-maps-rho0.1-10", 3), ppl("pull-gated-rho0.1-10"), ppl("pull-annealed-rho0.1-10")),
        claim("two pulls ({}, {} and {}) have {} with a JVP", *seeds("pull2-maps-rho0.1-10", 3),
              ppl("pull2-maps-every4-rho0.1-10")),
        *fixed("cost of 2% or less", "gain less than 2%"),
        claim("AdamW reaches {} and backprop at rho = 0.1 {}.", ppl("tuned-adamw-10"), ppl("tuned-rho0.1-10")),
        claim("the faster maps one pull has {} after the epoch, {}% above.", ppl("pull-fastmaps-blocks-rho0.1"),
              over_tuned("pull-fastmaps-blocks-rho0.1")),
        claim("Four pulls have {} at the 10% budget.", ppl(f"{PULLED[2]}-10")),
        *fixed("trunk three times slower"),
        claim("the first evaluation, at step {}, has {}, the last {}.", *reversed(first_evaluation("maps-rho0.01")),
              ppl("maps-rho0.01")),
        claim("They take {} reverse passes", lambda: runs_of("language", PULLED[2])[0].block_backward or 0),
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
        claim("At 16 blocks, compiled and captured, one pull peaks at {} MiB, of whole transformer blocks at {}",
              ladder_mib("pull-maps"), ladder_mib("pull-maps-blocks")),
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

FLAT = {
    "Backprop": ("backprop", 70.7),
    "Learned feedback, measured by a second pass": ("learned", None),
    "One pull, reverse mode inside a block only": ("pull", None),
    "Direct path": ("direct-rho1", None),
    "Direct path with learned maps": ("maps-rho1", None),
    **{f"Split-FG, K = {K}": (f"k{K}-rho1", None) for K in (256, 64, 16)},
    "Split-FG, K = 4": ("split_fg", 56.9),
    "Activity tangents, K = 8": ("activity-rho1", None),
    "Split-FG, K = 4, single linear head": ("split_fg-single", 54.4),
    "Frozen trunk": ("frozen", None),
    "Split-FG, K = 1": ("k1-rho1", None),
    "ES": ("es", 21.7),
    "Pure FG": ("pure_fg", 22.6),
}
"""The flat head: preset and the paper's number."""
FLAT_RHOS = ("1", "0.3", "0.1", "0.03")
FLAT_SEARCHED = {
    "Split-FG, K = 4": ("split_fg", best_top1("flat-split_fg", *(f"flat-k4-rho{r}" for r in FLAT_RHOS[1:]))),
    "Split-FG, K = 64": ("k64", best_top1(*(f"flat-k64-rho{r}" for r in FLAT_RHOS[:3]))),
    "Direct path": ("direct", best_top1(*(f"flat-direct-rho{r}" for r in FLAT_RHOS))),
    "Learned feedback": ("learned", top1("flat-learned")),
    "Activity tangents, K = 8": ("activity", best_top1(*(f"flat-activity-rho{r}" for r in FLAT_RHOS))),
}
"""The line search on the flat head: preset and the best step scale."""


def _flat(name: str, paper: float | None) -> tuple[Value, ...]:
    preset = f"flat-{name}"
    return (lambda: len(runs_of("images", preset)), mean_top1(preset), *([] if paper is None else [paper]))


def _flat_searched(name: str, best: Value) -> tuple[Value, ...]:
    presets = [p for p in (f"flat-{name}-adaptive", f"flat-{name}-adaptive-fast") if runs_of("images", p)]
    return (*map(top1, presets), best)


TABLES: dict[str, tuple[dict[str, tuple[Value, ...]], ...]] = {
    "docs/notes/images.md": (
        {label: _flat(*found) for label, found in FLAT.items()},
        {label: _flat_searched(*found) for label, found in FLAT_SEARCHED.items()},
    ),
    "docs/notes/language.md": (
        {
            "Frozen trunk": tuple(ppl(epsilon("frozen", eps)) for eps in EPSILONS),
            "Split-FG, K = 4, rho = 0.1": tuple(ppl(epsilon("split_fg", eps)) for eps in EPSILONS),
            "Learned feedback, rho = 0.3": (*seeds(epsilon("learned", 1e-6), 1), ppl(epsilon("learned", 1e-5))),
            "Backprop, rho = 0.3": tuple(seeds(epsilon("backprop", eps), 1)[0] for eps in EPSILONS),
        },
        {
            "Learned feedback": searched("learned", 2),
            "Maps to the writers": searched("maps"),
            "Backprop": searched("tuned", 2),
            "Split-FG, K = 4": searched("split_fg-k4"),
            "Maps, one pull": searched("pull-maps", 3),
        },
    ),
}
"""The tables of notes: by row, the values of its numbers in order."""
