"""Where a model and its tokenizer come from: a local folder, the Hugging Face hub, or a shape with random weights.

The trainer and the native engine load through here, so both run the same modelling code. A local folder always wins
over a name of the hub (rill.models.hub), and nothing but such a name is fetched.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field, model_validator

from rill.config import Config
from rill.errors import ModelError, RillError, UnsupportedError
from rill.models.hub import TEXT_FILES, WEIGHT_FILES, hub_folder, is_hub_name
from rill.models.packaged import SCHEME, packaged_folder
from rill.models.tokenizer import build_char_tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

CHARS = "chars"
"""The name of the built-in character tokenizer."""
VOCABULARIES = ("tokenizer.json", "tekken.json", "*.model", "*.tiktoken", "*.spm", "*vocab*")
"""Files, one of which every tokenizer's folder holds."""
VISION_TYPES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})
"""Models whose pictures are served and trained: rill.models.vision."""
HEADS = frozenset({"lm_head.weight", "lm_head.bias"})
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelConfig(Config):
    """`path`, or `shape` for a fresh model; where both are given, `path` counts."""

    path: str | None = None
    """A local Hugging Face folder (config.json, *.safetensors, tokenizer), a name of the hub such as
    "Qwen/Qwen2.5-1.5B-Instruct" or NAME@REVISION (rill.models.hub), or "package:smollm2-135m-instruct" for a model
    that comes in a Python package (rill.models.packaged). Unset: `shape` is used."""
    shape: dict[str, Any] = Field(default_factory=dict)
    """For a model with random weights: transformers config values, `model_type` among them. Empty: `path` is used."""
    seed: int = 0
    """Seeds the random weights of a fresh model."""
    tokenizer: str | None = None
    """A tokenizer's folder or name of the hub, or "chars": the built-in character tokenizer. Unset: that of `path`."""

    @model_validator(mode="before")
    @classmethod
    def _path_wins(cls, values: Any) -> Any:
        """So that `model.path=…` on the command line replaces a recipe's fresh model, and its character tokenizer."""
        if isinstance(values, dict) and values.get("path") and values.get("shape"):
            replaced = {"shape", "tokenizer"} if values.get("tokenizer") == CHARS else {"shape"}
            return {key: value for key, value in values.items() if key not in replaced}
        return values

    @model_validator(mode="after")
    def _has_a_source(self) -> ModelConfig:
        if not self.path and not self.shape:
            raise ValueError("a model needs `path` (a local folder) or `shape` (a fresh model)")
        if self.shape and "model_type" not in self.shape:
            raise ValueError("`shape` needs a `model_type` such as 'qwen2' or 'llama'")
        return self


def load_model_config(config: ModelConfig) -> PretrainedConfig:
    """The transformers configuration, without loading any weights."""
    from transformers import AutoConfig

    if config.path:
        folder = model_folder(config.path, weights=False)
        with _explained(f"{config.path} holds no config.json that transformers can read"):
            return AutoConfig.from_pretrained(folder, local_files_only=True)
    shape = dict(config.shape)
    with _explained("model.shape is none that transformers knows"):
        plain = AutoConfig.for_model(model_type := shape.pop("model_type"))
        # Transformers keeps what it does not know, and models read some of it; what is near to a name is misspelt.
        names = {*vars(plain), *plain.attribute_map, *vars(type(plain))}
        for key in shape.keys() - names:
            if near := difflib.get_close_matches(key, names, n=1, cutoff=0.9):
                raise ModelError(f"model.shape: {model_type} has no {key!r} (did you mean {near[0]!r}?)")
        return AutoConfig.for_model(model_type, **shape)


def load_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    attention: str = "sdpa",
    needs_head: bool = True,
) -> PreTrainedModel:
    """The causal language model in eval mode. `attention` is a name in transformers' attention interface; `needs_head`
    False: a checkpoint without an output head will do."""
    from transformers import GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # it would be drawn into the middle of a worker's log or a command's answer
    model_config = load_model_config(config)
    builder = model_builder(model_config)
    if attention.startswith("rill_"):
        check_interface(builder._model_mapping.get(type(model_config), None), model_config.model_type)
    chosen = attention_of_parts(model_config, attention)
    model: PreTrainedModel
    if config.path:
        folder = model_folder(config.path)
        with _explained(f"the weights in {config.path} cannot be loaded"):
            model, found = builder.from_pretrained(
                folder,
                local_files_only=True,
                dtype=dtype,
                attn_implementation=chosen,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
            )
        if (Path(folder) / "generation_config.json").is_file():  # transformers passes a damaged one over
            with _explained(f"{config.path}: which tokens end an answer is not known"):
                GenerationConfig.from_pretrained(folder, local_files_only=True)
        _refuse_misfit(config.path, found, may_lack=frozenset() if needs_head else HEADS)
        return model.to(device=device).eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        # Drawn in fp32 and on the CPU, so that the same seed gives the same model at any dtype on any device.
        model = builder.from_config(model_config, dtype=torch.float32, attn_implementation=chosen)
    # Parameters alone: transformers keeps buffers in float32, and rotary frequencies rounded to 16 bits turn later
    # tokens by other angles.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model.to(device=device).eval()


