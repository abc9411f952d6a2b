"""Further tiny models of transformers: state spaces, experts, several modalities, unusual heads and losses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from splitfg_lab.compatibility._case import Built, Case
from splitfg_lab.compatibility._hugging_face import (
    BART,
    CLASSES,
    GPT,
    GROUPED,
    IDS,
    PATCHES,
    ROWS,
    SWIN,
    T5,
    VOCABULARY,
    image_model,
    language_batch,
    made,
    paired_model,
    small,
)

_LENGTH = 9


def more_cases() -> list[Case]:
    """Return the models."""
    makers: dict[str, Callable[[], Built]] = {
        **{name: partial(_text, name, *given) for name, given in _CAUSAL.items()},
        **{name: partial(_masked, name, *given) for name, given in _MASKED.items()},
        **{name: partial(image_model, name, *given) for name, given in _IMAGES.items()},
        **{name: partial(paired_model, name, *given) for name, given in _PAIRS.items()},
        "GPT2DoubleHeadsModel": _double_heads,
        "XLMRobertaForSequenceClassification": partial(_classes, "XLMRoberta", small(num_labels=CLASSES)),
        "T5ForSequenceClassification": partial(_classes, "T5", {**_T5_IDS, "num_labels": CLASSES}),
        "EncoderDecoderModel": _encoder_decoder,
        "LlavaForConditionalGeneration": _llava,
        "ASTForAudioClassification": _spectrogram,
        "VideoMAEForVideoClassification": _video,
        "Wav2Vec2ForCTC": _ctc,
    }
    found = [Case("transformers", name, build) for name, build in makers.items()]
    training = ("XLMRobertaForSequenceClassification", "MobileViTForImageClassification", "LevitForImageClassification")
    return found + [Case("transformers", f"{name}, training", makers[name], train=True) for name in training]


def _text(name: str, config: str, settings: dict[str, Any]) -> Built:
    return made(name, config, settings), language_batch()


def _masked(name: str, config: str, settings: dict[str, Any]) -> Built:
    ids = torch.randint(3, VOCABULARY, (ROWS, _LENGTH))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.5, -100)
    return made(name, config, settings), {"input_ids": ids, "labels": labels}


def _class_labels() -> Tensor:
    return torch.randint(0, CLASSES, (ROWS,))


def _classes(kind: str, settings: dict[str, Any]) -> Built:
    """Sequences that end with the token that some models read."""
    ends = torch.full((ROWS, 1), IDS["eos_token_id"])
    ids = torch.cat([torch.randint(3, VOCABULARY, (ROWS, _LENGTH - 1)), ends], 1)
    model = made(f"{kind}ForSequenceClassification", f"{kind}Config", settings)
    return model, {"input_ids": ids, "labels": _class_labels()}


def _double_heads() -> Built:
    ids = torch.randint(3, VOCABULARY, (ROWS, 2, _LENGTH))
    return made("GPT2DoubleHeadsModel", "GPT2Config", GPT), {"input_ids": ids, "labels": ids.clone()}


def _encoder_decoder() -> Built:
    import transformers

    encoder = transformers.BertConfig(**small())
    decoder = transformers.BertConfig(**small(is_decoder=True, add_cross_attention=True))
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return transformers.EncoderDecoderModel(config), paired_model("T5ForConditionalGeneration", "T5Config", _T5_IDS)[1]


def _llava() -> Built:
    import transformers

    image, patches = VOCABULARY - 1, 4
    model = made(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "vision_config": transformers.CLIPVisionConfig(**_VISION),
            "text_config": transformers.LlamaConfig(**GROUPED),
            "image_token_index": image,
            "vision_feature_layer": -1,
        },
    )
    ids = torch.randint(3, image, (ROWS, _LENGTH))
    ids[:, 1 : 1 + patches] = image
    pixels = torch.randn(ROWS, 3, _VISION["image_size"], _VISION["image_size"])
    return model, {"input_ids": ids, "pixel_values": pixels, "labels": ids.masked_fill(ids == image, -100)}


def _spectrogram() -> Built:
    sizes = {"max_length": 16, "num_mel_bins": 16, "patch_size": 4, "frequency_stride": 4, "time_stride": 4}
    model = made("ASTForAudioClassification", "ASTConfig", small(**sizes, num_labels=CLASSES))
    return model, {"input_values": torch.randn(ROWS, 16, 16), "labels": _class_labels()}


def _video() -> Built:
    settings = small(image_size=8, patch_size=4, num_frames=4, num_labels=CLASSES)
    model = made("VideoMAEForVideoClassification", "VideoMAEConfig", settings)
    return model, {"pixel_values": torch.randn(ROWS, 4, 3, 8, 8), "labels": _class_labels()}


def _ctc() -> Built:
    convolutions = {"conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 3)}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    model = made("Wav2Vec2ForCTC", "Wav2Vec2Config", small(**convolutions, **positions))
    return model, {"input_values": torch.randn(ROWS, 64), "labels": torch.randint(3, VOCABULARY, (ROWS, 4))}


_T5_IDS = {**T5, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": IDS["eos_token_id"]}
_EXPERTS = {"num_key_value_heads": 2, "num_experts_per_tok": 1}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
    "projection_dim": 8,
}
_MAMBA2 = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "state_size": 4,
    "num_heads": 4,
    "head_dim": 8,
    "n_groups": 1,
    "chunk_size": 4,
    **IDS,
}
_DEEPSEEK = small(
    num_key_value_heads=4,
    moe_intermediate_size=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=4,
    first_k_dense_replace=1,
    n_shared_experts=1,
)
_JAMBA = small(
    num_key_value_heads=2,
    num_experts=2,
    attn_layer_period=2,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
    use_mamba_kernels=False,
    mamba_d_state=4,
)
_RECURRENT = small(num_key_value_heads=2, lru_width=16, attention_window_size=8)
_XLNET = {"vocab_size": VOCABULARY, "d_model": 16, "n_layer": 2, "n_head": 4, "d_inner": 24, **IDS}

_CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "Mamba2ForCausalLM": ("Mamba2Config", _MAMBA2),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", small(num_key_value_heads=2, head_dim=4, sliding_window=4)),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", _DEEPSEEK),
    "GraniteMoeForCausalLM": ("GraniteMoeConfig", small(**_EXPERTS, num_local_experts=2)),
    "JambaForCausalLM": ("JambaConfig", _JAMBA),
    "RecurrentGemmaForCausalLM": ("RecurrentGemmaConfig", {**_RECURRENT, "num_hidden_layers": 3}),
    "OpenAIGPTLMHeadModel": ("OpenAIGPTConfig", GPT),
    "XLNetLMHeadModel": ("XLNetConfig", _XLNET),
}

_MASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "LongformerForMaskedLM": ("LongformerConfig", small(attention_window=4)),
    "FNetForMaskedLM": ("FNetConfig", small()),
    "ConvBertForMaskedLM": ("ConvBertConfig", small(embedding_size=16)),
}

_LEVIT = {"hidden_sizes": [16, 16, 16], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1], "key_dim": [4, 4, 4]}
_MOBILE = {"hidden_sizes": [8, 8, 8], "neck_hidden_sizes": [8] * 7, "num_attention_heads": 2}

_IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "Swinv2ForImageClassification": ("Swinv2Config", SWIN),
    "ConvNextV2ForImageClassification": ("ConvNextV2Config", {"hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4}),
    "MobileViTForImageClassification": ("MobileViTConfig", {**_MOBILE, "image_size": 64}),
    "LevitForImageClassification": ("LevitConfig", {**_LEVIT, "image_size": 64}),
    "SiglipForImageClassification": ("SiglipConfig", {"vision_config": _VISION, "image_size": 8}),
    "CLIPForImageClassification": ("CLIPConfig", {"vision_config": _VISION, "image_size": 8}),
    "Dinov2WithRegistersForImageClassification": ("Dinov2WithRegistersConfig", PATCHES),
}

_SWITCH = {**_T5_IDS, "num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}

_PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "M2M100ForConditionalGeneration": ("M2M100Config", BART),
    "MarianMTModel": ("MarianConfig", BART),
    "SwitchTransformersForConditionalGeneration": ("SwitchTransformersConfig", {**_SWITCH, "num_decoder_layers": 2}),
}
