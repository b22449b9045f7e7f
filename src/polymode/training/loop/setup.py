"""From the user's arguments to a run that can begin; all bad input is found here."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polymode.data import ArrayData, Data, Examples, check_finite
from polymode.errors import InputError
from polymode.likelihoods import Likelihood
from polymode.networks.members import Tensors
from polymode.networks.surgery import (
    Model,
    floating_type,
    match_precision,
    normalisation_and_bias_names,
    structure,
    trainable_names,
)
from polymode.posteriors.network import Network
from polymode.posteriors.particles import MemberStore
from polymode.seeds import derive_generator, derive_seed, global_seed
from polymode.training.contract.batch import Batch
from polymode.training.contract.method import Method, Phase, Problem, describe
from polymode.training.contract.objective import Execution, Precision
from polymode.training.contract.state import State
from polymode.training.keeping.folder import MEMBERS
from polymode.training.loop.batches import Batches
from polymode.training.loop.start import Probe, Start, always_eval, make_template, own_names, probe
from polymode.trees import Tree, leaves


@dataclass(frozen=True)
class Job:
    """What ``fit`` was asked to do."""

    method: Method
    model: Model
    sources: Sequence[Data]
    validation: Sequence[Data] | None
    likelihood: Likelihood
    epochs: int
    seeds: Sequence[int]
    chains: range
    device: torch.device
    precision: Precision
    shared_order: bool

    def signature(self, network: Network, owned: frozenset[str]) -> dict[str, Any]:
        """What must be the same for a checkpoint to be continued."""
        some = {} if len(self.chains) == self.method.total_chains else {"total_chains": len(self.chains)}
        return some | {
            "method": describe(self.method),
            "likelihood": self.likelihood.config(),
            "epochs": self.epochs,
            "seeds": list(self.seeds),
            "first_chain": self.chains.start,
            "data": fingerprints(self.sources),
            "validation": fingerprints(self.validation or []),
            "sizes": {
                "data": [_size(data) for data in self.sources],
                "validation": [_size(data) for data in self.validation or []],
            },
            "precision": self.precision,
            "shared_order": self.shared_order,
            "constants": digest_of(network.constants(owned)),
            "network": network.fingerprint,
        }


@dataclass(frozen=True)
class SetUp:
    """Everything a run works with.

    owned: names of the tensors that members own. example_outputs: what the network gives for examples.
    """

    problem: Problem
    owned: frozenset[str]
    batches: Batches
    phases: Sequence[Phase]
    state: State
    example_outputs: Tree

    def arranged(self, batch: Batch) -> Batch:
        """The batch as the network wants it; what was not checked in memory before is checked now."""
        network = self.problem.network
        batch = batch.on(self.problem.execution.device, network)
        if not isinstance(self.batches.source, ArrayData):
            for piece in batch.pieces:
                check_finite(piece.inputs)
                network.likelihood.check_targets(piece.targets, self.example_outputs)
        return batch


def remarks_on(job: Job) -> Iterator[str]:
    """What is allowed, but might not be what was meant."""
    if isinstance(job.model, nn.Module) and job.chains.stop > 1:
        drawn = range(max(1, job.chains.start), job.chains.stop)
        own = "chain 0 starts from its weights, " if 0 in job.chains else ""
        numbers = f"chain {drawn[0]}" if len(drawn) == 1 else f"chains {drawn[0]} to {drawn[-1]}"
        verb = "starts" if len(drawn) == 1 else "start"
        yield (
            f"{job.method.name} trains several chains of one module: {own}{numbers} {verb} from weights that "
            "its layers draw anew. To choose, pass a function instead of the module: one that builds the "
            "network draws all of them, lambda: copy.deepcopy(module) starts all from these weights."
        )
    for data in job.sources:
        first = (
            data.targets
            if isinstance(data, ArrayData)
            else next(iter(data.in_order(data.batch_size))).targets
        )
        remark = job.likelihood.remark_on(first)
        if remark is not None:
            yield remark
            break  # one data set says enough about all


def set_up(job: Job, folder: Path | None) -> SetUp:
    """Build the template, the chains and the phases, and check all input before any training."""
    seed = job.seeds[0]
    template = make_template(job.model, job.likelihood, seed)
    before = structure(template)
    with global_seed(derive_seed(seed, "template", "adapt")):
        template = job.method.adapt(template).to(job.device)
    adapted_by = "" if structure(template) == before else job.method.name
    trainable = trainable_names(template)
    exempt = normalisation_and_bias_names(template)
    batches = Batches(job.sources, job.chains, job.seeds, shared_order=job.shared_order)
    seen = _check_data(job, template)
    counts = [_num_observations(job.likelihood, data) for data in job.sources]
    execution = Execution(
        job.device,
        torch.tensor([counts[group.data_set] for group in batches.groups], device=job.device),
        precision=job.precision,
        uses_global_random=seen.uses_global_random,
    )
    names = own_names(job.model, template, seen.changed, seed)
    start = Start(job.model, job.likelihood, job.device, names, job.method.adapt)
    network = Network(template, job.likelihood, always_eval=always_eval(template), adapted_by=adapted_by)
    replayable = all(source.replayable for source in job.sources)
    problem = Problem(
        network,
        trainable,
        exempt,
        start,
        execution,
        redraw=start.of_layers,
        replayable=replayable,
        num_minibatches=min(batches.num_minibatches(group.num_examples) for group in batches.groups),
    )
    phases = list(job.method.phases(problem, job.epochs))
    _check_phases(job, phases)
    states = []
    for index, group in enumerate(batches.groups):
        generator = derive_generator(group.seed, "chain", group.chain)
        state = job.method.init(replace(problem, chain=group.chain, group=index), generator)
        states.append(state.begin(generator, group.data_set, group.chain))
    state = State.side_by_side(states)
    state.finished = MemberStore(None if folder is None else folder / MEMBERS)
    return SetUp(problem, names, batches, phases, state, seen.outputs)


def _first_examples(data: Data, count: int, device: torch.device) -> Examples:
    return next(iter(data.in_order(count))).map(lambda t: t.to(device))


def _check_data(job: Job, template: nn.Module) -> Probe:
    """Run the network on a batch of every data set and check all targets that are in memory."""
    seen = []
    all_data: list[Data] = [*job.sources, *(job.validation or [])]
    dtype = floating_type(template)
    for index, data in enumerate(all_data):
        try:
            examples = _first_examples(data, data.batch_size, job.device)
            seen.append(probe(template, match_precision(dtype, examples.inputs)))
            outputs = seen[-1].outputs
            job.likelihood.check_outputs(outputs, examples.targets)
            targets = data.targets if isinstance(data, ArrayData) else examples.targets
            job.likelihood.check_targets(targets.to(job.device), outputs)
        except InputError as error:
            if index < len(job.sources):
                raise
            raise InputError(f"In the validation data: {error}") from error
    for data in job.sources:
        _check_leftover(job, template, data)
    return seen[0]


def _check_leftover(job: Job, template: nn.Module, data: Data) -> None:
    """A last batch of one example is where BatchNorm fails, an epoch into the training."""
    if data.drop_last or data.num_examples % data.batch_size != 1 or not data.replayable:
        return
    try:
        inputs = _first_examples(data, 1, job.device).inputs
        probe(template, match_precision(floating_type(template), inputs))
    except InputError as error:
        raise InputError(
            f"The last batch of an epoch has one example ({data.num_examples} examples in batches "
            f"of {data.batch_size}), and the network cannot train on one: {error.__cause__} "
            "Pass drop_last=True or another batch_size."
        ) from error


def _num_observations(likelihood: Likelihood, data: Data) -> int:
    if isinstance(data, ArrayData):
        return int(likelihood.num_observations(data.targets))
    # Tokens of a loader are counted by the first batch: reading all data once would cost an epoch.
    targets = next(iter(data.in_order(data.batch_size))).targets
    return round(int(likelihood.num_observations(targets)) / len(targets) * data.num_examples)


def _check_phases(job: Job, phases: Sequence[Phase]) -> None:
    for before, phase in zip([None, *phases], phases, strict=False):
        for name in phase.carry:
            if before is None or name not in phase.optimizers:
                raise InputError(
                    f"Phase {phase.name!r} carries {name!r}, which is not one of its optimisers."
                )
            if before.optimizers.get(name) != phase.optimizers[name]:
                raise InputError(
                    f"Phase {phase.name!r} carries the optimiser {name!r}, but describes it otherwise than "
                    f"phase {before.name!r}."
                )
        where = f"phase {phase.name!r} of {job.method.name}"
        if phase.batches == "full" and not all(source.replayable for source in job.sources):
            raise InputError(
                f"Each step of {where} is about the whole data set: an IterableDataset cannot be read again. "
                "Use ArrayData or a map-style data set."
            )
        if phase.batches == "full" and any(getattr(source, "augment", ()) for source in job.sources):
            raise InputError(
                f"Each step of {where} is about the whole data set as it is, and augmented images "
                "are others every time. Leave augment out."
            )
        if phase.epochs < 1:
            raise InputError(f"There are {phase.epochs} epochs for {where}: it needs at least one.")
        if phase.keep is None:
            continue
        if job.validation is None:
            raise InputError(
                f"The best weights of {where} are kept by validation: pass validation=..., or keep='last'."
            )
        if phase.keep.from_epoch > phase.epochs:
            raise InputError(
                f"KeepBest(from_epoch={phase.keep.from_epoch}) lies after the last of {phase.epochs} "
                f"epochs of {where}."
            )


def digest_of(tensors: Tensors) -> str:
    """SHA-256 of names and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _size(data: Data) -> str:
    return f"{data.num_examples} examples in batches of {data.batch_size}"


def fingerprints(sources: Sequence[Data]) -> list[str]:
    """A digest of each data set; one that occurs several times is read once."""
    known = {id(source): fingerprint(source) for source in {id(s): s for s in sources}.values()}
    return [known[id(source)] for source in sources]


def fingerprint(data: Data) -> str:
    """A digest of a data set: of all its bytes when it is in memory, else of its length."""
    digest = hashlib.sha256(repr((data.num_examples, data.batch_size, data.drop_last)).encode())
    if isinstance(data, ArrayData):
        digest.update(repr(data.augment).encode() if data.augment else b"")
        weights = [] if data.weights is None else [data.weights]
        for tensor in [*leaves(data.inputs), data.targets, *weights]:
            digest.update(repr((tensor.dtype, tensor.shape)).encode())
            raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(raw.numpy().data)
    return digest.hexdigest()
