"""The numbers that sample.py measures: CSV files, RUN/results.jsonl, and tables over runs and seeds."""
import csv
import functools
import json
import os
import platform
import subprocess

import torch

from assets.figures import draw_report, labels

METRICS = {
    "loss": "loss, nats",
    "window_loss": "loss in windows of the trained length, nats",
    "ppl": "perplexity",
    "token_error": "wrong targets, %",
    "sequence_error": "rows with a wrong target, %",
}


def write_csv(path, table):
    """Write a list of dicts to <path>.csv; columns are all their keys."""
    columns = {key: None for row in table for key in row}
    with open(path + ".csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(table)
    print(f"wrote {path}.csv")


def keep(path, table, models):
    """Write a table to <path>.csv, and each number in it to its run's results.jsonl.

    table: rows of run, data, split, trained, length, perhaps `multiple`, and of METRICS; models:
    {run: (model, checkpoint)}."""
    write_csv(path, table)
    for row in table:
        model, checkpoint = models[row["run"]]
        split = row["split"]
        if row["data"] != checkpoint["config"]["data"]:
            split = f"{row['data']} {split}"
        if "multiple" in row:
            split = f"{split} {row['multiple']}x"
        numbers = {metric: row[metric] for metric in METRICS if metric in row}
        append(row["run"], model, checkpoint, split, row["trained"], row["length"], numbers)


def append(run, model, checkpoint, split, trained, length, numbers):
    """Append {metric: value} to RUN/results.jsonl, a line each, with all that made it: measured on
    a split in sequences of this length, of a run on sequences of the trained length."""
    cfg = checkpoint["config"]
    made = dict(run=run, config=cfg["config"], pe=model.cfg.pe, seed=cfg["seed"], split=split)
    made |= dict(trained=trained, length=length)
    how = dict(steps=checkpoint["step"], commit=commit())
    how |= dict(torch=torch.__version__, machine=machine())
    with open(os.path.join(run.partition("@")[0], "results.jsonl"), "a", encoding="utf-8") as file:
        for metric, value in numbers.items():
            line = made | dict(metric=metric, value=value) | how
            file.write(json.dumps(line) + "\n")


@functools.cache
def commit():
    """The code's git commit, with a + where files were changed since; empty outside of a
    repository."""
    here = os.path.dirname(os.path.abspath(__file__))
    command = ["git", "-C", here, "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine():
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, threads: {torch.get_num_threads()}"


def report(runs, path):
    """Print a Markdown table for each config and metric: a row for the runs that differ in their
    seed alone, a column for each split, in a cell the mean (lowest to highest). Runs of other steps
    have a row of their own. Of the numbers of one kind the last counts. <path>.csv has a row for
    each number, also the perplexities of tasks, which are not printed, and <path>.png a panel for
    each config."""
    latest = {}
    for run in runs:
        name = os.path.join(run, "results.jsonl")
        if not os.path.isfile(name):
            raise FileNotFoundError(f"{name} does not exist; "
                                    f"`python sample.py {run} --evaluate=val` writes into it")
        with open(name, encoding="utf-8") as file:
            for line in map(json.loads, file):
                latest[line["run"], line["split"], line["length"], line["metric"]] = line
    lines = list(latest.values())
    tasks = {line["config"] for line in lines if line["metric"] == "token_error"}
    for config, metric in dict.fromkeys((line["config"], line["metric"]) for line in lines):
        if metric == "ppl" and config in tasks:
            continue
        here = [line for line in lines if (line["config"], line["metric"]) == (config, metric)]
        steps = {line["run"]: line["steps"] for line in here}
        names = labels({line["run"]: line["pe"] for line in here}, steps)
        rows = {}  # label -> split -> lines
        for line in here:
            row = rows.setdefault(names[line["run"]], {})
            row.setdefault(line["split"], []).append(line)
        splits = list(dict.fromkeys(split for row in rows.values() for split in row))
        print(f"\n{config}: {METRICS.get(metric, metric)}\n")
        print("| " + " | ".join(["run", "seeds", *splits]) + " |\n|" + " --- |" * (2 + len(splits)))
        for label, row in rows.items():
            seeds = {line["seed"] for same in row.values() for line in same}
            cells = [spread([line["value"] for line in row.get(split, [])]) for split in splits]
            print("| " + " | ".join([label, str(len(seeds)), *cells]) + " |")
    write_csv(path, lines)
    try:
        draw_report(lines, path)
    except ImportError as error:
        print(error)


def spread(values):
    """Mean (lowest to highest)."""
    if not values:
        return "–"
    mean = f"{sum(values) / len(values):.4g}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):.4g} to {max(values):.4g})"
