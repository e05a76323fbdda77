"""Stops `python data/x.py`. For such a command, Python looks for the package `data` inside data/,
so a script that imports it gets this file.

    python -m data.openwebtext    # this is how to run a script
"""
import sys

sys.exit("run it from the folder above, with `python -m data.NAME`")
