"""Adapters of peft: scores against <g, v> with g from autograd, and nothing more of a frozen head than u."""

import copy

import pytest
import torch
from _state import state_of
from _toolkit import generator
from torch.utils.flop_counter import FlopCounterMode

from splitfg import (
    ActivityFG,
    Backprop,
    CheckpointedBackprop,
    ForwardGradient,
    LearnedFeedback,
    SplitError,
    SplitFG,
    split,
)
from splitfg.tangents import Gaussian, Layout

peft = pytest.importorskip("peft")
from splitfg_lab.compatibility import CASES  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
FROZEN_HEAD, ADAPTED_HEAD = "GPT2LMHeadModel, LoRA", "LlamaForCausalLM, LoRA, lm_head too"


def made(name, dtype=torch.float32):
    """A model with adapters, its batch, and the gradient of an untouched copy by autograd."""
    model, batch = next(case for case in CASES if case.name == name).made()
    for p in model.parameters():
        p.data = p.data.to(torch.float32 if p.requires_grad else dtype)
    untouched = copy.deepcopy(model)
    untouched(**batch).loss.backward()
    return model, batch, {n: p.grad for n, p in untouched.named_parameters() if p.requires_grad}


def relative(scores, params, grads):
    layout = Layout.of(params)
    g = layout.flatten(grads)
    return float((scores - Gaussian().draw(layout, 2, generator()) @ g).abs().max() / g.norm())


@pytest.mark.parametrize("name", [FROZEN_HEAD, ADAPTED_HEAD])
def test_scores_of_adapters(name):
    model, batch, grads = made(name)
    s = split(model)
    x, y = s.unpack(batch)
    assert set(s.trained_params()) == set(grads)
    assert all("lora" in n for n in grads)
    assert relative(ForwardGradient(K=2)(s, x, y, generator=generator()).stats.scores, grads, grads) <= 1e-5
    found = SplitFG(K=2)(s, x, y, generator=generator())
    assert set(found.grads) == set(grads)
    assert relative(found.stats.scores, s.trunk_params(), grads) <= 1e-5


def test_adapters_of_the_head_are_exact():
    model, batch, grads = made(ADAPTED_HEAD)
    s = split(model)
    x, y = s.unpack(batch)
    head = [n for n in grads if "lm_head" in n]
    assert len(head) == 2
    assert set(s.head_params()) == set(head)
    for estimator in (SplitFG(K=1), SplitFG(K=1, lean=True), Backprop()):
        found = estimator(s, x, y, generator=generator()).grads
        for n in head:
            torch.testing.assert_close(found[n], grads[n], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("lean", [False, True])
def test_a_frozen_head_costs_its_outputs_and_u(lean):
    """Two products with the vocabulary table: outputs and u; a trained table would need a third."""
    model, batch, _ = made(FROZEN_HEAD)
    s = split(model)
    x, y = s.unpack(batch)
    h = s.h(x)
    rows, width, outputs = y.numel(), h.shape[-1], s.head.out_features
    with FlopCounterMode(display=False) as counter:
        assert s.head(h, y).grads == {}
    assert counter.get_total_flops() == 2 * (2 * rows * width * outputs)
    assert all("lora" in n for n in SplitFG(K=1, lean=lean)(s, x, y, generator=generator()).grads)


def test_a_narrow_base_with_wide_adapters():
    """bfloat16 rounds to 3 digits, so the derivatives of both sides agree to about 1%."""
    model, batch, grads = made(FROZEN_HEAD, torch.bfloat16)
    s = split(model)
    x, y = s.unpack(batch)
    found = SplitFG(K=2)(s, x, y, generator=generator())
    assert {g.dtype for g in found.grads.values()} == {torch.float32}
    assert relative(found.stats.scores, s.trunk_params(), grads) <= 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activities_of_adapters(dtype):
    model, batch, grads = made(ADAPTED_HEAD, dtype)
    s = split(model)
    found = ActivityFG(K=2)(s, *s.unpack(batch), generator=generator())
    assert set(found.grads) == set(grads)
    assert {g.dtype for g in found.grads.values()} == {torch.float32}


def test_learned_feedback_reaches_all_adapters():
    model, batch, grads = made(FROZEN_HEAD)
    s = split(model)
    estimator, draws, (x, y) = LearnedFeedback(), generator(), s.unpack(batch)
    for _ in range(15):
        estimator.update_state(s, estimator(s, x, y, generator=draws))
    found = estimator(s, x, y, generator=draws).grads
    far = torch.stack([(found[n] - grads[n]).norm() for n in grads]).norm()
    assert float(far) <= 0.1 * float(torch.stack([g.norm() for g in grads.values()]).norm())


BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 30}
GPT2 = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 30, "n_positions": 16, "bos_token_id": 0}


def prompted(kind):
    """A model with learned prompts, or a learned prefix, and a batch."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    tokens = torch.randint(0, 30, (3, 5))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if kind == "encoded":
        config = peft.PromptEncoderConfig(task_type="SEQ_CLS", num_virtual_tokens=2, encoder_hidden_size=8)
        model = transformers.BertForSequenceClassification(transformers.BertConfig(**BERT, num_labels=3))
        return peft.get_peft_model(model, config).eval(), {**batch, "labels": torch.tensor([0, 1, 2])}
    settings = peft.PrefixTuningConfig if kind == "prefix" else peft.PromptTuningConfig
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, eos_token_id=0))
    adapted = peft.get_peft_model(model, settings(task_type="CAUSAL_LM", num_virtual_tokens=2))
    return adapted.eval(), {**batch, "labels": tokens}


@pytest.mark.parametrize("kind", ["prompt", "encoded", "prefix"])
def test_learned_prompts(kind):
    """Virtual tokens come before the labels, and the readout is the model's own layer, not peft's."""
    model, batch = prompted(kind)
    untouched = copy.deepcopy(model)
    untouched(**batch).loss.backward()
    grads = {n: p.grad for n, p in untouched.named_parameters() if p.requires_grad}
    s = split(model)
    before = state_of(model)
    x, y = s.unpack(batch)
    assert state_of(model) == before  # classifiers store their problem_type when they get labels
    found = Backprop()(s, x, y).grads
    assert set(found) == set(grads)
    for name, g in grads.items():
        torch.testing.assert_close(found[name], g, rtol=1e-4, atol=1e-6)
    assert SplitFG(2)(s, x, y, generator=generator()).grads


def test_a_checkpointed_block_that_adds_to_a_cache():
    model, batch = prompted("prefix")
    s = split(model)
    with pytest.raises(SplitError, match="a checkpointed block fails when it runs again"):
        CheckpointedBackprop()(s, *s.unpack(batch))


def test_learned_feedback_through_an_empty_cache():
    """``torch.cat`` skips the empty tensor that a cache of keys starts with."""
    model, batch = prompted("prefix")
    s = split(model)
    assert LearnedFeedback()(s, *s.unpack(batch), generator=generator()).grads