def _refuse_misfit(path: str, found: dict[str, Any], *, may_lack: frozenset[str]) -> None:
    """Transformers draws whatever a checkpoint lacks at random, and says so in its log alone."""
    for name, theirs, ours in sorted(found["mismatched_keys"]):
        raise ModelError(
            f"{path}: {name} has shape {tuple(theirs)}, by config.json it should have {tuple(ours)}"
        )
    if missing := sorted(set(found["missing_keys"]) - may_lack):
        unknown = sorted(found["unexpected_keys"])
        rest = f"; it brings {unknown[0]!r}, which the model does not have" if unknown else ""
        raise ModelError(
            f"{path}: the checkpoint lacks {len(missing)} of the model's parameters, {missing[0]!r} first{rest}: is it "
            "whole, and of this config.json?"
        )


@contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except RillError:
        raise
    except Exception as error:  # boundary: damaged files make transformers fail in any way
        raise ModelError(f"{what}: {type(error).__name__}: {error}") from error


def reads_pictures(model_config: PretrainedConfig) -> bool:
    """Whether it has a tower, and rill.models.vision can show it pictures."""
    return model_config.model_type in VISION_TYPES


def model_builder(model_config: PretrainedConfig) -> Any:
    """The class of transformers that makes this model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if reads_pictures(model_config):
        return AutoModelForImageTextToText
    kind = type(model_config)
    if kind not in AutoModelForCausalLM._model_mapping and kind in AutoModelForImageTextToText._model_mapping:
        raise UnsupportedError(
            f"{model_config.model_type!r} is a vision-language model that rill does not know: known are "
            f"{', '.join(sorted(VISION_TYPES))}; the openai engine asks a server that has it"
        )
    return AutoModelForCausalLM


def empty_model(model_config: PretrainedConfig) -> PreTrainedModel:
    """Its modules and the shapes of its parameters, without a number in them."""
    with torch.device("meta"):
        model: PreTrainedModel = model_builder(model_config).from_config(model_config)
    return model


def attention_of_parts(model_config: PretrainedConfig, attention: str) -> str | dict[str, str]:
    """A tower looks at whole pictures: it keeps transformers' own attention, whatever the decoder has."""
    if not reads_pictures(model_config):
        return attention
    return {"": attention, "text_config": attention, "vision_config": "sdpa"}


def check_interface(model_class: Any, model_type: str) -> None:
    """Another attention can be put into models of transformers' attention interface only."""
    if model_class is not None and not model_class._supports_attention_backend:
        raise UnsupportedError(
            f"transformers computes the attention of {model_type!r} inside the model and not through its attention "
            "interface, so it can neither be packed nor paged: the vllm or sglang engine may serve it"
        )


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    source = config.tokenizer or config.path
    if source == CHARS:
        return build_char_tokenizer(has_pictures="vision_config" in config.shape)
    if source is None:
        raise ModelError('a model given by `shape` needs `tokenizer`: a local folder, or "chars"')
    folder = model_folder(source, holds="", weights=False)
    if not any(next(Path(folder).glob(pattern), None) for pattern in VOCABULARIES):
        # transformers would make an empty tokenizer of the model's type, and every prompt would have no tokens.
        raise ModelError(
            f"{source!r} holds no tokenizer (no tokenizer.json, nor another vocabulary): copy it there, or set "
            "`model.tokenizer` to a folder that has one"
        )
    with _explained(f"{source} holds no tokenizer that transformers can load"):
        loader = PreTrainedTokenizerFast if _stands_alone(folder) else AutoTokenizer
        tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(folder, local_files_only=True)
    return tokenizer


def _stands_alone(folder: str) -> bool:
    """Whether the folder's tokenizer.json is all there is to its tokenizer.

    AutoTokenizer goes by the model's type instead: beside a qwen2 model it makes a byte-level tokenizer of any
    vocabulary, which silently loses the white space of rill's character tokenizer.
    """
    path = Path(folder) / "tokenizer_config.json"
    if not path.is_file() or not (Path(folder) / "tokenizer.json").is_file():
        return False
    values = json.loads(path.read_text(encoding="utf-8"))
    return values.get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast")


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig) -> None:
    """A tokenizer that can emit ids the model has no embedding for would index out of range much later."""
    vocab_size = model_config.get_text_config().vocab_size
    if len(tokenizer) > vocab_size:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens, the model embeds {vocab_size}: they do not "
            "belong together; set `model.tokenizer` to the model's own, or raise `vocab_size` in `model.shape`"
        )


def model_folder(path: str, *, holds: str = "config.json", weights: bool = True) -> str:
    """The local folder behind a model or tokenizer path; an error in words where there is none, or not such a one. What
    is on the hub is fetched, without its weights where those are not asked for."""
    if path.startswith(SCHEME):
        return str(packaged_folder(path))
    if is_hub_name(path):
        path = str(hub_folder(path, "model", [*TEXT_FILES, *(WEIGHT_FILES if weights else ())]))
    folder = Path(path).expanduser()
    if not folder.exists():
        raise ModelError(
            f"there is no model folder {path!r}: give a folder, or a name of the Hugging Face hub as OWNER/NAME"
        )
    if holds and not (folder / holds).is_file():
        raise ModelError(
            f"{path!r} holds no {holds}: give the folder of a model as Hugging Face's save_pretrained writes it"
        )
    return str(folder)
