from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from rill.algorithms.embodied import EmbodiedAlgorithmConfig
from rill.errors import ConfigError, ModelError
from rill.policies import Policy, open_policy
from rill.policies.base import load_policy
from rill.policies.draws import Draws
from rill.policies.openvla import OpenVLAPolicy
from rill.policies.pi0 import PI0Policy
from rill.policies.pretrained import PretrainedPolicy
from rill.training.robots import RobotTrainer
from rill.types import EmbodiedTrajectory, InitialState, Observations, RobotSpec
from tests.policies.checkpoints import SPEC, openvla, pi0, pi0_actions, seen, tokenizer

OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "frozen tower": {"freeze_vision": True},
    "lora": {"lora": {"rank": 2}},
}


def opened(kind: str, folder: Path, **options: Any) -> PretrainedPolicy:
    tokenizer(folder)
    if kind == "openvla":
        openvla(folder)
        config: Any = OpenVLAPolicy.Config(path=str(folder), chunk=3, unnorm_key="libero", **options)
    else:
        pi0(folder)
        noise = "learned" if kind == "pi0, learned noise" else "sde"
        config = PI0Policy.Config(path=str(folder), chunk=3, num_steps=4, noise=noise, **options)
    policy = open_policy(config, SPEC, seed=1)
    assert isinstance(policy, PretrainedPolicy)
    return policy


@pytest.mark.parametrize("prefix", ["", "model."], ids=["the base's names", "lerobot's fine-tuning's names"])
def test_pi0_acts_as_transformers_samples_it(prefix: str, tmp_path: Path) -> None:
    words = tokenizer(tmp_path / "words")
    source = pi0(tmp_path / "pi0", prefix=prefix)
    config = PI0Policy.Config(
        path=str(tmp_path / "pi0"), tokenizer=str(tmp_path / "words"), chunk=3, num_steps=4
    )
    policy = open_policy(config, SPEC)
    observations = seen(3)
    noise = Draws(range(3)).normal(5, 6, 5)[:, 0]
    wanted = pi0_actions(source, words, observations, noise)[:, :3]
    with torch.no_grad():
        encoded = policy.encode(policy.seen(observations))
        actions, _ = policy.decide(encoded, Draws(range(3)), greedy=True)
    assert torch.allclose(actions, wanted, atol=1e-5)
    assert actions.std() > 0.01


def test_openvlas_logits_are_those_of_its_parts_and_norm_stats_scale_what_is_drawn(tmp_path: Path) -> None:
    words, source = tokenizer(tmp_path), openvla(tmp_path)
    config = OpenVLAPolicy.Config(path=str(tmp_path), chunk=3, unnorm_key="libero", gripper=True)
    policy = open_policy(config, SPEC)
    assert isinstance(policy, OpenVLAPolicy)
    observations = seen(3)
    with torch.no_grad():
        logits, _ = policy.encode(policy.seen(observations))
    wanted = torch.stack([source.logits(o, words, 3) for o in observations])
    assert torch.allclose(logits, wanted, atol=1e-4)
    acted = policy.act(observations, range(3), greedy=True).actions_BJA
    # Bin b is the middle of part b of 255; the first number is scaled to −0.5 … 0.5, the second is a gripper's.
    middles = -1.0 + (2.0 * wanted.argmax(-1).clamp(max=254).numpy() + 1.0) / 255
    assert np.allclose(acted[..., 0], 0.5 * middles[..., 0], atol=1e-5)
    assert np.array_equal(acted[..., 1], np.where(middles[..., 1] > 0.5, -1.0, 1.0))


