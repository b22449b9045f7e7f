"""Networks as members: the member axis, changes to modules, selections of their layers."""
