"""Makes a bare `pytest` work in a checkout where headrace is not installed."""

import importlib.util
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

if importlib.util.find_spec("headrace") is None:
    package = types.ModuleType("headrace")
    package.__path__ = [str(ROOT)]
    sys.modules["headrace"] = package
