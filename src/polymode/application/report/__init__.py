"""One self-contained page from a comparison."""

from polymode.application.report.page import write_page

__all__ = ["write_page"]
