"""How the contract tests make a small instance of every registered method.

A new method adds one line here; everything in this folder then runs on it.
"""

import functools
from collections.abc import Callable

import polymode as pm
from cases import BY_NAME, NetworkCase
from polymode.networks.surgery import Model
from polymode.training.contract import Method

# Not Adam: it turns rounding on gradients that are zero by symmetry (the key bias of attention) into
# steps of full size, so that backends could not be compared.
SGD = pm.Optimizer("SGD", lr=0.05, momentum=0.9)

WALK = pm.samplers.GuidedWalk(step=3.0)  # so long that one step spans the prior

LIGHT = pm.schedules.Constant(0.02)  # of the KL term, so that few data keep their units

SMALL: dict[str, Callable[[], Method]] = {
    "single": lambda: pm.methods.Single(prior_std=1.0, optimizer=SGD),
    "deep_ensemble": lambda: pm.methods.DeepEnsemble(3, of=pm.methods.Single(prior_std=1.0, optimizer=SGD)),
    "anchored": lambda: pm.methods.Anchored(3, prior_std=1.0, optimizer=SGD, perturb_data=True),
    "sequential_anchored": lambda: pm.methods.SequentialAnchored(
        2, prior_std=1.0, walk=WALK, short_epochs=1, optimizer=SGD
    ),
    "mc_dropout": lambda: pm.methods.MCDropout(prior_std=1.0, optimizer=SGD),
    "dropconnect": lambda: pm.methods.DropConnect(rate=0.2, prior_std=1.0, optimizer=SGD),
    "emp": lambda: pm.methods.EMP(num_components=3, statistics="component", prior_std=1.0, optimizer=SGD),
    "ecmp": lambda: pm.methods.ECMP(num_components=3, prior_std=1.0, optimizer=SGD),
    "mean_field": lambda: pm.methods.MeanField(prior_std=1.0, rho=-3.0, optimizer=SGD),
    "spike_slab": lambda: pm.methods.SpikeSlab(
        prior_std=1.0, rho=-3.0, inclusion=0.9, annealing=LIGHT, optimizer=SGD
    ),
    "sequential_bnn": lambda: pm.methods.SequentialBNN(
        pm.methods.MeanField(prior_std=1.0, rho=-3.0, optimizer=SGD), 2, at_once=2, high=1.0, low=0.5
    ),
    "sebays": lambda: pm.methods.SeBayS(
        pm.methods.SpikeSlab(prior_std=1.0, rho=-3.0, inclusion=0.9, annealing=LIGHT, optimizer=SGD),
        *(2, 2),
        high=1.0,
        low=0.5,
    ),
    "late_phase": lambda: pm.methods.LatePhase(2, start=0.5, noise=0.1, prior_std=1.0, optimizer=SGD),
    "swa": lambda: pm.methods.SWA(
        pm.methods.LatePhase(2, start=0.5, noise=0.1, prior_std=1.0, optimizer=SGD), start=0.5
    ),
    "swag": lambda: pm.methods.SWAG(
        pm.methods.Single(prior_std=1.0, optimizer=SGD), start=0, num_draws=3, rank=2
    ),
    "batch_ensemble": lambda: pm.methods.BatchEnsemble(3, prior_std=1.0, optimizer=SGD),
    "dst_ensemble": lambda: pm.methods.DSTEnsemble(
        3, density=0.6, update_every=2, prune_rate=0.2, optimizer=SGD
    ),
    "edst_ensemble": lambda: pm.methods.EDSTEnsemble(
        1, density=0.6, update_every=2, prune_rate=0.2, phase_epochs=1, optimizer=SGD
    ),
    "rank_one_bnn": lambda: pm.methods.RankOneBNN(3, prior_std=1.0, std=0.2, optimizer=SGD),
    "mimo": lambda: pm.methods.MIMO(2, repetitions=2, input_repetition=0.2, prior_std=1.0, optimizer=SGD),
    "snapshot": lambda: pm.methods.Snapshot(2, prior_std=1.0, optimizer=SGD),
    "fast_geometric": lambda: pm.methods.FastGeometric(1, high=1.0, low=0.5, prior_std=1.0, optimizer=SGD),
    "cyclical_sgmcmc": lambda: pm.methods.CyclicalSGMCMC(
        num_cycles=1, samples_per_cycle=1, lr=0.5, prior_std=1.0, temperature=0.1
    ),
    "trajectory": lambda: pm.methods.Trajectory(pm.methods.Single(prior_std=1.0, optimizer=SGD)),
    "tunnel": lambda: pm.methods.Tunnel(3, prior_std=1.0, optimizer=SGD),
    "hmc": lambda: pm.methods.HMC(2, prior_std=1.0, num_samples=3, burn_in=0.5, optimizer=SGD),
    "microcanonical": lambda: pm.methods.Microcanonical(
        2, prior_std=1.0, num_samples=2, descent=1, step_size=0.1, optimizer=SGD
    ),
}

