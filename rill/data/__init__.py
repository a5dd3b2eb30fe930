"""Datasets, their loader, chat encoding and curricula."""

from rill.data.base import DATASETS, Dataset, DatasetConfig, Split, StreamDataset, open_dataset
from rill.data.chat import PromptEncoder
from rill.data.curriculum import Curriculum, CurriculumConfig
from rill.data.loader import Loader, LoaderConfig, PromptSource, StreamLoader, open_loader
from rill.data.sft import SFTEncoder, SFTExample

__all__ = [
    "Curriculum",
    "CurriculumConfig",
    "DATASETS",
    "Dataset",
    "DatasetConfig",
    "Loader",
    "LoaderConfig",
    "PromptEncoder",
    "PromptSource",
    "SFTEncoder",
    "SFTExample",
    "Split",
    "StreamDataset",
    "StreamLoader",
    "open_dataset",
    "open_loader",
]
