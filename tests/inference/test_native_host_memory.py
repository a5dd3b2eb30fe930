"""The cache on the CPU is sized by what the process may take, not by what the machine has."""

from __future__ import annotations

from pathlib import Path

from rill.inference.native.model_runner import free_host_bytes


def test_a_container_has_its_own_limit(tmp_path: Path) -> None:
    machine = free_host_bytes(tmp_path)
    assert machine > 0
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert free_host_bytes(tmp_path) == 600_000
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 50000\n")
    assert free_host_bytes(tmp_path) == 650_000, "what the kernel would drop is free"
    (tmp_path / "memory.max").write_text("max\n")
    assert free_host_bytes(tmp_path) > 650_000


def test_the_older_layout_of_control_groups_counts_too(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("2000\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("500\n")
    assert free_host_bytes(tmp_path) == 1500
