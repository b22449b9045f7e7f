"""A reference predictive, such as that of Hamiltonian Monte Carlo, in a file that others are judged by."""

import hashlib
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polymode.arrays_on_disk import names_of_arrays, read_arrays
from polymode.data import Data
from polymode.errors import InputError, require, unknown_name
from polymode.judging.contents import CONTENTS, Contents, contents_for
from polymode.likelihoods import Likelihood
from polymode.storage import write_bytes
from polymode.trees import leaves

# What is read of where a reference comes from, where it is told, and its types.
ABOUT = {
    "noise_floor": dict | None,
    "verdict": dict,
    "method": dict,
    "chains": list,
    "effective_samples": int | float,
}


@dataclass(frozen=True)
class Reference:
    """What a trusted posterior predicts for the test points of a task.

    values: probabilities [N, C] of classes, or samples [R, N] of the predictive distribution of numbers, as
    the network sees them (standardised). rows: [N], a hash of each point's inputs, where it is known: it
    tells other points, and another order of the same ones. about: where it comes from, as JSON values; its
    "noise_floor" is what ``diagnostics.noise_floor`` gives, its "units" those of distances.
    """

    kind: str
    values: Tensor
    rows: Tensor | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in CONTENTS:
            raise unknown_name("kind of reference", self.kind, CONTENTS)
        values = self.values
        if values.ndim != 2 or not values.numel() or not values.is_floating_point():
            raise InputError(
                f"A reference of {self.kind} is a matrix of real numbers, got {list(values.shape)} of "
                f"{values.dtype}."
            )
        require(bool(values.isfinite().all()), f"A reference of {self.kind} holds finite numbers only.")
        self.contents.check(values)
        if self.rows is not None and self.rows.shape != (self.num_points,):
            raise InputError(
                f"A reference names each of its {self.num_points} points once, got {list(self.rows.shape)}."
            )
        for name, wanted in ABOUT.items():
            if name in self.about and not isinstance(found := self.about[name], wanted):
                raise InputError(f"What a reference says of its {name} is damaged: {found!r:.100}.")
        floor = self.noise_floor or {}
        if not all(isinstance(v, int | float) and math.isfinite(v) and v >= 0 for v in floor.values()):
            raise InputError(
                f"The noise_floor of a reference holds a number for each distance, got {floor!r:.100}."
            )

    @property
    def num_points(self) -> int:
        return self.values.shape[self.contents.point_axis]

    @property
    def contents(self) -> Contents:
        """How values of this kind are compared."""
        return CONTENTS[self.kind]

    @property
    def units(self) -> str:
        """What distances to it are measured in; empty where they have no units."""
        return self.about.get("units", self.contents.units)

    @property
    def noise_floor(self) -> dict[str, float] | None:
        """Distances between halves of its own chains, by the names of the scores; None where not known."""
        return self.about.get("noise_floor")

    @property
    def digest(self) -> str:
        """Tells one reference from another."""
        return hashlib.sha256(self.values.contiguous().numpy().tobytes()).hexdigest()[:16]

    def check(self, test: Data, likelihood: Likelihood, num_outputs: int | None = None) -> None:
        """Raise an ``InputError`` unless it is about these test points, in their order, and these classes."""
        wanted = contents_for(likelihood).name
        if self.kind != wanted:
            raise InputError(
                f"The reference holds {self.kind}; the likelihood {likelihood.kind!r} needs {wanted}."
            )
        if self.num_points != test.num_examples:
            raise InputError(
                f"The reference is about {self.num_points} points, the test data have {test.num_examples}: "
                "they must be the same points in the same order."
            )
        self.contents.check_about(self.values, test, num_outputs)
        self._check_order(test)

    def _check_order(self, test: Data) -> None:
        if self.rows is not None:
            here = row_hashes(test)
            if torch.equal(self.rows, here):
                return
            if torch.equal(self.rows.sort().values, here.sort().values):
                raise InputError(
                    "The reference is about the same test points in another order: make it again, or bring "
                    "the data into the order it was made in."
                )
            differing = int((self.rows != here).sum())
            raise InputError(
                f"The reference is about other test points: {differing} of {self.num_points} differ. The "
                "data must be read with the options that the reference was made with."
            )
        self.contents.check_order(self.values, test)

    def save(self, path: str | Path) -> Path:
        """Write it as an NPZ file."""
        path = Path(path)
        if path.suffix != ".npz":
            raise InputError(f"A reference is an .npz file, got {str(path)!r}.")
        arrays = {self.kind: self.values.numpy(), "about": np.array(json.dumps(dict(self.about)))}
        if self.rows is not None:
            arrays["rows"] = self.rows.numpy()
        content = io.BytesIO()
        np.savez_compressed(content, **arrays)  # pyright: ignore  # its stubs take names for options
        write_bytes(path, content.getvalue())
        return path

    @classmethod
    def load(cls, spec: str | Path) -> "Reference":
        """Read what ``save`` wrote, or ``FILE.npz:NAME``, a matrix of probabilities in any NPZ file."""
        text = str(spec)
        path, colon, name = text.rpartition(":") if ".npz:" in text else (text, "", "")
        try:
            arrays, names = read_arrays(path, {name} if colon else None), names_of_arrays(path)
        except FileNotFoundError:
            raise InputError(f"There is no reference {path}.") from None
        except InputError as error:
            raise InputError(f"{path} is not a readable .npz file: {error}.") from None
        if colon:
            if name not in arrays:
                raise unknown_name(f"array in {path}", name, names)
            return cls("probabilities", torch.as_tensor(arrays[name]), about={"file": Path(path).name})
        kinds = [kind for kind in CONTENTS if kind in arrays]
        if len(kinds) != 1:
            raise InputError(
                f"{path} is not a reference of polymode: it holds {', '.join(names)}. Name the matrix of "
                f"probabilities in it: {path}:{names[0]}."
            )
        rows = torch.as_tensor(arrays["rows"]) if "rows" in arrays else None
        try:
            about = json.loads(str(arrays["about"])) if "about" in arrays else {}
        except ValueError:
            about = None
        if not isinstance(about, dict):
            raise InputError(f"What {path} says of itself is damaged: it must be a JSON object.")
        return cls(kinds[0], torch.as_tensor(arrays[kinds[0]]), rows, about)


def row_hashes(data: Data) -> Tensor:
    """A 63-bit hash of each example's inputs, [N]."""
    hashes = []
    for examples in data.in_order():
        parts = [leaf.detach().cpu().contiguous().numpy() for leaf in leaves(examples.inputs)]
        for rows in zip(*parts, strict=True):
            digest = hashlib.blake2b(digest_size=8)
            for row in rows:
                digest.update(row.tobytes())
            hashes.append(int.from_bytes(digest.digest(), "little") >> 1)
    return torch.tensor(hashes)
