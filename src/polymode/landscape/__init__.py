"""Looking at losses, and at what optimisers make of them."""

from polymode.landscape.flatness import Flatness, flatness
from polymode.landscape.quadratic import NoisyQuadratic

__all__ = ["Flatness", "NoisyQuadratic", "flatness"]
