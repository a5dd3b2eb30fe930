"""Exports load in plain transformers and PEFT, and compute what the trainer computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rill.models.loading import ModelConfig
from rill.training.preference import RewardTrainer
from rill.training.reward import RewardModel
from tests.training.tiny import SHAPE, make_samples, trainer


def plain(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    ids = torch.tensor(tokens).long()
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].numpy()


def test_an_export_loads_in_plain_transformers_and_in_rill(tmp_path: Path) -> None:
    t = trainer()
    t.update(make_samples())
    folder = t.export(tmp_path / "model")
    assert t.export(tmp_path / "model") == folder  # replaces what is there
    model = AutoModelForCausalLM.from_pretrained(folder)
    sample = make_samples(1)[0]
    wanted = t.logprobs([sample])[0][1:]
    np.testing.assert_allclose(plain(model, sample.trajectory.token_ids), wanted, atol=1e-5)
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<eos>"
    again = trainer(model=ModelConfig(path=str(folder)))
    np.testing.assert_array_equal(again.logprobs([sample])[0][1:], wanted)
    assert not list(tmp_path.glob("*.partial"))


def test_bfloat16_training_exports_bfloat16_weights(tmp_path: Path) -> None:
    t = trainer(compute_dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(t.export(tmp_path / "m")).dtype == torch.bfloat16


def test_adapters_are_merged_in_exports_and_named_weights(tmp_path: Path) -> None:
    t = trainer(lora={"rank": 4}, optimizer={"learning_rate": 1e-2})
    base = {n: w.clone() for n, w in trainer().named_weights()}
    trained = {s.name for s in t.engine.slots}
    assert trained and all("lora_" in n for n in trained)
    before = {n: w.clone() for n, w in t.named_weights()}
    assert before.keys() == base.keys()
    assert all(torch.equal(before[n], base[n]) for n in base)
    t.update(make_samples())
    sample = make_samples(1)[0]
    wanted = t.logprobs([sample])[0][1:]
    model = AutoModelForCausalLM.from_pretrained(t.export(tmp_path / "merged"))
    np.testing.assert_allclose(plain(model, sample.trajectory.token_ids), wanted, atol=1e-4)


def test_an_adapter_loads_in_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = trainer().export(tmp_path / "base")
    t = trainer(model=ModelConfig(path=str(base)), lora={"rank": 4}, optimizer={"learning_rate": 1e-2})
    t.update(make_samples())
    sample = make_samples(1)[0]
    folder = t.export(tmp_path / "tuned") / "adapter"
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    wanted = t.logprobs([sample])[0][1:]
    np.testing.assert_allclose(plain(model, sample.trajectory.token_ids), wanted, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_reward_model_scores_as_it_was_trained_with_or_without_a_head_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    model = ModelConfig(shape={**SHAPE, "tie_word_embeddings": tied})
    t = RewardTrainer(RewardTrainer.Config(model=model))
    with torch.no_grad():
        t.engine.module.value_head.weight.normal_(generator=torch.Generator().manual_seed(1))
    sequences = [np.array(tokens, np.int32) for tokens in ([5, 6, 7], [8, 9])]
    judge = RewardModel(RewardModel.Config(model=ModelConfig(path=str(t.export(tmp_path / "model")))))
    assert judge.scores(sequences) == pytest.approx(t.score(sequences), abs=1e-6)
    monkeypatch.setenv("HOME", str(tmp_path))
    again = RewardTrainer(RewardTrainer.Config(model=ModelConfig(path="~/model")))
    assert again.score(sequences) == pytest.approx(t.score(sequences), abs=1e-6), "its head goes on, too"
