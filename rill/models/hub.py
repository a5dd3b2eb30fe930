"""Repositories of the Hugging Face hub, by name: fetched once into its cache, found there without a network.

    Qwen/Qwen2.5-1.5B-Instruct            the newest commit of its main branch
    Qwen/Qwen2.5-1.5B-Instruct@989aa79    a branch, a tag or a commit: the same files for ever

Callers: rill.models.loading (models, tokenizers), rill.data.hub (data), `rill push`. The one door for huggingface_hub,
whose own variables hold here too: HF_TOKEN, HF_HOME (the cache), HF_HUB_OFFLINE=1, HF_ENDPOINT (a mirror). Every way
to fail is one ModelError or DataError that says what to do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import httpx

from rill.errors import DataError, ModelError, UserError

Kind = Literal["model", "dataset"]

TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.spm")
"""All of a model but its weights."""
WEIGHT_FILES = ("*.safetensors",)
NOT_NEEDED = ("original/*", "onnx/*", "*/*.safetensors")
"""The same weights in other forms."""
UNREACHABLE = (httpx.TransportError, ConnectionError, TimeoutError)
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def is_hub_name(name: str) -> bool:
    """`owner/name`, and nothing of that name lies here."""
    return _NAME.fullmatch(name) is not None and not Path(name).exists()


def hub_folder(name: str, kind: Kind, patterns: Sequence[str]) -> Path:
    """A local folder with the files of a repository that match; fetched where they are not in the cache yet."""
    from huggingface_hub import snapshot_download

    repo, revision = _parts(name)
    with _explained(name, kind):
        found = snapshot_download(
            repo,
            repo_type=kind,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(NOT_NEEDED),
            endpoint=_endpoint(),
        )
    return Path(str(found))


def hub_files(name: str, kind: Kind) -> list[str]:
    """The paths of all files of a repository; without a network those in the cache."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.constants import is_offline_mode

    repo, revision = _parts(name)
    with _explained(name, kind):
        if not is_offline_mode():
            try:
                return sorted(HfApi(_endpoint()).list_repo_files(repo, revision=revision, repo_type=kind))
            except UNREACHABLE:
                pass  # the cache may have it, as it does for hub_folder
        nothing = ["no file"]  # asked for none, it does not mind that others are missing
        cached = snapshot_download(
            repo, repo_type=kind, revision=revision, local_files_only=True, allow_patterns=nothing
        )
    root = Path(str(cached))
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def push_folder(folder: Path, name: str, *, private: bool, message: str) -> str:
    """Upload a model's folder; the address of the commit. The repository is made where there is none."""
    from huggingface_hub import HfApi

    if not _NAME.fullmatch(name) or "@" in name:
        raise UserError(f"{name!r} is no name of the hub: give OWNER/NAME")
    api = HfApi(_endpoint())
    with _explained(name, "model", pushed=folder):
        api.create_repo(name, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=name, folder_path=str(folder), commit_message=message)
    return str(commit.commit_url)


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT")


def _parts(name: str) -> tuple[str, str | None]:
    repo, _, revision = name.partition("@")
    return repo, revision or None


@contextmanager
def _explained(name: str, kind: Kind, pushed: Path | None = None) -> Iterator[None]:
    from huggingface_hub import errors

    raised: Callable[[str], Exception] = ModelError if kind == "model" else DataError
    where = _endpoint() or "huggingface.co"
    try:
        yield
    except errors.GatedRepoError as error:
        raise raised(
            f"{name}: its owners want to be asked: accept the terms on its page at {where}, and set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise raised(
            f"{name}: it has no such revision: give a branch, a tag or a commit behind the @"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise raised(
            f"there is no local folder {name!r}, and no {kind} of that name on the hub ({where}) that you may read: "
            "check the name; a private one needs HF_TOKEN"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, *UNREACHABLE) as error:
        silent = f"the hub ({where}) cannot be reached (HF_HUB_OFFLINE set, or no network)"
        if pushed is not None:
            raise raised(
                f"nothing was uploaded, {silent}: the model stays in {pushed}; once it can be, push again, "
                f"or copy the folder to a machine that reaches it and run `hf upload {name} FOLDER`"
            ) from error
        raise raised(
            f"{name} is not in the local cache, and {silent}: on a machine that can, run `hf download "
            f"{_parts(name)[0]} --repo-type {kind} --local-dir FOLDER`, and give that folder"
        ) from error
    except errors.HfHubHTTPError as error:
        raise raised(f"{name}: the hub ({where}) answers: {error}") from error
