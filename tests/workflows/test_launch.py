"""Before anything runs: what cannot is refused, and the placement decides how weights travel."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from rill.config import load_recipe, resolve
from rill.errors import CheckpointError, ConfigError, PlanError, RunError, WorkerError
from rill.journal.checkpoints import RunCheckpoints
from rill.models.loading import ModelConfig
from rill.runtime.cluster import Cluster
from rill.runtime.device.accelerator import CPU, CUDA
from rill.runtime.device.device import Device
from rill.telemetry.run import Run
from rill.weights import TransportConfig
from rill.workflows import recipe_schema
from rill.workflows.config import OnlineConfig
from rill.workflows.grpo import GRPO
from rill.workflows.language import require_same_tokenizer
from rill.workflows.launch import Launcher, routed
from rill.workflows.workflow import may_follow_a_death
from tests.workflows.scene import MODEL


def test_engines_that_run_ahead_may_not_share_devices_with_the_trainer(tmp_path: Path) -> None:
    values = load_recipe("demo", ["loop.max_lag=1", "sft.steps=0"])
    config = resolve(GRPO.Config, values.values, values.provenance)
    run = Run.create("r", root=tmp_path)
    with Cluster(devices="cpu:1") as cluster:
        with pytest.raises(PlanError, match="place them apart"):
            Launcher(config, run, [], cluster)
    run.close()


def test_what_is_lost_on_its_way_back_from_a_move_that_failed_hides_nobody_who_has_to_load() -> None:
    """A trainer that was started again without its weights must not be trained on. Engines go back to the devices that
    each of them had: an engine may be one rank on several."""
    tries = Mock(
        side_effect=[None, RunError("the actor does not start there"), RunError("and an engine dies")]
    )
    session = SimpleNamespace(
        groups={
            "rollout": SimpleNamespace(devices={0: (0, 1), 1: (2, 3)}),
            "actor": SimpleNamespace(devices={0: (0,)}),
        },
        devices={"rollout": frozenset(range(4)), "actor": frozenset({0})},
        ids_of=lambda placement: frozenset({int(placement)}),
        can_move=True,
    )
    launch = SimpleNamespace(session=session, config=SimpleNamespace(placement=None), _move=tries)
    moved, error = Launcher.move(launch, {"rollout": "4", "actor": "5"})  # type: ignore[arg-type]
    assert moved == ["rollout", "actor"] and "does not start there" in str(error)
    assert tries.call_args.args == ("rollout", [(0, 1), (2, 3)])


@pytest.mark.parametrize("recipe", ["demo", "ppo_arithmetic", "sft_arithmetic"])
def test_the_seed_of_a_recipe_decides_the_fresh_weights_of_every_part(recipe: str) -> None:
    def weights_seeds(*changes: str) -> set[int]:
        values = load_recipe(recipe, list(changes))
        config = resolve(recipe_schema(values.values, recipe), values.values, values.provenance)
        tables = config.model_dump()
        engine = [tables["rollout"]["engine"]] if "rollout" in tables else []
        return {part["model"]["seed"] for part in (tables, tables["trainer"], *engine)}

    assert weights_seeds("seed=3") == {3}
    assert weights_seeds("seed=3", "model.seed=5") == {5}


@pytest.mark.parametrize("engine", ["rollout.engine=native", "rollout.engine.type=native"])
def test_the_engine_computes_in_the_trainers_precision_however_it_is_named(engine: str) -> None:
    values = load_recipe("demo", [engine, "trainer.compute_dtype=bfloat16"])
    config = resolve(GRPO.Config, values.values, values.provenance).model_dump()
    assert config["rollout"]["engine"]["dtype"] == "bfloat16"


def test_a_critic_may_be_another_model_than_the_policy() -> None:
    changes = ["critic.model.path=models/critic"]
    values = load_recipe("ppo_arithmetic", changes)
    config = resolve(recipe_schema(values.values, "ppo"), values.values, values.provenance).model_dump()
    assert config["critic"]["model"]["path"] == "models/critic" != config["trainer"]["model"]["path"]


def test_a_model_that_reads_other_tokens_is_refused_by_name(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"[UNK]": 0, "yes": 1}, "[UNK]")))
    other.save_pretrained(tmp_path)
    require_same_tokenizer(MODEL, MODEL)
    with pytest.raises(ConfigError, match="another vocabulary"):
        require_same_tokenizer(MODEL, ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("nodes", "kind", "stay", "rollout", "actor", "expected"),
    [
        ("aa", CPU, False, "0", "1", "shm"),
        ("ab", CPU, False, "1", "0", "tcp"),
        ("aa", CUDA, True, "0", "0", "cuda_ipc"),
        ("aa", CUDA, False, "0", "0", "shm"),
        ("aa", CUDA, True, "1", "0", "shm"),
        ("aa", CUDA, True, "0,1", "0", "shm"),
        ("aa", CPU, True, "0", "0", "shm"),
    ],
)
def test_the_placement_decides_how_weights_travel(
    nodes: str, kind: str, stay: bool, rollout: str, actor: str, expected: str
) -> None:
    devices = [Device(kind=kind, index=i, id=i, node_id=node) for i, node in enumerate(nodes)]

    def route(**transport: str) -> tuple[str, str]:
        config = OnlineConfig.model_validate(
            {
                "workflow": "any",
                "data": {"type": "arithmetic"},
                "rollout": {},
                "algorithm": {},
                "trainer": {},
                "sync": {"transport": transport},
                "cluster": {"colocate": stay},
                "placement": {"rollout": rollout, "actor": actor},
            }
        )
        found = routed(config, devices).transport
        assert isinstance(found, TransportConfig)
        return found.type, found.verify.value

    assert route(type="auto", verify="off") == (expected, "off")
    assert route(type="disk") == ("disk", "full")


def test_a_checkpoint_that_fails_in_a_worker_may_be_its_peers_death_and_one_on_a_full_disk_is_not(
    tmp_path: Path,
) -> None:
    """The peers of a rank that is killed while it writes cannot write theirs, and may say so first."""
    run = Run.create("r", root=tmp_path)
    for cause, may_follow in (
        (WorkerError("…", group="actor", rank=0, remote_traceback=""), True),
        (OSError(28), False),
    ):
        handle = SimpleNamespace(wait=Mock(side_effect=cause))
        group = SimpleNamespace(save=lambda folder, handle=handle: handle)
        checkpoints = RunCheckpoints(run, {"actor": group}, 3, 1.0)  # type: ignore[dict-item]
        with pytest.raises(CheckpointError) as caught:
            checkpoints.save(1)
        assert may_follow_a_death(caught.value, is_ready=True) is may_follow
    run.close()
