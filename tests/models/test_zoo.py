"""Every causal architecture of the installed transformers: engine, trainer and modules agree, or it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rill.errors import ModelError
from tests.models.zoo import SMALL, causal_types, documented, look_at

QUICK = {
    "llama": "fused",
    "gemma3_text": "fused",
    "olmo2": "fused",
    "granite": "fused",
    "gpt_oss": "fused",
    "deepseek_v3": "modules",
    "cohere2": "fused",
    "glm4": "fused",
    "gpt2": "modules",
    "mamba": "refused",
}


@pytest.mark.parametrize("model_type", QUICK)
def test_a_few_of_every_kind(model_type: str) -> None:
    assert look_at(model_type).kind == QUICK[model_type] == documented()[model_type]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model_type", causal_types())
def test_each_does_what_the_docs_say(model_type: str) -> None:
    assert look_at(model_type).kind == documented().get(model_type, "unbuilt")


def test_a_decoder_that_differs_gives_way_to_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    from rill.inference.native.engine import NativeEngine
    from rill.models.decode import structure
    from rill.models.loading import ModelConfig

    shape: dict[str, Any] = {"model_type": "gemma2", **SMALL}
    plain = structure._norm
    monkeypatch.setattr(
        structure,
        "_norm",
        lambda module: None if (n := plain(module)) is None else structure.Norm(n.weight, 9.0, True),
    )
    engine = NativeEngine(NativeEngine.Config(model=ModelConfig(shape=shape), num_kv_blocks=8))
    try:
        assert engine._runner.decoder is None
    finally:
        engine.close()


def test_modules_that_differ_are_refused_with_the_engine_to_use_instead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rill.inference.native.engine import NativeEngine
    from rill.models.loading import ModelConfig
    from rill.models.ops.cpu_kernels import CpuKernels
    from rill.models.ops.torch_kernels import TorchKernels

    def other(self: Any, query_NW: Any, num_heads: int, *args: Any) -> Any:
        return query_NW.view(len(query_NW), num_heads, -1).clone()

    for kernels in (CpuKernels, TorchKernels):
        monkeypatch.setattr(kernels, "attend", other)
    config = NativeEngine.Config(
        model=ModelConfig(shape={"model_type": "llama", **SMALL}), num_kv_blocks=8, fast_path=False
    )
    with pytest.raises(ModelError, match=r"does not run 'llama': its logits differ .* vllm or sglang"):
        NativeEngine(config)
