"""Self-contained pages: of a comparison, and of a landscape."""

from polymode.application.report.atlas_page import export_figures, number_text, write_atlas
from polymode.application.report.page import write_page
from polymode.application.report.shell import require_plotly

__all__ = ["export_figures", "number_text", "require_plotly", "write_atlas", "write_page"]
