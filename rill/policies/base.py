"""What a policy of a robot is: it sees, decides on a chunk of actions, and can say again how likely they were.

    decision = policy.act(observations, seeds)             in the rollout: encode ─▶ decide ─▶ score, without gradients
    evaluated = policy.evaluate(inputs, latents)           in the trainer: encode ─▶ score, with them

What is drawn depends on the observation's own seed and never on its neighbours. Both sides compute in blocks of `rows`
observations, padded: a matrix product of another shape may round differently, one of the same shape does not. So at
equal weights on a CPU the rollout's log-probabilities are the trainer's, bit for bit, whoever was batched with whom.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rill.config import Config, OneOf, PartConfig
from rill.errors import ConfigError, ModelError
from rill.policies.draws import Draws
from rill.policies.inputs import Inputs, padded_rows, read
from rill.policies.trunk import Trunk
from rill.registry import Registry
from rill.types import Decision, Observation, RobotSpec

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "policy.json"

POLICIES = Registry(
    "policy",
    {
        "tokens": "rill.policies.tokens:TokenPolicy",
        "gaussian": "rill.policies.gaussian:GaussianPolicy",
        "squashed": "rill.policies.squashed:SquashedPolicy",
        "flow": "rill.policies.flow:FlowPolicy",
        "pi0": "rill.policies.pi0:PI0Policy",
        "openvla": "rill.policies.openvla:OpenVLAPolicy",
    },
)


class PolicyConfig(PartConfig):
    """What every policy has."""

    chunk: int = Field(default=4, ge=1)
    """Actions that are decided on at once."""
    rows: int = Field(default=32, ge=1)
    """Observations that are computed together, in the rollout and in the trainer. A GPU wants more of them."""

    def inside(self, folder: Path) -> Self:
        """For a policy that was saved there."""
        return self


class Evaluated(NamedTuple):
    logprobs_BJ: Tensor
    entropies_BJ: Tensor
    values_B: Tensor


class Policy(nn.Module):
    """A network with its way of drawing actions. `spec` is the robot it is made for."""

    config: PolicyConfig
    spec: RobotSpec

    @abstractmethod
    def encode(self, inputs: Inputs) -> Any:
        """All that follows from what is seen alone, for `decide` and `score`."""

    @abstractmethod
    def decide(self, encoded: Any, draws: Draws, *, greedy: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """(actions before they are cut [B, J, A], latents) of one block. `greedy`: the likeliest, for evaluations."""

    @abstractmethod
    def score(self, encoded: Any, latents: Mapping[str, Tensor]) -> Evaluated:
        """How likely what was drawn is."""

    @abstractmethod
    def values(self, inputs: Inputs) -> Tensor:
        """[B]: what is still to come."""

    @abstractmethod
    def imitation_loss(self, inputs: Inputs, actions_BJA: Tensor, mask_BJ: Tensor) -> Tensor:
        """The sum over what the mask leaves: how far the policy is from doing the same."""

    @classmethod
    def check(cls, config: PartConfig, spec: RobotSpec) -> None:
        """Whether such a policy can steer this robot, before any process starts. UserError: it cannot."""
        open_policy(config, spec)

    def evaluate(self, inputs: Inputs, latents: Mapping[str, Tensor]) -> Evaluated:
        """How likely what was drawn is now, with gradients."""
        return self.score(self.encode(inputs), latents)

    def set_normaliser(self, states_NS: Tensor, actions_NA: Tensor) -> None:
        """Take the mean and spread of the states that it will see; of the actions, where it scales them."""
        for part in self.modules():
            if isinstance(part, Trunk):
                part.set_normaliser(states_NS)

    def normalised(self, actions: Tensor) -> Tensor:
        """The simulator's −1 … 1 to the numbers that the network computes; `denormalised` goes back."""
        return actions

    def denormalised(self, numbers: Tensor) -> Tensor:
        return numbers

    def seen(self, observations: Sequence[Observation]) -> Inputs:
        """Observations as tensors on the CPU. A frozen vision tower looks here, once, for all that follows."""
        return read(observations, self.spec)

    def trained(self) -> dict[str, Tensor]:
        """What can change in a run, by name; what is frozen is the same on every side from the start."""
        frozen = {name for name, parameter in self.named_parameters() if not parameter.requires_grad}
        return {name: tensor for name, tensor in self.state_dict().items() if name not in frozen}

    @torch.no_grad()
    def act(
        self, observations: Sequence[Observation], seeds: Sequence[int], *, greedy: bool = False
    ) -> Decision:
        """`seeds`: one to an observation, which decides what is drawn for it."""
        inputs = self.seen(observations).to(self.device)
        parts: list[tuple[Tensor, dict[str, Tensor], Evaluated]] = []
        size = self.config.rows
        for number, block in enumerate(inputs.blocks(size)):
            chosen = [*seeds[number * size : (number + 1) * size]]
            chosen += [0] * (size - len(chosen))
            encoded = self.encode(block)
            drawn_BJA, latents = self.decide(encoded, Draws(chosen, self.device), greedy=greedy)
            parts.append((drawn_BJA, latents, self.score(encoded, latents)))
        size = len(inputs)  # without what was padded
        drawn_BJA = torch.cat([drawn for drawn, _, _ in parts])[:size]
        latents = {name: torch.cat([part[1][name] for part in parts])[:size] for name in parts[0][1]}
        return Decision(
            actions_BJA=drawn_BJA.clamp(-1.0, 1.0).float().cpu().numpy(),
            latents={name: tensor.cpu().numpy() for name, tensor in latents.items()},
            logprobs_BJ=torch.cat([part[2].logprobs_BJ for part in parts])[:size].cpu().numpy(),
            values_B=torch.cat([part[2].values_B for part in parts])[:size].cpu().numpy(),
            clipped_B=(drawn_BJA.abs() > 1.0).float().mean((1, 2)).cpu().numpy(),
        )

    @torch.no_grad()
    def evaluate_as_drawn(self, inputs: Inputs, latents: Mapping[str, Tensor]) -> Evaluated:
        """`evaluate` in the blocks of `act`."""
        parts, size = [], self.config.rows
        for number, block in enumerate(inputs.blocks(size)):
            drawn = {name: padded_rows(tensor, number * size, size) for name, tensor in latents.items()}
            parts.append(self.evaluate(block, drawn))
        return Evaluated(*(torch.cat(column)[: len(inputs)] for column in zip(*parts, strict=True)))

    @torch.no_grad()
    def values_as_drawn(self, inputs: Inputs) -> Tensor:
        """`values` in the blocks of `act`."""
        found = [self.values(block) for block in inputs.blocks(self.config.rows)]
        return torch.cat(found)[: len(inputs)]

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def save(self, folder: Path) -> None:
        """`load_policy` reads it."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.stored().items()}
        save_file(weights, folder / WEIGHTS_FILE)
        written = {"policy": self.config.model_dump(mode="json"), "robot": asdict(self.spec)}
        (folder / CONFIG_FILE).write_text(json.dumps(written, indent=1), encoding="utf-8")

    def stored(self) -> dict[str, Tensor]:
        """The weights by the names of the file."""
        return self.state_dict()

    def load(self, folder: Path) -> None:
        self.load_state_dict(load_file(folder / WEIGHTS_FILE))


def open_policy(config: PartConfig, spec: RobotSpec, *, seed: int = 0) -> Policy:
    """A fresh one; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy: Policy = POLICIES.load(config.type)(config, spec)
    return policy


