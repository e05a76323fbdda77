"""Stores what is measured: RUN/results.jsonl, CSV files, and tables over runs and seeds."""
import csv
import json
import math
import os
import platform
import re
import statistics
import subprocess

import torch

from model import refuse

METRICS = {
    "loss": "loss, nats per token",
    "window_loss": "loss in windows of the trained length, nats per token",
    "ppl": "perplexity",
    "token_error": "wrong targets, %",
    "sequence_error": "rows with a wrong target, %",
}

def append(run, rows):
    """Append every number in the rows to RUN/results.jsonl, with everything that it depends on, and
    return these lines as dicts."""
    other = "" if run.data == run.config["data"] else f"{run.data} "
    machine = f"{platform.machine()} CPU, threads: {torch.get_num_threads()}"
    if run.device.type == "cuda":
        machine = torch.cuda.get_device_name(run.device)
    made = dict(run=run.name, config=run.config["config"], pe=run.pe, seed=run.config["seed"])
    how = dict(steps=run.step, commit=commit(), torch=torch.__version__, machine=machine)
    lines = []
    for row in rows:
        at = dict(split=other + row["split"], trained=run.trained, length=row["length"])
        numbers = {key: value for key, value in row.items() if isinstance(value, float)}
        lines += [made | at | dict(metric=key, value=numbers[key]) | how for key in numbers]
    with open(os.path.join(run.folder, "results.jsonl"), "ab+") as file:
        file.seek(0)
        cut_short = file.read()[-1:] not in (b"", b"\n")  # by a kill or a full disk
        file.write(b"\n" * cut_short + "".join(json.dumps(line) + "\n" for line in lines).encode())
    return lines

def commit():
    """The code's git commit, with a + if files have changed since; empty outside a repository."""
    here, describe = os.path.dirname(os.path.abspath(__file__)), "git describe --always --dirty=+"
    done = subprocess.run(f"{describe} --exclude='*'", shell=True, cwd=here, capture_output=True)
    return done.stdout.decode().strip()

def records(folder, name):
    """The dicts of a file of JSON lines. Lines cut short by a kill or a full disk are skipped."""
    path = os.path.join(folder, name)
    refuse(not os.path.isfile(path), f"there is no {path}; train the run, or evaluate it, first")
    with open(path, encoding="utf-8", errors="replace") as file:
        return [json.loads(line) for line in file if line.endswith("}\n")]

def write_csv(path, lines):
    """Write a list of dicts with the same keys to <path>.csv."""
    with open(path + ".csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, lines[0] if lines else [])
        writer.writeheader()
        writer.writerows(lines)
    print(f"wrote {path}.csv")

def training(names):
    """Rows of run, pe, step, tokens, loss, val/loss, ...: one for each step in the runs' logs."""
    rows = {}
    for name in names:
        cfg, length = {}, 0
        for line in records(name, "log.jsonl"):
            cfg, length = line.get("config", cfg), line.get("length", length)
            if "step" in line:  # a resumed run repeats some steps: the last time counts
                step, split = line.pop("step"), line.pop("split", "")
                row = rows.setdefault((name, step), dict(run=name, pe=cfg["pe"], step=step))
                row["tokens"] = step * cfg["batch_size"] * (length or cfg["block_size"])
                row |= {f"{split}/{key}" if split else key: line[key] for key in line}
    return list(rows.values())

def labels(rows):
    """{(run, steps): label}, which tells them apart: `pope` for out/quickstart_pope and for its
    other seed, out/quickstart_pope_seed1338. Steps are added where they differ."""
    names = {row["run"]: re.sub(r"_seed\d+$", "", row["run"].partition("@")[0]) for row in rows}
    common = os.path.commonprefix([names[row["run"]].removesuffix(row["pe"]) for row in rows])
    cut = 1 + max(common.rfind("_"), common.rfind(os.sep))
    steps_differ, result = len({row.get("steps") for row in rows}) > 1, {}
    for row in rows:
        options = row["run"].partition("@")[2].replace(",", ", ")
        label = names[row["run"]][cut:] + (f" ({options})" if options else "")
        label += f", {row['steps']:,} steps" if steps_differ else ""
        result[row["run"], row.get("steps")] = label
    return result

def report(names, path):
    """Print a Markdown table for each config and metric: a row for runs that differ only in seed, a
    column for each split. If a number was measured twice, the later one counts. All are written to
    <path>.csv and returned."""
    latest, groups = {}, {}
    for name in names:
        for line in records(name, "results.jsonl"):
            latest[line["run"], line["split"], line["length"], line["metric"]] = line
    tasks = {line["config"] for line in latest.values() if line["metric"] == "token_error"}
    for line in latest.values():
        if line["metric"] != "ppl" or line["config"] not in tasks:
            groups.setdefault((line["config"], line["metric"]), []).append(line)
    for (config, metric), lines in groups.items():
        label, splits, rows = labels(lines), dict.fromkeys(line["split"] for line in lines), {}
        for line in lines:
            rows.setdefault(label[line["run"], line["steps"]], []).append(line)
        print(f"\n{config}: {METRICS.get(metric, metric)}, mean ± standard deviation (range)\n")
        print(f"| run | seeds | {' | '.join(splits)} |\n|{' --- |' * (2 + len(splits))}")
        for name, row in rows.items():
            cells = [name, str(len({line["seed"] for line in row}))]
            cells += [spread([x["value"] for x in row if x["split"] == split]) for split in splits]
            print(f"| {' | '.join(cells)} |")
    write_csv(path, list(latest.values()))
    return list(latest.values())

def spread(values):
    """Mean ± sample standard deviation (lowest to highest), to two digits of the deviation."""
    if len(values) < 2:
        return f"{values[0]:#.4g}" if values else "–"
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    digits = min(max(0, 1 - math.floor(math.log10(deviation))), 6) if deviation else 3
    found = (f"{x:.{digits}f}" for x in (mean, deviation, min(values), max(values)))
    return "{} ± {} ({} to {})".format(*found)
