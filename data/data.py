"""Stops `python data/x.py`. For such a command, Python looks for the package `data` inside data/,
so a script that imports it gets this file.

    python -m data.openwebtext    # this is how to run a script
"""
import sys
from pathlib import Path

sys.exit(f"run it from the folder above: `python -m data.{Path(sys.argv[0]).stem}`")
