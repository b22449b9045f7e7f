"""forward_members against a naive oracle: one ordinary module a member."""

import copy

import pytest
import torch
from torch import nn

import polymode as pm
from cases import BY_NAME, NETWORKS
from polymode.errors import CannotVectorise, InputError
from polymode.networks.members import BACKENDS, Members, concatenate, forward_members, map_members, stack
from polymode.networks.surgery import prepare, tensors_of
from polymode.trees import leaves, map_tree

DETERMINISTIC = [case for case in NETWORKS if case.name != "functional_dropout"]


def make(case, num_members=3):
    modules = [prepare(case.double_factory()) for _ in range(num_members)]
    for index, module in enumerate(modules):
        for name, buffer in module.named_buffers():
            if name.endswith("seed"):
                buffer.fill_(index + 1)
    members = pm.stack([tensors_of(module) for module in modules])
    template = copy.deepcopy(modules[0])
    return template, members, modules


def call(module, inputs):
    if isinstance(inputs, dict):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("backend", ["vmap", "loop"])
@pytest.mark.parametrize("case", DETERMINISTIC, ids=lambda c: c.name)
def test_forward_equals_one_module_a_member(case, backend, training):
    if backend == "vmap" and not case.vectorises:
        pytest.skip("vmap cannot run it; test_errors_name_the_trouble shows the error")
    template, members, modules = make(case)
    inputs = case.data().inputs
    template.train(training)
    before = {name: tensor.clone() for name, tensor in tensors_of(template).items()}
    outputs = pm.forward_members(template, members, inputs, backend=backend)
    expected = [call(module.train(training), inputs) for module in modules]
    for got, *each in zip(leaves(outputs), *(leaves(e) for e in expected), strict=True):
        torch.testing.assert_close(got, torch.stack(each))
    # Buffers of the members move as those of the modules do; the template does not move at all.
    for index, module in enumerate(modules):
        for name, tensor in tensors_of(module).items():
            torch.testing.assert_close(members.stacked[name][index], tensor)
    for name, tensor in tensors_of(template).items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("backend", ["vmap", "loop"])
def test_inputs_of_their_own(backend):
    template, members, modules = make(BY_NAME["mlp"])
    inputs = torch.randn(3, 5, 4, dtype=torch.float64)
    outputs = pm.forward_members(template, members, inputs, inputs_have_members=True, backend=backend)
    expected = torch.stack([module(x) for module, x in zip(modules, inputs, strict=True)])
    torch.testing.assert_close(outputs, expected)


@pytest.mark.parametrize("backend", ["vmap", "loop"])
@pytest.mark.parametrize(("num_groups", "group_size"), [(1, 3), (3, 1), (2, 3)])
def test_groups_share_weights_and_data(backend, num_groups, group_size):
    """Member m of group g: its own head on the group's body, on the group's inputs."""
    count = num_groups * group_size
    bodies = torch.randn(num_groups, 6, 4, dtype=torch.float64)
    heads = torch.randn(count, 3, 6, dtype=torch.float64)
    own = torch.randn(count, 1, dtype=torch.float64)
    x = torch.randn(num_groups, 5, 4, dtype=torch.float64)
    members = Members({"head": heads}, {"body": bodies}, num_groups)
    result = map_members(
        lambda w, own, x: torch.tanh(x @ w["body"].T) @ w["head"].T * own,
        members,
        own,
        x,
        backend=backend,
    )
    for m in range(count):
        g = m // group_size
        expected = torch.tanh(x[g] @ bodies[g].T) @ heads[m].T * own[m]
        torch.testing.assert_close(result[m], expected)


def test_views_of_groups_write_through():
    members = Members({"w": torch.zeros(6, 2)}, {"s": torch.zeros(3, 2)}, num_groups=3)
    members.groups(slice(1, 3), member=1).stacked["w"].fill_(1.0)
    assert members.stacked["w"][:, 0].tolist() == [0, 0, 0, 1, 0, 1]
    assert members.groups(slice(1, 2)).shared["s"].shape == (1, 2)


def test_stack_and_unstack_are_inverse_and_keep_channels_last():
    modules = [nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last) for _ in range(4)]
    members = pm.stack([tensors_of(module) for module in modules])
    assert members.stacked["weight"][2].is_contiguous(memory_format=torch.channels_last)
    for module, state in zip(modules, pm.unstack(members), strict=True):
        assert torch.equal(module.weight, state["weight"])


def test_concatenate_keeps_labels_and_groups():
    a = Members({"w": torch.zeros(2, 1)})
    b = Members({"w": torch.ones(2, 1)})
    joined = concatenate([a, b])
    assert joined.num_groups == 2
    assert joined.stacked["w"].flatten().tolist() == [0, 0, 1, 1]
    assert joined.labels[:, 2].tolist() == [0, 1, 0, 1]


def test_errors_name_the_trouble():
    template, members, _ = make(BY_NAME["mlp"])
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    with pytest.raises(InputError, match="lead with \\[2\\] and there are 3 members"):
        pm.forward_members(template, members, x, inputs_have_members=True)
    with pytest.raises(InputError, match="Did you mean 'vmap'"):
        pm.forward_members(template, members, x[0], backend="vmaps")
    with pytest.raises(InputError, match="do not divide into 2"):
        Members({"w": torch.zeros(3, 1)}, num_groups=2)
    with pytest.raises(InputError, match="leading member axis"):
        Members({"w": torch.zeros(3, 1), "v": torch.zeros(2)})
    branching, own, _ = make(BY_NAME["data_dependent"])
    with pytest.raises(CannotVectorise, match="backend='loop'"):
        pm.forward_members(branching, own, x[0])


def test_hidden_randomness_is_refused_under_vmap():
    template, members, _ = make(BY_NAME["functional_dropout"])
    with pytest.raises(CannotVectorise, match="random"):
        pm.forward_members(template.train(), members, torch.randn(5, 4, dtype=torch.float64))


def test_dropout_noise_does_not_depend_on_chunks_or_backend():
    template, members, _ = make(BY_NAME["dropout"])
    template.train()
    x = torch.randn(10, 4, dtype=torch.float64)
    whole = pm.forward_members(template, members, x, backend="vmap")
    parts = [
        pm.forward_members(template, members, x[a:b], backend="loop", first_example=a)
        for a, b in ((0, 3), (3, 10))
    ]
    torch.testing.assert_close(whole, torch.cat(parts, 1))


def test_map_tree_refuses_what_is_not_a_tree():
    with pytest.raises(InputError, match="got str"):
        map_tree(lambda t: t, {"a": "text"})


class Fusing(nn.Module):
    """Multiplies its layers once and remembers the product, in attributes and in a dictionary."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.fused, self.kept = None, {}

    def forward(self, x):
        if self.fused is None:
            self.fused = self.last.weight @ self.first.weight
            self.kept["bias"] = self.last.weight @ self.first.bias + self.last.bias
        return x @ self.fused.T + self.kept["bias"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_module_remembers_of_one_member_is_not_used_for_the_next(backend):
    modules = [Fusing().double() for _ in range(3)]
    x = torch.randn(6, 4, dtype=torch.float64)
    expected = torch.stack([module.last(module.first(x)) for module in modules])
    members = stack([tensors_of(module) for module in modules])
    template = Fusing().double()
    for _ in range(2):
        found = forward_members(template, members, x, backend=backend)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert template.fused is None
    assert template.kept == {}
