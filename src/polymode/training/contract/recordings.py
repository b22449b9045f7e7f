"""What was recorded, and compiled, of the objectives of a problem."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from polymode.errors import CannotCompile
from polymode.networks.recording import Recording, compiled, record
from polymode.trees import Tree


@dataclass
class Recordings:
    """Recordings by what they depend on; None where there can be none. failure: why one is not compiled."""

    found: dict[Any, tuple[Recording | None, Any]] = field(default_factory=dict)
    failure: str | None = None

    def of(
        self,
        function: Callable[..., Any],
        arguments: tuple[Tree, ...],
        key: Any,
        *,
        kept: Any,
        compiling: bool,
    ) -> Recording | None:
        """The recording of a function, made for arguments like these at the first call.

        kept: what the key identifies, so that it stays what it is.
        """
        key = (compiling, key)
        if key not in self.found:
            made = self._compiled(function, arguments) if compiling else record(function, arguments)
            self.found[key] = (made, kept)
        return self.found[key][0]

    def _compiled(self, function: Callable[..., Any], arguments: tuple[Tree, ...]) -> Recording | None:
        try:
            return compiled(function, arguments)
        except CannotCompile as error:
            if self.failure is None:
                warnings.warn(f"A step runs under vmap, not compiled: {error.reason}", stacklevel=2)
            self.failure = error.reason
        return None