@pytest.mark.parametrize("kind", ["pi0", "pi0, learned noise", "openvla"])
@pytest.mark.parametrize("option", [*OPTIONS, "lora in bfloat16"])
def test_the_trainers_logprobs_are_the_rollouts_bit_for_bit(kind: str, option: str, tmp_path: Path) -> None:
    policy = opened(kind, tmp_path, **OPTIONS.get(option, {"lora": {"rank": 2}, "dtype": "bfloat16"}))
    observations = seen(40)
    acted = [policy.act(observations[a:b], range(a, b)) for a, b in ((0, 7), (7, 40))]
    order = np.random.default_rng(0).permutation(40)
    latents = {
        name: torch.from_numpy(np.concatenate([decision.latents[name] for decision in acted])[order])
        for name in acted[0].latents
    }
    again = policy.evaluate_as_drawn(policy.seen([observations[n] for n in order]), latents)
    told = np.concatenate([decision.logprobs_BJ for decision in acted])
    values = np.concatenate([decision.values_B for decision in acted])
    assert np.array_equal(again.logprobs_BJ.numpy(), told[order])
    assert np.array_equal(again.values_B.numpy(), values[order])


def batch(policy: Policy, count: int) -> list[EmbodiedTrajectory]:
    episodes = []
    for number in range(count):
        observations = seen(3)
        decision = policy.act(observations[:2], [2 * number, 2 * number + 1])
        episodes.append(
            EmbodiedTrajectory(
                id=f"e{number}",
                group_id=f"g{number}",
                start=InitialState("", "", number),
                observations=Observations.of(observations[:2]),
                final=observations[2],
                actions_CJA=decision.actions_BJA,
                executed_CJ=np.ones((2, 3), np.bool_),
                latents=decision.latents,
                logprobs_CJ=decision.logprobs_BJ,
                values_C=decision.values_B,
                versions_C=np.ones(2, np.int32),
                rewards_CJ=np.full((2, 3), float(number % 2), np.float32),
                terminated=True,
                truncated=False,
                success=bool(number % 2),
            )
        )
    return episodes


