"""The compressor of DeepSeek-V4: one row for every few tokens."""

from winnow._winnow.compressor import backward, forward, step

__all__ = ["backward", "forward", "step"]
