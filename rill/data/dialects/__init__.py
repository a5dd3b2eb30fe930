"""The wire forms of the three APIs that programs speak to a model: OpenAI's chat completions and Responses, and
Anthropic's messages. Pure translation, shared by agents behind a base_url and by the server.

    body ── to_chat ──▶ a chat body ──▶ whoever answers ──▶ Answer ── whole │ stream ──▶ what the client expects

base.py   the interface        chat.py   chat completions        responses.py   Responses        anthropic.py   messages
"""

from rill.data.dialects.anthropic import ANTHROPIC
from rill.data.dialects.base import Answer, AnswerStream, Dialect
from rill.data.dialects.chat import CHAT
from rill.data.dialects.responses import RESPONSES

__all__ = ["ANTHROPIC", "CHAT", "RESPONSES", "Answer", "AnswerStream", "Dialect"]
