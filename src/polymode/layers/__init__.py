"""Layers whose noise acts on activations."""

from polymode.layers.dropout import Masks, SeededDropout

__all__ = ["Masks", "SeededDropout"]
