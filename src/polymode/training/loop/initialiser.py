"""Where chains begin: a template module, and the weights of every chain, drawn or given."""

import copy
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from polymode.errors import InputError, require
from polymode.likelihoods import Likelihood
from polymode.networks.adaptations import Adaptation, adapt
from polymode.networks.members import Members, Tensors
from polymode.networks.surgery import (
    Model,
    build,
    prepare,
    prepare_in_place,
    reinitialised,
    seed_buffers,
    tensors_of,
    trainable_names,
)
from polymode.posteriors import Posterior
from polymode.seeds import derive_generator, derive_seed, draw_seed, global_seed
from polymode.storage import digest_of
from polymode.training.contract.method import Method
from polymode.training.contract.problem import Problem
from polymode.trees import Tree, leaves, map_tree


@dataclass(frozen=True)
class Initialiser:
    """Draws initial weights: from the factory, or from a module.

    The first chain of a module starts with the module's own weights, so that one member is exactly
    the base model; the others are re-initialised layer by layer. adaptations: what is done to each network
    then, under a seed of its chain. names: of the tensors that every member owns.
    """

    model: Model
    likelihood: Likelihood
    device: torch.device
    adaptations: Sequence[Adaptation]
    names: frozenset[str] = frozenset()

    def __call__(self, chain: int, generator: torch.Generator) -> Tensors:
        seed = draw_seed(generator)
        if not isinstance(self.model, nn.Module):
            module = prepare_in_place(build(self.model, seed))
        elif chain == 0:
            module = prepare(self.model)
        else:
            module = prepare_in_place(reinitialised(self.model, seed))
        tensors = tensors_of(self._adapted(module, derive_seed(seed, "adapt")).to(self.device))
        missing = self.names - tensors.keys()
        if missing:
            raise InputError(
                f"The model factory builds different networks: {sorted(missing)[0]!r} is not always "
                "there. It must build the same layers each time."
            )
        return {name: tensor for name, tensor in tensors.items() if name in self.names}

    def _adapted(self, module: nn.Module, seed: int) -> nn.Module:
        return adapt(self.likelihood.prepare(module), self.adaptations, seed)

    def own_names(self, template: nn.Module, changed: frozenset[str], seed: int) -> frozenset[str]:
        """Names of what every member owns: trained, changed by a pass, drawn at random, or said to be so."""
        found = trainable_names(template) | changed | frozenset(seed_buffers(template))
        found = found.union(*(adaptation.own for adaptation in self.adaptations))
        if isinstance(self.model, nn.Module) and not self.adaptations:
            return found
        first, second = self._two_networks(seed)
        drawn = {n for n in first.keys() & second.keys() if not torch.equal(first[n], second[n])}
        return found | drawn

    def _two_networks(self, seed: int) -> list[Tensors]:
        """Networks that differ in what the factory and the adaptations draw."""
        model, seeds = self.model, [derive_seed(seed, name) for name in ("a", "b")]
        if isinstance(model, nn.Module):
            modules = [prepare(model) for _ in seeds]
        else:
            modules = [build(model, each) for each in seeds]
            if modules[0] is modules[1]:
                raise InputError(
                    "The model factory returns the same module each time: build it inside the function, pass "
                    "the module itself, or lambda: copy.deepcopy(module) to start all chains from its "
                    "weights."
                )
            modules = [prepare_in_place(module) for module in modules]
        pairs = zip(modules, seeds, strict=True)
        return [tensors_of(self._adapted(module, derive_seed(each, "adapt"))) for module, each in pairs]

    def of_layers(self, layers: Iterable[str], generator: torch.Generator) -> Tensors:
        """Weights of some layers, drawn anew; nobody needs to be able to re-draw the other layers."""
        if not isinstance(self.model, nn.Module):
            return self(0, generator)
        prepared = self._adapted(prepare(self.model), derive_seed("layers"))  # its layers are drawn below
        prepared.requires_grad_(True)
        first_names = {id(parameter): name for name, parameter in prepared.named_parameters()}
        drawn: Tensors = {}
        for part in map(prepared.get_submodule, layers):
            for name in (first_names[id(parameter)] for parameter in part.parameters(recurse=False)):
                if name in drawn:
                    continue
                owner, _, _ = name.rpartition(".")  # another layer than this one where tensors are tied
                fresh = reinitialised(prepared.get_submodule(owner), draw_seed(generator)).to(self.device)
                of_owner = fresh.named_parameters(recurse=False)
                drawn |= {f"{owner}.{own}".lstrip("."): new.detach() for own, new in of_owner}
        return drawn


def make_template(model: Model, likelihood: Likelihood, seed: int) -> nn.Module:
    """The prepared module whose weights the members replace."""
    if not isinstance(model, nn.Module) and not callable(model):
        raise InputError(
            f"The model must be an nn.Module or a function that builds one, got {type(model).__name__}."
        )
    module = model if isinstance(model, nn.Module) else build(model, derive_seed(seed, "template"))
    if not trainable_names(module):
        raise InputError("The model has no trainable parameters: nothing can be fitted.")
    return likelihood.prepare(prepare(module))


def always_eval(module: nn.Module) -> tuple[str, ...]:
    """Layers that the user has put into evaluation mode inside a module that is in training mode."""
    if not module.training:
        return ()
    return tuple(name for name, part in module.named_modules() if name and not part.training)


@dataclass(frozen=True)
class Probe:
    """What a pass through a copy of the template shows, in training and in evaluation mode."""

    inputs: Tree
    outputs: Tree
    changed: frozenset[str]
    uses_global_random: bool


