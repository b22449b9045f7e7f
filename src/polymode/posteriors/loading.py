"""Saved posteriors, read back."""

import copy
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from polymode.errors import CheckpointError, InputError, unknown_name
from polymode.likelihoods import make_likelihood
from polymode.posteriors.base import MANIFEST, POSTERIORS, Posterior
from polymode.posteriors.network import Network, check_fingerprint, check_layers
from polymode.storage import check_file, read_json, read_tensors
from polymode.surgery import Model, Sampling, build, prepare, sample_dropout_of, set_tensors


def _posterior_of_run(folder: Path) -> Path:
    """The folder of the only posterior in the folder of a run."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is missing: there is no such folder.")
    manifest = read_json(folder / MANIFEST, "saved posterior or run")
    if manifest.get("what") != "run":
        raise CheckpointError(
            f"{folder} is not the folder of a run: its manifest is of a {manifest['what']}."
        )
    if manifest["status"] != "finished":
        raise CheckpointError(
            f"{folder} holds a run that has not ended: fit(..., run_dir={str(folder)!r}, resume=True), or "
            "the command that began it, goes on with it."
        )
    names = manifest["posteriors"]
    if len(names) != 1:
        raise CheckpointError(f"{folder} holds {len(names)} posteriors; load one of them: {names}.")
    return folder / names[0]


def load_posterior(folder: str | Path, model: Model, *, check_structure: bool = True) -> Posterior:
    """Read a saved posterior; ``model`` is the module (or its factory) it was fitted with.

    folder: where ``save`` wrote it, or the ``run_dir`` of a finished run over one data set. check_structure:
    refuse a module whose layers are of other classes, or say other things of themselves (``extra_repr``);
    what a module calls inside ``forward`` cannot be seen.
    """
    folder = Path(folder)
    if not (folder / "posterior.json").exists():
        return load_posterior(_posterior_of_run(folder), model, check_structure=check_structure)
    manifest = read_json(folder / "posterior.json", "saved posterior")
    if manifest["kind"] not in POSTERIORS:
        raise unknown_name("kind of posterior", manifest["kind"], POSTERIORS)
    if adapted_by := manifest.get("adapted_by"):
        raise CheckpointError(
            f"{folder} cannot be loaded: {adapted_by} changes the network before it trains it, and of such "
            "changes only dropout that is sampled (mc_dropout) is stored and made again. Keep the posterior "
            "that fit returned in memory, or build the change into the model."
        )
    likelihood = make_likelihood(manifest["likelihood"])
    module = copy.deepcopy(model) if isinstance(model, nn.Module) else build(model, seed=0)
    saved_in_double = any(kind == "float64" for kind, *_ in manifest["network"].values())
    if saved_in_double and all(p.dtype != torch.float64 for p in module.parameters()):
        module = module.double()  # it was fitted with precision="double"
    kind, options = POSTERIORS[manifest["kind"]], manifest.get("options", {})
    prepared = likelihood.prepare(prepare(module))
    if manifest.get("sampling") is not None:
        try:
            sample_dropout_of(prepared, Sampling(**manifest["sampling"]))
        except InputError as error:
            raise CheckpointError(f"{folder} belongs to another network: {error}") from error
    network = Network(prepared, likelihood, manifest["backend"])
    check_fingerprint(manifest["network"], network.fingerprint, str(folder))
    if check_structure and "structure" in manifest:
        check_layers(manifest["structure"], prepared, str(folder))
    for name, expected in manifest["files"].items():
        check_file(folder / name, expected)
    set_tensors(network.module, read_tensors(folder / "constants.safetensors"))
    members = [name for name in manifest["files"] if name != "constants.safetensors"]
    posterior = kind.from_files(network, folder, members, options)
    return replace(posterior, record=manifest["record"])
