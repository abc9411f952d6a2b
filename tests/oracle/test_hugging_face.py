"""Models of transformers as they are: scores against <g, v> with g from autograd on the untouched model."""

import copy

import pytest
import torch
from _toolkit import generator, seeded
from torch import nn

from splitfg import (
    Backprop,
    CrossEntropy,
    ForwardGradient,
    ForwardMode,
    GradientLearner,
    LearnedFeedback,
    SplitError,
    SplitFG,
    split,
)
from splitfg.tangents import Gaussian, Layout

transformers = pytest.importorskip("transformers")
from splitfg_lab.compatibility import CASES, measure  # noqa: E402

REQUIRED = (
    *("GPT2LMHeadModel", "LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM", "BertForMaskedLM"),
    *("BertForSequenceClassification", "ViTForImageClassification", "T5ForConditionalGeneration"),
    *("WhisperForConditionalGeneration", "GPT2ForSequenceClassification", "LlamaForSequenceClassification"),
    *("BartForConditionalGeneration", "Gemma2ForCausalLM", "GraniteForCausalLM", "MambaForCausalLM"),
    *("BloomForCausalLM", "MixtralForCausalLM"),
)
BY_NAME = {case.name: case for case in CASES}
K = 2


@pytest.fixture(scope="module", params=REQUIRED)
def trained(request):
    """A split model, its batch, and loss and gradients of an untouched copy by autograd."""
    model, batch = BY_NAME[request.param].made()
    untouched = copy.deepcopy(model)
    loss = untouched(**batch).loss
    loss.backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in untouched.named_parameters()}
    return split(model), batch, loss.detach(), grads


def relative(scores, params, grads, seed=0):
    layout = Layout.of(params)
    g = layout.flatten(grads)
    return float((scores - Gaussian().draw(layout, K, generator(seed)) @ g).abs().max() / g.norm())


def distance(found, expected):
    names = [n for n in found if expected[n].any()]
    far = torch.stack([(found[n] - expected[n]).norm() for n in names]).norm()
    return float(far / torch.stack([expected[n].norm() for n in names]).norm())


def test_loss_and_backprop_are_the_models_own(trained):
    s, batch, loss, grads = trained
    x, y = s.unpack(batch)
    found = Backprop()(s, x, y)
    torch.testing.assert_close(found.loss.float(), loss.float())  # the models' own losses are float32
    assert all(torch.allclose(found.grads[n], grads[n], atol=1e-6, rtol=1e-4) for n in found.grads)


@pytest.mark.parametrize("chunk", [1, None])
def test_scores_of_split_fg(trained, chunk):
    s, batch, _, grads = trained
    x, y = s.unpack(batch)
    found = SplitFG(K=K, engine=ForwardMode(chunk=chunk))(s, x, y, generator=generator())
    head = s.named_head_grads(s.head(s.h(x), y).grads)
    trunk = {n: grads[n] - head.get(n, 0) for n in s.trunk_params()}
    assert relative(found.stats.scores, s.trunk_params(), trunk) <= 1e-5
    exact = [n for n in head if n not in trunk]
    assert all(torch.allclose(found.grads[n], grads[n], atol=1e-6, rtol=1e-4) for n in exact)


def test_scores_of_forward_gradient(trained):
    s, batch, _, grads = trained
    found = ForwardGradient(K=K)(s, *s.unpack(batch), generator=generator())
    assert relative(found.stats.scores, s.trained_params(), grads) <= 1e-5


def test_a_model_that_draws_random_numbers_in_evaluation_mode_too():
    """Wav2Vec2 draws for its layer drop; it also has weight norm."""
    cells = measure(BY_NAME["Wav2Vec2ForSequenceClassification"], ["SplitFG", "ForwardGradient", "Backprop"])
    assert {cell.status for cell in cells.values()} == {"exact"}


def test_learner_takes_the_batch_as_it_is(trained):
    s, batch, loss, _ = trained
    learner = GradientLearner(s, SplitFG(K=K), torch.optim.SGD(s.model.parameters(), lr=0.0))
    torch.testing.assert_close(learner.step(batch, generator=generator()).loss.float(), loss.float())
    torch.testing.assert_close(learner.predict(batch), s.model(**batch).logits)


