"""Two hosts, as network namespaces joined by a cable, in one Ray cluster. Needs root and the `ip` command."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import child

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
TOKEN = secrets.token_hex(16)
"""Ray's token authentication stays on; both hosts are given the same token."""
HOSTS = {"rill-test-a": "10.213.0.1", "rill-test-b": "10.213.0.2"}


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


def in_host(host: str, *command: str) -> list[str]:
    return ["ip", "netns", "exec", host, *command]


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    first, second = HOSTS
    _remove_hosts()
    try:
        for host in HOSTS:
            ip("netns", "add", host)
            ip("-n", host, "link", "set", "lo", "up")
        ip("link", "add", "rill-a", "netns", first, "type", "veth", "peer", "name", "rill-b", "netns", second)
        for host, device in ((first, "rill-a"), (second, "rill-b")):
            ip("-n", host, "addr", "add", f"{HOSTS[host]}/24", "dev", device)
            ip("-n", host, "link", "set", device, "up")
    except subprocess.CalledProcessError as error:
        _remove_hosts()
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    yield list(HOSTS)
    _remove_hosts()


def _remove_hosts() -> None:
    for host in HOSTS:
        pids = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True).stdout.split()
        for pid in pids:
            subprocess.run(["kill", "-9", pid], capture_output=True)
        ip("netns", "del", host, check=False)


def start_ray(host: str, tmp: Path, *options: str) -> subprocess.Popen[bytes]:
    ray = Path(sys.executable).with_name("ray")
    command = in_host(
        host, str(ray), "start", "--block", "--num-cpus=1", f"--node-ip-address={HOSTS[host]}", *options
    )
    with open(tmp / f"{host}.log", "wb") as log:
        return subprocess.Popen(command, env=environment(), stdout=log, stderr=log)


def environment() -> dict[str, str]:
    return child.environment(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN)


@pytest.fixture
def address(hosts: list[str], tmp_path: Path) -> Iterator[str]:
    """A Ray cluster of both hosts."""
    first, second = hosts
    head_address = f"{HOSTS[first]}:6399"
    temp = Path("/tmp/rill-test-ray")
    shutil.rmtree(temp, ignore_errors=True)
    options = ("--head", "--port=6399", "--include-dashboard=false", f"--temp-dir={temp}")
    running = [start_ray(first, tmp_path, *options)]
    try:
        wait_for_ray(first, head_address, 1)
        running.append(start_ray(second, tmp_path, f"--address={head_address}", "--labels=room=lab"))
        wait_for_ray(first, head_address, 2)
        yield head_address
    finally:
        for process in reversed(running):
            process.terminate()
        shutil.rmtree(temp, ignore_errors=True)


def run_driver(*command: str) -> str:
    """Run a driver on the first host; gives what it printed."""
    first = next(iter(HOSTS))
    done = subprocess.run(
        in_host(first, sys.executable, *command),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    return done.stdout


def test_groups_transfers_channels_and_deaths_work_across_two_hosts(address: str) -> None:
    script = Path(__file__).with_name("two_hosts_script.py")
    assert run_driver(str(script), address).split()[-1] == "closed"


FIGURE_FIVE = """
import sys
from rill import Cluster
from tests.runtime.figure_five import run
for rollout_on, actor_on in (("0-1", "0-1"), ("0", "1"), ("1", "0")):
    with Cluster.ray(sys.argv[1], devices="cpu:1") as cluster:
        assert {device.node_id for device in cluster.devices} == {"node0", "node1"}
        print(run(cluster, rollout_on, actor_on, num_steps=3, batch_size=12), flush=True)
"""


def test_the_program_of_figure_five_runs_unchanged_on_two_hosts(address: str) -> None:
    """Both groups spread over the hosts and sharing devices; then each group on a host of its own."""
    expected = [2 * sum(range(12))] * 3
    assert run_driver("-c", FIGURE_FIVE, address).splitlines() == [str(expected)] * 3


def test_a_run_with_engine_and_trainer_on_two_hosts_leaves_the_model_of_a_local_one(
    address: str, tmp_path: Path
) -> None:
    """Samples go one way, weights the other, over TCP, without the driver."""
    recipe, root = str(ROOT / "tests/e2e/tiny.toml"), str(tmp_path)
    common = (
        "-m",
        "rill.cli.main",
        "train",
        recipe,
        "--root",
        root,
        "placement.rollout=1",
        "placement.actor=0",
    )
    exact = ("rollout.engine.batch_invariant=true", "algorithm.correction=tis")
    run_driver(*common, "--name", "apart", *exact, "cluster.type=ray", f"cluster.address={address}")
    run_driver(*common, "--name", "here", *exact, "cluster.devices=2")
    apart, here = (Path(root, name, "model", "model.safetensors").read_bytes() for name in ("apart", "here"))
    assert apart == here
    assert "weights travel by tcp" in Path(root, "apart", "log.txt").read_text()


def wait_for_ray(host: str, address: str, num_nodes: int) -> None:
    code = (
        "import ray, sys, time\n"
        f"for _ in range(60):\n"
        "    try:\n"
        f"        ray.init({address!r}, log_to_driver=False)\n"
        f"        while sum(n['Alive'] for n in ray.nodes()) < {num_nodes}: time.sleep(0.3)\n"
        "        sys.exit(0)\n"
        "    except (ConnectionError, RuntimeError): time.sleep(0.5)\n"
        "sys.exit(1)\n"
    )
    subprocess.run(in_host(host, sys.executable, "-c", code), env=environment(), check=True, timeout=150)
