"""Judging posteriors: scores, references, diagnostics, recalibration, weights of members."""
