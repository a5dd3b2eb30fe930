"""A tiny random model of every causal architecture in the installed transformers, and what rill does with it.

    python -m tests.models.zoo            writes the list in docs/models.md again

`look_at` holds engine, trainer and the model's own eager modules against each other: greedy tokens, log-probabilities
and gradients.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rill.errors import ModelError, RillError, UnsupportedError
from rill.inference.base import Request
from rill.inference.native.engine import NativeEngine
from rill.models.eager import attention_of
from rill.models.loading import ModelConfig, load_model, load_model_config
from rill.training.module import PolicyModule, load_packed_lm
from rill.training.packing import PackSequence, build_pack
from rill.types import SamplingParams

DOCS = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- zoo: begin -->", "<!-- zoo: end -->"
NUM_TOKENS = 6
MOST_PARAMETERS = 3_000_000
"""Of a tiny one: parts of some architectures do not shrink with these sizes."""
SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 8, "n_embd": 32, "n_layer": 2,
    "n_head": 4, "n_positions": 64, "n_inner": 48, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64,
    "ffn_dim": 48, "word_embed_proj_dim": 32, "num_layers": 2, "attention_heads": 4, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "moe_k": 2,
    "moe_num_experts": 4, "expert_ffn_hidden_size": 16, "shared_expert_intermediate_size": 16, "n_group": 2,
    "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "qk_head_dim": 16, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "query_pre_attn_scalar": 8, "rotary_dim": 8, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8,
    "ffn_hidden_size": 48, "decoder_layers": 2, "encoder_layers": 2, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "moe_layer_start_index": 1,
    "num_dense_layers": 1,
}  # fmt: skip
LATENT: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 8, "v_head_dim": 12}
OWN: dict[str, dict[str, Any]] = {
    "gemma3n_text": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
                     "num_kv_shared_layers": 0},
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip


class Finding(NamedTuple):
    kind: str
    """fused, modules, refused, or unbuilt: no tiny one could be made."""
    reason: str = ""


def causal_types() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_shape(model_type: str) -> dict[str, Any]:
    from transformers import AutoConfig

    config: Any = AutoConfig.for_model(model_type)
    values = config.get_text_config().to_dict()
    shape = {name: value for name, value in SMALL.items() if name in values}
    if "kv_lora_rank" in values:
        shape |= {name: value for name, value in LATENT.items() if name in values}
    if values.get("layer_types"):
        shape["layer_types"] = (list(dict.fromkeys(values["layer_types"])) * 2)[:2]
    return shape | OWN.get(model_type, {}) | {"model_type": config.get_text_config().model_type}


def look_at(model_type: str) -> Finding:
    try:
        config = ModelConfig(shape=tiny_shape(model_type))
        if _num_parameters(config) > MOST_PARAMETERS:
            return Finding("unbuilt", "too large")
        plain: Any = load_model(config, dtype=torch.float32, attention="eager")
    except Exception as error:
        return Finding("unbuilt", type(error).__name__)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # away from symmetric starts: sinks and biases begin at zero
        for parameter in plain.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    try:
        kind = _engine_kind(config, plain)
        _check_trainer(config, plain)
    except (ModelError, UnsupportedError) as error:
        return Finding("refused", _reason(str(error)))
    return Finding(kind)


def _num_parameters(config: ModelConfig) -> int:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(load_model_config(config))
    return sum(p.numel() for p in model.parameters())


def _engine_kind(config: ModelConfig, plain: Any) -> str:
    engine = NativeEngine(
        NativeEngine.Config(model=config, num_kv_blocks=32, max_num_seqs=4, max_context=64), model=plain
    )
    try:
        prompt = np.arange(3, 16, dtype=np.int32)  # longer than the window
        sampling = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        requests = [Request(id=str(n), token_ids=prompt[:n], sampling=sampling) for n in (4, 13)]
        for request, completion in zip(requests, engine.generate(requests, timeout_s=60), strict=True):
            tokens = torch.tensor(np.concatenate([request.token_ids, completion.token_ids])).long()
            with torch.no_grad(), attention_of(plain, "eager"):
                logprobs = plain(tokens[None], use_cache=False).logits[0].float().log_softmax(-1)
            start = len(request.token_ids) - 1
            best = logprobs[start:-1].max(-1)
            assert completion.token_ids.tolist() == best.indices.tolist()
            np.testing.assert_allclose(completion.logprobs, best.values, atol=2e-3)
        return "modules" if engine._runner.decoder is None else "fused"
    finally:
        engine.close()


def _check_trainer(config: ModelConfig, plain: Any) -> None:
    lm = load_packed_lm(config, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        for ours, theirs in zip(lm.parameters(), plain.parameters(), strict=True):
            ours.copy_(theirs)
    sequences = [np.arange(5, 16, dtype=np.int32), np.arange(20, 24, dtype=np.int32)]
    packed = [PackSequence(token_ids=s, wanted=np.arange(len(s)) > 0) for s in sequences]
    pack = build_pack(packed, device=torch.device("cpu"), use_flash=False)
    found = PolicyModule(lm)(pack).logprobs_K
    wanted = []
    for sequence in sequences:
        ids = torch.tensor(sequence).long()
        with attention_of(plain, "eager"):
            logprobs = plain(ids[None], use_cache=False).logits[0].float().log_softmax(-1)
        wanted.append(logprobs[:-1].gather(1, ids[1:, None])[:, 0])
    torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-3, atol=2e-3)
    found.sum().backward()
    torch.cat(wanted).sum().backward()
    for (name, ours), theirs in zip(lm.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None and theirs.grad.norm() > 1e-4:
            distance = (ours.grad - theirs.grad).norm() / theirs.grad.norm()
            assert distance < 1e-2, f"the gradient of {name} differs by {float(distance):.1e}"


def _reason(message: str) -> str:
    """Without the architecture's name and numbers, so that equal reasons read alike."""
    for known in (
        "inside the model", "both directions", "encoder with a decoder", "an index selects", "another state",
        "attends twice", "position bias of its own", "no list of", "differ from its own modules'",
        "hand their arguments down",
    ):  # fmt: skip
        if known in message:
            return known
    kinds = message.partition("it has layers of ")[2].partition(";")[0]
    return f"layers of {kinds}" if kinds else message[:80]