@pytest.mark.parametrize(
    "trained",
    ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM", "WhisperForConditionalGeneration"],
    indirect=True,
)
def test_learned_feedback_learns_the_gradient(trained):
    """Relay's maps learn the transposed weights, so that the gradient becomes exact, here from one batch."""
    s, batch, _, grads = trained
    estimator, draws, (x, y) = LearnedFeedback(), generator(), s.unpack(batch)
    first = estimator(s, x, y, generator=draws)
    for _ in range(8):
        estimator.update_state(s, estimator(s, x, y, generator=draws))
    last = estimator(s, x, y, generator=draws)
    assert set(last.grads) == set(s.trained_params())
    assert distance(last.grads, grads) < 0.25
    assert distance(last.grads, grads) < 0.5 * distance(first.grads, grads)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForSequenceClassification"])
def test_scores_of_activities(name):
    """Σ_l <dL/dz_l, e_l> with autograd's gradients at the layers; learned positions write once for all samples."""
    cell = measure(BY_NAME[name], ["ActivityFG"])["ActivityFG"]
    assert cell.error <= 1e-5
    assert cell.reached is None


def test_padding_rows_get_the_gradient_of_backprop():
    model, batch = BY_NAME["MistralForCausalLM"].made()
    s = split(model)
    estimate = SplitFG(K=1)(s, *s.unpack(batch), generator=generator())
    table = estimate.grads["model.embed_tokens.weight"]
    assert model.get_input_embeddings().padding_idx == 0
    assert not table[0].any()
    assert table[1].any()


def test_next_tokens_are_the_targets():
    model, batch = BY_NAME["GPT2LMHeadModel"].made()
    x, y = split(model).unpack(batch)
    assert "labels" not in x
    assert torch.equal(y[:, :-1], batch["labels"][:, 1:])
    assert (y[:, -1] == -100).all()


def test_no_cache_of_keys_and_values():
    model, batch = BY_NAME["GPT2LMHeadModel"].made()
    used = []
    model.transformer.register_forward_hook(lambda *call: used.append(call[-1].past_key_values))
    s = split(model)
    s.h(s.unpack(batch)[0])
    assert model.config.use_cache
    assert set(used) == {None}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m.config, "problem_type", "regression"), "regression.*SquaredError"),
        (lambda m: m.train().gradient_checkpointing_enable(), "gradient_checkpointing_disable"),
    ],
)
def test_settings_that_a_split_cannot_follow(change, words):
    model, _ = BY_NAME["BertForSequenceClassification"].made()
    change(model)
    with pytest.raises(SplitError, match=words):
        split(model)


def test_a_model_without_a_head():
    model, _ = BY_NAME["BertForMaskedLM"].made()
    with pytest.raises(SplitError, match=r"BertModel has no head.*ForSequenceClassification"):
        split(model.bert)


class Pair(nn.Module):
    """Takes keywords and returns a dict."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, left, *, right, scale=1.0):
        return {"logits": self.last((self.first(left) + scale * self.second(right)).tanh()), "other": left}


@pytest.mark.parametrize("at", [None, "last"])
def test_any_model_with_keywords_and_an_output(at):
    model = seeded(Pair)
    x = {"left": torch.randn(5, 3), "right": torch.randn(5, 2), "scale": 2.0}
    y = torch.tensor([0, 1, 2, 0, 1])
    loss = nn.functional.cross_entropy(model(**x)["logits"], y)
    grads = dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, model.parameters()), strict=True))
    s = split(model, at, output=lambda returned: returned["logits"], example=x)
    for micro_batch in (None, 2):
        found = SplitFG(K=K, micro_batch=micro_batch)(s, x, y, generator=generator())
        assert relative(found.stats.scores, s.trunk_params(), grads) <= 1e-5
    found = GradientLearner(s, Backprop(), torch.optim.SGD(model.parameters(), lr=0.1)).estimate(
        {**x, "labels": y}, generator=generator()
    )
    assert all(torch.allclose(found.grads[n], grads[n], atol=1e-6) for n in grads)


def test_a_batch_without_target():
    s = split(seeded(Pair), output=lambda returned: returned["logits"])
    with pytest.raises(SplitError, match=r"no target.*'labels'"):
        s.unpack({"left": torch.randn(5, 3)})


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.head(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("chunk", [1, None])
def test_compiled_attention_has_tangents(chunk):
    s, estimator = split(seeded(Attention)), SplitFG(K=K, engine=ForwardMode(chunk=chunk))
    x, y = torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.long)
    expected = estimator(s, x, y, generator=generator())
    compiled = estimator.compiled(s, lambda f: torch.compile(f, fullgraph=True, dynamic=False, backend="aot_eager"))
    found = compiled[1](compiled[0], x, y, generator=generator())
    torch.testing.assert_close(found.stats.scores, expected.stats.scores)


def test_a_narrow_trunk_under_a_wide_head():
    """The model casts h itself; both parts keep their own dtype."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(6, 8).bfloat16(), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.body(x).tanh().float())

    model = seeded(Mixed)
    s, x, y = split(model), torch.randn(32, 6).bfloat16(), torch.arange(32) % 3
    nn.functional.cross_entropy(model(x), y).backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    found = SplitFG(K=K)(s, x, y, generator=generator())
    assert {n: g.dtype for n, g in found.grads.items()} == {n: p.dtype for n, p in model.named_parameters()}
    torch.testing.assert_close(found.grads["head.weight"], grads["head.weight"])
    assert relative(found.stats.scores, s.trunk_params(), grads) <= 0.02
    with pytest.raises(SplitError, match=r"one dtype.*SplitFG"):
        ForwardGradient(K=K)(s, x, y, generator=generator())


