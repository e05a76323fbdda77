"""Data sets: data/<name>.py writes data/<name>/, and data/shards.py is the format they share."""
