"""DPO (arXiv 2305.18290), SLiC's hinge (arXiv 2305.10425) and IPO (arXiv 2310.12036)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from rill.algorithms.base import LossSum
from rill.algorithms.checks import require_finite
from rill.algorithms.preferences.base import PreferenceBatch, PreferenceLoss, pair_loss
from rill.config.base import PartConfig


class DPO(PreferenceLoss):
    class Config(PartConfig):
        type: Literal["dpo"] = "dpo"
        form: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
        """sigmoid: DPO. hinge: SLiC. ipo: IPO, where beta is its regularisation τ."""
        beta: float = Field(0.1, gt=0)
        """Strength of the tie to the reference."""
        label_smoothing: float = Field(0.0, ge=0, lt=0.5)
        """Share of labels thought to be wrong (conservative DPO; sigmoid only). 0: off."""
        length_normalised: bool = False
        """Mean instead of sum of log-probabilities over a sequence. IPO always takes the mean."""

        @model_validator(mode="after")
        def _smoothing_is_used(self) -> DPO.Config:
            if self.label_smoothing > 0 and self.form != "sigmoid":
                raise ValueError(
                    f"label_smoothing = {self.label_smoothing} belongs to form = 'sigmoid', got {self.form!r}: set it "
                    "to 0"
                )
            return self

    config: Config

    def __call__(self, batch: PreferenceBatch) -> LossSum:
        """h = [log π/π_ref](chosen) − [log π/π_ref](rejected), summed (or averaged) over the answer's tokens.

        sigmoid: −(1 − s) log σ(βh) − s log σ(−βh)   (s label smoothing)
        hinge:   max(0, 1 − βh)
        ipo:     (h − 1/(2β))², h averaged
        """
        ratio_S, lengths_S = batch.log_ratio(), batch.lengths()
        if self.config.length_normalised or self.config.form == "ipo":
            ratio_S = ratio_S / lengths_S
        margin_P = ratio_S[batch.chosen_P] - ratio_S[batch.rejected_P]
        require_finite({"log-ratio margins": margin_P})
        return pair_loss(self._of_margin(margin_P), self.config.beta * ratio_S, batch)

    def _of_margin(self, margin_P: Tensor) -> Tensor:
        beta, smoothing = self.config.beta, self.config.label_smoothing
        if self.config.form == "hinge":
            return relu(1.0 - beta * margin_P)
        if self.config.form == "ipo":
            return (margin_P - 1.0 / (2.0 * beta)).square()
        return -(1.0 - smoothing) * logsigmoid(beta * margin_P) - smoothing * logsigmoid(-beta * margin_P)
