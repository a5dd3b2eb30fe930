"""Policy losses by name; a new one is one file and one line here."""

from rill.registry import Registry

LOSSES = Registry(
    "loss",
    {
        "clip": "rill.algorithms.losses.clip:Clip",
        "reinforce": "rill.algorithms.losses.reinforce:Reinforce",
    },
)
