"""Checkpoints: bit-identical resume, cut-off files, asynchronous saves, refusals."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from rill.errors import CheckpointError
from rill.training import checkpoint, offload
from rill.training.checkpoint import FOLDER, MANIFEST
from rill.training.policy import PolicyTrainer
from rill.training.staging import Staging, StateCopy
from tests.training.tiny import check_saved_off_the_device, make_samples, trainer


def weights(t: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {n: w.clone() for n, w in t.named_weights()}


def save(t: PolicyTrainer, folder: Path) -> Path:
    t.save(folder)
    t.wait_saved()
    return folder / FOLDER


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"compute_dtype": "bfloat16"},
        {"optimizer": {"type": "muon", "learning_rate": 1e-3}, "num_mini_batches": 2},
        {"optimizer": {"type": "adamw8bit", "learning_rate": 1e-3}, "compute_dtype": "bfloat16"},
        {"optimizer": {"type": "adamw8bit", "learning_rate": 1e-3, "offload_state": True}},
        {"lora": {"rank": 2}, "schedule": {"type": "linear", "total_steps": 9}},
    ],
    ids=str,
)
def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path, values: dict[str, Any]) -> None:
    straight = trainer(**values)
    straight.update(make_samples(seed=1))
    straight.update(make_samples(seed=2))
    straight.save(tmp_path)
    straight.wait_saved()
    resumed = trainer(**values)
    assert resumed.load(tmp_path) == straight.version
    assert resumed.learning_rate == straight.learning_rate
    wanted, found = straight.update(make_samples(seed=3)), resumed.update(make_samples(seed=3))
    for name in ("loss", "grad_norm", "version"):
        assert found[name] == wanted[name], name
    for name, tensor in weights(straight).items():
        assert torch.equal(tensor, weights(resumed)[name]), name


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "muon"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_that_left_its_device_is_saved_from_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str
) -> None:
    """As on a GPU, whose memory is taken from it: here the host's own is."""
    monkeypatch.setattr(offload, "_device_storages", lambda tensors: list(storages(tensors).values()))
    monkeypatch.setattr(offload, "_pinned_slab", lambda count: torch.zeros(count, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    values = {"compute_dtype": dtype, "optimizer": {"type": kind, "learning_rate": 1e-3}}
    # moments of 8 bits are decoded on the device
    check_saved_off_the_device(lambda: trainer(**values), leave, tmp_path, rests=kind != "adamw8bit")


def leave(t: PolicyTrainer) -> None:
    here, t.engine.device = t.engine.device, torch.device("cuda")
    t.offload()
    t.engine.device = here


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    found = {s._cdata: s for s in (t.untyped_storage() for t in tensors)}
    return {address: storage for address, storage in found.items() if storage.nbytes() > 0}


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "muon", "sgd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_save_before_the_first_step_changes_nothing(tmp_path: Path, kind: str, dtype: str) -> None:
    values: dict[str, Any] = {"compute_dtype": dtype}
    values["optimizer"] = {"type": kind, "learning_rate": 1e-2, "weight_decay": 0.1}
    saved, other = trainer(**values), trainer(**values)
    saved.save(tmp_path)
    saved.wait_saved()
    resumed = trainer(**values)
    assert resumed.load(tmp_path) == 0
    for t in (saved, other, resumed):
        t.update(make_samples())
    for name, wanted in weights(other).items():
        assert torch.equal(weights(saved)[name], wanted) and torch.equal(weights(resumed)[name], wanted), name


def test_a_run_can_change_between_adamw_with_32_and_with_8_bits(tmp_path: Path) -> None:
    plain = trainer()
    plain.update(make_samples(seed=1))
    plain.save(tmp_path)
    plain.wait_saved()
    coded = trainer(optimizer={"type": "adamw8bit", "learning_rate": 1e-3})
    assert coded.load(tmp_path) == 1
    before = weights(plain)
    plain.update(make_samples(seed=2))
    coded.update(make_samples(seed=2))
    for name, wanted in weights(plain).items():
        moved = (wanted - before[name]).norm()
        assert moved > 0 and (weights(coded)[name] - wanted).norm() < 0.1 * moved, name


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    save(trainer(), tmp_path)
    with pytest.raises(CheckpointError, match=r"optimizer state of adamw.*set optimizer.type"):
        trainer(optimizer={"type": "muon", "learning_rate": 1e-3}).load(tmp_path)


def test_a_save_holds_the_weights_of_its_moment(tmp_path: Path) -> None:
    t = trainer()
    t.update(make_samples())
    wanted = weights(t)
    t.save(tmp_path)
    t.update(make_samples(seed=5))
    t.wait_saved()
    again = trainer()
    assert again.load(tmp_path) == 1
    assert all(torch.equal(w, wanted[n]) for n, w in weights(again).items())


def test_a_save_returns_before_the_state_is_copied_and_the_next_step_waits_for_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_step_due = threading.Event()
    copies, waits = Staging.to_host, StateCopy.wait

    def when_a_step_is_due(self: Staging, name: str, value: Any) -> Any:
        assert is_step_due.wait(60)
        return copies(self, name, value)

    def wait(self: StateCopy) -> None:
        is_step_due.set()
        waits(self)

    monkeypatch.setattr(Staging, "to_host", when_a_step_is_due)
    monkeypatch.setattr(StateCopy, "wait", wait)
    t = trainer()
    t.update(make_samples())
    wanted = weights(t)
    t.save(tmp_path)
    t.update(make_samples(seed=5))
    t.wait_saved()
    again = trainer()
    assert again.load(tmp_path) == 1
    assert all(torch.equal(w, wanted[n]) for n, w in weights(again).items())


def test_training_goes_on_while_the_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    original = checkpoint.save

    def slowly(*args: Any, **kwargs: Any) -> Any:
        assert may_write.wait(60)
        return original(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "save", slowly)
    t = trainer()
    t.save(tmp_path)
    t.update(make_samples())
    assert t.version == 1 and not (tmp_path / FOLDER).exists()
    may_write.set()
    t.save(tmp_path)  # waits for the one before it
    t.close()
    assert trainer().load(tmp_path) == 1


def test_a_save_that_fails_says_so_when_it_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    t = trainer()
    t.save(tmp_path / "file")
    with pytest.raises(CheckpointError, match="could not be written.*file"):
        t.wait_saved()
    t.save(tmp_path)
    t.wait_saved()


def test_a_checkpoint_cut_off_at_any_byte_is_never_loaded(tmp_path: Path) -> None:
    whole = save(trainer(), tmp_path / "a")
    files = list(whole.iterdir())
    assert {".metadata", MANIFEST} < {p.name for p in files}
    reader = trainer()
    for file in files:
        size = file.stat().st_size
        for length in {0, 1, size // 2, size - 1}:
            copy = tmp_path / "b"
            shutil.copytree(tmp_path / "a", copy)
            with (copy / FOLDER / file.name).open("r+b") as handle:
                handle.truncate(length)
            with pytest.raises(CheckpointError, match="no whole checkpoint"):
                reader.load(copy)
            shutil.rmtree(copy)


def test_changed_bytes_of_the_right_length_are_found(tmp_path: Path) -> None:
    part = next(save(trainer(), tmp_path).glob("*.distcp"))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    with pytest.raises(CheckpointError, match="no whole checkpoint.*has changed"):
        trainer().load(tmp_path)


def test_a_killed_save_leaves_the_one_before_it(tmp_path: Path) -> None:
    folder = save(trainer(), tmp_path)
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir()
    (partial / "__0_0.distcp").write_bytes(b"half")
    assert trainer().load(tmp_path) == 0
    t = trainer()
    t.update(make_samples())
    save(t, tmp_path)
    assert trainer().load(tmp_path) == 1 and not partial.exists()


def test_a_save_into_the_same_folder_has_a_whole_checkpoint_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(trainer(), tmp_path)
    remove = shutil.rmtree

    def removed(path: Path, **how: Any) -> None:
        remove(path, **how)
        assert checkpoint.find_damage(folder) is None, "a kill here would lose it"

    t = trainer()
    t.update(make_samples())
    with monkeypatch.context() as watched:
        watched.setattr(checkpoint.shutil, "rmtree", removed)
        save(t, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FOLDER]
    folder.rename(checkpoint.retired(folder))  # killed between two renames
    assert trainer().load(tmp_path) == 1


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    save(trainer(lora={"rank": 2}), tmp_path)
    with pytest.raises(CheckpointError, match="another model"):
        trainer().load(tmp_path)
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        trainer().load(tmp_path / "nothing")
