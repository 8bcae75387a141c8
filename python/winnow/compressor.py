"""The compressor of DeepSeek-V4: one row for every few tokens."""

from winnow._winnow.compressor import forward

__all__ = ["forward"]
