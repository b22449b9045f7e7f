"""Small networks with known weights, as plain modules and as a posterior of them."""

import copy

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import polymode as pm


def mlp(batch_norm: bool = False, dropout: float = 0.0) -> nn.Module:
    """Four numbers in, three classes out, in double precision."""
    return pm.models.MLP(4, 3, (6,), batch_norm=batch_norm, dropout=dropout).double()


def trained_elsewhere(factory, count, likelihood="categorical", spread=0.7, **options):
    """Modules with weights drawn at random, and the posterior of their states."""
    modules = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(100 + seed)
        module = factory().eval()
        with torch.no_grad():
            for weight in module.parameters():
                weight.copy_(spread * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
        modules.append(module)
    states = [module.state_dict() for module in modules]
    return modules, pm.from_state_dicts(factory, states, likelihood=likelihood, **options)


def flat(module) -> torch.Tensor:
    """All weights of a module as one vector, by torch's own means."""
    return parameters_to_vector(module.parameters()).detach()


def at(module, vector):
    """A copy of a module with other weights."""
    moved = copy.deepcopy(module)
    vector_to_parameters(vector, moved.parameters())
    return moved.eval()


def points(count=40, seed=5):
    """Inputs and labels of three classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return pm.ArrayData(x, torch.randint(3, (count,), generator=generator), batch_size=16)


@torch.no_grad()
def scores(module, data):
    """Loss, error and labels of a module, from its plain forward pass."""
    outputs = module(data.inputs)
    said = outputs.argmax(-1)
    loss = nn.functional.cross_entropy(outputs, data.targets)
    return float(loss), float((said != data.targets).double().mean()), said
