"""What the source may not hold: code that runs what it reads. The linter's rule is shown to fire."""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RUFF = shutil.which("ruff", path=str(Path(sys.executable).parent)) or "ruff"
CODES = ("S1", "S3", "S5", "S6", "TID251")
FORBIDDEN = {
    "pickle": "import pickle\n",
    "part of pickle": "from pickle import loads\n",
    "C pickle": "import _pickle\n",
    "unpickling": "import pickle\n\nvalue = pickle.loads(b'')\n",
    "marshal": "import marshal\n",
    "shelve": "import shelve\n",
    "dill": "import dill\n",
    "cloudpickle": "import cloudpickle\n",
    "joblib.load": "import joblib\n\nvalue = joblib.load('x')\n",
    "joblib.dump": "from joblib import dump\n",
    "pandas": "import pandas as pd\n\nvalue = pd.read_pickle('x')\n",
    "numpy": "import numpy as np\n\nvalue = np.load('x', allow_pickle=True)\n",
    "eval": "value = eval('1 + 1')\n",
    "exec": "exec('value = 1')\n",
    "shell": "import subprocess\n\nsubprocess.run('ls', shell=True)\n",
    "Popen": "import subprocess\n\nsubprocess.Popen('ls', shell=True)\n",
    "wrapped shell": "from polymode import run\n\nrun('ls', shell=True)\n",
    "system": "import os\n\nos.system('ls')\n",
    "getoutput": "import subprocess\n\nsubprocess.getoutput('ls')\n",
    "yaml": "import yaml\n\nvalue = yaml.load('a: 1')\n",
    "yaml loader": "import yaml\n\nvalue = yaml.load('a: 1', Loader=yaml.UnsafeLoader)\n",
    "unsafe yaml": "import yaml\n\nvalue = yaml.unsafe_load('a: 1')\n",
    "full yaml": "from yaml import full_load\n",
    "torch.load": "import torch\n\nvalue = torch.load('x')\n",
    "torch.load of objects": "import torch\n\nvalue = torch.load('x', weights_only=False)\n",
    "torch.load by name": "from torch import load\n",
    "torch.save": "import torch\n\ntorch.save({}, 'x')\n",
    "torch.hub": "import torch\n\nvalue = torch.hub.load('x', 'y')\n",
}
INNOCENT = {
    "yaml": "import yaml\n\nvalue = yaml.safe_load('a: 1')\n",
    "a list": "import subprocess\n\nsubprocess.run(['ls', '-l'], check=True)\n",
    "checked torch.load": "import torch\n\nvalue = torch.load('x', weights_only=True)  # noqa: TID251\n",
    "evaluation mode": "from torch import nn\n\nnn.Linear(1, 1).eval()\n",
    "json": "import json\n\nvalue = json.loads('1')\n",
    "safetensors": "from safetensors.torch import load_file\n\nvalue = load_file('x')\n",
    "joblib": "import joblib\n\nvalue = joblib.Parallel(2)\n",
}


def reported(content, name="src/polymode/found.py"):
    """The codes that the project's configuration reports for a file of this content and place."""
    done = subprocess.run(
        [
            *(RUFF, "check", "--output-format", "json", "--config", "pyproject.toml"),
            *("--stdin-filename", name, "-"),
        ],
        input=content,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stderr
    return {found["code"] for found in json.loads(done.stdout)}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_the_rule_fires(name):
    found = reported(FORBIDDEN[name])
    assert any(code.startswith(CODES) for code in found), found


@pytest.mark.parametrize("name", INNOCENT)
def test_the_rule_leaves_what_is_harmless(name):
    assert not [code for code in reported(INNOCENT[name]) if code.startswith(CODES)]


def test_the_rule_is_for_the_source():
    assert "S307" in reported(FORBIDDEN["eval"], "src/polymode/application/cli/deep/found.py")
    assert "S307" not in reported(FORBIDDEN["eval"], "tests/found.py")


def calls_in_source():
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield path, ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}


def test_exemptions_are_what_they_say():
    """One line of the source is exempt from the rule; it reads weights only. No other is."""
    exempt = [
        line.strip()
        for path in (ROOT / "src").rglob("*.py")
        for line in path.read_text().splitlines()
        if "noqa" in line and any(code in line for code in CODES)
    ]
    [line] = exempt
    assert line.startswith("content = torch.load(")
    calls = list(calls_in_source())
    loads = [words for _, name, words in calls if name == "torch.load"]
    assert [words["weights_only"] for words in loads] == ["True"]
    for path, name, words in calls:
        assert words.get("allow_pickle", "False") == "False", (path, name)
        assert "shell" not in words, (path, name)
