"""What all pages have in common: one HTML file that needs no network, in light and dark."""

import html
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from polymode.errors import InputError
from polymode.storage import write_text

SHELL = Path(__file__).with_name("shell.html")


def require_plotly() -> None:
    """Raise, before any work, where figures cannot be drawn."""
    try:
        import plotly.offline  # noqa: F401
    except ImportError:
        raise InputError("The page needs plotly: pip install 'polymode[report]'.") from None


def write_shell(path: str | Path, title: str, body: str) -> Path:
    """Write a page with this content (HTML) and return where it is."""
    require_plotly()
    from plotly.offline import get_plotlyjs

    content = Template(SHELL.read_text()).substitute(
        title=escape(title),
        body=body,
        # No part of the script may look like the end of its element.
        plotly=get_plotlyjs().replace("</script", "<\\/script"),
    )
    write_text(path := Path(path), content)
    return path


def escape(text: object) -> str:
    """Text for a page: names come from data and folders of others."""
    return html.escape(str(text))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells, which are HTML."""
    cells = "".join(f"<th>{name}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def figure(drawn: Any, caption: str) -> str:
    """A figure with its caption (HTML)."""
    import plotly.io

    plot = plotly.io.to_html(
        drawn,
        include_plotlyjs=False,
        full_html=False,
        config={"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["lasso2d", "select2d"]},
    )
    return f"<figure>{plot}<figcaption>{caption}</figcaption></figure>"
