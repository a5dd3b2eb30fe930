"""Profiles are files with an identity: read back as written, merged with their like, refused as somebody else's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rill.errors import PlanError
from rill.planning.cost import call_seconds
from rill.planning.profile import DeviceKind, Identity, Points, Profile, WorkerProfile, merge_all, shortened

IDENTITY = Identity(model="m", machine="box", version="1")


def profile(
    items: tuple[float, ...] = (8.0, 16.0, 32.0), identity: Identity = IDENTITY, **more: float
) -> Profile:
    points = Points(
        kind="gpu", items=items, replicas=(1,) * len(items), seconds=tuple(1 + x / 8 for x in items), **more
    )
    worker = WorkerProfile(options={"gpu1": points}, lengths=(1.0, 5.0), streams=True)
    return Profile(
        identity=identity, workers={"rollout": worker}, devices={"gpu": DeviceKind(memory_bytes=8e10)}
    )


def test_a_profile_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(profile(onload_s=0.5).dumps())
    assert Profile.load(path) == profile(onload_s=0.5)


def test_an_integer_in_an_edited_file_is_a_number_too(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(profile().dumps().replace("[8.0, 16.0, 32.0]", "[8, 16, 32]"))
    assert Profile.load(path) == profile()


def test_merged_profiles_have_the_points_of_both() -> None:
    merged = merge_all([profile((8.0, 16.0)), profile((64.0,))])
    assert merged.workers["rollout"].options["gpu1"].items == (8.0, 16.0, 64.0)
    cost = merged.costs()["rollout"]
    assert cost.options[0].work_s.at(128) == pytest.approx(17.0)
    assert "3 points at 3 sizes" in merged.basis()["rollout"]


@pytest.mark.parametrize("field", ["model", "machine", "version"])
def test_a_profile_of_another_is_refused_or_marked(field: str) -> None:
    other = profile(
        identity=Identity(**({"model": "m", "machine": "box", "version": "1"} | {field: "other"}))
    )
    wanted = {"model": "m", "machine": "box", "version": "1"}
    with pytest.raises(PlanError, match=f"{field} is 'other'"):
        other.check(wanted)
    assert len(other.check(wanted, is_other_ok=True)) == 1
    with pytest.raises(PlanError, match=f"another {field}"):
        profile().merge(other)
    assert profile().check(wanted) == []


@pytest.mark.parametrize(
    ("on_four", "exponent", "joined_s"),
    [((2.0, 4.0), 0.5, 0.0), ((1.75, 2.75), 0.0, 1.0)],
    ids=["all", "a call"],
)
def test_what_several_replicas_cost_is_seen(
    on_four: tuple[float, float], exponent: float, joined_s: float
) -> None:
    """All work takes longer, or a call does, whatever its size: two sizes tell, however often one was measured."""
    chunks = 20
    points = Points(
        kind="gpu",
        items=(8.0, 16.0, *[8.0] * chunks, 16.0),
        replicas=(1, 1, *[4] * chunks, 4),
        seconds=(1.0, 2.0, *[on_four[0]] * chunks, on_four[1]),
    )
    made = Profile(identity=IDENTITY, workers={"actor": WorkerProfile(options={"gpu1": points})})
    option = made.costs()["actor"].options[0]
    assert option.replica_exponent == pytest.approx(exponent, abs=0.01)
    assert option.joined_s == pytest.approx(joined_s, abs=0.01)


def test_the_fullest_replica_is_not_counted_twice() -> None:
    """What three engines took is measured on the fullest of them: the same batch on them is predicted to take that."""
    points = Points(kind="gpu", items=(8.0, 16.0, 8.0), replicas=(1, 1, 3), seconds=(1.0, 2.0, 1.5))
    worker = WorkerProfile(options={"gpu1": points}, lengths=(1.0, 2.0, 6.0), streams=True)
    cost = Profile(identity=IDENTITY, workers={"rollout": worker}).costs()["rollout"]
    seconds, _ = call_seconds(cost, cost.options[0], 24, 24, np.array([3]))
    assert seconds[0] == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[identity]\nmodel = 1", "cannot read"),
        (profile().dumps().replace("streams", "dreams"), "dreams"),
        (profile().dumps().replace("replicas = [1, 1, 1]", "replicas = [1]"), "one length"),
        (profile().dumps().replace("replicas = [1, 1, 1]", "replicas = [0, 1, 1]"), ">= 1.*replicas"),
        (profile().dumps().replace("items = [8.0", "items = [0.0"), "> 0.0.*items"),
        (profile().dumps().replace("seconds = [2.0", "seconds = [inf"), r"rollout\.gpu1: items, seconds"),
        (profile(tail_s=-1.0).dumps(), ">= 0.0.*tail_s"),
        (profile(least=0).dumps(), ">= 1.*least"),
        (profile().dumps().replace("lengths = [1.0", "lengths = [0.0"), "> 0.0.*lengths"),
        (
            profile().dumps().replace("memory_bytes = 80000000000.0", "link_bytes_per_s = 0"),
            "> 0.0.*link_bytes",
        ),
        (profile().dumps() + '[graph]\nnodes = "rollout"\n', "the profile's graph: Expected `array`"),
        (profile().dumps().partition("[workers.rollout.options")[0] + "options = {}\n", "no options"),
        ("model = 'caf\xe9'", "cannot read the profile .*utf-8"),
    ],
)
def test_a_damaged_profile_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(text, encoding="latin-1")
    with pytest.raises(PlanError, match=words):
        Profile.load(tmp_path / "p.toml")


def test_devices_that_nothing_was_measured_on_are_refused() -> None:
    with pytest.raises(PlanError, match="measured on tpu"):
        profile().pools({"tpu": 4})
    assert profile().pools({"gpu": 4})[0].memory_bytes == 8e10


def test_many_lengths_become_quantiles_with_the_longest() -> None:
    short = shortened(range(10_000))
    assert len(short) == 64
    assert short[-1] == 9999.0
    assert shortened([3.0, 1.0]) == (1.0, 3.0)
