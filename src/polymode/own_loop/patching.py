"""Model patching for one's own training loop: a copy of a module whose patched layers draw their weights.

The copy is an ordinary ``nn.Module``: every call draws anew, ``parameters()`` are the components, any
optimiser and any trainer works with it. Layers keep their type and attributes; their weights are parametrised
(``torch.nn.utils.parametrize``).
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from polymode.errors import InputError, require, require_whole, unknown_name
from polymode.likelihoods import FixedGaussian, Likelihood, make_likelihood
from polymode.networks.members import Backend, Tensors
from polymode.networks.selection import Where, is_normalisation
from polymode.networks.surgery import prepare_in_place, reinitialised, tensors_of, trainable_names
from polymode.posteriors import ComponentMixture
from polymode.posteriors.component_mixture import COMPONENTS, SHARED, STATISTICS
from polymode.posteriors.network import Network
from polymode.seeds import draw_seed
from polymode.trees import Tree
from polymode.weights.mixtures import Mixture, family_of, initial_components, mixture_kl, mixture_over
from polymode.weights.priors import PriorStd, prior_stds

_STATISTICS = "of_components_"  # buffers of a layer with the running statistics of each component


class _Drawn(nn.Module):
    """The parametrisation of one tensor: components [K, ...] to the tensor that was drawn last."""

    def __init__(self, mixture: Mixture, name: str, components: Tensor) -> None:
        super().__init__()
        self.mixture, self.name = mixture, name
        start = torch.zeros(1, *mixture.index_shape(name), dtype=torch.uint8)
        self.register_buffer("index", start, persistent=False)
        object.__setattr__(self, "_initial", components)

    index: Tensor
    _initial: Tensor

    def forward(self, components: Tensor) -> Tensor:
        return self.mixture.choose(components, self.index)[0]

    def right_inverse(self, _: Tensor) -> Tensor:
        return self._initial


def patch(
    module: nn.Module,
    where: Where = ("norm", "output"),
    num_components: int = 5,
    scheme: str = "ecmp",
    *,
    rate: float = 0.1,
    probabilities: Sequence[float] | None = None,
    components_from: Literal["initialiser", "weights"] = "initialiser",
    spread: float = 0.1,
    statistics: Literal["shared", "component"] = "shared",
) -> nn.Module:
    """Copy a module and let its layers ``where`` draw their weights from components at every call.

    where: kinds ("norm", "input", "output", "all"), types such as "Linear", or patterns of layers' names.
    scheme: "ecmp" draws for every scalar, "emp" for every layer, "explicit" for the whole module; "dropout"
        drops inputs of the layers (a mask for each call, not for each example) and "dropconnect" weights,
        both with probability ``rate``.
    components_from: "initialiser" draws the components of Linear, Conv and Embedding layers independently,
        with ``reset_parameters``; "weights" keeps the module's weights in component 0, the others begin near
        them.
    spread: size of the noise that components begin with, where they begin near each other.
    statistics: running statistics of BatchNorm, "shared" or of each "component" (schemes "emp", "explicit").
    """
    family = family_of(scheme, num_components, rate, probabilities)
    if components_from not in ("initialiser", "weights"):
        raise unknown_name("components_from", components_from, ("initialiser", "weights"))
    if statistics not in ("shared", "component"):
        raise unknown_name("statistics", statistics, ("shared", "component"))
    if statistics == "component" and family.assignment not in ("layer", "network"):
        raise InputError(
            f"statistics='component' needs one component for a whole layer (schemes 'emp', 'explicit'), the "
            f"scheme is {scheme!r}."
        )
    require(isinstance(module, nn.Module), f"patch needs an nn.Module, got {type(module).__name__}.")
    if any(parametrize.is_parametrized(part) for part in module.modules()):
        raise InputError("The module has parametrised layers already: patch the plain module.")
    patched = copy.deepcopy(module)
    whole = mixture_over(patched, where, family, trainable_names(patched))
    _check_ties(patched, whole)
    starts = [tensors_of(patched)]
    if components_from == "initialiser" and not family.drop:
        starts += [_redrawn(patched, whole) for _ in range(family.num_components - 1)]
    keep = components_from == "weights" or bool(family.drop)
    components = initial_components(whole, patched, starts, None, keep=keep, spread=spread)
    for layer, names in whole.layers.items():
        part = patched.get_submodule(layer)
        for name in names:
            drawn = _Drawn(whole, name, components[name])
            parametrize.register_parametrization(part, name.rpartition(".")[2], drawn, unsafe=True)
        if statistics == "component":
            for name, buffer in list(part.named_buffers(recurse=False)):
                part.register_buffer(_STATISTICS + name, torch.stack([buffer] * family.num_components))
    patched.register_forward_pre_hook(_draw_anew)
    return patched


def _check_ties(module: nn.Module, mixture: Mixture) -> None:
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for tied in names.values():
        if len(tied) > 1 and mixture.names & set(tied):
            raise InputError(
                f"{' and '.join(tied)} are tied, and a patched copy would part them: fit the method 'emp' or "
                "'ecmp', or name other layers in where."
            )


def _redrawn(module: nn.Module, mixture: Mixture) -> Tensors:
    """Weights of the patched layers as their ``reset_parameters`` draws them."""
    drawn: Tensors = {}
    for layer, names in mixture.layers.items():
        part = module.get_submodule(layer)
        if is_normalisation(part):
            continue
        try:
            fresh = reinitialised(part, draw_seed(torch.default_generator))
        except InputError as error:
            raise InputError(
                f"The layer {layer!r} holds trained or custom values: say components_from='weights' to keep "
                f"them in component 0. ({error})"
            ) from error
        for name in names:
            drawn[name] = fresh.get_parameter(name.rpartition(".")[2]).detach()
    return drawn


def _drawn_parts(module: nn.Module) -> Iterator[tuple[nn.Module, list[_Drawn]]]:
    """Patched layers with the parametrisations of their tensors."""
    for layer in module.modules():
        if parametrize.is_parametrized(layer):
            chains = layer.parametrizations.values()  # type: ignore[operator]  # ModuleDict, typed as Module
            first = [chain[0] for chain in chains]
            parts = [part for part in first if isinstance(part, _Drawn)]
            if parts:
                yield layer, parts


def _draw_anew(module: nn.Module, _: Tree) -> None:
    """One assignment for a pass: a layer that is used twice has the same weights twice."""
    seed = torch.randint(2**62, (1,))
    indices: Tensors = {}
    for layer, parts in _drawn_parts(module):
        indices = indices or parts[0].mixture.indices(seed)
        for part in parts:
            part.index.copy_(indices[part.name])
        for name, stacked in list(layer.named_buffers(recurse=False)):
            if name.startswith(_STATISTICS):
                chosen = stacked[
                    int(parts[0].index.flatten()[0])
                ]  # a view: BatchNorm moves the component's own
                layer._buffers[name.removeprefix(_STATISTICS)] = chosen


def _mixture_of(module: nn.Module) -> Mixture:
    """The mixture of a module that ``patch`` has returned."""
    patched = any(hook is _draw_anew for hook in module._forward_pre_hooks.values())
    require(patched, "This is not a patched module: pass the one that patch(module, ...) has returned.")
    return next(_drawn_parts(module))[1][0].mixture


def _weights(module: nn.Module) -> Tensors:
    """Parameters under the names of the plain module: components of patched tensors, other weights."""
    return {
        name.replace("parametrizations.", "").removesuffix(".original"): parameter
        for name, parameter in module.named_parameters()
    }


def kl(module: nn.Module, prior_std: PriorStd = 1.0) -> Tensor:
    """The KL term of a patched module (Eq. 6), up to a constant, for the prior N(0, s²) over weights.

    It belongs to the whole data set: a loss that is a mean over examples adds it divided by their number.
    """
    mixture = _mixture_of(module)
    weights = {name: parameter for name, parameter in _weights(module).items() if parameter.requires_grad}
    require(bool(weights), "All parameters of the patched module are frozen: there is nothing to regularise.")
    return mixture_kl(mixture, weights, prior_stds(prior_std, module, frozenset(weights)))


def _plain(module: nn.Module) -> nn.Module:
    """A copy without parametrisations, its patched tensors as they were drawn last."""
    plain = copy.deepcopy(module)
    for layer, _ in list(_drawn_parts(plain)):
        # Not torch's remove_parametrizations: copies share a class, and it would take the weights of all.
        names = list(layer.parametrizations)  # type: ignore[arg-type]  # ModuleDict, typed as Module
        drawn = {name: getattr(layer, name).detach() for name in names}
        del layer._modules["parametrizations"]
        layer.__class__ = type(layer).__bases__[0]
        for name, tensor in drawn.items():
            layer.register_parameter(name, nn.Parameter(tensor))
        for name in [n for n, _ in layer.named_buffers(recurse=False) if n.startswith(_STATISTICS)]:
            del layer._buffers[name]
    for number in [n for n, hook in plain._forward_pre_hooks.items() if hook is _draw_anew]:
        del plain._forward_pre_hooks[number]
    return plain


def patched_posterior(
    module: nn.Module, likelihood: str | Likelihood, *, backend: Backend = "vmap"
) -> ComponentMixture:
    """The posterior of a patched module as it is now: to predict, to be scored and to be saved."""
    likelihood = make_likelihood(likelihood)
    likelihood.check_prepared(module)
    whole, weights = _mixture_of(module), _weights(module)
    tensors = {
        (COMPONENTS if name in whole.names else SHARED) + name: parameter.detach().clone()
        for name, parameter in weights.items()
    }
    plain = _plain(module)
    statistics = {
        STATISTICS + name.replace(_STATISTICS, ""): buffer.clone()
        for name, buffer in module.named_buffers()
        if name.rpartition(".")[2].startswith(_STATISTICS)
    }
    for name, buffer in plain.named_buffers():
        if STATISTICS + name not in statistics:
            tensors[SHARED + name] = buffer.detach().clone()
    network = Network(prepare_in_place(plain), likelihood, backend)
    return ComponentMixture(network, mixture=whole, chains=[tensors | statistics])


def draw(module: nn.Module, inputs: Tree, num_draws: int | None = None, *, seed: int = 0) -> Tensor:
    """Outputs [num_draws, B, ...] of networks drawn from a patched module, in evaluation mode.

    num_draws: 100 unless given; of scheme "explicit" each network once. What comes before the first patched
    layer is computed once.
    """
    if num_draws is not None:
        require_whole("num_draws", num_draws)
    posterior = patched_posterior(module, FixedGaussian())  # outputs as they are, whatever they mean
    generator = torch.Generator().manual_seed(seed)
    blocks: list[list[Tensor]] = []
    for rows, outputs, _ in posterior.outputs(inputs, num_draws, generator):
        if rows.start == 0:
            blocks.append([])
        blocks[-1].append(outputs)
    return torch.cat([torch.cat(block, 1) for block in blocks])
