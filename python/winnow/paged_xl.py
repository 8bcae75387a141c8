"""Decode with Transformer-XL relative positions over a paged key-value cache."""

from winnow._winnow.paged_xl import append, attention, attention_fused, position_term

__all__ = ["append", "attention", "attention_fused", "position_term"]
