"""One self-contained page from a comparison."""

from polymode.report.page import write_page

__all__ = ["write_page"]
