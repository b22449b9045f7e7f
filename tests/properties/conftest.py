import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parents[1] / "application/cli"))  # command_line

COMMON = {
    "deadline": None,  # what a machine has to do beside is no property
    "database": None,
    "suppress_health_check": list(HealthCheck),
}
settings.register_profile("short", derandomize=True, max_examples=40, **COMMON)
settings.register_profile("long", max_examples=1000, print_blob=True, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))