WORDS = {
    "inside the model": "transformers computes its attention inside the model",
    "both directions": "it attends in both directions",
    "an index selects": "it attends to keys that an index selects",
    "another state": "some layers keep another state than keys and values",
    "attends twice": "a layer attends more than once",
    "position bias of its own": "it passes a mask or bias of its own to attention",
    "no list of": "its layers are not one list of blocks",
    "differ from its own modules'": "the logits differ from the modules' own",
    "hand their arguments down": "its layers do not hand arguments down to attention (the engine alone runs it)",
}


def table(findings: dict[str, Finding]) -> str:
    lines = [BEGIN]
    for kind, words in (("fused", "Fused"), ("modules", "Through their modules")):
        names = [name for name, finding in findings.items() if finding.kind == kind]
        lines.append(f"- **{words}** ({len(names)}): {', '.join(names)}.")
    for reason in sorted({f.reason for f in findings.values() if f.kind == "refused"}):
        names = [name for name, f in findings.items() if f.kind == "refused" and f.reason == reason]
        lines.append(f"- **Refused**, {WORDS.get(reason, reason)} ({len(names)}): {', '.join(names)}.")
    names = [name for name, finding in findings.items() if finding.kind == "unbuilt"]
    lines.append(
        f"- **Not tried**, no tiny one could be made from sizes alone ({len(names)}): {', '.join(names)}."
    )
    return "\n".join([*lines, END])


def documented() -> dict[str, str]:
    """Kind by architecture, as docs/models.md says it."""
    kinds = {"Fused": "fused", "Through": "modules", "Refused": "refused", "Not": "unbuilt"}
    text = DOCS.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("- **"):
            kind = kinds[line[4:].split("*")[0].split()[0]]
            found |= {name.strip(): kind for name in line.rpartition("): ")[2].rstrip(".").split(",")}
    return found


def main() -> None:
    findings: dict[str, Finding] = {}
    for name in causal_types():
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                findings[name] = look_at(name)
        except (AssertionError, RillError) as error:
            findings[name] = Finding("refused", f"WRONG: {str(error)[:100]}")
        sys.stdout.write(f"{name}: {findings[name]}\n")
        sys.stdout.flush()
    before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    DOCS.write_text(before + table(findings) + after, encoding="utf-8")


if __name__ == "__main__":
    main()
