"""Columns of a table as numbers: what is done with each, learned from training rows, kept as plain values.

A ``Column`` says what one column of a table becomes: ``laid_out`` decides its kind and its width from all
rows (never from targets), ``fitted`` learns what it fills gaps with and which values it knows from training
rows, and ``encode`` does the same to any rows. Several splits of one table hence have one width.
"""

import re
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import date, datetime
from typing import Any, ClassVar, Self

import numpy as np

from polymode.errors import InputError, require, shortened, unknown_name

# Values of a category that are rarer than this, or beyond so many, share one place with all new ones.
LEAST_COUNT, MOST_VALUES = 5, 50
# Text of which more than this share is different in every row is a name, not a category.
MOST_DISTINCT = 0.5
# A column of text is one of numbers or dates if this share of its values is.
NEARLY_ALL = 0.95
# A table in which more than this share of a column's cells is of another kind is another table.
MOST_UNREADABLE = 0.5
# Rows that decide whether text is a date.
LOOKED_AT = 500
# What stands for a missing value in files of any program; pandas knows others, such as an empty cell.
GAP_WORDS = frozenset({"?", "-", "--", "—", ".", "na", "n/a", "nan", "null", "none", "missing", "#n/a"})
OTHER, MISSING = "other", "missing"

_PLAIN = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?")
_BETWEEN = ".'’ \u00a0\u202f"  # what stands between thousands beside a decimal comma
_COMMA = re.compile(rf"[+-]?(\d+|\d{{1,3}}([{_BETWEEN}]\d{{3}})+)(,\d+)?")
_CURRENCIES = " \t\r\n\u00a0\u202f$€£¥"
# Numbers beyond this are none that a network can see.
LARGEST = float(np.finfo(np.float32).max)
_DATE = re.compile(
    r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}|\d{4}-\d{2}|\d{8}T\d{4}|\d{1,2}:\d{2}(:\d{2})?"
    r"|\d{1,2}[ -][A-Za-z]{3,9}\.?[ ,-]+\d{2,4}|[A-Za-z]{3,9}\.? \d{1,2},? \d{4}"
)
_NUMERIC_DATE = re.compile(r"(\d{1,2})[-/.](\d{1,2})[-/.]\d{2,4}")  # day and month, or the other way
_TIME = re.compile(r"\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?( ?[AaPp][Mm])?")
_IDENTIFIER = re.compile(
    r"(?i)(.*[_ .-])?(id|uuid|guid|key|index|rownames?|row|nr|no)|Unnamed: \d+(\.\d+)*|\s*"
)
_COUNTER = re.compile(r"X|(?i:obs|observation|case|s\.?no|number|#)")  # X is what R writes


def pandas() -> Any:
    """The package, or an error that says how to have it."""
    try:
        import pandas
    except ImportError:
        raise InputError("Reading tables needs pandas: pip install 'polymode[data]'.") from None
    return pandas


@dataclass(frozen=True)
class Column(ABC):
    """What a column of a table becomes; name: in the table."""

    kind: ClassVar[str]
    name: str

    @property
    @abstractmethod
    def features(self) -> list[str]:
        """Names of the numbers that it becomes."""

    @property
    def is_scaled(self) -> list[bool]:
        """Which of them are standardised; places of categories are 0 or 1 as they are."""
        return [False] * len(self.features)

    @abstractmethod
    def encode(self, values: Any) -> np.ndarray:
        """The numbers [N, width] of a series."""

    @abstractmethod
    def fitted(self, values: Any) -> Self:
        """The same with what is learned of training rows."""

    @property
    def reads_text(self) -> bool:
        """Whether cells of a text file are to be read as they are written: their type is that of no cell."""
        return bool(self.features)

    def unreadable(self, values: Any) -> np.ndarray:
        """Which cells hold something else than the column does, and are taken as gaps, [N]."""
        return np.zeros(len(values), dtype=bool)

    @abstractmethod
    def strange(self, values: Any) -> np.ndarray:
        """Which values are none that training rows have, or far outside of theirs, [N]."""

    @property
    @abstractmethod
    def about(self) -> str:
        """What is done with it, in words."""

    def config(self) -> dict[str, Any]:
        return {"kind": self.kind} | {
            name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()
        }