class SavedPolicy(Config):
    """What policy.json holds."""

    policy: Annotated[PartConfig, OneOf(POLICIES)]
    robot: dict[str, Any]


def load_policy(folder: Path, spec: RobotSpec | None = None) -> Policy:
    """What `save` wrote. `spec`: the robot it is to steer; another's policy is refused."""
    config, made_for = read_saved(folder, spec)
    policy = open_policy(config.inside(folder), made_for)
    policy.load(folder)
    return policy


def read_saved(folder: Path, spec: RobotSpec | None) -> tuple[PolicyConfig, RobotSpec]:
    """What is in a folder, without the weights."""
    try:
        saved = SavedPolicy(**json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} holds no policy of a robot: {error}") from error
    robot: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.robot.items()}
    made_for = RobotSpec(**robot)
    if spec is not None:
        check_fits(made_for, spec, str(folder))
    assert isinstance(saved.policy, PolicyConfig)
    return saved.policy, made_for


def check_fits(made_for: RobotSpec, spec: RobotSpec, name: str) -> None:
    for what in ("state_size", "action_size", "cameras", "image_size"):
        if getattr(made_for, what) != getattr(spec, what):
            raise ConfigError(
                f"the policy in {name} is another robot's: its {what} is {getattr(made_for, what)!r}, the simulator's "
                f"{getattr(spec, what)!r}"
            )
