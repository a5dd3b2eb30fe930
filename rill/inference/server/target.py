"""A running server as a target of rill.weights: the trainer's side of /update_weights.

    publisher = open_publisher(ShmTransport.Config())                      # disk, shm or tcp
    targets = ThreadedTargets([ServerTarget("server", "http://…:8000", admin_key="…")])
    WeightSync(publisher, targets, canary=canary).sync(trainer.named_weights(), version, trainer_logprobs)

The server pulls by itself; only the manifest travels in the request. A refusal comes back as the server worded it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np

from rill.errors import PeerDiedError, WeightSyncError
from rill.types import Floats, PolicyVersion, TokenIds
from rill.weights import Pulled, SealedManifest
from rill.weights.disk import manifest_to_json


class ServerTarget:
    """See rill.weights.sync.PullTarget. Every call ends by `timeout_s`."""

    def __init__(
        self,
        name: str,
        url: str,
        *,
        admin_key: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.name = name
        self._url = url.rstrip("/")
        self._admin_key, self._api_key = admin_key, api_key
        self._timeout_s = timeout_s

    def pull(self, manifest: SealedManifest) -> Pulled:
        """Let the server take this version; then it answers what the manifest's proof asks."""
        body = b'{"manifest":' + manifest_to_json(manifest.open()).encode() + b"}"
        with self._client(self._admin_key) as client:
            version = PolicyVersion(self._post(client, "/update_weights", content=body)["version"])
        return Pulled.proven(self.name, manifest, version, self.score)

    def score(self, sequences: Sequence[TokenIds]) -> list[Floats]:
        """The server's log-probabilities of these tokens at temperature 1; 0 at position 0."""
        with self._client(self._api_key) as client:
            return [self._score_one(client, tokens) for tokens in sequences]

    def _score_one(self, client: httpx.Client, tokens: TokenIds) -> Floats:
        sampling = {"max_tokens": 1, "prompt_logprobs": 1}
        body = {"token_ids": tokens.tolist(), "sampling_params": sampling}
        entries = self._post(client, "/inference/v1/generate", json=body)["prompt_logprobs"]
        scores = [
            entry[str(token)]["logprob"]
            for token, entry in zip(body["token_ids"][1:], entries[1:], strict=True)
        ]
        return np.array([0.0, *scores], dtype=np.float32)

    def _client(self, key: str | None) -> httpx.Client:
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        return httpx.Client(base_url=self._url, headers=headers, timeout=self._timeout_s, trust_env=False)

    def _post(self, client: httpx.Client, path: str, **content: Any) -> dict[str, Any]:
        try:
            response = client.post(path, **content)
        except httpx.TransportError as error:
            raise PeerDiedError(f"{self.name} at {self._url}: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise WeightSyncError(f"{self.name}: {path} answered {response.status_code}: {_reason(response)}")
        answer: dict[str, Any] = response.json()
        return answer


def _reason(response: httpx.Response) -> str:
    """The server's own words, or what some proxy said in its place."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:500]