# Epochs, where two are too few: a step of microcanonical has two gradients and begins with a third.
FEW = {"microcanonical": 3}

# Networks that a method cannot be fitted to, for a reason that it gives.
WITHOUT_HIDDEN_LAYERS = frozenset({"lstm", "random_features", "data_dependent"})
RANDOM_OR_BATCHED = frozenset(
    {"batch_norm", "dropout", "batch_norm_and_dropout", "convolution", "functional_dropout"}
)
REFUSED: dict[str, frozenset[str]] = {
    "mimo": frozenset(
        {
            "lstm",
            "transformer",
            "tied_tokens",
            "two_inputs",
            "keyword_inputs",
            "random_features",
            "data_dependent",
        }
    ),
    "hmc": RANDOM_OR_BATCHED,
    "microcanonical": RANDOM_OR_BATCHED,
    "spike_slab": WITHOUT_HIDDEN_LAYERS,
    "sebays": WITHOUT_HIDDEN_LAYERS,
}

# What they say when they refuse one.
REASONS: dict[str, str] = {
    "hmc": "hmc cannot sample a network",
    "microcanonical": "microcanonical cannot sample a network",
    "mimo": "Heads cannot be joined in this",
    "spike_slab": "left out",
    "sebays": "left out",
}

# Of methods that are made of one another, or share a file, one runs on every network, the others on some.
SOME = frozenset({"mlp", "batch_norm_and_dropout", "convolution", "tied_tokens", "learned_noise"})
FEWER: dict[str, frozenset[str]] = {
    "snapshot": SOME | {"lstm"},
    "fast_geometric": SOME,
    "trajectory": SOME | {"random_features"},
    "cyclical_sgmcmc": SOME | {"batch_norm", "random_features", "functional_dropout", "two_inputs"},
    "sequential_bnn": SOME | {"batch_norm"},
    "sebays": SOME | {"batch_norm", "transformer"},
    "rank_one_bnn": SOME | {"batch_norm", "random_features"},
    "edst_ensemble": SOME | {"batch_norm"},
    "emp": frozenset({"mlp", "batch_norm", "batch_norm_and_dropout", "convolution", "random_features"}),
    "dropconnect": frozenset({"mlp", "batch_norm_and_dropout", "convolution", "learned_noise"}),
    "mc_dropout": frozenset(
        {"mlp", "batch_norm_and_dropout", "convolution", "transformer", "tied_tokens", "learned_noise"}
    ),
}


def accepts(method: str, network: str) -> bool:
    return network not in REFUSED.get(method, ()) and network in FEWER.get(method, (network,))


def beginning(method: Method, case: NetworkCase, model: Model | None = None, num_data_sets: int = 1) -> dict:
    """What ``fit`` has to be given beside the data: networks to begin at, where a method needs some."""
    if not method.needs_initial:
        return {}
    return {"initial": [_solutions(case.name) if model is None else _trained(case, model)] * num_data_sets}


@functools.cache
def _solutions(network: str) -> pm.Posterior:
    return _trained(BY_NAME[network], BY_NAME[network].double_factory)


def _trained(case: NetworkCase, model: Model) -> pm.Posterior:
    ensemble = pm.methods.DeepEnsemble(4, of=pm.methods.Single(optimizer=SGD))
    return pm.fit(
        ensemble,
        model,
        case.data(),
        likelihood=case.likelihood,
        epochs=1,
        backend="loop",
        progress=False,
    )
