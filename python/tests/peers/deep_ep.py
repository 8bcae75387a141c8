"""Stands in for DeepEP in test_peers.py: Winnow's own replacement of it."""

from winnow.compat.deep_ep import Buffer

__all__ = ["Buffer"]
__version__ = "stand-in"