@pytest.mark.parametrize("kind", ["pi0", "openvla"])
@pytest.mark.parametrize("option", OPTIONS)
def test_a_policy_is_trained_as_far_as_it_may_be_and_saved_in_the_layout_that_it_came_in(
    kind: str, option: str, tmp_path: Path
) -> None:
    policy = opened(kind, tmp_path / "from", **OPTIONS[option])
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    trainer = RobotTrainer(
        RobotTrainer.Config(num_epochs=2, num_mini_batches=2), EmbodiedAlgorithmConfig(), policy
    )
    episodes = batch(policy, 4)
    looks: list[int] = []
    look = policy.look
    policy.look = lambda inputs: looks.append(len(inputs)) or look(inputs)  # type: ignore[method-assign,func-returns-value]
    assert trainer.update(episodes)["mismatch/abs_mean"] == 0.0
    if option != "whole":
        assert looks == [32, 32], "once at all that was seen, once at what was seen last"
    changed = {name for name, tensor in policy.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed and changed <= policy.trained().keys()
    assert {n for n in changed if "vision" in n} == set() or option == "whole"
    if option == "lora":
        assert all(not n.startswith("vla.") or "lora_" in n for n in changed)
    policy.save(tmp_path / "to")
    loaded = load_policy(tmp_path / "to", SPEC)
    drawn = [each.act(seen(4), range(4)).actions_BJA for each in (policy, loaded)]
    assert np.allclose(*drawn, atol=1e-5)  # adapters are merged, which rounds
    assert names_in(tmp_path / "from") < names_in(tmp_path / "to")
    assert {n.split(".")[0] for n in names_in(tmp_path / "to") - names_in(tmp_path / "from")} <= {
        *("value", "state_shift", "state_scale", "action_shift", "action_scale", "spread_JA")
    }


def names_in(folder: Path) -> set[str]:
    names: set[str] = set()
    for file in folder.glob("model*.safetensors"):
        with safe_open(file, framework="pt") as opened_file:
            names |= set(opened_file.keys())
    return names


def test_a_checkpoint_without_scales_takes_those_of_what_it_imitates(tmp_path: Path) -> None:
    tokenizer(tmp_path)
    pi0(tmp_path)
    (tmp_path / "policy_preprocessor_step_5_normalizer_processor.safetensors").unlink()
    policy = open_policy(PI0Policy.Config(path=str(tmp_path), chunk=3, num_steps=4), SPEC)
    states, actions = torch.randn(50, 3) * 3 + 1, torch.randn(50, 2) * 0.2
    policy.set_normaliser(states, actions)
    assert torch.allclose(policy.normalised(actions).std(0), torch.ones(2))
    assert torch.allclose(policy.denormalised(policy.normalised(actions)), actions, atol=1e-6)
    loss = policy.imitation_loss(policy.seen(seen(4)), torch.zeros(4, 3, 2), torch.ones(4, 3))
    loss.backward()
    assert torch.isfinite(loss)


@pytest.mark.parametrize(
    ("kind", "changes", "options", "spec", "said"),
    [
        ("pi0", {"type": "pi05"}, {}, SPEC, "holds a checkpoint of 'pi05'"),
        ("pi0", {}, {"chunk": 7}, SPEC, "decides on 6 actions"),
        (
            "pi0",
            {},
            {},
            RobotSpec(state_size=3, action_size=4, cameras=("a",), image_size=16),
            "action_size is 2",
        ),
        (
            "pi0",
            {},
            {},
            RobotSpec(state_size=4, action_size=2, cameras=("a",), image_size=16),
            "state_size is 3",
        ),
        ("pi0", {}, {}, RobotSpec(state_size=3, action_size=2), "set simulator.image_size = 16"),
        (
            *("pi0", {}, {}),
            RobotSpec(state_size=3, action_size=2, cameras=("a", "b", "c"), image_size=16),
            "2 cameras, the simulator has a, b, c",
        ),
        ("openvla", {"model_type": "llama"}, {}, SPEC, "holds a checkpoint of 'llama'"),
        ("openvla", {}, {}, SPEC, "unnorm_key is one of the norm_stats of .*: bridge, libero"),
        ("openvla", {}, {"unnorm_key": "aloha"}, SPEC, "'aloha' is not among .*: bridge, libero"),
        (
            *("openvla", {}, {"unnorm_key": "libero"}),
            RobotSpec(state_size=3, action_size=7, cameras=("a",), image_size=16),
            "another robot's: its action_size is 2, the simulator's 7",
        ),
        ("openvla", {"vision_backbone_id": "dinoclip-vit-l-336px"}, {}, SPEC, "not DINOv2 or SigLIP"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_before_its_weights_are_read(
    kind: str, changes: dict[str, Any], options: dict[str, Any], spec: RobotSpec, said: str, tmp_path: Path
) -> None:
    (pi0 if kind == "pi0" else openvla)(tmp_path, **changes)
    for file in tmp_path.glob("model*"):
        file.unlink()
    policy = PI0Policy if kind == "pi0" else OpenVLAPolicy
    with pytest.raises((ConfigError, ModelError), match=said):
        policy.check(policy.Config(path=str(tmp_path), **options), spec)


def test_heads_without_probabilities_weights_that_are_missing_and_folders_of_nothing_are_named(
    tmp_path: Path,
) -> None:
    config = OpenVLAPolicy.Config(path=str(tmp_path), unnorm_key="libero")
    with pytest.raises(ModelError, match=r"no checkpoint of a policy: config\.json"):
        OpenVLAPolicy.check(config, SPEC)
    openvla(tmp_path)
    with pytest.raises(ModelError, match=r"holds no tokenizer .*`policy.tokenizer`"):
        OpenVLAPolicy.check(config, SPEC)
    (tmp_path / "action_head--150000_checkpoint.pt").touch()
    with pytest.raises(ModelError, match="it regresses actions"):
        OpenVLAPolicy.check(config, SPEC)
    pi0(tmp_path / "pi0")
    tokenizer(tmp_path / "pi0")
    values = json.loads((tmp_path / "pi0" / "config.json").read_text())
    values["dit_config"]["num_hidden_layers"] = 3
    values["vlm_config"]["text_config"]["num_hidden_layers"] = 3
    (tmp_path / "pi0" / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match="lacks 18 weights of a 'pi0' policy, the first 'model"):
        open_policy(PI0Policy.Config(path=str(tmp_path / "pi0"), chunk=3), SPEC)
