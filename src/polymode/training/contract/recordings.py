"""What was recorded, and compiled, of the objectives of a problem."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from polymode.errors import CannotCompile
from polymode.networks.recording import Recording, compiled, record
from polymode.trees import Tree

MOST_FORMS = 32  # of tensors that are recorded: sentences of every length would each be compiled


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
            if compiling and len(self.found) >= MOST_FORMS:
                self._say(f"{MOST_FORMS} forms of batches have graphs, and more keep coming.")
                return None
            made = self._compiled(function, arguments) if compiling else record(function, arguments)
            self.found[key] = (made, kept)
        return self.found[key][0]

    def _compiled(self, function: Callable[..., Any], arguments: tuple[Tree, ...]) -> Recording | None:
        try:
            return compiled(function, arguments)
        except CannotCompile as error:
            self._say(error.reason)
        return None

    def _say(self, reason: str) -> None:
        if self.failure is None:
            warnings.warn(f"Some steps run under vmap, not compiled: {reason}", stacklevel=2)
        self.failure = reason
