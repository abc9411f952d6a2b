"""Your own model: cut a transformer classifier that knows nothing of splitfg, with one call.

The model is shaped like one of Hugging Face's (``forward(input_ids)``, a ``classifier`` at the end). The task: does a
sequence hold more even tokens than odd ones?

    python examples/own_model.py
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import splitfg


class Block(nn.Module):
    """Attention and MLP with pre-norm. Plain matmul and softmax have forward-mode rules; fused kernels do not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        attention = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1)
        x = x + self.proj(attention @ v)
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Classifier(nn.Module):
    """Embedding, blocks, pooling, a linear classifier."""

    def __init__(self, vocab: int = 16, context: int = 7, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Parameter(0.1 * torch.randn(context, width))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.classifier = nn.Linear(width, 2)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.classifier(self.blocks(self.embed(input_ids) + self.position)[:, 0])


def batch(generator: torch.Generator, rows: int = 64) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 16, (rows, 7), generator=generator)
    return tokens, ((tokens % 2 == 0).sum(1) > 3).long()


def train(network: splitfg.Split, steps: int) -> float:
    """Train with eight tangents, and return the accuracy on new sequences."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(splitfg.parameter_groups(network, lr=3e-3, rho=0.3))
    learner = splitfg.GradientLearner(network, splitfg.SplitFG(K=8), optimizer)
    for _ in range(steps):
        learner.step(*batch(generator), generator=generator)
    tokens, labels = batch(generator, rows=1000)
    return (network.model(tokens).argmax(1) == labels).float().mean().item()  # the model itself has been trained


def main(steps: int) -> None:
    torch.manual_seed(0)
    network = splitfg.split(Classifier())  # the head is the last linear layer, with a closed-form gradient
    generator = torch.Generator().manual_seed(0)
    print(splitfg.diagnose(network, *batch(generator), generator=generator, K=8, steps=steps))
    print(f"\ncut at the classifier:    {train(network, steps):.1%}")

    torch.manual_seed(0)
    network = splitfg.split(Classifier(), at="blocks.0")  # everything after the embedding is the head
    print(f"cut after the embedding:  {train(network, steps):.1%}  (reverse mode inside the head)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few steps only")
    main(steps=5 if parser.parse_args().smoke else 300)
