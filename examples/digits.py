"""Three ways to predict handwritten digits, and what they say about digits they have never seen.

Networks are trained on the digits 0–7 of scikit-learn's bundled set; 8 and 9 are foreign to them. A single
network and two ensembles of it: one line changes.
"""

import time

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

import polymode as pm


def digits() -> tuple[pm.ArrayData, pm.ArrayData, torch.Tensor]:
    """Training and test data of the digits 0–7, and images of 8 and 9."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16.0, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    known = y < 8
    train, test = x[known][:1000], x[known][1000:]
    data = pm.ArrayData(train, y[known][:1000], batch_size=50)
    return data, pm.ArrayData(test, y[known][1000:]), x[~known]


def network() -> torch.nn.Module:
    return pm.models.SmallCNN(num_classes=8, in_channels=1, image_size=8, dropout=0.0)


def main() -> None:
    data, test, foreign = digits()
    table = Table(title="digits 0–7, SmallCNN, 15 epochs each; 8 and 9 are foreign", title_justify="left")
    for column in ("method", "members", "acc.", "NLL", "Brier", "ECE", "OOD AUROC", "member-epochs", "sec."):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for method in (
        pm.methods.Single(),
        pm.methods.DeepEnsemble(num_members=5),
        pm.methods.DeepEnsemble(num_members=10),
    ):
        began = time.perf_counter()
        posterior = pm.fit(method, network, data, likelihood="categorical", epochs=15, seed=0)
        seconds = time.perf_counter() - began
        scores = pm.evaluate(posterior, test, ood=foreign)
        table.add_row(
            method.name,
            str(posterior.num_members),
            f"{scores['accuracy']:.3f}",
            f"{scores['nll']:.3f}",
            f"{scores['brier']:.3f}",
            f"{scores['ece']:.3f}",
            f"{scores['ood_entropy_auroc']:.3f}",
            f"{posterior.record['member_epochs']:.0f}",
            f"{seconds:.1f}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
