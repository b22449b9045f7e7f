"""Pictures of networks: which views some runs, checkpoints or predictions allow, and how they are made."""
