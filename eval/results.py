"""
Stores measurements in RUN/results.jsonl and in CSV files, and makes tables of them over runs and
seeds. Each line of results.jsonl is a dict of one number and everything that it depends on.
"""
import csv
import json
import os
import platform
import re
import statistics
import subprocess
import sys

import torch

import checkpoint

METRICS = {
    "loss": "loss, nats per token",
    "window_loss": "loss in windows of the trained length, nats per token",
    "ppl": "perplexity",
    "token_error": "wrong targets, %",
    "sequence_error": "rows with a wrong target, %",
}

def split_options(run):
    """Returns the folder and the options of "folder@key=value,key=value". A folder's own name may
    contain an @ too, so what follows the last @ counts as options only if it contains an = and no
    folder of the whole name exists."""
    folder, at, options = run.rpartition("@")
    if not at or "=" not in options or os.path.isdir(run):
        return run, ""
    return folder, options

def on_different_data(lines):
    """Returns what a heading or title says of lines that were not all measured on the same data."""
    return ", on different data" if len({line.get("data") for line in lines}) > 1 else ""

def name_of_split(run, split):
    """Returns the name under which a report shows a split that a run was evaluated on."""
    return split if run.reads_its_own else f"{run.data} {split}"

# --- what is written ------------------------------------------------------------------------------

