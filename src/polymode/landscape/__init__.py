"""Looking at losses around trained networks."""

from polymode.landscape.flatness import Flatness, flatness

__all__ = ["Flatness", "flatness"]
