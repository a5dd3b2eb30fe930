"""What clients may send. Types are strict, as OpenAI's are; a field that is not known here is refused by its name.

A field that is known and cannot be honoured is refused by a route, never ignored: see sampling.py and text.py. A field
that is null asks for nothing, and a few (`HINTS`) are only about accounting or about how others compute.
Answers are plain dictionaries built beside the routes; they are encoded by msgspec, not validated again.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Prompts = str | Annotated[list[str], Field(fail_fast=True)] | list[TokenId] | list[list[TokenId]]
"""Texts or token ids, one or several. What begins as no text is not looked at further as texts."""
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100)]


HINTS = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "detokenize", "flat_logprobs", "extra_args", "output_kind", "spaces_between_special_tokens", "skip_clone",
})  # fmt: skip
"""Accepted, and without effect on an answer. The second line is vLLM's: how its engine is to compute the same."""


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, values: Any) -> Any:
        """But a max_tokens of null is one: as many as the context has room for."""
        if not isinstance(values, dict):
            return values
        return {k: v for k, v in values.items() if k not in HINTS and (v is not None or k == "max_tokens")}


class DialectBody(BaseModel):
    """A part of another dialect (rill.data.dialects): what it needs at least. The rest is looked at when it has been
    translated."""

    model_config = ConfigDict(strict=True, extra="allow")


class ResponsesBody(DialectBody):
    """POST /v1/responses"""

    input: str | list[dict[str, Any]]


class AnthropicMessage(DialectBody):
    role: Literal["user", "assistant", "system"]
    content: str | list[Any] | None = None


class MessagesBody(DialectBody):
    """POST /v1/messages"""

    messages: list[AnthropicMessage] = Field(min_length=1)


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: one of them."""

    json_schema: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = Field(default=None, max_length=65536)
    choice: Annotated[list[str], Field(min_length=1, max_length=1024)] | None = None
    grammar: str | None = Field(default=None, max_length=65536)
    json_object: bool | None = None


class SamplingBody(Body):
    """The sampling fields that completions, chat and the token routes share."""

    model: str | None = None
    """Unset: the served model."""
    n: int = Field(default=1, ge=1, lt=2**31)
    temperature: float | None = Field(default=None, ge=0, le=1000)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    """0 and -1: off."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=1000)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, Bias], Field(max_length=1024)] | None = None
    structured_outputs: StructuredOutputs | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    min_tokens: Count = 0
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    cache_salt: str | None = None
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class StreamOptions(Body):
    include_usage: bool = False


class GenerationBody(SamplingBody):
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    """Adds the prompt's and the choices' token ids, and the policy version of every token."""
    return_tokens_as_token_ids: bool = False
    """Names tokens in logprobs as "token_id:ID"."""
    response_format: dict[str, Any] | None = None
    request_id: str | None = Field(default=None, max_length=256)
    """The client's own name of the request, for /abort_requests. Unset: the answer's id."""


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompt: Prompts
    max_tokens: Count | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False


class FunctionCall(Body):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ImageUrl(BaseModel):
    """Other fields, such as `detail`, change nothing here: the model's own processor says how large pictures are."""

    url: str


class ContentPart(BaseModel):
    """Of other types than these there are many, with fields of their own; text.py refuses them by their type."""

    model_config = ConfigDict(strict=True)

    type: str
    text: str | None = None
    image_url: ImageUrl | str | None = None


class ChatMessage(Body):
    role: str = Field(min_length=1, max_length=64)
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """Given to the template: some write the reasoning of earlier turns."""


class FunctionTool(Body):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionTool


class ToolName(Body):
    name: str = Field(min_length=1)


class NamedTool(Body):
    type: Literal["function"]
    function: ToolName


class ChatTemplateBody(Body):
    """The fields that decide how messages become a prompt."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[Tool] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class ChatBody(ChatTemplateBody, GenerationBody):
    """POST /v1/chat/completions"""

    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True


class ChatTokensBody(ChatBody):
    """POST /v1/chat/completions/tokens: the prompt is already encoded; messages serve tool parsing only."""

    messages: list[ChatMessage] = Field(default_factory=list)
    tokens: list[TokenId] = Field(min_length=1)


class TokenSampling(SamplingBody):
    """`sampling_params` of the token route; the model stands beside it."""

    max_tokens: Count | None = None
    """Unset: up to the context."""
    logprobs: Annotated[int, Field(ge=-1, le=1024)] | None = None
    """The sampled token's log-probability is always returned; above 1, the likeliest so many too."""
    prompt_logprobs: int | None = None
    """Set: the prompt's own log-probabilities are returned too."""


class GenerateBody(Body):
    """POST /inference/v1/generate: token ids in, token ids out."""

    model: str | None = None
    token_ids: list[TokenId] = Field(min_length=1)
    sampling_params: TokenSampling = Field(default_factory=TokenSampling)
    cache_salt: str | None = None
    request_id: str | None = Field(default=None, max_length=256)
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    stream: bool = False
    return_token_ids: bool = True


class TokenizeBody(ChatTemplateBody):
    """POST /tokenize: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None  # type: ignore[assignment]
    return_token_strs: bool = False


class EmbeddingsBody(Body):
    """POST /v1/embeddings"""

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    add_special_tokens: bool = True


class AbortBody(Body):
    """POST /abort_requests"""

    request_ids: list[Annotated[str, Field(max_length=256)]] = Field(min_length=1, max_length=4096)


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[TokenId]


class UpdateWeightsBody(Body):
    """POST /update_weights"""

    weight_dir: str
    """A model's folder of safetensors on the server's machine."""
    version: Count | None = None
    """The policy version of these weights. Unset: one more than the engine's."""
    partial: bool = False
    """The folder may lack parameters."""


AdapterName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f]*$")]


class LoadAdapterBody(Body):
    """POST /v1/load_lora_adapter, with vLLM's names."""

    lora_name: AdapterName
    lora_path: str = Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")
    """A folder in PEFT's format on the server's machine."""
    load_inplace: bool = False
    """Replace an adapter of this name."""


class UnloadAdapterBody(Body):
    """POST /v1/unload_lora_adapter"""

    lora_name: AdapterName


class PauseBody(Body):
    """POST /pause"""

    mode: Literal["interrupt", "finish", "keep", "wait", "abort"] = "interrupt"
    """`keep` and `wait` are vLLM's names for interrupt and finish; abort ends what runs, then pauses."""


class SleepBody(Body):
    """POST /sleep"""

    level: Literal["kv", "weights", "graphs"] = "weights"
