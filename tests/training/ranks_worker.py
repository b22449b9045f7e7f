"""One of the processes that train together; ``test_ranks`` starts it by torchrun, and once alone."""

import json
import os
import sys
from collections import Counter
from pathlib import Path

import torch
from torch import distributed, nn

import polymode as pm
from contract.registry import SMALL
from polymode.errors import InputError

CASES = [  # network, method, backend
    ("dropout", "deep_ensemble", "loop"),
    ("dropout", "deep_ensemble", "vmap"),
    ("dropout", "mc_dropout", "loop"),
    ("plain", "perturbed", "vmap"),
    ("plain", "late_phase", "vmap"),
    ("plain", "sequential_anchored", "loop"),
    ("plain", "mean_field", "auto"),
    ("plain", "batch_ensemble", "vmap"),
    ("statistics", "single", "loop"),
    ("global", "single", "loop"),
    ("plain", "hmc", "loop"),
    ("stateless", "single", "loop"),
    ("centred", "single", "loop"),
]
METHODS = SMALL | {"perturbed": lambda: pm.methods.Anchored(2, prior_std=1.0, perturb_data=True)}
seen: list[int] = []  # examples of every pass in training mode


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        layers = {
            "statistics": nn.BatchNorm1d(16),
            "stateless": nn.BatchNorm1d(16, track_running_stats=False),
            "dropout": nn.Dropout(0.3),
        }
        middle = layers.get(kind, nn.Identity())
        self.layers = nn.Sequential(nn.Linear(5, 16), middle, nn.ReLU(), nn.Linear(16, 3)).double()
        self.draws, self.centred = kind == "global", kind == "centred"

    def forward(self, x):
        if self.training:
            seen.append(x.shape[0])
        if self.centred:
            x = x - x.mean(0, keepdim=True)
        return self.layers(nn.functional.dropout(x, 0.1, self.training) if self.draws else x)


def losses_of_tokens(together: bool, num_observed: int, prior_std: float | None = None) -> list[list[float]]:
    """Of sequences most of which are ignored, so that whole shares of minibatches are, or all of them."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 3, 5, generator=generator).double()
    y = (x[..., 0] > 0).long()
    y[num_observed:] = -100
    losses: list = []
    pm.fit(
        pm.methods.Single(prior_std=prior_std, optimizer=pm.Optimizer("SGD", lr=0.1)),
        lambda: Net("plain"),
        pm.ArrayData(x, y, batch_size=4),
        likelihood=pm.likelihoods.Categorical(ignore_index=-100),
        epochs=8,
        backend="loop",
        threads=1,
        progress=False,
        data_parallel=together,
        observer=lambda epoch: losses.append(epoch.losses.tolist()),
    )
    return losses


def told_otherwise(rank: int) -> str:
    """What a process says that was told another number of epochs than the first."""
    x = torch.ones(4, 5).double()
    try:
        pm.fit(
            pm.methods.Single(),
            lambda: Net("plain"),
            pm.ArrayData(x, torch.zeros(4, dtype=torch.int64)),
            likelihood="categorical",
            epochs=2 + rank,
            progress=False,
            data_parallel=True,
        )
    except InputError as error:
        return str(error)
    return "nothing"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    together = "WORLD_SIZE" in os.environ
    if together:
        distributed.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(58, 5, generator=generator).double()
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.3).long()
    weights = torch.rand(58, generator=generator) + 0.5
    data = pm.ArrayData(x, y, weights=weights, batch_size=9)  # seven steps an epoch, the last one of four
    found: dict = {}
    for kind, method, backend in CASES:
        seen.clear()
        losses: list = []
        try:
            posterior = pm.fit(
                METHODS[method](),
                lambda kind=kind: Net(kind),
                pm.ArrayData(x, y, batch_size=9) if method == "perturbed" else data,
                likelihood="categorical",
                epochs=8,
                validation=pm.ArrayData(x[:20], y[:20]),
                backend=backend,
                threads=1,
                progress=False,
                data_parallel=together,
                run_dir=folder / f"{kind}-{method}-{backend}" if backend == "loop" else None,
                observer=lambda epoch, losses=losses: losses.append(epoch.losses.tolist()),
            )
        except InputError as error:
            found[f"{kind}-{method}-{backend}"] = {"error": str(error)}
            continue
        predicted = posterior.predict(x[:6], None if posterior.num_members else 5).mean
        found[f"{kind}-{method}-{backend}"] = {
            "losses": losses,
            "mean": predicted.tolist(),
            "member_epochs": posterior.record["member_epochs"],
            "typical": Counter(seen).most_common(1)[0][0] if seen else 0,
        }
    found["tokens"] = {"losses": losses_of_tokens(together, 6)}
    found["few tokens under a prior"] = {"losses": losses_of_tokens(together, 2, prior_std=0.1)}
    if together:
        found["told otherwise"] = told_otherwise(distributed.get_rank())
    rank = os.environ.get("RANK", "alone")
    (folder / f"{rank}.json").write_text(json.dumps(found))
    if together:
        distributed.barrier()
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
