"""What the rows of ``run.py`` say, by the path of its file."""

import sys
from collections.abc import Iterable

import pandas


def main() -> None:
    """Print the numbers that the results page tells."""
    rows = pandas.read_csv(sys.argv[1])
    failed = rows["failed"].dropna() if "failed" in rows else ()
    rows = rows[rows["method"].notna()]
    print(f"{rows['table'].nunique()} tables, {len(failed)} failed")
    for task, some in rows.groupby("task"):
        recommended = some[some["recommended"]].set_index("table")["nll"]
        rival = some[some["rival"]].set_index("table")["nll"]
        gap = (recommended - rival).dropna()
        print(
            f"{task}: {len(gap)} tables; NLL of the recommended method minus that of the best baseline, both "
            f"chosen on validation: median {gap.median():+.3f}, quartiles {gap.quantile(0.25):+.3f} to "
            f"{gap.quantile(0.75):+.3f}, worst {gap.max():+.3f} ({gap.idxmax()}); better on {(gap < 0).sum()}"
        )
        print(_listed(some[some["recommended"]]["method"].value_counts().items()))
    numbers = rows[rows["task"] == "regression"]
    constant = numbers[numbers["method"] == "constant"].set_index("table")["nll"]
    found = []
    for method, some in numbers.groupby("method", sort=False):
        above = some.set_index("table")["nll"] - constant
        found.append(
            {
                "method": method,
                "coverage": some["coverage90"].mean(),
                "lowest coverage": some["coverage90"].min(),
                "median NLL - constant": above.median(),
                "largest NLL - constant": above.max(),
                "over-trained": (some["mark"] == "over-trained").sum(),
                "under-trained": (some["mark"] == "under-trained").sum(),
                "seconds": some["seconds"].median(),
            }
        )
    print(pandas.DataFrame(found).round(3).to_string(index=False))
    labels = rows[rows["task"] == "classification"]
    prior = labels[labels["method"] == "prior"].set_index("table")["nll"]
    for method, some in labels.groupby("method", sort=False):
        each = some.set_index("table")["nll"]
        print(f"{method}: mean NLL {each.mean():.4f}, largest above the prior {(each - prior).max():+.4f}")


def _listed(counts: Iterable[tuple[object, int]]) -> str:
    return "recommended: " + ", ".join(f"{name} {count}" for name, count in counts)


if __name__ == "__main__":
    main()
