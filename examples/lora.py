"""LoRA: fine-tune the adapters of a GPT-2 with tangents for the adapters alone, beside backprop and MeZO's estimator.

The base is small and random by default; give the name of a model of Hugging Face to fine-tune that one instead:

    python examples/lora.py
    python examples/lora.py --model gpt2
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import splitfg
from splitfg.diagnosis import saved_bytes

METHODS = {
    "backprop": (splitfg.Backprop(), 1e-2),
    "SplitFG, K = 16": (splitfg.SplitFG(K=16, engine=splitfg.ForwardMode(chunk=4), lean=True), 1e-2),
    "SplitFG, K = 1": (splitfg.SplitFG(K=1, lean=True), 1e-2),
    "MeZO's, two passes": (splitfg.EvolutionStrategy(K=1, sigma=1e-2), 1e-2),
    "learned feedback": (splitfg.LearnedFeedback(), 1e-2),
}


def adapted(name: str | None, layers: int, width: int, device: torch.device) -> nn.Module:
    """A frozen bfloat16 base with float32 adapters in every block."""
    torch.manual_seed(0)
    sizes = {"n_layer": layers, "n_embd": width, "n_head": 4, "vocab_size": 512, "n_positions": 128}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    base = AutoModelForCausalLM.from_pretrained(name) if name else GPT2LMHeadModel(config)
    targets = ["c_attn", "c_proj", "c_fc"]
    lora = LoraConfig(r=4, lora_alpha=16, target_modules=targets, fan_in_fan_out=True)
    model = get_peft_model(base.to(device, torch.bfloat16), lora, autocast_adapter_dtype=True)
    return model.eval()  # no dropout


def batches(rows: int, length: int, device: torch.device) -> dict[str, Tensor]:
    """Sequences that count upwards from a random start, in steps of one."""
    ids = (torch.randint(0, 400, (rows, 1)) + torch.arange(length)).to(device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def trained(method: str, network: splitfg.Split, batch: dict[str, Tensor], steps: int) -> str:
    """Train the adapters; return first and last loss, time per step, and on a GPU the peak of memory."""
    estimator, rate = METHODS[method]
    parameters = [p for p in network.model.parameters() if p.requires_grad]
    learner = splitfg.GradientLearner(network, estimator, torch.optim.Adam(parameters, lr=rate))
    generator = torch.Generator(parameters[0].device).manual_seed(0)
    losses = [learner.step(batch, generator=generator).loss.item()]  # validates the network, too
    if parameters[0].is_cuda:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    losses += [learner.step(batch, generator=generator).loss.item() for _ in range(steps)]
    each = (time.perf_counter() - began) / steps
    peak = f"  peak {torch.cuda.max_memory_allocated() / 2**20:6.0f} MiB" if parameters[0].is_cuda else ""
    return f"{method:20} loss {losses[0]:.3f} -> {losses[-1]:.3f}  {1e3 * each:7.1f} ms a step{peak}"


def main(name: str | None, layers: int, width: int, rows: int, length: int, steps: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for method in METHODS:
        network = splitfg.split(adapted(name, layers, width, device))
        batch = batches(rows, length, device)
        print(trained(method, network, batch, steps), flush=True)
    print(f"{network}: tangents and optimizer state for the adapters alone")
    print(f"backprop keeps {saved_bytes(network, network.unpack(batch)[0]) / 2**20:.1f} MiB for its backward pass")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a tiny model")
    parser.add_argument("--model", help="name or folder of a model of Hugging Face")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", module="peft")
    main(given.model, *((1, 32, 2, 16, 3) if given.smoke else (4, 128, 8, 64, 30)))
