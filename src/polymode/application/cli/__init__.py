"""The command line: ``polymode COMMAND [options]``, one file a command."""

import contextvars
import importlib
import json
import shlex
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence

from polymode.errors import (
    LONGEST_MESSAGE,
    InputError,
    PolymodeError,
    UnknownName,
    UntrustedImport,
    shortened,
    unknown_name,
)

COMMANDS = {
    "plan": "what a comparison will cost, before it is begun",
    "compare": "which method is worth its price on this data",
    "train": "train one method, keep its posterior",
    "evaluate": "scores of a finished run",
    "predict": "predictions of a finished run, with their uncertainty",
    "landscape": "pictures of networks: how they differ, what lies between them",
    "diversity": "do members differ? from saved probabilities of any library",
    "reference": "sample the posterior itself, to judge methods by",
    "methods": "list the methods, or explain one",
    "data": "list, fetch, check and describe data sets",
}
USAGE = (
    "usage: polymode COMMAND [options]\n\n"
    + "\n".join(f"  {name:<11}{about}" for name, about in COMMANDS.items())
    + "\n\npolymode COMMAND --help explains a command; polymode --version tells the version."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 is success, 2 a wrong command line, 1 a failure, 130 an interruption."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from polymode._version import __version__

        print(f"polymode {__version__}")
        return 0
    debug = "--debug" in arguments
    terminated = signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as cleanly as Ctrl-C
    try:
        return contextvars.copy_context().run(_run, arguments)  # what it may not import ends with it
    except KeyboardInterrupt:
        print(f"\nInterrupted.{_how_to_go_on(arguments)}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has gone
        sys.stderr.close()
        return 1
    except Exception as error:
        if debug:
            traceback.print_exc()
        advice = _how_to_trust(error, arguments) if isinstance(error, UntrustedImport) else ""
        print(f"polymode {arguments[0]}: {_one_line(error, debug=debug)}{advice}", file=sys.stderr)
        return 2 if _is_usage(error) else 1
    finally:
        signal.signal(signal.SIGTERM, terminated)


def _run(arguments: list[str]) -> int:
    command = arguments[0]
    if command not in COMMANDS:
        raise unknown_name("command", command, COMMANDS)
    warnings.showwarning = _write_warning if "--json" in arguments else _show_warning
    from polymode.application.cli.options import parse
    from polymode.application.cli.ranks import require_alone

    if command != "train":
        require_alone(command)
    module = importlib.import_module(f"polymode.application.cli.{command}")
    kind = getattr(module, f"{command.title()}Options")
    module.run(parse(kind, command, module.ABOUT, arguments[1:]))
    return 0


def _how_to_go_on(arguments: list[str]) -> str:
    if arguments[0] not in ("compare", "train", "reference", "landscape"):
        return ""
    kept = "computed" if arguments[0] == "landscape" else "trained"
    return f" What was {kept} is kept; the same command goes on with it:\n  polymode " + shlex.join(arguments)


def _how_to_trust(error: UntrustedImport, arguments: list[str]) -> str:
    typed = f"polymode {shlex.join(arguments)}"
    again = f"{typed} {shlex.join(error.again)} or, " if error.again else ""
    return f" Type: {again}{'for all that it names, ' if again else ''}{typed} --trust"


def _is_usage(error: Exception) -> bool:
    from polymode.application.cli.options import UsageError

    return isinstance(error, UsageError | UnknownName | UntrustedImport)


def _one_line(error: Exception, *, debug: bool) -> str:
    text = _text_of(error)
    if isinstance(error, PolymodeError):
        return text
    hint = "" if debug else " --debug shows where."
    kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
    return f"{kind}{text}{hint}"


def _write_warning(message: Warning | str, *rest: object, **more: object) -> None:
    print(json.dumps({"message": _text_of(message)}), file=sys.stderr)


def _show_warning(message: Warning | str, *rest: object, **more: object) -> None:
    print(f"polymode: {_text_of(message)}", file=sys.stderr)


def _text_of(message: object) -> str:
    return shortened(" ".join(str(message).split()), LONGEST_MESSAGE)
