"""Which Python the Makefile sets things up with."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKE = shutil.which("make")

pytestmark = pytest.mark.skipif(MAKE is None, reason="there is no make")


def planned(folder: Path, pythons: dict[str, tuple[str, bool]], *options: str) -> subprocess.CompletedProcess:
    """What ``make install`` would do on a machine with these Pythons: name -> (version, whether it fits)."""
    programs = folder / "bin"
    programs.mkdir()
    for name, (version, fits) in pythons.items():
        text = f'#!/bin/sh\n[ "$1" = --version ] && echo "Python {version}" && exit 0\nexit {int(not fits)}\n'
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    command = [str(MAKE), "--dry-run", "install", f"VENV={folder}/venv", *options]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PYTHON"))
    }
    environment["PATH"] = str(programs)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        ({"python3": ("3.12.1", True), "python3.11": ("3.11.2", True)}, "python3"),
        (
            {"python3": ("3.9.2", False), "python3.11": ("3.11.2", False), "python3.13": ("3.13.0", True)},
            "python3.13",
        ),
        ({"python": ("3.14.0", True)}, "python"),
    ],
)
def test_the_first_python_that_fits_is_taken(tmp_path, pythons, chosen):
    assert f"|| {chosen} -m venv {tmp_path}/venv" in planned(tmp_path, pythons).stdout


def test_without_one_it_stops_at_once_and_says_what_was_found(tmp_path):
    found = planned(tmp_path, {"python3": ("3.9.2", False), "python3.11": ("3.11.2", False)})
    assert found.returncode == 2
    assert found.stdout == ""
    [line] = found.stderr.splitlines()
    assert "needs Python 3.11 or later with venv" in line
    assert "found: python3 is Python 3.9.2, python3.11 is Python 3.11.2, so install one" in line
    assert "make PYTHON=/path/to/python3" in line


@pytest.mark.parametrize("name", ["python3.9", "nowhere"])
def test_one_that_is_named_has_to_fit_too(tmp_path, name):
    found = planned(tmp_path, {"python3": ("3.12.1", True), "python3.9": ("3.9.9", False)}, f"PYTHON={name}")
    assert found.returncode == 2
    assert "needs Python 3.11 or later with venv" in found.stderr
