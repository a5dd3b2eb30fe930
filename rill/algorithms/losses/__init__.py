"""Policy losses by name; a new one is one file and one line here."""

from rill.registry import Registry

LOSSES = Registry(
    "loss",
    {
        "clip": "rill.algorithms.losses.clip:Clip",
        "reinforce": "rill.algorithms.losses.reinforce:Reinforce",
        "gspo": "rill.algorithms.losses.gspo:GSPO",
        "cispo": "rill.algorithms.losses.cispo:CISPO",
        "gmpo": "rill.algorithms.losses.gmpo:GMPO",
        "clip_cov": "rill.algorithms.losses.clip_cov:ClipCov",
        "kl_cov": "rill.algorithms.losses.kl_cov:KLCov",
        "sapo": "rill.algorithms.losses.sapo:SAPO",
        "dppo": "rill.algorithms.losses.dppo:DPPO",
        "dro": "rill.algorithms.losses.dro:DRO",
        "aipo": "rill.algorithms.losses.aipo:AIPO",
        "decoupled": "rill.algorithms.losses.decoupled:Decoupled",
    },
)
