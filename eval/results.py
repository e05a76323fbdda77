"""The numbers that are measured: CSV files, RUN/results.jsonl, and tables over runs and seeds."""
import csv
import functools
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys

import torch

METRICS = {
    "loss": "loss, nats per token",
    "window_loss": "loss in windows of the trained length, nats per token",
    "ppl": "perplexity",
    "token_error": "wrong targets, %",
    "sequence_error": "rows with a wrong target, %",
}


def write_csv(path, table):
    """Write a list of dicts to <path>.csv. Its columns are all their keys."""
    columns = dict.fromkeys(key for row in table for key in row)
    with open(path + ".csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(table)
    print(f"wrote {path}.csv")


def append(run, row, numbers):
    """Append {metric: value} to RUN/results.jsonl, a line each, with all that made it: the run, the
    split, the length of its sequences in training and here, the code and the machine."""
    split = row["split"]
    if run.data != run.config["data"]:
        split = f"{run.data} {split}"
    if "multiple" in row:
        split += f" {row['multiple']}x"
    made = dict(run=run.name, config=run.config["config"], pe=run.pe, seed=run.config["seed"],
                split=split, trained=row["trained"], length=row["length"])
    how = dict(steps=run.step, commit=commit(), torch=torch.__version__, machine=machine())
    lines = [json.dumps(made | dict(metric=key, value=numbers[key]) | how) for key in numbers]
    with open(os.path.join(run.folder, "results.jsonl"), "ab+") as file:
        file.seek(0)
        cut_short = file.read()[-1:] not in (b"", b"\n")  # by a kill or a full disk
        file.write(b"\n" * cut_short + "".join(f"{line}\n" for line in lines).encode())


@functools.cache
def commit():
    """The code's git commit, with a + if files have changed since; empty outside a repository."""
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


def records(path, mend):
    """The dicts of a file of JSON lines. A line that a kill or a full disk cut short is left out."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path} does not exist; {mend}")
    found = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for n, line in enumerate(file, 1):
            try:
                found.append(json.loads(line))
            except ValueError:
                print(f"{path}: line {n} is cut short and left out", file=sys.stderr)
    return found


def training(names):
    """Rows of run, pe, step, tokens, loss, val/loss, ...: one for each step in the runs' logs."""
    rows = {}
    for name in names:
        path, cfg = os.path.join(name.partition("@")[0], "log.jsonl"), {}
        for line in records(path, "name run directories that train.py wrote"):
            cfg = line.get("config", cfg)
            if "step" in line:  # a resumed run repeats some steps: the last time counts
                step, split = line.pop("step"), line.pop("split", "")
                row = rows.setdefault((name, step), dict(run=name, pe=cfg["pe"], step=step))
                row["tokens"] = step * cfg["batch_size"] * cfg["block_size"]
                row |= {f"{split}/{key}" if split else key: line[key] for key in line}
    return list(rows.values())


def labels(rows):
    """{run: label} with what tells the runs apart: `pope` for out/quickstart_pope and for its other
    seed out/quickstart_pope_seed1338. Steps count where they differ."""
    names = {row["run"]: re.sub(r"_seed\d+$", "", row["run"].partition("@")[0]) for row in rows}
    common = os.path.commonprefix([names[row["run"]].removesuffix(row["pe"]) for row in rows])
    cut = 1 + max(common.rfind("_"), common.rfind(os.sep))
    steps_differ, result = len({row.get("steps") for row in rows}) > 1, {}
    for row in rows:
        options = row["run"].partition("@")[2].replace(",", ", ")
        label = names[row["run"]][cut:] + (f" ({options})" if options else "")
        result[row["run"]] = label + (f", {row['steps']:,} steps" if steps_differ else "")
    return result


def report(names, path):
    """Print a Markdown table for each config and metric: a row for the runs that differ in their
    seed alone, a column for each split. Of the numbers of one kind the last counts. <path>.csv has
    every number. Returns the lines of results.jsonl that count."""
    latest, groups = {}, {}
    for name in names:
        file = os.path.join(name.partition("@")[0], "results.jsonl")
        for line in records(file, f"`python sample.py {name} --evaluate=val` writes into it"):
            latest[line["run"], line["split"], line["length"], line["metric"]] = line
    tasks = {line["config"] for line in latest.values() if line["metric"] == "token_error"}
    for line in latest.values():
        if line["metric"] != "ppl" or line["config"] not in tasks:
            groups.setdefault((line["config"], line["metric"]), []).append(line)
    for (config, metric), lines in groups.items():
        label, splits, rows = labels(lines), dict.fromkeys(line["split"] for line in lines), {}
        for line in lines:
            rows.setdefault(label[line["run"]], []).append(line)
        print(f"\n{config}: {METRICS.get(metric, metric)}, mean ± standard deviation (range)\n")
        print("| " + " | ".join(["run", "seeds", *splits]) + " |\n|" + " --- |" * (2 + len(splits)))
        for name, row in rows.items():
            seeds = len({line["seed"] for line in row})
            cells = [spread([x["value"] for x in row if x["split"] == split]) for split in splits]
            print("| " + " | ".join([name, str(seeds), *cells]) + " |")
    lines = list(latest.values())
    write_csv(path, lines)
    return lines


def spread(values):
    """Mean ± sample standard deviation (lowest to highest), to the deviation's second digit."""
    if not values:
        return "–"
    mean, deviation = statistics.fmean(values), statistics.stdev(values) if values[1:] else 0
    if len(values) == 1 or not deviation:
        return f"{mean:.4g}" + " ± 0" * (len(values) > 1)
    digits = min(max(0, 1 - math.floor(math.log10(deviation))), 6)
    mean, deviation, low, high = (f"{x:.{digits}f}" for x in (mean, deviation, min(values), max(values)))
    return f"{mean} ± {deviation} ({low} to {high})"
