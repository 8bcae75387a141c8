"""What a layer gets in the place of an attention mask if the ranks of a group share a sequence."""

from typing import Optional

from torch import Tensor

from winnow.context_parallel import Tokens
from winnow.transformers.sequences import Sequences


class Placed:
    """In the place of an attention mask: the tokens of all ranks, and what this rank's see."""

    def __init__(
        self, tokens: Tokens, ranges: Tensor, position_ids: Tensor, sequences: Optional[Sequences]
    ):
        self.tokens = tokens
        self.position_ids = position_ids  # [batch or 1, own]
        self.ranges = ranges  # int32 [batch, own, 2], in the rows of all ranks
        self.sequences = sequences  # DeepSeek-V4: of all ranks

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.sequences.longest
