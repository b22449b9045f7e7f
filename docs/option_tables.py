"""Writes the tables of options in ``docs/methods``: what a method declares, between two marks of its page.

``make docs`` runs it; a test holds that nothing would change.
"""

from pathlib import Path

from polymode.application.cli.methods import as_typed
from polymode.errors import InputError
from polymode.methods import METHODS
from polymode.options import options_of
from polymode.training.contract import Method

PAGES = Path(__file__).parent / "methods"
BEGIN, END = "<!-- options: written by make docs -->", "<!-- end of options -->"


def table(method: type[Method]) -> str:
    """The options of a method as a table in Markdown, and what its best epoch is."""
    rows = ["| option | default | meaning |", "| --- | --- | --- |"]
    for each in options_of(method):
        meaning = each.meaning.replace("|", "\\|")
        rows.append(f"| `{each.name}` | `{as_typed(each.default)}` | {meaning} |")
    return "\n".join([*rows, "", f"Best epoch: {method.best_epoch}."])


def with_table(page: str, method: type[Method]) -> str:
    """The text of a method's page with the present table between its marks."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise InputError(
            f"The page of {method.name} has no place for its options: it needs the lines {BEGIN!r} and "
            f"{END!r}, once each."
        )
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table(method)}\n\n{END}{after}"


def main() -> None:
    """Bring all pages up to date."""
    for name, method in METHODS.items():
        path = PAGES / f"{name}.md"
        path.write_text(with_table(path.read_text(), method))


if __name__ == "__main__":
    main()
