"""Losses on preferred answers, by name; a new one is one file and one line here."""

from rill.registry import Registry

PREFERENCES = Registry(
    "preference loss",
    {
        "dpo": "rill.algorithms.preferences.dpo:DPO",
        "simpo": "rill.algorithms.preferences.simpo:SimPO",
        "orpo": "rill.algorithms.preferences.orpo:ORPO",
        "kto": "rill.algorithms.preferences.kto:KTO",
    },
)
