"""Commands as the tests give them: inside this process, or in one of their own.

A process of its own takes seconds before it does anything, as it imports torch. So most commands run in this
one, under the conditions of a fresh one: warnings are errors, nobody's terminal, no module of the user's
imported yet. What is about the process itself (signals, exit codes, bits from one process to the next) starts
one.
"""

import contextlib
import io
import os
import signal
import subprocess
import sys
import warnings
from dataclasses import dataclass

import pytest
import torch

from polymode.application.cli import main

WIDTH = {"COLUMNS": "120"}


@dataclass(frozen=True)
class Said:
    """What a command has written."""

    stdout: str
    stderr: str
    code: int = 0


def polymode(*arguments, cwd, code: int | None = 0, expected_warnings=False, **environment) -> Said:
    """Run a command in this process, in a folder, and check its exit code, unless it may be any."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.chdir(cwd)
        patch.setattr(sys, "path", list(sys.path))  # the folder joins it where code of the user's is named
        for name, value in (WIDTH | environment).items():
            patch.setenv(name, value)
        stack.enter_context(warnings.catch_warnings())  # the command line shows them its own way
        warnings.simplefilter("default" if expected_warnings else "error")
        stack.callback(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # as begin() has it, for the same bits
        stack.callback(_forget_modules_in, os.path.realpath(cwd))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        try:
            ended = main([str(argument) for argument in arguments])
        except SystemExit as end:  # after --help
            ended = end.code
    said = Said(out.getvalue(), err.getvalue(), int(ended or 0))
    assert code is None or ended == code, said.stdout + said.stderr
    return said


def _forget_modules_in(folder: str) -> None:
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path and os.path.realpath(path).startswith(folder + os.sep):
            del sys.modules[name]


def begin(*arguments, cwd, **options) -> subprocess.Popen:
    """Start ``python -m polymode``, with one thread and the kernels of this process."""
    program = ["-m", "polymode"]
    if "other_kernels" in sys.modules:
        program = ["-c", "import other_kernels, runpy; runpy.run_module('polymode', run_name='__main__')"]
    return subprocess.Popen(
        [sys.executable, *program, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"} | WIDTH,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def polymode_process(*arguments, cwd, code=0) -> Said:
    """Run a command in a process of its own and check its exit code."""
    with begin(*arguments, cwd=cwd) as process:
        try:
            said = Said(*process.communicate(timeout=300))
        finally:
            process.kill()
    assert process.returncode == code, said.stdout + said.stderr
    return said


def the_line(said: Said) -> str:
    """The one line that an error is."""
    lines = said.stderr.strip().splitlines()
    assert len(lines) == 1, said.stderr
    assert said.stdout == ""
    return lines[0]
