"""Compiled kernels where there is no compiler, a broken one, or an older processor."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import platform
import time
from pathlib import Path

import pytest

from rill.inference.native import cpu_runner
from rill.models.ops import cpu_build
from rill.models.ops.cpu_kernels import CpuKernels
from tests.inference.native_models import greedy_tokens, make_engine, prompts, reference, request


@pytest.mark.parametrize("compiler", [None, "false"])
def test_without_a_compiler_that_works_the_answer_is_none_and_a_warning(
    compiler: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("RILL_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu_build.shutil, "which", lambda name: compiler)
    monkeypatch.setattr(cpu_build, "_compiler", cpu_build._compiler.__wrapped__)
    with caplog.at_level(logging.WARNING):
        assert cpu_build.load_library.__wrapped__("cpu_kernels") is None
    assert "torch operations" in caplog.text


PROCESSORS = {
    "x86-64-v2": False,  # SSE only
    "x86-64-v3": False,  # AVX2
    "skylake-avx512": True,
}
"""Whether they have products of their own."""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 processors")
@pytest.mark.parametrize("processor", PROCESSORS)
def test_on_an_older_processor_less_is_compiled_and_the_tokens_are_the_same(
    processor: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = cpu_build._compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("RILL_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu_build, "_processor_flag", lambda: f"-march={processor}")
    kernels = CpuKernels(ctypes.CDLL(str(cpu_build._build(compiler, "cpu_kernels"))))
    assert kernels.has_products == PROCESSORS[processor]
    monkeypatch.setattr(cpu_runner, "load_cpu_kernels", lambda: kernels)
    inputs = prompts((5, 33, 1))
    for dtype in ("float32", "bfloat16"):
        engine = make_engine("llama", dtype=dtype)
        try:
            done = engine.generate([request(i, p) for i, p in enumerate(inputs)], timeout_s=60)
        finally:
            engine.close()
        if dtype == "float32":
            expected = [greedy_tokens(reference("llama"), p, 12) for p in inputs]
            assert [c.token_ids.tolist() for c in done] == expected
        assert all(len(c.token_ids) == 12 for c in done)


def test_without_a_writable_home_the_same_folder_is_used_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RILL_CACHE", "/proc/nowhere")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first = cpu_build._cache_folder()
    assert first.parent == tmp_path and first.stat().st_mode & 0o777 == 0o700
    assert cpu_build._cache_folder() == first
    first.rmdir()
    (tmp_path / "elsewhere").mkdir()
    first.symlink_to(tmp_path / "elsewhere")
    assert cpu_build._cache_folder() != first, "a link that somebody else may have laid is not followed"


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A compiler that writes empty files, and a cache that has nothing yet."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("RILL_CACHE", str(tmp_path / "cache"))
    return str(compiler)


def left_behind(tmp_path: Path, name: str, days: float) -> Path:
    """A library of other sources, last used so long ago."""
    path = tmp_path / "cache" / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    then_s = time.time() - days * 24 * 3600
    os.utime(path, (then_s, then_s))
    return path


def test_a_new_library_takes_the_place_of_those_that_nobody_used_for_a_month(
    builder: str, tmp_path: Path
) -> None:
    unused = left_behind(tmp_path, "cpu_kernels-0123456789abcdef.so", days=31)
    recent = left_behind(tmp_path, "cpu_kernels-fedcba9876543210.so", days=29)
    other = left_behind(tmp_path, "rows.json", days=400)
    killed_build = tmp_path / "cache" / ".build-1"
    killed_build.mkdir()
    (killed_build / "object.o").touch()
    os.utime(killed_build, (1.0, 1.0))
    built = cpu_build._build(builder, "cpu_kernels")
    assert sorted(tmp_path.glob("cache/*")) == sorted([built, recent, other]), (
        "removed: old ones, and only ours"
    )
    assert not unused.exists() and not killed_build.exists()


def test_a_library_that_is_loaded_counts_as_used(builder: str, tmp_path: Path) -> None:
    built = cpu_build._build(builder, "cpu_kernels")
    left_behind(tmp_path, built.name, days=31)
    assert cpu_build._build(builder, "cpu_kernels") == built
    cpu_build._remove_unused(built.parent)
    assert built.exists()


def test_nothing_is_removed_while_another_process_chooses_what_to_load(builder: str, tmp_path: Path) -> None:
    unused = left_behind(tmp_path, "cpu_kernels-0123456789abcdef.so", days=31)
    other = os.open(tmp_path / "cache", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_SH)
    cpu_build._build(builder, "cpu_kernels")
    assert unused.exists()
    fcntl.flock(other, fcntl.LOCK_EX)
    assert not cpu_build._mark_used(unused), "what may be going just now is built again, not waited for"
    os.close(other)
    assert cpu_build._mark_used(unused)