FURTHER = (
    *("XLNetLMHeadModel", "GPT2DoubleHeadsModel"),  # labels are not shifted; labels of three dimensions
    *("XLMRobertaForSequenceClassification, training", "T5ForSequenceClassification"),  # the head is not defined last
    *("SiglipForImageClassification", "LlavaForConditionalGeneration"),  # no base model by name; no use_cache by name
)


@pytest.mark.parametrize("name", FURTHER)
def test_unusual_heads_and_labels(name):
    cells = measure(BY_NAME[name], ["SplitFG", "ForwardGradient", "Backprop", "FrozenTrunk"])
    assert {cells[n].status for n in ("SplitFG", "ForwardGradient", "Backprop")} == {"exact"}


def test_losses_that_are_not_the_cross_entropy_of_the_logits():
    """CTC; a router's loss beside cross-entropy. Inputs and target, or a loss, choose cross-entropy."""
    model, batch = BY_NAME["Wav2Vec2ForCTC"].made()
    with pytest.raises(SplitError, match=r"Wav2Vec2ForCTC's own loss .* is not the cross-entropy"):
        split(model).unpack(batch)
    model, batch = BY_NAME["MixtralForCausalLM"].made()
    model.config.output_router_logits = True
    learner = GradientLearner(split(model), SplitFG(K), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(SplitError, match=r"own loss .* is not .* the cross-entropy of its logits: .* loss="):
        learner.step(batch, generator=generator())
    split(model, loss=CrossEntropy()).unpack(batch)
    split(model, check=False).unpack(batch)


def test_a_bias_that_is_added_after_the_last_layer():
    """The loss cannot be computed, since the cut is wrong: the message gives a cut that works."""
    settings = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.EsmConfig(**settings, intermediate_size=16, pad_token_id=0, mask_token_id=2)
    model, ids = seeded(lambda: transformers.EsmForMaskedLM(config)).eval(), torch.arange(3, 11).view(2, 4)
    batch = {"input_ids": ids, "labels": ids + 1}
    with pytest.raises(SplitError, match=r"another operation follows the last linear layer.* at='lm_head'"):
        split(model, tied="include").unpack(batch)
    s = split(model, at="lm_head", tied="include")
    x, y = s.unpack(batch)
    grads = Backprop()(s, x, y).grads
    model(**batch).loss.backward()
    expected = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    assert all(torch.allclose(g, expected[n], atol=1e-6) for n, g in grads.items())


def test_logits_that_the_config_multiplies():
    """Falcon-H1 scales its logits; its state-space layers are small here."""
    settings = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "lm_head_multiplier": 0.4}
    mamba = {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 4}
    config = transformers.FalconH1Config(**settings, **heads, **mamba)
    model, ids = seeded(lambda: transformers.FalconH1ForCausalLM(config)).eval(), torch.arange(3, 11).view(2, 4)
    s = split(model, tied="include")
    x, y = s.unpack({"input_ids": ids, "labels": ids})
    found = SplitFG(1)(s, x, y, generator=generator())
    torch.testing.assert_close(found.loss.float(), model(input_ids=ids, labels=ids).loss.float())


@pytest.mark.parametrize("name", ["GraniteMoeForCausalLM", "LlavaForConditionalGeneration"])
def test_no_cache_if_forward_does_not_name_the_option(name):
    model, batch = BY_NAME[name].made()
    found = []
    model.register_forward_hook(lambda *call: found.append(call[-1].past_key_values))
    s = split(model)
    s.disagreement(s.unpack(batch)[0])
    assert set(found) == {None}


def test_a_set_in_an_attribute_is_no_state():
    """Copies of a set may iterate in another order: Marian's passes change nothing."""
    model, batch = BY_NAME["MarianMTModel"].made()
    s = split(model)
    assert not s.traits(s.unpack(batch)[0]).stateful
