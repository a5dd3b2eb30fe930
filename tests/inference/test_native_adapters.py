"""LoRA adapters served beside the base model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rill.errors import ModelError, RequestError, UnsupportedError
from rill.models.lora import LoRAConfig, add_lora, save_adapter
from tests.inference.native_models import greedy_tokens, make_engine, prompts, reference, request


def write_adapter(folder: Path, seed: int) -> torch.nn.Module:
    """A random adapter on disk, and the model it makes."""
    model = reference()
    config = LoRAConfig(rank=4, alpha=8, seed=seed)
    add_lora(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    save_adapter(model.named_parameters(), config, folder, base_model="tiny")
    return model


def test_requests_of_one_batch_each_get_their_own_adapter(tmp_path: Path) -> None:
    models = {None: reference(), "a": write_adapter(tmp_path / "a", 1), "b": write_adapter(tmp_path / "b", 2)}
    engine = make_engine()
    try:
        for name in ("a", "b"):
            engine.load_adapter(name, tmp_path / name)
        (prompt,) = prompts((20,))
        names = ["a", None, "b", "a"]
        batch = [replace(request(i, prompt), adapter=name) for i, name in enumerate(names)]
        done = engine.generate(batch)
        for name, completion in zip(names, done):
            assert completion.token_ids.tolist() == greedy_tokens(models[name], prompt, 12), name
        assert done[0].token_ids.tolist() != done[1].token_ids.tolist()
        assert [c.num_cached_tokens for c in done] == [
            0,
            0,
            0,
            16,
        ]  # a prefix is shared within an adapter only
    finally:
        engine.close()


def test_reloading_an_adapter_forgets_its_cached_prefixes(tmp_path: Path) -> None:
    write_adapter(tmp_path / "old", 1)
    new = write_adapter(tmp_path / "new", 2)
    engine = make_engine()
    try:
        (prompt,) = prompts((40,))
        engine.load_adapter("a", tmp_path / "old")
        engine.generate([replace(request(0, prompt), adapter="a")])
        engine.load_adapter("a", tmp_path / "new")
        done = engine.generate([replace(request(1, prompt), adapter="a")])[0]
        assert done.num_cached_tokens == 0
        assert done.token_ids.tolist() == greedy_tokens(new, prompt, 12)
        engine.unload_adapter("a")
        with pytest.raises(RequestError, match="no adapter"):
            engine.submit([replace(request(2, prompt), adapter="a")])
    finally:
        engine.close()


def test_modules_may_have_a_rank_and_an_alpha_of_their_own(tmp_path: Path) -> None:
    import json

    from rill.inference.native.adapters import read_adapter

    write_adapter(tmp_path, 1)
    plain = read_adapter(tmp_path)
    path = tmp_path / "adapter_config.json"
    description = json.loads(path.read_text())
    # PEFT: a key is the end of a module's name, or a regular expression of it.
    description |= {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers\.1\.self_attn\..*": 24}}
    path.write_text(json.dumps(description))
    cut = {
        name: (t[:2] if "lora_A" in name else t[:, :2]).contiguous() if "q_proj" in name else t
        for name, t in load_file(tmp_path / "adapter_model.safetensors").items()
    }
    save_file(cut, tmp_path / "adapter_model.safetensors")
    found = read_adapter(tmp_path)
    wanted = {"layers.0.self_attn.q_proj": 8 / 2, "layers.1.self_attn.q_proj": 24 / 2}
    wanted |= {"layers.1.self_attn.k_proj": 24 / 4, "layers.0.mlp.up_proj": 8 / 4}
    for module, own in wanted.items():
        (down, up), (plain_down, plain_up) = found[f"model.{module}"], plain[f"model.{module}"]
        assert torch.equal(down, plain_down[: len(down)]) and len(down) == (2 if "q_proj" in module else 4)
        torch.testing.assert_close(up, plain_up[:, : len(down)] / (8 / 4) * own)


def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    layer, A, B = "model.layers.0.self_attn.q_proj", torch.zeros(4, 32), torch.zeros(32, 4)
    wrong = {
        "belongs to no linear layer": {"model.ghost.lora_A.weight": A, "model.ghost.lora_B.weight": B},
        "only A": {f"{layer}.lora_A.weight": A},
        "no half": {f"{layer}.weight": A},
        "its rank is 4": {
            f"{layer}.lora_A.weight": A[:2].clone(),
            f"{layer}.lora_B.weight": B[:, :2].clone(),
        },
        "do not fit": {f"{layer}.lora_A.weight": A, f"{layer}.lora_B.weight": B.T.contiguous()},
    }
    write_adapter(tmp_path, 1)
    engine = make_engine()
    try:
        for words, tensors in wrong.items():
            save_file(tensors, tmp_path / "adapter_model.safetensors")
            with pytest.raises(ModelError, match=words):
                engine.load_adapter("x", tmp_path)
        path = tmp_path / "adapter_config.json"
        path.write_text(path.read_text().replace('"r": 4', '"r": 4, "rank_pattern": {"(": 4}'))
        with pytest.raises(ModelError, match="no PEFT adapter that can be read"):
            engine.load_adapter("x", tmp_path)
        assert engine.adapters == frozenset()
    finally:
        engine.close()
    invariant = make_engine(batch_invariant=True)
    try:
        with pytest.raises(UnsupportedError):
            invariant.load_adapter("x", tmp_path)
    finally:
        invariant.close()
