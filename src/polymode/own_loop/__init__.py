"""Parts for a training loop of one's own."""