def mixes_examples(template: nn.Module, inputs: Tree) -> bool:
    """Whether what a network gives for an example depends on those beside it: others are put there."""
    half = (next(leaves(inputs)).shape[0] + 1) // 2
    others = map_tree(lambda t: torch.cat([t[:half], t[: len(t) - half]]), inputs)
    found = []
    for each in (inputs, others):  # the same shapes, seeds and weights: the same bits
        trial = copy.deepcopy(template).eval()
        with global_seed(0), torch.no_grad():
            outputs = trial(**each) if isinstance(each, dict) else trial(*_arguments(each))
        found.append([leaf[:half] for leaf in leaves(outputs)])
    return not all(map(torch.equal, *found))


def probe(template: nn.Module, inputs: Tree, adaptations: Sequence[Adaptation] = ()) -> Probe:
    """Run a copy of the template in training mode, and then in evaluation mode, and see what it does.

    A buffer that changes (running statistics) belongs to each member; one that does not is a
    constant of the template. adaptations: what an error has to say that the template was changed by.
    """
    trial = copy.deepcopy(template)
    kept = always_eval(trial)
    trial.train()
    for name in kept:
        trial.get_submodule(name).eval()
    before = {name: tensor.clone() for name, tensor in tensors_of(trial).items()}
    with global_seed(0), torch.no_grad():
        states = _random_states()
        try:
            outputs = trial(**inputs) if isinstance(inputs, dict) else trial(*_arguments(inputs))
            after = {name: tensor.clone() for name, tensor in tensors_of(trial).items()}
            trial.eval()  # what it does when it is validated
            trial(**inputs) if isinstance(inputs, dict) else trial(*_arguments(inputs))
        except Exception as error:  # it may be anybody's code
            shapes = map_tree(lambda t: f"{list(t.shape)} {t.dtype}", inputs)
            changed_by = f", changed by {list(adaptations)}," if adaptations else ""
            speaks = isinstance(error, RuntimeError | ValueError | TypeError | IndexError)
            reason = error if speaks else f"{type(error).__name__}: {error}"
            raise InputError(
                f"The network{changed_by} cannot run on a batch of the data, inputs {shapes}: {reason}"
            ) from error
        kinds = [leaf.dtype for leaf in leaves(outputs)]
        require(
            any(kind.is_floating_point for kind in kinds),
            f"The network's outputs are {', '.join(map(str, kinds))}: they must be real floating-point "
            "numbers (logits, means), so that its weights can be trained.",
        )
        uses_global_random = any(not torch.equal(a, b) for a, b in zip(states, _random_states(), strict=True))
    changed = frozenset(name for name in before if not torch.equal(before[name], after[name]))
    return Probe(inputs, outputs, changed, uses_global_random)


def _random_states() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return states + (torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])


def _arguments(inputs: Tree) -> tuple:
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)


def _initial_draws(posterior: Posterior, method: Method, seed: int) -> Iterator[Members]:
    """The members of a posterior that chains begin at: as many as all of them take, spread evenly."""
    wanted, each = method.total_chains * method.num_initial, method.num_initial
    available = posterior.num_members
    if available is not None and available < wanted:
        raise InputError(
            f"initial has {available} member{'s' if available != 1 else ''}, and {method.name} takes {wanted}"
            f"{f' ({each} for each chain)' if each > 1 else ', one for each chain'}: pass a posterior with "
            "as many, or a method with fewer chains."
        )
    return posterior.draw(wanted, derive_generator(seed, "initial"))


def digest_of_draws(posterior: Posterior, method: Method, seed: int) -> str:
    """A digest of the members that chains begin at."""
    digests = [digest_of(block.stacked | block.shared) for block in _initial_draws(posterior, method, seed)]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def members_to_begin_at(
    posterior: Posterior, method: Method, problem: Problem, owned: frozenset[str], seed: int
) -> list[Tensors]:
    """The weights of the members that chains begin at, in order; what a chain owns beyond them is drawn."""
    network, before = problem.network, posterior.network
    if before.likelihood.kind != network.likelihood.kind:
        raise InputError(
            f"initial has the likelihood {before.likelihood.kind!r}, and here it is "
            f"{network.likelihood.kind!r}: its outputs mean something else."
        )
    there, here = posterior.network.fingerprint, network.fingerprint
    for name in sorted(problem.trainable):
        if name not in there or there[name][1:] != here[name][1:]:  # another precision is converted
            raise InputError(
                f"initial is of another network: {name!r} is {there.get(name, 'absent')} in it and "
                f"{here[name]} in the model. Pass the model and the likelihood that it was made with."
            )
    constants = network.constants(owned)
    common = {n for n in owned if n in there and there[n][1:] == here[n][1:]}
    types = {name: tensor.dtype for name, tensor in tensors_of(network.module).items()}
    found = []
    for block in _initial_draws(posterior, method, seed):
        for index in range(block.num_members):
            member = block.member(index)
            # Frozen weights are the model's: those of the posterior must not be lost without a word.
            for name, tensor in (before.constants(member) | member).items():
                fixed = constants.get(name)
                if fixed is not None and not torch.equal(tensor.cpu(), fixed.to(tensor.dtype).cpu()):
                    raise InputError(
                        f"initial is of another network: {name!r}, which is fixed in the model, differs in "
                        "it. Let the model hold the same values, or train them."
                    )
            found.append({n: t.to(network.device, types[n]) for n, t in member.items() if n in common})
    return found
