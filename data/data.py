"""When a script is run as a file, Python imports this as `data`: it looks in data/, not beside it.

    python -m data.openwebtext    # this works
"""
import sys
from pathlib import Path

sys.exit(f"run it from the folder above: `python -m data.{Path(sys.argv[0]).stem}`")
