"""Compiled kernels where there is no compiler, a broken one, or an older processor."""

from __future__ import annotations

import ctypes
import logging
import platform
import shutil
from pathlib import Path

import pytest

from rill.inference.native import model_runner
from rill.models.ops import cpu_build
from rill.models.ops.cpu_kernels import CpuKernels
from tests.inference.native_models import greedy_tokens, make_engine, prompts, reference, request


@pytest.mark.parametrize("compiler", [None, "false"])
def test_without_a_compiler_that_works_the_answer_is_none_and_a_warning(
    compiler: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("RILL_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu_build.shutil, "which", lambda name: compiler)
    with caplog.at_level(logging.WARNING):
        assert cpu_build.load_library() is None
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
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("RILL_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu_build, "_processor_flag", lambda: f"-march={processor}")
    kernels = CpuKernels(ctypes.CDLL(str(cpu_build.build(compiler))))
    assert kernels.has_products == PROCESSORS[processor]
    monkeypatch.setattr(model_runner, "load_cpu_kernels", lambda: kernels)
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
