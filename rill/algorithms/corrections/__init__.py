"""Corrections for mismatch and staleness by name; a new one is one file and one line here."""

from rill.registry import Registry

CORRECTIONS = Registry(
    "correction",
    {
        "none": "rill.algorithms.corrections.none:NoCorrection",
        "tis": "rill.algorithms.corrections.tis:TruncatedIS",
        "mis": "rill.algorithms.corrections.mis:MaskedIS",
        "sequence_mask": "rill.algorithms.corrections.sequence_mask:SequenceMask",
        "lag_limit": "rill.algorithms.corrections.lag_limit:LagLimit",
        "chain": "rill.algorithms.corrections.chain:Chain",
    },
)
