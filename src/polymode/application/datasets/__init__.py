"""Data sets by name, path or import, and their readers."""
