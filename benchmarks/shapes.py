"""Models that several benchmarks measure, by their shape; weights are random."""

from __future__ import annotations

from typing import Any

QWEN_1_5B: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}  # fmt: skip
"""Of Qwen2.5-1.5B."""
SMALL: dict[str, Any] = QWEN_1_5B | {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 512,
}  # fmt: skip
"""For smoke tests on any machine."""
