"""What makes a request malformed for any engine; adapters ask before they hand a request on."""

from __future__ import annotations

from rill.errors import RequestError
from rill.inference.base import Request


def check_request(request: Request, *, max_context: int, vocab_size: int | None) -> None:
    """Raises RequestError. `vocab_size` None: unknown here, the server will refuse ids it does not have."""
    length, sampling = len(request.token_ids), request.sampling
    who = f"request {request.id!r}"
    if length == 0 or int(request.token_ids.min()) < 0:
        raise RequestError(f"{who}: needs at least one token, and no negative ids")
    if vocab_size is not None and int(request.token_ids.max()) >= vocab_size:
        raise RequestError(f"{who}: token ids must be below {vocab_size}, got {int(request.token_ids.max())}")
    if sampling.max_new_tokens < 1 or length + sampling.max_new_tokens > max_context:
        raise RequestError(
            f"{who}: {length} prompt tokens and max_new_tokens={sampling.max_new_tokens} do not fit the context of"
            f" {max_context}"
        )
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or not 0 <= sampling.min_p <= 1:
        raise RequestError(f"{who}: temperature must be at least 0, top_p in (0, 1] and min_p in [0, 1]")
    if sampling.top_k < 0 or sampling.repetition_penalty <= 0:
        raise RequestError(f"{who}: top_k must be at least 0 and repetition_penalty above 0")
    if not 0 <= sampling.min_new_tokens <= sampling.max_new_tokens:
        raise RequestError(f"{who}: min_new_tokens must lie between 0 and max_new_tokens")
