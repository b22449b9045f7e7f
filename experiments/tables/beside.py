r"""Methods of polymode beside those of peers, on the same rows of the same tables.

    python experiments/tables/run.py tables --part held_out --out ours.csv \
        "--options=--methods=deep_ensemble,microcanonical --baselines=none --set=data.splits=1 --seeds=1"
    python experiments/tables/peers.py tables --part held_out --out theirs.csv ...
    python experiments/tables/beside.py ours.csv theirs.csv --method microcanonical

One split of every table, the first, so that rows are the same. Differences are NLL of the method minus NLL of
the peer, in nats of standardised units: below 0 the method is better.
"""

import argparse

import pandas


def main() -> None:
    """Print a row a table, and what they say together."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ours", help="CSV of run.py")
    parser.add_argument("theirs", help="CSV of peers.py")
    parser.add_argument("--method", default="microcanonical")
    given = parser.parse_args()
    ours, theirs = pandas.read_csv(given.ours), pandas.read_csv(given.theirs)
    ours = ours[ours["method"] == given.method].set_index("table")
    theirs = theirs.set_index("table")
    both = ours.merge(theirs, left_index=True, right_index=True, suffixes=("", "_peer"))
    both["difference"] = both["nll"] - both["nll_peer"]
    shown = ["task", "nll", "nll_peer", "difference", "coverage90", "coverage90_peer", "seconds"]
    print(both[[*shown, "cpu_seconds"]].round(3).to_string())
    for task, some in [("all", both), *both.groupby("task")]:
        gap = some["difference"].dropna()
        print(
            f"{task}: {len(gap)} tables, median difference {gap.median():+.3f}, quartiles "
            f"{gap.quantile(0.25):+.3f} to {gap.quantile(0.75):+.3f}; better on {(gap < 0).sum()}; coverage "
            f"of 90 % intervals {some['coverage90'].mean():.3f} ({some['coverage90'].min():.2f} to "
            f"{some['coverage90'].max():.2f}), peer {some['coverage90_peer'].mean():.3f}; median seconds "
            f"{some['seconds'].median():.0f}, peer {some['seconds_peer'].median():.0f} (CPU "
            f"{some['cpu_seconds'].median():.0f})"
        )


if __name__ == "__main__":
    main()
