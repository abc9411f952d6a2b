"""The benchmark of adapters: they are peft's, MeZO is a difference of losses, and the record says enough."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_ext")]

low_rank = importlib.import_module("benchmarks._low_rank")
lora = importlib.import_module("benchmarks.lora")

SIZES = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 16}


def model():
    return low_rank.gpt2(SIZES, rank=2, alpha=4, device=torch.device("cpu"), dtype=torch.float32)


def test_the_adapters_are_those_of_peft():
    peft = pytest.importorskip("peft")
    from transformers import GPT2Config, GPT2LMHeadModel

    own = model()
    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(**SIZES, bos_token_id=0, eos_token_id=0))
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=list(low_rank.TARGETS), fan_in_fan_out=True)
    other = peft.get_peft_model(base, config).eval()
    ours = {name: p for name, p in own.named_parameters() if p.requires_grad}
    theirs = {name: p for name, p in other.named_parameters() if p.requires_grad}
    assert len(ours) == len(theirs) == 8
    for (name, p), q in zip(ours.items(), theirs.values(), strict=True):
        assert (".A." in name) == (q.shape == p.shape and "lora_A" in "".join(n for n, v in theirs.items() if v is q))
        torch.nn.init.normal_(p, std=0.1)
        q.data.copy_(p.data)
    ids = torch.randint(0, 32, (2, 8))
    for one in (own, other):
        one(input_ids=ids, labels=ids).loss.backward()
    for p, q in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_mezo_moves_along_a_direction_by_the_slope_of_the_loss():
    network, batch = lora._built(lora.SMALL, torch.device("cpu"), 2, 8)
    trained = {n: p for n, p in network.model.named_parameters() if p.requires_grad}
    before = {n: p.detach().clone() for n, p in trained.items()}
    for p in network.model.parameters():
        p.data = p.data.double()
    draws = torch.Generator().manual_seed(0)
    v = {n: torch.randn(p.shape, generator=draws, dtype=p.dtype) for n, p in trained.items()}
    network.model(**batch).loss.backward()
    slope_by_hand = sum((p.grad * v[n]).sum() for n, p in trained.items())
    lora._mezo(network, batch)()
    for name, p in trained.items():
        torch.testing.assert_close(p.data, before[name].double() - 1e-6 * slope_by_hand * v[name], atol=1e-9, rtol=1e-6)


def test_command(tmp_path, capsys):
    lora.main(["--smoke", "--device", "cpu", "--record", str(tmp_path / "lora.json")])
    found = json.loads((tmp_path / "lora.json").read_text())
    assert set(found["step"]) == set(lora.METHODS)
    assert all({"ms", "step_mib"} <= set(figures) for figures in found["step"].values())
    assert [row["length"] for row in found["attention"]] == list(lora.SMALL.lengths)
    assert {"date", "device", "torch", "git"} <= set(found)
    assert "MeZO" in capsys.readouterr().out


def test_the_page_shows_what_is_recorded():
    adapters_page = importlib.import_module("adapters_page")
    records = adapters_page.records()
    page = adapters_page.page(records)
    assert [record["device"].partition(":")[0] for record in records] == ["cuda", "cpu"]
    for record in records:
        known = lora.methods(torch.device(record["device"].partition(":")[0]))
        assert set(lora.METHODS) <= set(record["step"]) <= set(known)
        for name, figures in record["step"].items():
            assert f"| {name} | {figures.get('error') or format(figures['ms'], ',.0f')} |" in page
        assert record["git"]
        assert not record["git_dirty"]
