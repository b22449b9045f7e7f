"""Virtual environments of the peers, which cannot all live in one, nor beside polymode.

Versions are pinned, and PyTorch by a constraint for every package: whatever asks for torchvision would
otherwise replace it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = ("torch==2.13.0", "torchvision==0.28.0", "scikit-learn==1.6.1", "lightning==2.6.6")
PACKAGES = {
    "torch": (
        "torch-uncertainty[cpu]==0.13.0",
        "torchensemble==0.2.0",
        "bayesian-torch==0.5.0",
        "posteriors==0.1.3",
    ),
    "lightning-uq-box": ("lightning-uq-box==0.2.0",),
    "laplace": ("laplace-torch==0.3",),
    "pyro": ("pyro-ppl==1.9.2",),
    "jax": ("blackjax==1.7.1", "jax==0.10.2", "optax==0.2.8"),
}


class NotMade(Exception):
    """An environment that could not be made; the message is the reason."""


def default_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "polymode" / "peers"


def interpreter(name: str, folder: Path) -> Path:
    """The Python of an environment, which is made unless it is there with the same packages."""
    place = folder / name
    python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp, wanted = place / "made.json", [*CONSTRAINTS, *PACKAGES[name]]
    if stamp.exists() and json.loads(stamp.read_text()) == wanted:
        return python
    print(f"making {place}: {', '.join(PACKAGES[name])}", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(CONSTRAINTS) + "\n")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([sys.executable, "-m", "venv", "--clear", place])
    if name != "jax":
        _run([*install, CONSTRAINTS[0]])
    _run([*install, "--constraint", constraints, *PACKAGES[name]])
    stamp.write_text(json.dumps(wanted))
    return python


def _run(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()
        raise NotMade(lines[-1].strip() if lines else f"{command[0]} ended with {done.returncode}")