@dataclass(frozen=True)
class NumberColumn(Column):
    """A number; gaps become ``fill``, the median, and where training rows have some a mark says so.

    low, high: the range of training rows. decimal: "," where text such as 1,234 is less than two.
    """

    kind: ClassVar[str] = "number"
    has_gaps: bool = False
    fill: float = 0.0
    low: float = 0.0
    high: float = 0.0
    decimal: str = "."

    @property
    def features(self) -> list[str]:
        return [self.name, *([f"{self.name} is {MISSING}"] if self.has_gaps else [])]

    @property
    def is_scaled(self) -> list[bool]:
        return [True, *([False] if self.has_gaps else [])]

    @property
    def reads_text(self) -> bool:
        return self.decimal == ","  # 1.234 alone is a number to every reader, and here it is another one

    def unreadable(self, values: Any) -> np.ndarray:
        return np.isnan(as_numbers(values, self.name, self.decimal)) & ~gaps_in(values)

    def encode(self, values: Any) -> np.ndarray:
        numbers = as_numbers(values, self.name, self.decimal)
        gaps = np.isnan(numbers)
        filled = np.where(gaps, self.fill, numbers)
        return np.stack([filled, gaps], 1) if self.has_gaps else filled[:, None]

    def fitted(self, values: Any) -> Self:
        numbers = as_numbers(values, self.name, self.decimal)
        known = numbers[~np.isnan(numbers)]
        if not len(known):
            return replace(self, fill=0.0, low=0.0, high=0.0)
        return replace(self, fill=float(np.median(known)), low=float(known.min()), high=float(known.max()))

    def strange(self, values: Any) -> np.ndarray:
        numbers = as_numbers(values, self.name, self.decimal)
        margin = 0.1 * (self.high - self.low)
        outside = (numbers < self.low - margin) | (numbers > self.high + margin)
        return outside | self.unreadable(values) | (np.isnan(numbers) & (not self.has_gaps))

    @property
    def about(self) -> str:
        gaps = f", gaps filled with {self.fill:.6g} and marked" if self.has_gaps else ""
        return f"standardised, {self.low:.6g} to {self.high:.6g}{gaps}"


@dataclass(frozen=True)
class TruthColumn(Column):
    """A truth value, 0 or 1."""

    kind: ClassVar[str] = "truth value"

    @property
    def features(self) -> list[str]:
        return [self.name]

    def unreadable(self, values: Any) -> np.ndarray:
        return np.isnan(_as_truth(values, self.name)) & ~gaps_in(values)

    def encode(self, values: Any) -> np.ndarray:
        numbers = _as_truth(values, self.name)
        return np.nan_to_num(numbers, nan=0.5)[:, None]

    def fitted(self, values: Any) -> Self:
        return self

    def strange(self, values: Any) -> np.ndarray:
        return np.isnan(_as_truth(values, self.name))

    @property
    def about(self) -> str:
        return "0 or 1"


@dataclass(frozen=True)
class CategoryColumn(Column):
    """Text: a place for every frequent value, one for all other and new ones, one for gaps if there are any.

    A linear layer behind such places is an embedding: each value has a row of weights of its own. known:
    those of the values that training rows have.
    """

    kind: ClassVar[str] = "category"
    values: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    has_gaps: bool = False

    @property
    def features(self) -> list[str]:
        other = "none of these" if OTHER in self.values else OTHER
        ends = [other, *([MISSING] if self.has_gaps else [])]
        return [f"{self.name} is {value}" for value in (*self.values, *ends)]

    def encode(self, values: Any) -> np.ndarray:
        texts, gaps = as_texts(values)
        places, other = {value: place for place, value in enumerate(self.values)}, len(self.values)
        known = set(self.known)
        codes, distinct = pandas().factorize(texts)
        place_of = np.array([places[v] if v in known else other for v in distinct] + [other], dtype=np.int64)
        chosen = place_of[codes]
        chosen[gaps] = other + 1 if self.has_gaps else other
        encoded = np.zeros((len(chosen), len(self.features)))
        encoded[np.arange(len(chosen)), chosen] = 1.0
        return encoded

    def fitted(self, values: Any) -> Self:
        texts, gaps = as_texts(values)
        seen = set(texts[~gaps].tolist())
        return replace(self, known=tuple(value for value in self.values if value in seen))

    def strange(self, values: Any) -> np.ndarray:
        texts, gaps = as_texts(values)
        known = set(self.known)
        new = np.array([text not in known for text in texts.tolist()], dtype=bool)
        return np.where(gaps, not self.has_gaps, new)

    @property
    def about(self) -> str:
        ends = f"{OTHER}, {MISSING}" if self.has_gaps else OTHER
        return f"{len(self.features)} places: {listed(self.values)}, {ends}"