def append(run, row):
    """Appends a line to RUN/results.jsonl for every float in the row. Raises ValueError if the run
    was moved since it was read, because another run may have taken its place."""
    if not checkpoint.is_still(run.folder, run.folder_stat):
        raise ValueError(f"{run.folder} was moved, deleted or replaced while it was evaluated; "
                         "evaluate it again at its new place")
    machine = f"{platform.machine()} {run.device.type.upper()}, threads: {torch.get_num_threads()}"
    if run.device.type == "cuda":
        machine = torch.cuda.get_device_name(run.device)
    code = commit()
    split = name_of_split(run, row["split"])
    lines = ""
    for metric, value in row.items():
        if isinstance(value, float):
            lines += json.dumps({
                "run": run.folder, "options": run.options, "config": run.config["config"],
                "pe": run.model.cfg.pe, "seed": run.config["seed"], "split": split,
                "data": row.get("data"), "trained": run.trained, "length": row["length"],
                "metric": metric, "value": value, "steps": run.step,
                "experiment": run.experiment, "weights": run.weights, "read_at": run.read_at,
                "commit": code, "torch": torch.__version__,
                "machine": machine,
            }) + "\n"
    with open(os.path.join(run.folder, "results.jsonl"), "ab+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if file.read() not in (b"", b"\n"):  # a full disk has cut the last line short
            lines = "\n" + lines
        file.write(lines.encode())

def commit():
    """Returns the git commit of this code, with a + if files have changed since. Outside a
    repository, or without git, it is empty."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        return subprocess.run(command, cwd=here, capture_output=True).stdout.decode().strip()
    except OSError:
        return ""

def write_csv(path, rows):
    """Writes a list of dicts to <path>.csv. A key that a row lacks is an empty cell."""
    keys = dict.fromkeys(key for row in rows for key in row)
    with open(path + ".csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, keys)
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {path}.csv")

# --- what is read ---------------------------------------------------------------------------------

def records(folder, name):
    """Returns the dicts of a file of JSON lines, or an empty list if there is no such file. Raises
    ValueError if there is no such folder, and for a line that is not JSON."""
    if not os.path.isdir(folder):
        raise ValueError(f"there is no run directory {folder!r}")
    path = os.path.join(folder, name)
    found = []
    if not os.path.isfile(path):
        return found
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line == b"\n":  # two processes have appended at the same time
                continue
            try:
                found.append(json.loads(line))
            except ValueError:
                raise ValueError(f"{path} is damaged in line {number}; delete it from the "
                                 "file") from None
    return found

def training(folders):
    """Returns rows with run, pe, seed, experiment, step, loss, val/loss and so on, one for each
    step of the last start in a log and those that led to it. It may hold others if an older
    checkpoint was put back, which shows once it is resumed. Raises ValueError without any step."""
    found = []
    for folder in folders:
        start = None
        rows = {}  # {(step, its branch): row}

        def branch(step):  # which weights the run had at this step
            return start["config"]["seed"], checkpoint.experiment(start["history"], step)

        for line in records(folder, "log.jsonl"):
            if "history" in line:  # the run begins, resumes or starts over
                start = line
                begin = line["from_step"]
                # this branch takes the steps after `begin` again; the rows of others stay
                rows = {(step, its_branch): row for (step, its_branch), row in rows.items()
                        if (begin and step <= begin) or its_branch != branch(step)}
            if "step" not in line:
                continue
            if start is None:
                raise ValueError(f"{folder}/log.jsonl does not begin with the options of the run "
                                 "and its history; leave this run out")
            step = line.pop("step")
            split = line.pop("split", "")
            row = rows.setdefault((step, branch(step)), {"step": step})
            for key, value in line.items():
                row[f"{split}/{key}" if split else key] = value
        led_here = [row for (step, its_branch), row in rows.items() if its_branch == branch(step)]
        if not led_here:
            raise ValueError(f"{folder} has no step in its log yet; train it first")
        seed, experiment = branch(max(row["step"] for row in led_here))
        same = dict(run=folder, pe=start["config"]["pe"], seed=seed, experiment=experiment)
        found.extend({**row, **same} for row in led_here)
    return found

def latest(folders):
    """Returns the lines of each run's results.jsonl that were measured on the checkpoint that was
    read last. If a number was measured twice, the later one counts. A run without results is left
    out, and a line on stderr says so. Raises ValueError if no run has any."""
    found = {}
    for folder in folders:
        # older code did not say which weights it had measured
        lines = [line for line in records(folder, "results.jsonl") if "weights" in line]
        if not lines:
            print(f"left out {folder}, which has no results; evaluate it first", file=sys.stderr)
            continue
        # not the last line, because a slow evaluation may have read an earlier checkpoint
        last = max(lines, key=lambda line: line["read_at"])
        for line in lines:
            if line["weights"] == last["weights"]:
                # the run may have been measured under another path
                line["run"] = f"{folder}@{line['options']}" if line["options"] else folder
                found[line["run"], line["split"], line["metric"]] = line
    if not found:
        raise ValueError("none of these runs has results to report; evaluate them first, as in "
                         "python sample.py RUN --evaluate=val")
    return list(found.values())

# --- the report -----------------------------------------------------------------------------------

def print_tables(lines):
    """Prints a Markdown table for each config and metric. Runs that differ only in their seed share
    a row, and each split has a column. Its heading says if not all runs read the same data. The
    steps are those after which a run was measured. It may have been trained on since."""
    tables = {}
    label_of = labels(lines)
    for line in lines:
        config = os.path.basename(line["config"])  # its folder may be written in several ways
        tables.setdefault((config, line["metric"]), []).append(line)
    for (config, metric), table in tables.items():
        splits = list(dict.fromkeys(line["split"] for line in table))
        print(f"\n{config}: {METRICS.get(metric, metric)}, mean ± standard deviation (range)\n")
        headings = []
        for split in splits:
            set_name = split.split()[0]  # or, for the run's own set, the split, as in `val 4x`
            of_set = [line for line in table if line["split"].split()[0] == set_name]
            headings.append(split + on_different_data(of_set))
        print(f"| run | seeds | steps | {' | '.join(headings)} |")
        print("| --- " * (3 + len(splits)) + "|")
        rows = {}  # {label: its lines}
        for line in table:
            rows.setdefault(label_of[line["run"]], []).append(line)
        for label, row in rows.items():
            runs = {line["run"] for line in row}
            cells = [label, str(len({line["seed"] for line in row})), str(row[0]["steps"])]
            for split in splits:
                values = [line["value"] for line in row if line["split"] == split]
                cells.append(spread(values))
                if 0 < len(values) < len(runs):  # some of the runs were not evaluated here
                    cells[-1] += f" [{len(values)} of {len(runs)} runs]"
            print(f"| {' | '.join(cells)} |")

def panel_of(config):
    """Returns the title under which a picture shows the runs of a config file."""
    return os.path.basename(config).removesuffix(".py").removesuffix("_small")

def labels(rows):
    """Returns {run: label}, where a label holds what tells the runs of a panel apart. Runs that
    differ only in their seed have the same label: it is `pope` for both out/quickstart_pope and
    out/quickstart_pope_seed1338. If anything else differs, or if two of them have the same seed,
    each has the name of its own folder."""
    names = {}  # {run: (its name without the seed, its own name, its panel)}
    alike = {}  # {name without the seed: {run: what there is besides the seed, and the seed}}
    stems = {}  # {panel: the names of its runs without their methods}
    for row in rows:
        folder, options = split_options(row["run"])
        name = re.sub(r"_seed\d+$", "", folder)
        panel = panel_of(row.get("config", ""))
        stems.setdefault(panel, []).append(name.removesuffix(row["pe"]))
        if options:
            options = f" ({options.replace(',', ', ')})"
        names[row["run"]] = name + options, folder + options, panel
        kind = row["pe"], row.get("steps"), row.get("experiment")
        alike.setdefault(name + options, {})[row["run"]] = kind, row.get("seed", row["run"])
    found = {}
    for run, (name, own_name, panel) in names.items():
        kinds, seeds = map(set, zip(*alike[name].values()))
        label = name if len(kinds) == 1 and len(seeds) == len(alike[name]) else own_name
        common = os.path.commonprefix(stems[panel])
        found[run] = label[1 + max(common.rfind("_"), common.rfind(os.sep)) :]  # whole words
    return found

def spread(values):
    """Returns the mean ± the sample standard deviation (lowest to highest)."""
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):#.4g}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values):.2g} ({min(values):#.4g} to {max(values):#.4g})"
