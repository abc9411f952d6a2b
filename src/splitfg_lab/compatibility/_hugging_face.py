"""Tiny models of transformers and peft with random weights; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from splitfg_lab.compatibility._case import Built, Case

VOCABULARY, CLASSES, ROWS, LENGTH = 50, 3, 3, 9
_IGNORED = -100


def cases() -> list[Case]:
    """Return all models of transformers and peft."""
    text = {"causal": _causal, "masked": _masked, "sequence": _sequence, "token": _tokens}
    found = [
        Case("transformers", name, partial(_text, name, config, settings, text[kind]))
        for kind, rows in _TEXT.items()
        for name, (config, settings) in rows.items()
    ]
    found += [
        Case("transformers", f"{name}, training", partial(_text, name, *_TEXT[kind][name], text[kind]), train=True)
        for kind, name in (("causal", "GPT2LMHeadModel"), ("causal", "LlamaForCausalLM"), ("masked", "BertForMaskedLM"))
    ]
    found += [Case("transformers", name, partial(image_model, name, c, s)) for name, (c, s) in _IMAGES.items()]
    found += [Case("transformers", name, partial(paired_model, name, c, s)) for name, (c, s) in _PAIRS.items()]
    found += [
        Case("transformers", "WhisperForConditionalGeneration", _whisper),
        Case("transformers", "Wav2Vec2ForSequenceClassification", _wav2vec),
        Case("peft", "GPT2LMHeadModel, LoRA", partial(_lora, "GPT2LMHeadModel", ("c_attn", "c_proj", "c_fc"))),
        Case("peft", "LlamaForCausalLM, LoRA, lm_head too", partial(_lora, "LlamaForCausalLM", ("q_proj", "lm_head"))),
    ]
    return found


def language_batch(rows: int = ROWS, length: int = LENGTH, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """Return token ids, a mask that ends the first row early, and labels that are ignored there."""
    ids = torch.randint(3, vocabulary, (rows, length))
    mask = torch.ones_like(ids)
    mask[0, 2 * length // 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, _IGNORED)}


def made(name: str, config: str, settings: dict[str, Any]) -> nn.Module:
    """Build a model of transformers by the names of its class and its config's class."""
    import transformers

    transformers.logging.set_verbosity_error()
    model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**settings))
    return model


def _text(name: str, config: str, settings: dict[str, Any], batch: Callable[[], dict[str, Tensor]]) -> Built:
    return made(name, config, settings), batch()


def _causal() -> dict[str, Tensor]:
    return language_batch()


def _masked() -> dict[str, Tensor]:
    batch = language_batch()
    hidden = torch.rand(batch["input_ids"].shape) < 0.5
    return {**batch, "labels": batch["labels"].masked_fill(~hidden, _IGNORED)}


def _sequence() -> dict[str, Tensor]:
    return {**language_batch(), "labels": torch.randint(0, CLASSES, (ROWS,))}


def _tokens() -> dict[str, Tensor]:
    batch = language_batch()
    return {**batch, "labels": batch["labels"].where(batch["labels"] < 0, batch["labels"] % CLASSES)}


def image_model(name: str, config: str, settings: dict[str, Any]) -> Built:
    side = settings.get("image_size", 32)
    batch = {"pixel_values": torch.randn(ROWS, 3, side, side), "labels": torch.randint(0, CLASSES, (ROWS,))}
    return made(name, config, {**settings, "num_labels": CLASSES}), batch


def paired_model(name: str, config: str, settings: dict[str, Any]) -> Built:
    batch, labels = language_batch(), torch.randint(3, VOCABULARY, (ROWS, 5))
    labels[0, 3:] = _IGNORED
    return made(name, config, settings), {**batch, "labels": labels}


def _whisper() -> Built:
    both = {"attention_heads": 2, "layers": 2, "ffn_dim": 24}
    settings = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in both.items()}
    model = made(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **settings,
            **IDS,
            "d_model": 16,
            "vocab_size": VOCABULARY,
            "num_mel_bins": 8,
            "max_source_positions": 8,
            "max_target_positions": 16,
            "decoder_start_token_id": 1,
        },
    )
    labels = torch.randint(3, VOCABULARY, (ROWS, 5))
    labels[0, 3:] = _IGNORED
    return model, {"input_features": torch.randn(ROWS, 8, 16), "labels": labels}


def _wav2vec() -> Built:
    settings = {
        **small(),
        "conv_dim": (8, 8),
        "conv_stride": (2, 2),
        "conv_kernel": (3, 3),
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "num_labels": CLASSES,
        "classifier_proj_size": 8,
    }
    model = made("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", settings)
    return model, {"input_values": torch.randn(ROWS, 64), "labels": torch.randint(0, CLASSES, (ROWS,))}


def _lora(name: str, targets: tuple[str, ...]) -> Built:
    from peft import LoraConfig, get_peft_model

    config, settings = _TEXT["causal"][name]
    model = get_peft_model(made(name, config, settings), LoraConfig(r=2, target_modules=list(targets)))
    for parameter, value in model.named_parameters():
        if "lora_B" in parameter:  # starts at zero, where lora_A has no gradient
            nn.init.normal_(value, std=0.1)
    return model, language_batch()


IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def small(**more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {**sizes, "vocab_size": VOCABULARY, "max_position_embeddings": 32, **IDS, **more}


GPT = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": VOCABULARY, "n_positions": 32, **IDS}
_NEO = {
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "attention_types": [[["global", "local"], 1]],
    **IDS,
}
_OPT = small(ffn_dim=24, word_embed_proj_dim=16)
_BLOOM = {"hidden_size": 16, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, **IDS}
_FALCON = small(ffn_hidden_size=24, num_kv_heads=1)
GROUPED = small(num_key_value_heads=2)
_GEMMA = small(num_key_value_heads=2, head_dim=4)
_MAMBA = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "state_size": 4, **IDS}
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
BART = {
    "d_model": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 2,
    **IDS,
    **{f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in (("layers", 2), ("ffn_dim", 24))},
    **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
}
_DISTIL = {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 4, "vocab_size": VOCABULARY, "pad_token_id": 0}
_DEBERTA = small(relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8)
_MODERN = small(global_attn_every_n_layers=2, local_attention=8, cls_token_id=1, sep_token_id=2)

_TEXT: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "causal": {
        "GPT2LMHeadModel": ("GPT2Config", GPT),
        "GPTNeoForCausalLM": ("GPTNeoConfig", _NEO),
        "GPTNeoXForCausalLM": ("GPTNeoXConfig", small()),
        "GPTJForCausalLM": ("GPTJConfig", {**GPT, "rotary_dim": 4}),
        "OPTForCausalLM": ("OPTConfig", _OPT),
        "BloomForCausalLM": ("BloomConfig", _BLOOM),
        "FalconForCausalLM": ("FalconConfig", _FALCON),
        "LlamaForCausalLM": ("LlamaConfig", GROUPED),
        "MistralForCausalLM": ("MistralConfig", {**GROUPED, "sliding_window": 4}),
        "MixtralForCausalLM": ("MixtralConfig", {**GROUPED, "num_local_experts": 4}),
        "Qwen2ForCausalLM": ("Qwen2Config", {**GROUPED, "tie_word_embeddings": True}),
        "Qwen3ForCausalLM": ("Qwen3Config", {**GROUPED, "head_dim": 4}),
        "GemmaForCausalLM": ("GemmaConfig", _GEMMA),
        "Gemma2ForCausalLM": ("Gemma2Config", _GEMMA),
        "PhiForCausalLM": ("PhiConfig", small()),
        "Phi3ForCausalLM": ("Phi3Config", GROUPED),
        "OlmoForCausalLM": ("OlmoConfig", GROUPED),
        "StableLmForCausalLM": ("StableLmConfig", GROUPED),
        "GraniteForCausalLM": ("GraniteConfig", {**GROUPED, "logits_scaling": 4.0}),
        "CohereForCausalLM": ("CohereConfig", GROUPED),
        "MambaForCausalLM": ("MambaConfig", _MAMBA),
    },
    "masked": {
        "BertForMaskedLM": ("BertConfig", small()),
        "RobertaForMaskedLM": ("RobertaConfig", small()),
        "ElectraForMaskedLM": ("ElectraConfig", small(embedding_size=16)),
        "AlbertForMaskedLM": ("AlbertConfig", small(embedding_size=8)),
        "ModernBertForMaskedLM": ("ModernBertConfig", _MODERN),
    },
    "sequence": {
        "GPT2ForSequenceClassification": ("GPT2Config", {**GPT, "num_labels": CLASSES}),
        "LlamaForSequenceClassification": ("LlamaConfig", {**GROUPED, "num_labels": CLASSES}),
        "BertForSequenceClassification": ("BertConfig", small(num_labels=CLASSES)),
        "DistilBertForSequenceClassification": ("DistilBertConfig", {**_DISTIL, "num_labels": CLASSES}),
        "DebertaV2ForSequenceClassification": ("DebertaV2Config", {**_DEBERTA, "num_labels": CLASSES}),
    },
    "token": {"BertForTokenClassification": ("BertConfig", small(num_labels=CLASSES))},
}

PATCHES = small(image_size=8, patch_size=4)
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
_STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "image_size": 32}

_IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "ViTForImageClassification": ("ViTConfig", PATCHES),
    "DeiTForImageClassification": ("DeiTConfig", PATCHES),
    "BeitForImageClassification": ("BeitConfig", PATCHES),
    "Dinov2ForImageClassification": ("Dinov2Config", PATCHES),
    "SwinForImageClassification": ("SwinConfig", SWIN),
    "ConvNextForImageClassification": ("ConvNextConfig", {**_STAGES, "num_stages": 2}),
    "ResNetForImageClassification": ("ResNetConfig", {**_STAGES, "embedding_size": 8, "layer_type": "basic"}),
    "MobileNetV2ForImageClassification": ("MobileNetV2Config", {"image_size": 32, "depth_multiplier": 0.1}),
}

_PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "T5ForConditionalGeneration": ("T5Config", {**T5, "decoder_start_token_id": 0}),
    "BartForConditionalGeneration": ("BartConfig", BART),
    "PegasusForConditionalGeneration": ("PegasusConfig", BART),
}
