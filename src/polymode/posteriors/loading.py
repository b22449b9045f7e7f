"""Saved posteriors, read back."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polymode.errors import CheckpointError, InputError, unknown_name
from polymode.likelihoods import make_likelihood
from polymode.networks.adaptations import Adaptation, Sampling, adapt, make_adaptation
from polymode.networks.members import BACKENDS, Tensors
from polymode.networks.surgery import Model, build, prepare, set_tensors
from polymode.posteriors.base import CONSTANTS, MANIFEST, POSTERIORS, Posterior, names_in
from polymode.posteriors.network import Network, check_fingerprint, check_layers, check_tensors
from polymode.storage import (
    CheckedFile,
    entry,
    fingerprint_of,
    inside,
    names_of,
    read_document,
    read_tensors,
    refuse_links,
    well_formed,
)


def _posterior_of_run(folder: Path) -> Path:
    """The folder of the only posterior in the folder of a run."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is missing: there is no such folder.")
    path = folder / MANIFEST
    if not path.exists():
        raise CheckpointError(
            f"{path} is missing: this is not a saved posterior or run. Name the folder of one."
        )
    manifest = read_document(path, "run")
    if entry(manifest, "status", str, path) != "finished":
        raise CheckpointError(
            f"{folder} holds a run that has not ended: fit(..., run_dir={str(folder)!r}, resume=True), or "
            "the command that began it, goes on with it."
        )
    names = entry(manifest, "posteriors", list, path)
    if len(names) != 1:
        raise CheckpointError(f"{folder} holds {len(names)} posteriors; load one of them: {names}.")
    return inside(folder, names[0])


def load_posterior(folder: str | Path, model: Model, *, check_structure: bool = True) -> Posterior:
    """Read a saved posterior; ``model`` is the module (or its factory) it was fitted with.

    folder: where ``save`` wrote it, or the ``run_dir`` of a finished run over one data set. Its files are
    compared with their checksums, and their tensors with those that the network needs. check_structure:
    refuse a module whose layers are of other classes, or say other things of themselves (``extra_repr``);
    what a module calls inside ``forward`` cannot be seen.
    """
    folder = Path(folder)
    path = folder / "posterior.json"
    if not path.exists():
        folder = _posterior_of_run(folder)
        path = folder / "posterior.json"
    refuse_links(folder)
    manifest = read_document(path, "posterior")
    kind = entry(manifest, "kind", str, path)
    if kind not in POSTERIORS:
        raise unknown_name("kind of posterior", kind, POSTERIORS)
    adaptations = _adaptations_in(manifest, path)
    saved = entry(manifest, "network", dict, path)
    with well_formed(path):
        likelihood = make_likelihood(entry(manifest, "likelihood", dict, path))
        saved_in_double = any(dtype == "float64" for dtype, *_ in saved.values())
    module = copy.deepcopy(model) if isinstance(model, nn.Module) else build(model, seed=0)
    if saved_in_double and all(p.dtype != torch.float64 for p in module.parameters()):
        module = module.double()  # it was fitted with precision="double"
    try:  # what the adaptations draw is replaced by what was stored
        prepared = adapt(likelihood.prepare(prepare(module)), adaptations, seed=0)
    except (InputError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{folder} belongs to another network: {error}") from error
    backend: Any = entry(manifest, "backend", str, path)
    if backend not in BACKENDS:
        raise unknown_name(f"backend in {path}", backend, BACKENDS)
    network = Network(prepared, likelihood, backend, adaptations=adaptations)
    check_fingerprint(saved, network.fingerprint, str(folder))
    if check_structure and "structure" in manifest:
        with well_formed(path):
            check_layers(manifest["structure"], prepared, str(folder))
    files = {
        name: CheckedFile(inside(folder, name), digest)
        for name, digest in entry(manifest, "files", dict, path).items()
    }
    for file in files.values():
        file.check()
    if CONSTANTS not in files:
        raise CheckpointError(f"{path} is damaged: it names no {CONSTANTS}.")
    constants = read_tensors(files.pop(CONSTANTS).path)
    options = manifest.get("options", {})
    with well_formed(path):
        posterior = POSTERIORS[kind].from_files(network, list(files.values()), constants, options)
    _set_constants(network, constants, files.values(), folder / CONSTANTS)
    return replace(posterior, record=entry(manifest, "record", dict, path))


def _adaptations_in(manifest: Mapping[str, Any], path: Path) -> tuple[Adaptation, ...]:
    """What was done to the user's network before it was trained, as a document names it."""
    if "adaptations" not in manifest:
        return _earlier_adaptations(manifest, path)
    with well_formed(path):
        try:
            return tuple(map(make_adaptation, entry(manifest, "adaptations", list, path)))
        except InputError as error:
            raise CheckpointError(f"{path} cannot be loaded: {error}") from error


def _earlier_adaptations(manifest: Mapping[str, Any], path: Path) -> tuple[Adaptation, ...]:
    """The same of documents from before adaptations had names: of all of them only one was stored."""
    if adapted_by := manifest.get("adapted_by"):
        raise CheckpointError(
            f"{path} cannot be loaded: {adapted_by} changed the network before it trained it, and the "
            "version of polymode that wrote this did not store how. Fit it again."
        )
    if manifest.get("sampling") is None:
        return ()
    with well_formed(path):
        return (Sampling(**manifest["sampling"]),)


def _set_constants(network: Network, constants: Tensors, files: Iterable[CheckedFile], path: Path) -> None:
    """Copy into the template what members do not own: exactly that, nothing stays as it was built."""
    owned = set().union(*(names_in(names_of(file.path)) for file in files))
    expected = {name: kind for name, kind in network.fingerprint.items() if name not in owned}
    check_tensors(fingerprint_of(path, infinite=True), expected, path)  # a mask may be of -inf
    set_tensors(network.module, constants)
