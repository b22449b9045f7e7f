"""A tunnel between the ends of two runs: Figures S2 and S3 of Fort et al. (2019).

    python experiments/loss_landscape/tunnel.py RUN RUN --folder runs/tunnel --name smallcnn

POLYMODE_DATA names the data folder. The runs are folders of ``polymode train --method trajectory`` (or of any
other method). Nine points between their last networks descend for a few epochs with Adam at a tenth of the
rate that the runs were trained with. Loss is on training images, errors and disagreement on test images; rows
go to results/NAME-tunnel.csv.
"""

import argparse
import csv
from pathlib import Path

import torch

import polymode as pm
from polymode import landscape
from polymode.application.cli.runs import StoredRun
from polymode.training.loop.arithmetic import with_threads


def main() -> None:
    """Train the tunnel, walk along it and along the straight line, write both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs=2)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--points", type=int, default=9)
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=1.6e-4)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    stored = [StoredRun.open(folder) for folder in options.runs]
    networks = [landscape.networks_of(each.posterior(0)) for each in stored]
    ends = pm.merge([each.only([each.num_members - 1]) for each in networks])
    split = stored[0].split("", 0)
    train = pm.ArrayData(split.train.inputs, split.train.targets, batch_size=split.train.batch_size)
    tunnel = pm.fit(
        pm.methods.Tunnel(options.points, optimizer=pm.Optimizer("Adam", lr=options.lr)),
        stored[0].model,
        train,
        likelihood="categorical",
        epochs=options.epochs,
        initial=ends,
        run_dir=options.folder,
        resume=True,
        threads=1,
    )
    with with_threads(1):
        write(options, tunnel, split)


def write(options: argparse.Namespace, tunnel: pm.Particles, split) -> None:
    """Losses, errors and disagreement along both paths."""
    space = landscape.WeightSpace.of(tunnel)
    corners = space.vectors(tunnel)
    parts = [
        pm.ArrayData(data.inputs[: options.examples], data.targets[: options.examples])
        for data in (split.train, split.test)
    ]
    statistics = split.train.inputs[:2000]
    ends = tunnel.only([0, tunnel.num_members - 1])
    answers = torch.cat(
        [landscape.judged(space.network, b, parts[1].inputs, parts[1].targets).answers for b in ends.draw()]
    )
    rows = []
    segments = len(corners) - 1
    for name, points, between in (
        ("straight line", corners[[0, -1]], 4 * segments - 1),
        ("tunnel", corners, 3),
    ):
        trained = landscape.walk(space, points, parts[0], num_between=between, statistics=statistics)
        tested = landscape.walk(
            space, points, parts[1], num_between=between, references=answers, statistics=statistics
        )
        for i, place in enumerate(trained.place.tolist()):
            rows.append(
                {
                    "path": name,
                    "place": round(place, 6),
                    "is_corner": bool(trained.is_corner[i]),
                    "training_loss": round(float(trained.loss[i]), 5),
                    "training_error": round(float(trained.error[i]), 5),
                    "test_error": round(float(tested.error[i]), 5),
                    "disagreement_with_first": round(float(tested.difference[i, 0]), 5),
                    "disagreement_with_last": round(float(tested.difference[i, 1]), 5),
                }
            )
        print(name, "highest training loss", float(trained.loss.max()))
    path = options.results / f"{options.name}-tunnel.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
