"""Running statistics of normalisation layers for any weights, such as a point of a plane."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import nn

from polymode.networks.members import Members, copied_module, forward_members
from polymode.networks.surgery import running_statistics
from polymode.posteriors.network import Network
from polymode.trees import Tree, length, map_tree


def of_latest_batch(network: Network) -> Network:
    """The same network, but its running statistics are those of the latest batch alone."""
    module = copied_module(network.module)
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._NormBase):
            part.momentum = 1.0
    return replace(network, module=module)


def estimated_names(network: Network) -> list[str]:
    """Names of the running statistics that can be estimated anew: not those that the user has fixed."""
    kept = set(network.always_eval)
    return [n for n in running_statistics(network.module) if n.rpartition(".")[0] not in kept]


@torch.no_grad()
def with_statistics(network: Network, members: Members, batches: Iterable[Tree]) -> Members:
    """The members with running statistics for their own weights: means over batches of inputs [B, ...].

    Only normalisation layers are in training mode; dropout stays off.
    """
    latest = of_latest_batch(network)
    names = [name for name in estimated_names(network) if name in members.stacked]
    for part in latest.module.modules():
        part.training = isinstance(part, nn.modules.batchnorm._NormBase)
    for name in network.always_eval:
        latest.module.get_submodule(name).eval()
    members = members.map(torch.clone)
    means = {name: torch.zeros_like(members.stacked[name], dtype=torch.float64) for name in names}
    seen = 0
    for inputs in batches:
        arranged = network.arrange(map_tree(lambda t: t.to(network.device), inputs))
        forward_members(latest.module, members, arranged, backend="loop")
        seen += length(inputs)
        for name, mean in means.items():
            mean += (length(inputs) / seen) * (members.stacked[name] - mean)
    stacked = {name: mean.to(members.stacked[name].dtype) for name, mean in means.items()}
    return replace(members, stacked=members.stacked | stacked)


def in_batches(inputs: Tree, batch_size: int) -> Sequence[Tree]:
    """Inputs in batches of nearly one size: a last one of few would count as little as its size."""
    count = max(1, round(length(inputs) / batch_size))
    ends = [(length(inputs) * place) // count for place in range(count + 1)]
    return [map_tree(lambda t, a=a, b=b: t[a:b], inputs) for a, b in pairwise(ends)]
