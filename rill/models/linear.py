"""Linear layers whose products are made in another way. Callers: rill.models.train; rill.models.decode reads them."""

from __future__ import annotations

from torch import nn


class ReplacedLinear(nn.Linear):
    """One whose products are made in another way; for whoever reads its weight it is an nn.Linear.

    Modules change their class in place. Functions of each module's own would do too, but a compiler would compile them
    one by one, and give up after a few."""

    @classmethod
    def take(cls, module: nn.Module) -> bool:
        """Whether the module was a linear layer, and is one of these now."""
        if type(module) is not nn.Linear and not isinstance(module, ReplacedLinear):
            return False
        module.__class__ = cls
        return True
