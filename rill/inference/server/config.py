"""What an operator can set on the server: names, keys, limits, deadlines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr, model_validator

from rill.config import Config


class ServerConfig(Config):
    """Every limit has an off-value, and every off-value is 0."""

    host: str = "127.0.0.1"
    """Interface to listen on. Anything but loopback should have api_keys."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0: the system picks a free port."""
    model_name: str = "model"
    """The name clients ask for, and that /v1/models lists."""
    tool_syntax: Literal["auto", "hermes", "qwen_xml", "llama", "mistral", "glm", "kimi", "deepseek"] = "auto"
    """How the model writes tool calls; see rill/data/tool_calls.py. auto: what its chat template shows."""
    reasoning: Literal["auto", "think", "none"] = "auto"
    """Whether a block `<think>…</think>` at the beginning of an answer is handed out as reasoning_content. auto: where
    the chat template knows such blocks."""
    api_keys: list[SecretStr] = []
    """Keys clients may use. Empty: clients need none."""
    admin_key: SecretStr | None = None
    """The key of the administration routes. Unset: those routes answer only callers on this machine."""

    max_body_bytes: int = Field(default=16 * 2**20, ge=0)
    """Larger request bodies get 413. 0: off."""
    max_samples: int = Field(default=128, ge=1)
    """The largest `n` (times prompts) of one request."""
    max_concurrent: int = Field(default=4096, ge=0)
    """Generation requests in flight; beyond gets 429. 0: off."""
    request_timeout_s: float = Field(default=3600.0, ge=0)
    """A generation that takes longer is aborted and gets 408. 0: off."""
    stream_interval_s: float = Field(default=0.04, ge=0)
    """Tokens of a stream are sent together, this often (from 20 streams on more rarely: 2 ms for each); its first and
    its last ones at once. 0: one by one, which costs several times as much as everything else the server does."""
    admin_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of pause and of weight updates, in seconds."""
    drain_timeout_s: float = Field(default=60.0, ge=0)
    """After SIGTERM, requests in flight have this long to end, in seconds."""

    @model_validator(mode="after")
    def _admin_key_is_not_a_client_key(self) -> ServerConfig:
        if self.admin_key is None:
            return self
        secret = self.admin_key.get_secret_value()
        if not secret or secret in [key.get_secret_value() for key in self.api_keys]:
            raise ValueError("admin_key must be non-empty and differ from every client key in api_keys")
        return self
