"""From what ``fit`` was asked to what a run works with; all bad input is found here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from polymode.data import ArrayData, Data, Examples, check_finite, fingerprints
from polymode.errors import InputError
from polymode.likelihoods import Likelihood
from polymode.networks.adaptations import Adaptation, adapt
from polymode.networks.surgery import (
    Model,
    floating_type,
    match_precision,
    normalisation_and_bias_names,
    trainable_names,
)
from polymode.posteriors import Posterior
from polymode.posteriors.network import Network
from polymode.posteriors.particles import MemberStore
from polymode.seeds import derive_generator, derive_seed
from polymode.storage import digest_of
from polymode.training.contract.execution import Execution, Precision
from polymode.training.contract.method import Method, describe
from polymode.training.contract.phase import Phase
from polymode.training.contract.problem import Problem
from polymode.training.contract.ranks import ALONE, Ranks
from polymode.training.contract.state import State
from polymode.training.keeping.folder import MEMBERS
from polymode.training.loop.batches import Batches
from polymode.training.loop.initialiser import (
    Initialiser,
    Probe,
    always_eval,
    digest_of_draws,
    make_template,
    members_to_begin_at,
    mixes_examples,
    probe,
)
from polymode.training.loop.memory import check_chains_fit, check_whole_fits
from polymode.trees import map_tree


@dataclass(frozen=True)
class Request:
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
    initial: Sequence[Posterior] | None = None  # one a data set
    data_sets: range = range(
        0
    )  # where this is a part of a larger request: its own, as they are counted there
    ranks: Ranks = ALONE  # processes that share every minibatch
    first_seed: int = 0  # of the first data set of the whole: it makes what all members have in common

    @property
    def first_data_set(self) -> int:
        return self.data_sets.start

    def signature(self, network: Network, owned: frozenset[str]) -> dict[str, Any]:
        """What must be the same for a checkpoint to be continued."""
        some = {} if len(self.chains) == self.method.total_chains else {"num_chains": len(self.chains)}
        if self.initial is not None:
            some |= {
                "initial": [digest_of_draws(each, self.method, self.first_seed) for each in self.initial]
            }
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
class Material:
    """What a run works with, however it is executed.

    problem: its execution is not decided yet. owned: names of the tensors that members own.
    """

    request: Request
    problem: Problem
    owned: frozenset[str]
    batches: Batches
    state: State

    def phases(self, execution: Execution) -> list[Phase]:
        """The algorithm, for chains that are executed in this way."""
        problem = replace(self.problem, execution=execution)
        return list(self.request.method.phases(problem, self.request.epochs))


def remarks_on(request: Request) -> Iterator[str]:
    """What is allowed, but might not be what was meant."""
    if isinstance(request.model, nn.Module) and request.chains.stop > 1 and request.initial is None:
        drawn = range(max(1, request.chains.start), request.chains.stop)
        own = "chain 0 starts from its weights, " if 0 in request.chains else ""
        numbers = f"chain {drawn[0]}" if len(drawn) == 1 else f"chains {drawn[0]} to {drawn[-1]}"
        verb = "starts" if len(drawn) == 1 else "start"
        yield (
            f"{request.method.name} trains several chains of one module: {own}{numbers} {verb} from weights "
            "that its layers draw anew. To choose, pass a function instead of the module: one that builds "
            "the network draws all of them, lambda: copy.deepcopy(module) starts all from these weights."
        )
    for data in request.sources:
        first = (
            data.targets
            if isinstance(data, ArrayData)
            else next(iter(data.in_order(data.batch_size))).targets
        )
        remark = request.likelihood.remark_on(first)
        if remark is not None:
            yield remark
            break  # one data set says enough about all
    yield from request.method.remarks(request.epochs)


def gather(request: Request, folder: Path | None) -> Material:
    """Build the template, the chains and their batches, and check all input before any training."""
    seed, device = request.first_seed, request.device
    template = make_template(request.model, request.likelihood, seed)
    adaptations = tuple(request.method.adaptations(template))
    template = adapt(template, adaptations, derive_seed(seed, "template", "adapt")).to(device)
    trainable = trainable_names(template)

    def arrange(examples: Examples, has_groups: bool) -> Examples:
        """Examples as the network wants them; what was not checked in memory before is checked now."""
        if not in_memory or examples.targets.device != device:
            examples = map_tree(lambda t: t.to(device, non_blocking=True), examples)
        if not in_memory:
            check_finite(examples.inputs)
            request.likelihood.check_targets(examples.targets, seen.outputs)
        return examples._replace(inputs=network.arrange(examples.inputs, has_groups=has_groups))

    in_memory = all(isinstance(source, ArrayData) for source in request.sources)
    batches = Batches(
        request.sources,
        request.chains,
        request.seeds,
        shared_order=request.shared_order,
        arrange=arrange,
        ranks=request.ranks,
    )
    seen = _check_data(request, template, adaptations)
    initialiser = Initialiser(request.model, request.likelihood, device, adaptations)
    request.ranks.check(
        looks_at_batches=bool(seen.changed)
        or any(map(_has_no_statistics, template.modules()))
        or (request.ranks.size > 1 and mixes_examples(template, seen.inputs)),
        draws_globally=seen.uses_global_random,
        replayable=all(source.replayable for source in request.sources),
        refusal=request.method.undivided,
    )
    owned = initialiser.own_names(template, seen.changed, seed)
    initialiser = replace(initialiser, names=owned)
    network = Network(  # from here on the template has no gradients
        template,
        request.likelihood,
        always_eval=always_eval(template),
        draws_globally=seen.uses_global_random,
        adaptations=adaptations,
    )
    counts = [_num_observations(request.likelihood, data) for data in request.sources]
    problem = Problem(
        network,
        trainable,
        normalisation_and_bias_names(template),
        initialiser,
        Execution(device, precision=request.precision),
        torch.tensor([counts[group.data_set] for group in batches.groups], device=device),
        redraw=initialiser.of_layers,
        replayable=all(source.replayable for source in request.sources),
        num_minibatches=min(batches.num_minibatches(group.num_examples) for group in batches.groups),
        example=network.arrange(map_tree(lambda t: t[:1].clone(), seen.inputs)),
    )
    _check_phases(request, problem, request.method.phases(problem, request.epochs))
    given = [
        members_to_begin_at(each, request.method, problem, owned, request.first_seed)
        for each in request.initial or ()
    ]
    size, states = request.method.num_initial, []
    for index, group in enumerate(batches.groups):
        generator = derive_generator(group.seed, "chain", group.chain)
        of_chain = replace(problem, chain=group.chain, group=index)
        if given:
            own = slice(group.chain * size, (group.chain + 1) * size)
            of_chain = replace(of_chain, initial=given[group.data_set][own])
        state = request.method.init(of_chain, generator)
        number = request.first_data_set + group.data_set
        states.append(state.as_chain(generator, number, group.chain))
        if index == 0:
            check_chains_fit(states[0], len(batches.groups), device, request.method.name)
    state = State.side_by_side(states)
    members = None if folder is None else folder / MEMBERS
    state.finished = MemberStore(members, writes=request.ranks.is_first)
    return Material(request, problem, owned, batches, state)


def _first_examples(data: Data, count: int, device: torch.device) -> Examples:
    return map_tree(lambda t: t.to(device), next(iter(data.in_order(count))))


def _check_data(request: Request, template: nn.Module, adaptations: Sequence[Adaptation]) -> Probe:
    """Run the network on a batch of every data set and check all targets that are in memory."""
    seen = []
    all_data: list[Data] = [*request.sources, *(request.validation or [])]
    dtype = floating_type(template)
    for index, data in enumerate(all_data):
        try:
            examples = _first_examples(data, data.batch_size, request.device)
            seen.append(probe(template, match_precision(dtype, examples.inputs), adaptations))
            outputs = seen[-1].outputs
            request.likelihood.check_outputs(outputs, examples.targets)
            targets = data.targets if isinstance(data, ArrayData) else examples.targets
            request.likelihood.check_targets(targets.to(request.device), outputs)
        except InputError as error:
            if index < len(request.sources):
                raise
            raise InputError(f"In the validation data: {error}") from error
    for data in request.sources:
        _check_leftover(request, template, data)
    return seen[0]


def _check_leftover(request: Request, template: nn.Module, data: Data) -> None:
    """A last batch of one example is where BatchNorm fails, an epoch into the training."""
    if data.drop_last or data.num_examples % data.batch_size != 1 or not data.replayable:
        return
    try:
        inputs = _first_examples(data, 1, request.device).inputs
        probe(template, match_precision(floating_type(template), inputs))
    except InputError as error:
        raise InputError(
            f"The last batch of an epoch has one example ({data.num_examples} examples in batches "
            f"of {data.batch_size}), and the network cannot train on one: {error.__cause__} "
            "Pass drop_last=True or another batch_size."
        ) from error


def _has_no_statistics(module: nn.Module) -> bool:
    """Whether a layer normalises by the minibatch it sees, always."""
    return isinstance(module, _BatchNorm) and module.running_mean is None


def _num_observations(likelihood: Likelihood, data: Data) -> int:
    if isinstance(data, ArrayData):
        return int(likelihood.num_observations(data.targets))
    # Tokens of a loader are counted by the first batch: reading all data once would cost an epoch.
    targets = next(iter(data.in_order(data.batch_size))).targets
    return round(int(likelihood.num_observations(targets)) / len(targets) * data.num_examples)


def _check_phases(request: Request, problem: Problem, phases: Sequence[Phase]) -> None:
    whole = next((phase for phase in phases if phase.batches == "full"), None)
    if whole is not None:
        where = f"phase {whole.name!r} of {request.method.name}"
        check_whole_fits(request.sources, len(request.chains), problem.example, request.device, where)
    for before, phase in zip([None, *phases], phases, strict=False):
        for name in phase.carry:
            if before is None:
                raise InputError(
                    f"Phase {phase.name!r} carries the optimiser {name!r}, but no phase comes before it."
                )
            if name not in phase.optimizers:
                raise InputError(
                    f"Phase {phase.name!r} carries {name!r}, which is not one of its optimisers."
                )
            if before.optimizers.get(name) != phase.optimizers[name]:
                raise InputError(
                    f"Phase {phase.name!r} carries the optimiser {name!r}, but describes it otherwise than "
                    f"phase {before.name!r}."
                )
        where = f"phase {phase.name!r} of {request.method.name}"
        if phase.batches == "full" and not all(source.replayable for source in request.sources):
            raise InputError(
                f"Each step of {where} is about the whole data set: an IterableDataset cannot be read again. "
                "Use ArrayData or a map-style data set."
            )
        if phase.batches == "full" and any(getattr(source, "augment", ()) for source in request.sources):
            raise InputError(
                f"Each step of {where} is about the whole data set as it is, and augmented images "
                "are others every time. Leave augment out."
            )
        if phase.epochs < 1:
            raise InputError(f"There are {phase.epochs} epochs for {where}: it needs at least one.")
        if phase.keep is None:
            continue
        if request.validation is None:
            raise InputError(
                f"The best weights of {where} are kept by validation: pass validation=..., or keep='last'."
            )
        if phase.keep.from_epoch > phase.epochs:
            raise InputError(
                f"KeepBest(from_epoch={phase.keep.from_epoch}) lies after the last of {phase.epochs} "
                f"epochs of {where}."
            )


def _size(data: Data) -> str:
    return f"{data.num_examples} examples in batches of {data.batch_size}"
