"""Layers whose noise acts on activations."""

from polymode.layers.dropout import SeededDropout

__all__ = ["SeededDropout"]
