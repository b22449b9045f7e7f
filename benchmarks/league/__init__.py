"""Jobs, environments and contenders of ``benchmarks/peers.py``."""
