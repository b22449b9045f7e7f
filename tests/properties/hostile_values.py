"""Values and changes that nobody wrote on purpose, or somebody did."""

import json
import math
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st

from documents import edit
from polymode.storage import write_document


def examples(number):
    """So many examples, and as many times more as the profile has more than the short one."""
    return settings(max_examples=max(1, number * settings().max_examples // 40))


NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**63, -(2**63), 10**12, 10**30, 0.5, -0.0, 1e-320, 1e308, 10**400]),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.floats(),
)
WORDS = st.one_of(
    st.sampled_from(
        [
            "",
            ".",
            "..",
            "../x",
            "/etc/passwd",
            "a/b",
            "\0",
            "os:system",
            "payload:load",
            "nan",
            "auto",
            "None",
        ]
    ),
    st.text(max_size=8),
    st.just("x" * 5000),
)
PLAIN = st.one_of(st.none(), st.booleans(), NUMBERS, WORDS)
NAMES = st.one_of(WORDS, st.sampled_from(["name", "type", "options", "kind"]))


def nested(inner, names=NAMES):
    """Values, lists of them, and dictionaries."""
    return st.one_of(inner, st.lists(inner, max_size=4), st.dictionaries(names, inner, max_size=3))


VALUES = nested(nested(PLAIN))


def places(value, place=()):
    """The places of all values in a nested one."""
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*place, key))


@st.composite
def changed(draw, document):
    """A copy of a document with one value replaced, removed, doubled or put under another name."""
    document = json.loads(json.dumps(document))
    place = draw(st.sampled_from([p for p in places(document) if p]))
    part = document
    for step in place[:-1]:
        part = part[step]
    last = place[-1]
    kind = draw(st.sampled_from(["replace", "replace", "replace", "remove", "double", "rename"]))
    if kind == "replace":
        part[last] = draw(VALUES)
    elif kind == "remove":
        del part[last]
    elif kind == "double" and isinstance(part, list):
        part.insert(last, part[last])
    elif isinstance(part, dict):
        part[draw(WORDS)] = part.pop(last)
    return document


def forged(path: Path, document) -> None:
    """Write a changed document with the checksum that it should have, as far as it can be written at all."""
    document = {key: value for key, value in document.items() if key != "sha256"}
    version, what = document.pop("format_version", None), document.pop("what", None)
    write_document(path, what, document)
    if version != json.loads(path.read_text())["format_version"]:
        edit(path, what=what)
