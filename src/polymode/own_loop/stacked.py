"""Members for one's own training loop: M networks as one ordinary ``nn.Module``."""

import copy
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from polymode.errors import InputError
from polymode.likelihoods import Likelihood, make_likelihood
from polymode.networks.members import Backend, Members, forward_members, stack
from polymode.networks.surgery import prepare, seed_buffers, tensors_of, trainable_names
from polymode.posteriors import Particles
from polymode.posteriors.network import Network
from polymode.trees import Tree


class StackedModule(nn.Module):
    """M networks of one architecture: parameters are [M, ...], outputs [M, B, ...].

    It trains with any optimiser that works element by element (SGD, Adam, AdamW, ...), in plain PyTorch
    or Lightning. Sum the members' losses, do not average them: then each gradient is the member's own.
    With ``inputs_have_members`` every member is given its own batch, [M, B, ...].
    """

    def __init__(self, modules: Sequence[nn.Module], *, backend: Backend = "vmap") -> None:
        super().__init__()
        if not modules or not all(isinstance(module, nn.Module) for module in modules):
            raise InputError("StackedModule needs a list of at least one nn.Module (instances, not classes).")
        shapes = [{n: t.shape for n, t in tensors_of(module).items()} for module in modules]
        if any(each != shapes[0] for each in shapes):
            raise InputError("The modules of a StackedModule must have the same tensors, of the same shapes.")
        prepared = [prepare(module) for module in modules]
        names = trainable_names(prepared[0])
        self.backend: Backend = backend
        # Hidden from nn.Module: the template's own weights are never used, trained or saved.
        object.__setattr__(self, "_template", copy.deepcopy(prepared[0]).requires_grad_(False))
        object.__setattr__(self, "_keys", {})
        for name, tensor in stack([tensors_of(module) for module in prepared]).stacked.items():
            if name.endswith("first_example"):
                continue
            key = self._keys.setdefault(name, name.replace(".", "/"))
            if name in names:
                self.register_parameter(key, nn.Parameter(tensor))
            else:
                self.register_buffer(key, tensor)

    _template: nn.Module
    _keys: dict[str, str]

    @property
    def members(self) -> Members:
        """The members, as views of the parameters and buffers."""
        return Members({name: self.get_parameter_or_buffer(key) for name, key in self._keys.items()})

    def get_parameter_or_buffer(self, key: str) -> Tensor:
        return self._parameters[key] if key in self._parameters else self._buffers[key]  # type: ignore[return-value]

    @property
    def num_members(self) -> int:
        return self.members.num_members

    def forward(self, inputs: Tree, *, inputs_have_members: bool = False) -> Tree:
        if self.training:
            for name in seed_buffers(self._template):
                seeds = self.get_parameter_or_buffer(self._keys[name])
                seeds.copy_(torch.randint(2**62, seeds.shape))
        return forward_members(
            self._template,
            self.members,
            inputs,
            inputs_have_members=inputs_have_members,
            backend=self.backend,
        )

    def train(self, mode: bool = True) -> Self:
        self._template.train(mode)
        return super().train(mode)

    def posterior(self, likelihood: str | Likelihood) -> Particles:
        """The networks as they are now, ready to predict, to be scored and to be saved."""
        template = copy.deepcopy(self._template).to(self.members.log_weights.device)
        network = Network(template, make_likelihood(likelihood), self.backend)
        return Particles(network, blocks=[self.members.map(torch.detach).clone()])