# Parts of a date that repeat: how many of them a period has.
_PERIODS = {"month": 12.0, "weekday": 7.0, "hour": 24.0}


@dataclass(frozen=True)
class DateColumn(Column):
    """A date or time: days since the first one, and sine and cosine of month, weekday and hour.

    parts: those that vary in the table. origin: what days are counted from. fill: days of a gap.
    """

    kind: ClassVar[str] = "date"
    day_first: bool = False
    parts: tuple[str, ...] = ()
    has_gaps: bool = False
    origin: str = "1970-01-01"
    fill: float = 0.0
    low: float = 0.0
    high: float = 0.0

    @property
    def features(self) -> list[str]:
        waves = [f"{wave} of {part} of {self.name}" for part in self.parts for wave in ("sine", "cosine")]
        return [f"days of {self.name}", *waves, *([f"{self.name} is {MISSING}"] if self.has_gaps else [])]

    @property
    def is_scaled(self) -> list[bool]:
        return [True] + [False] * (len(self.features) - 1)

    def _days(self, values: Any) -> tuple[Any, np.ndarray]:
        dates = as_dates(values, self.day_first)
        return dates, _days_since(dates, self.origin)

    def unreadable(self, values: Any) -> np.ndarray:
        return np.isnan(self._days(values)[1]) & ~gaps_in(values)

    def encode(self, values: Any) -> np.ndarray:
        dates, days = self._days(values)
        gaps = np.isnan(days)
        columns = [np.where(gaps, self.fill, days)]
        for part in self.parts:
            angle = 2 * np.pi * _part_of(dates, part) / _PERIODS[part]
            columns += [np.where(gaps, 0.0, wave(angle)) for wave in (np.sin, np.cos)]
        return np.stack([*columns, *([gaps] if self.has_gaps else [])], 1)

    def fitted(self, values: Any) -> Self:
        _, days = self._days(values)
        known = days[~np.isnan(days)]
        if not len(known):
            return replace(self, fill=0.0, low=0.0, high=0.0)
        return replace(self, fill=float(np.median(known)), low=float(known.min()), high=float(known.max()))

    def strange(self, values: Any) -> np.ndarray:
        _, days = self._days(values)
        margin = 0.1 * (self.high - self.low)
        outside = (days < self.low - margin) | (days > self.high + margin)
        return outside | self.unreadable(values) | (np.isnan(days) & (not self.has_gaps))

    @property
    def about(self) -> str:
        origin = np.datetime64(self.origin, "D")
        first, last = (origin + np.timedelta64(int(end // 1), "D") for end in (self.low, self.high))
        parts = f"; {', '.join(self.parts)} as waves" if self.parts else ""
        gaps = ", gaps filled and marked" if self.has_gaps else ""
        return f"days, {first} to {last}{parts}{gaps}"


@dataclass(frozen=True)
class LeftOut(Column):
    """A column that says nothing: why says what it is."""

    kind: ClassVar[str] = "left out"
    why: str = ""

    @property
    def features(self) -> list[str]:
        return []

    def encode(self, values: Any) -> np.ndarray:
        return np.zeros((len(values), 0))

    def fitted(self, values: Any) -> Self:
        return self

    def strange(self, values: Any) -> np.ndarray:
        return np.zeros(len(values), dtype=bool)

    @property
    def about(self) -> str:
        return self.why


COLUMNS: dict[str, type[Column]] = {
    column.kind: column for column in (NumberColumn, TruthColumn, CategoryColumn, DateColumn, LeftOut)
}
_TYPES: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "bool": bool,
    "float": (int, float),
}


def column_from(config: Any) -> Column:
    """The column that a document describes, checked: a file may have been changed."""
    require(isinstance(config, Mapping), f"a column is {shortened(repr(config))}, not names and values.")
    kind = config.get("kind")
    if not isinstance(kind, str) or kind not in COLUMNS:
        raise unknown_name("kind of column", str(kind), COLUMNS)
    given = {name: value for name, value in config.items() if name != "kind"}
    known = {each.name: each for each in fields(COLUMNS[kind])}
    if given.keys() != known.keys():
        raise InputError(f"a column of kind {kind!r} has {sorted(known)}, got {sorted(map(str, given))}.")
    for name, value in given.items():
        annotation = str(getattr(known[name].type, "__name__", known[name].type))
        if annotation.startswith("tuple"):
            right = isinstance(value, list) and all(isinstance(each, str) for each in value)
            given[name] = tuple(value) if right else value
        else:
            right = isinstance(value, _TYPES[annotation]) and (
                annotation != "float" or (not isinstance(value, bool) and abs(value) <= LARGEST)
            )
        require(right, f"{name} of a column must be {annotation}, got {shortened(repr(value))}.")
    made = COLUMNS[kind](**given)
    if isinstance(made, NumberColumn):
        require(
            made.decimal in (".", ","), f"decimal must be '.' or ',', got {shortened(repr(made.decimal))}."
        )
    if isinstance(made, CategoryColumn):
        require(len(set(made.values)) == len(made.values), f"values of {made.name!r} occur twice.")
        foreign = [value for value in made.known if value not in made.values]
        require(not foreign, f"known has {shortened(repr(foreign))}, which are no values of {made.name!r}.")
    if isinstance(made, DateColumn):
        require(all(part in _PERIODS for part in made.parts), f"parts of a date: {made.parts} not known.")
        require(
            re.fullmatch(r"\d{4}-\d{2}-\d{2}", made.origin) is not None and _is_date(made.origin),
            f"origin of a date must be a date, got {shortened(repr(made.origin))}.",
        )
        require(
            all(abs(days) < MOST_DAYS for days in (made.fill, made.low, made.high)),
            f"days of {made.name!r} are {made.fill}, {made.low}, {made.high}: allowed are {MOST_DAYS}.",
        )
    return made


MOST_DAYS = 10_000_000  # between two dates of four-digit years there are fewer


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


class UnreadableCells:
    """Cells of some columns that are not of their kind, counted over all frames of a table."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = columns
        self.num_rows = 0
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def add(self, frame: Any) -> None:
        self.num_rows += len(frame)
        for column in self.columns:
            found = column.unreadable(frame[column.name])
            if found.any():
                place = int(found.argmax())
                cell = shortened(repr(str(frame[column.name].iloc[place])), 40)
                self._first.setdefault(column.name, f"{cell} in row {int(frame.index[place]) + 1}")
                self._counts[column.name] += int(found.sum())

    def remarks(self) -> list[str]:
        """What to say of columns with such cells; most of them is an error."""
        said = []
        for column in self.columns:
            if not (number := self._counts[column.name]):
                continue
            count, where = f"{number} of {self.num_rows} cells of {column.name!r}", self._first[column.name]
            if number > MOST_UNREADABLE * self.num_rows:
                raise InputError(
                    f"{count} hold no {column.kind}, the first {where}. In the training table it is a column "
                    f"of the kind {column.kind!r}: write it as there."
                )
            said.append(f"{count} hold no {column.kind} (the first {where}) and are taken as gaps")
        return said


def unreadable_cells(columns: Sequence[Column], frame: Any) -> list[str]:
    """What to say of the cells of a whole table that are not of their column's kind."""
    cells = UnreadableCells(columns)
    cells.add(frame)
    return cells.remarks()


def encoded(columns: Sequence[Column], frame: Any) -> np.ndarray:
    """All numbers [N, D] of a frame, column after column."""
    parts = [column.encode(frame[column.name]) for column in columns]
    return np.concatenate([np.zeros((len(frame), 0)), *parts], 1)


def listed(names: Sequence[str], longest: int = 70) -> str:
    """Names with commas, as many as a line holds.

    >>> listed(["red", "green", "blue"], 12)
    'red, green and 1 more'
    """
    shown, length = [], 0
    for name in names:
        length += len(name) + 2
        if shown and length > longest:
            return f"{', '.join(shown)} and {len(names) - len(shown)} more"
        shown.append(shortened(name, longest))
    return ", ".join(shown)


# --- what a column is ---------------------------------------------------------------------------------


def laid_out(values: Any, name: str, *, as_category: bool = False) -> Column:
    """What a column becomes, from all rows of a table; what it learns of training rows is ``fitted`` later.

    as_category: numbers are names here, such as postal codes.
    """
    types = pandas().api.types
    present = values.dropna()
    if not len(present):
        return LeftOut(name, "empty")
    if isinstance(values.dtype, pandas().CategoricalDtype):
        return _category(values.astype(object), name)
    if types.is_bool_dtype(values.dtype):
        return LeftOut(name, "constant") if present.nunique() < 2 else TruthColumn(name)
    if types.is_datetime64_any_dtype(values.dtype):
        return _date(values, name, day_first=False)
    if (_is_real(values.dtype) or types.is_timedelta64_dtype(values.dtype)) and not as_category:
        return _number(values, name)
    if as_category:
        return _category(values, name)
    texts, gaps = as_texts(values)
    known = texts[~gaps]
    if not len(known):
        return LeftOut(name, "empty")
    # From the whole column: the first rows may all be of one day.
    distinct = pandas().unique(known)
    sample = distinct[np.linspace(0, len(distinct) - 1, min(len(distinct), LOOKED_AT)).astype(int)].tolist()
    if _share(sample, lambda text: number_of(text) is not None) >= NEARLY_ALL and len(sample) > 2:
        return _number(values, name, decimal_of(distinct.tolist()))
    if _share(sample, lambda text: bool(_DATE.match(text))) >= NEARLY_ALL:
        day_first = _is_day_first(distinct.tolist())
        if as_dates(values[~gaps], day_first).notna().mean() >= NEARLY_ALL:
            return _date(values, name, day_first=day_first)
    return _category(values, name)


def _share(sample: Sequence[str], holds: Any) -> float:
    return sum(map(holds, sample)) / len(sample)


def _number(values: Any, name: str, decimal: str = ".") -> Column:
    numbers = as_numbers(values, name, decimal)
    gaps = np.isnan(numbers)
    known = numbers[~gaps]
    if not len(known):
        return LeftOut(name, "empty")
    if known.min() == known.max():
        return LeftOut(name, "constant") if not gaps.any() else NumberColumn(name, True, decimal=decimal)
    if not gaps.any() and (known == np.round(known)).all() and len(np.unique(known)) == len(known):
        counts_on = len(known) > 2 and bool((np.diff(known) == 1).all())
        if counts_on and (_IDENTIFIER.fullmatch(name) or _COUNTER.fullmatch(name)):
            return LeftOut(name, "numbers the rows")
        if _IDENTIFIER.fullmatch(name):
            return LeftOut(name, "identifier: another number in every row")
    return NumberColumn(name, has_gaps=bool(gaps.any()), decimal=decimal)


def _category(values: Any, name: str) -> Column:
    texts, gaps = as_texts(values)
    counts = Counter(texts[~gaps].tolist())
    number = sum(counts.values())
    if not counts or (len(counts) == 1 and not gaps.any()):
        return LeftOut(name, "constant" if counts else "empty")
    if len(counts) > max(2, MOST_DISTINCT * number):
        words = np.mean([len(text.split()) for text in list(counts)[:LOOKED_AT]])
        what = "text" if words > 4 else "identifier: nearly every value is another one"
        return LeftOut(name, what)
    least = min(LEAST_COUNT, max(2, number // 50))
    frequent = [value for value, count in counts.most_common(MOST_VALUES) if count >= least]
    if not frequent:
        return LeftOut(name, f"no value occurs {least} times")
    return CategoryColumn(name, values=tuple(sorted(frequent)), has_gaps=bool(gaps.any()))


def _date(values: Any, name: str, *, day_first: bool) -> Column:
    dates = as_dates(values, day_first)
    known = dates.dropna()
    if not len(known):
        return LeftOut(name, "empty")
    if known.min() == known.max() and not dates.isna().any():
        return LeftOut(name, "constant")
    span = np.ptp(_days_since(known, str(known.min().date())))
    whole = {"month": 60, "weekday": 7, "hour": 0}  # days that a table must span for a part to repeat
    parts = [
        part
        for part, least in whole.items()
        if span >= least and len(set(_part_of(known, part).tolist())) > 1
    ]
    return DateColumn(
        name,
        day_first=day_first,
        parts=tuple(parts),
        has_gaps=bool(dates.isna().any()),
        origin=str(known.min().date()),
    )


def _part_of(dates: Any, part: str) -> np.ndarray:
    found = {
        "month": lambda: dates.dt.month,
        "weekday": lambda: dates.dt.day_of_week,
        "hour": lambda: dates.dt.hour + dates.dt.minute / 60,
    }[part]()
    return found.to_numpy(dtype=np.float64, na_value=np.nan)


# --- values -------------------------------------------------------------------------------------------


def number_of(text: str, decimal: str = ".") -> float | None:
    """The number that text stands for: plain, with thousands separators, a decimal comma, a currency, a %.

    decimal: what 1,234 and 1.234 mean; other text can be read in one way only.
    """
    text = text.lstrip(_CURRENCIES).rstrip(_CURRENCIES + "%")
    if decimal == "," and _COMMA.fullmatch(text):
        return _with_comma(text)
    if _PLAIN.fullmatch(text):
        return float(text)
    if _THOUSANDS.fullmatch(text):
        return float(text.replace(",", ""))
    if _COMMA.fullmatch(text):
        return _with_comma(text)
    return None


def _with_comma(text: str) -> float:
    return float(re.sub(rf"[{_BETWEEN}]", "", text).replace(",", "."))


def decimal_of(texts: Sequence[str]) -> str:
    """What stands before the decimals of a column: a comma if some number of it is none otherwise."""
    for text in texts:
        text = text.lstrip(_CURRENCIES).rstrip(_CURRENCIES + "%")
        if "," in text and _COMMA.fullmatch(text) and not _THOUSANDS.fullmatch(text):
            return ","
    return "."


def _is_real(dtype: Any) -> bool:
    types = pandas().api.types
    return types.is_numeric_dtype(dtype) and not types.is_complex_dtype(dtype)


def as_numbers(values: Any, name: str, decimal: str | None = None) -> np.ndarray:
    """A series as numbers, durations in days, NaN where there is none; infinite ones are refused.

    decimal: of text; None sees it in the text.
    """
    types = pandas().api.types
    if _is_real(values.dtype) or types.is_bool_dtype(values.dtype):
        numbers = values.astype(object) if types.is_bool_dtype(values.dtype) else values
        numbers = numbers.to_numpy(dtype=np.float64, na_value=np.nan)
    elif types.is_timedelta64_dtype(values.dtype):
        numbers = values.dt.total_seconds().to_numpy(dtype=np.float64, na_value=np.nan) / 86400
    else:
        texts, gaps = as_texts(values)
        codes, distinct = pandas().factorize(texts)
        decimal = decimal or decimal_of(distinct)
        read = [number_of(text, decimal) for text in distinct]
        table = np.array([np.nan if number is None else number for number in read] + [np.nan])
        numbers = np.where(gaps, np.nan, table[codes])
    beyond = np.abs(numbers) > LARGEST
    if beyond.any():
        place = int(beyond.argmax())
        what = "an infinite value" if np.isinf(numbers[place]) else f"a value beyond {LARGEST:.2g}"
        raise InputError(
            f"The column {name!r} holds {what} in row {int(values.index[place]) + 1}. Replace it, or remove "
            "the row."
        )
    return numbers


def gaps_in(values: Any) -> np.ndarray:
    """Where a series is missing, [N]: what ``as_texts`` says."""
    if _is_real(values.dtype) or pandas().api.types.is_datetime64_any_dtype(values.dtype):
        return values.isna().to_numpy()
    return as_texts(values)[1]


def as_texts(values: Any) -> tuple[np.ndarray, np.ndarray]:
    """A series as text without blanks around it, and where it is missing; 3.0 and 3 are one value."""
    types = pandas().api.types
    gaps = values.isna().to_numpy()
    if _is_real(values.dtype) and not types.is_bool_dtype(values.dtype):
        numbers = values.to_numpy(dtype=np.float64, na_value=np.nan)
        codes, distinct = pandas().factorize(numbers)
        texts = np.array([_text_of(number) for number in distinct] + [""], dtype=object)[codes]
        return texts, gaps
    if not types.is_string_dtype(values.dtype) or values.dtype == object:
        # Values of other types may be no keys, as lists are, or equal as keys, as 1 and True are.
        whole = values.astype(object)
        plain = [value if isinstance(value, str) else _text_of(value) for value in whole.tolist()]
        values = pandas().Series(plain, index=whole.index, dtype=object).mask(gaps)
    codes, distinct = pandas().factorize(values.astype(object))
    stripped = [value.strip() for value in distinct] + [""]
    empty = np.array([not text or text.lower() in GAP_WORDS for text in stripped])
    texts = np.array(stripped, dtype=object)[codes]
    return texts, gaps | empty[codes]


def plain_text(text: str) -> str:
    """A plain number as a column of numbers alone has it, 3 for 3.0 and 03; other text as it is."""
    return _text_of(float(text)) if _PLAIN.fullmatch(text) else text


def _text_of(value: Any) -> str:
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _as_truth(values: Any, name: str) -> np.ndarray:
    if pandas().api.types.is_bool_dtype(values.dtype):
        return as_numbers(values, name)
    texts, gaps = as_texts(values)
    words = {"true": 1.0, "1": 1.0, "yes": 1.0, "false": 0.0, "0": 0.0, "no": 0.0}
    known = {text: words.get(text.lower(), np.nan) for text in set(texts[~gaps].tolist())}
    return np.array([np.nan if gap else known[text] for text, gap in zip(texts, gaps, strict=True)], float)


def _is_day_first(sample: Sequence[str]) -> bool:
    """Whether dates such as 13/02/2020 have the day first: some first part then is larger than 12."""
    parts = [_NUMERIC_DATE.match(text) for text in sample]
    return any(match is not None and int(match.group(1)) > 12 for match in parts)


def _contradicts(text: str, day_first: bool) -> bool:
    """Whether a text has another order of day and month than the column, or is another date tomorrow."""
    if text.strip().lower() in ("now", "today"):
        return True
    found = _NUMERIC_DATE.match(text.strip())
    return found is not None and int(found.group(2 if day_first else 1)) > 12


def as_dates(values: Any, day_first: bool) -> Any:
    """A series as dates without time zones, NaT where there is none."""
    package = pandas()
    if not isinstance(values.dtype, np.dtype | package.DatetimeTZDtype) or values.dtype.kind != "M":
        known = np.zeros(len(values), dtype=bool)
        if (
            values.dtype == object
        ):  # dates beside text are not read again: as text, 2020-03-01 may be in January
            known = np.array([isinstance(value, datetime) for value in values], dtype=bool)
            known &= values.notna().to_numpy()
        if known.any():
            dates = as_dates(values.mask(known), day_first)
            there = package.to_datetime(values[known], utc=True).dt.tz_convert(None)
            dates[known] = there.astype("datetime64[us]")
            return dates
        texts, gaps = as_texts(values)
        codes, distinct = package.factorize(texts)
        # A time alone would be one of today, and another one tomorrow.
        dated = [f"1970-01-01 {text}" if _TIME.fullmatch(text) else text for text in distinct]
        found = _parsed(dated, day_first)
        taken = found.take(np.where(gaps, len(dated), codes))
        return package.Series(taken, index=values.index)
    return values.dt.tz_convert(None) if values.dt.tz is not None else values


def _parsed(texts: list[str], day_first: bool) -> Any:
    """Different texts as dates of UTC, NaT where there is none, and NaT after the last."""
    package = pandas()
    readable = [None if _contradicts(text, day_first) else text for text in texts]
    series = package.Series([*readable, None], dtype=object)
    options: dict[str, Any] = {"errors": "coerce", "dayfirst": day_first, "utc": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on formats that are not the first one's: they come next
        found = package.to_datetime(series, **options)  # of one format, which is fast
        rest = found.isna() & series.notna()
        if rest.any():
            others = package.to_datetime(series[rest], format="mixed", **options)
            found = found.astype("datetime64[us, UTC]")
            found[rest] = others.astype("datetime64[us, UTC]")
    return found.dt.tz_convert(None).astype("datetime64[us]").array


def _days_since(dates: Any, origin: str) -> np.ndarray:
    """Days since a date; years beyond those that nanoseconds can count are fine."""
    ticks = dates.to_numpy(dtype="datetime64[us]") - np.datetime64(origin, "us")
    days = ticks.astype(np.int64) / 86_400e6
    return np.where(np.isnat(ticks), np.nan, days)
