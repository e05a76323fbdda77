"""Catches `python data/x.py`. Python then looks for `data` in data/ instead of beside it, so every
script imports this file by that name.

    python -m data.openwebtext    # this is how to run a script
"""
import sys
from pathlib import Path

sys.exit(f"run it from the folder above: `python -m data.{Path(sys.argv[0]).stem}`")
