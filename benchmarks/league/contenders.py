"""Who takes part, where each one lives, and what it cannot do."""

from dataclasses import dataclass, field
from typing import Any

NO_ENSEMBLES = {"ensemble": "no ensembles", "cnn_ensemble": "no ensembles"}
NO_DROPOUT = {"dropout_training": "no MC dropout", "dropout_prediction": "no MC dropout"}
NO_BATCH_ENSEMBLE = {"batch_ensemble": "no BatchEnsemble"}
NO_SWAG, NO_MEAN_FIELD = {"swag": "no SWAG"}, {"mean_field": "no mean-field inference"}
NO_HMC, NO_SGMCMC = {"hmc": "no HMC"}, {"sgmcmc": "no SG-MCMC"}
NO_NETWORKS = NO_ENSEMBLES | NO_DROPOUT | NO_BATCH_ENSEMBLE | NO_SWAG
SHORT = {"mlp10_long": "measured with 5 epochs"}
SEE_BLACKJAX = {"hmc": "see blackjax", "sgmcmc": "see blackjax"}


@dataclass(frozen=True)
class Contender:
    """module: ``by_...`` of this package. environment: a name of ``environments``, None for polymode's own.

    packages: whose versions are reported. options: for every function of the module. cannot: kinds of jobs,
    or single jobs, with the reason.
    """

    title: str
    module: str
    environment: str | None
    packages: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    cannot: dict[str, str] = field(default_factory=dict)


OWN = "polymode"
CONTENDERS = {
    OWN: Contender("polymode", "polymode", None, ("polymode", "torch")),
    "loop": Contender("loop, in-memory batches", "plain_loops", None, ("torch",), {"from_memory": True}),
    "loader": Contender(
        "loop, DataLoader",
        "plain_loops",
        None,
        ("torch",),
        {"from_memory": False},
        dict.fromkeys(("prediction", "dropout_prediction", "hmc"), "no batches to load"),
    ),
    "jax": Contender(
        "JAX, jit(vmap(step))",
        "jax",
        "jax",
        ("jax", "optax"),
        {"scan": False},
        SEE_BLACKJAX,
    ),
    "jax-scan": Contender(
        "JAX, scan over epochs",
        "jax",
        "jax",
        ("jax", "optax"),
        {"scan": True},
        SEE_BLACKJAX | {"prediction": "nothing to scan", "dropout_prediction": "nothing to scan"},
    ),
    "blackjax": Contender(
        "blackjax",
        "blackjax",
        "jax",
        ("blackjax", "jax"),
        cannot=NO_NETWORKS | {"prediction": "no predictions"},
    ),
    "torch-uncertainty": Contender(
        "torch-uncertainty",
        "torch_uncertainty",
        "torch",
        ("torch-uncertainty", "torch", "lightning"),
        cannot=NO_HMC | SHORT,
    ),
    "torchensemble": Contender(
        "torchensemble",
        "torchensemble",
        "torch",
        ("torchensemble", "torch"),
        cannot=NO_BATCH_ENSEMBLE | NO_DROPOUT | NO_SWAG | NO_MEAN_FIELD | NO_HMC | NO_SGMCMC | SHORT,
    ),
    "bayesian-torch": Contender(
        "bayesian-torch",
        "bayesian_torch",
        "torch",
        ("bayesian-torch", "torch"),
        cannot=NO_NETWORKS | NO_HMC | NO_SGMCMC,
    ),
    "posteriors": Contender(
        "posteriors",
        "posteriors",
        "torch",
        ("posteriors", "torch"),
        cannot=NO_BATCH_ENSEMBLE | NO_DROPOUT | NO_SWAG | NO_HMC | {"prediction": "no predictions"},
    ),
    "lightning-uq-box": Contender(
        "lightning-uq-box",
        "lightning_uq_box",
        "lightning-uq-box",
        ("lightning-uq-box", "torch", "lightning"),
        cannot=NO_BATCH_ENSEMBLE | NO_HMC | SHORT | {"sghmc": "no SGHMC", "sghmc10": "no SGHMC"},
    ),
    "laplace": Contender(
        "laplace-torch",
        "laplace",
        "laplace",
        ("laplace-torch", "torch"),
        cannot=NO_NETWORKS | NO_MEAN_FIELD | NO_HMC | NO_SGMCMC | {"swag": "no draws, variances only"},
    ),
    "pyro": Contender("Pyro", "pyro", "pyro", ("pyro-ppl", "torch"), cannot=NO_NETWORKS | NO_SGMCMC),
}
