"""What is kept of a run: its folder, checkpoints, events, progress."""
