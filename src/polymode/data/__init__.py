"""Data: what members are trained and judged on."""

from polymode.data.sources import (
    ArrayData,
    Data,
    Examples,
    LoaderData,
    as_data,
    as_tree,
    check_finite,
)

__all__ = ["ArrayData", "Data", "Examples", "LoaderData", "as_data", "as_tree", "check_finite"]
