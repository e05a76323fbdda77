"""
Reads what was measured, and says which numbers belong together. A line is a dict that holds one
number of a record in results.jsonl or log.jsonl, and all that identifies it.
"""
import os
import sys

from config import Mistake, require, runs

ROW = ("experiment", "pe", "flags", "settings", "options", "step", "seed")  # whose number it is
COLUMN = ("metric", "split", "multiple", "data", "tokens", "window", "fingerprint")  # of what
# what a record leaves out if it is empty
EMPTY = {"title": "", "flags": {}, "settings": None, "options": {}, "multiple": None,
         "tokens": None, "unit": "token", "per_unit": 1, "axis": "length", "tick": "", "kind": ""}

# --- which numbers count --------------------------------------------------------------------------

def read(sources):
    """Returns the lines that count, from run directories and files of results. If a number was
    measured twice for one row and seed, the later one counts."""
    found = {}  # {what was measured, of which row and seed: its last line}
    repeated = {}  # messages, as a dict that keeps their order
    for source in sources:
        folder = os.path.normpath(source)
        path = os.path.join(folder, "results.jsonl") if os.path.isdir(folder) else folder
        if not os.path.isfile(path):
            print(f"left out {source}, which has no results.jsonl", file=sys.stderr)
            continue
        for line in lines_of(path, folder):
            key = str([line[field] for field in (*ROW, *COLUMN)])
            before = found.get(key, line)["run"]
            if before != folder:
                repeated[f"{before} and {folder} are the same row with the same seed, so only the "
                         "second one counts"] = None
            found[key] = line
    for message in repeated:
        print(message, file=sys.stderr)
    require(found, "none of these runs has results; measure them first, as in "
                   "python -m eval.scores RUN")
    return list(found.values())

def lines_of(path, run):
    """Yields a line for each number in a file of results, with `run` as the name of its run,
    because the directory may have been renamed."""
    for record in runs.read_records(path):
        if "values" not in record:
            raise Mistake(f"{path} does not hold results, which are in RUN/results.jsonl; name the "
                          "run directory")
        record = {**EMPTY, "window": record["trained"], "at": record["length"], **record,
                  "run": run}
        name = os.path.splitext(os.path.basename(record["config"]))[0]
        record["experiment"] = name or "no config file"  # however its path was given
        for metric, value in record.pop("values").items():
            line = {**record, "metric": metric, "value": value}
            if metric != "window_loss":
                line["window"] = None
            yield line

def comparable(others, lines):
    """Returns the lines of `others` that measure the same as one of `lines`, marked as `beside`.
    They share its columns, although data that are made of Python's own source differ between
    versions of Python."""
    same = ("experiment", "trained", "metric", "split", "multiple", "data", "tokens", "window")
    own = {values: measured[0]["fingerprint"] for values, measured in grouped(lines, *same).items()}
    found = []
    differ = set()
    for values, measured in grouped(others, *same).items():
        for line in measured if values in own else []:
            if line["fingerprint"] != own[values]:
                differ.add(line["data"])
            found.append({**line, "beside": True, "fingerprint": own[values]})
    for data in sorted(differ):
        print(f"your data set {data} has other contents than the one of the rows that are not bold")
    return found

def logged(run):
    """Yields a line for each record of a step in the log of a run, which also has what was logged
    there, under its own name. If a step appears twice because the run was resumed, its last record
    counts."""
    start, *records = runs.read_log(run)
    about = {**EMPTY, "run": run, "config": start["config"]["config"],
             "pe": start["config"]["pe"], "flags": start.get("flags", {}),
             "settings": start.get("settings"), "seed": start["config"]["seed"], "step": None}
    steps = {}
    for record in records:
        if "step" in record:
            steps.setdefault(record.pop("step"), {}).update(record)
    for step, values in steps.items():
        yield {**about, "at": step, "values": list(values), **values}

# --- which numbers belong together ----------------------------------------------------------------

def grouped(lines, *fields):
    """Returns {values of these fields: the lines that have them}."""
    groups = {}
    for line in lines:
        values = [line.get(field) for field in fields]
        values = tuple(str(value) if isinstance(value, dict) else value for value in values)
        groups.setdefault(values, []).append(line)
    return groups

def labelled(lines, rows=None):
    """Returns the lines of a table or a picture with a `label` each, which is the name of its row
    or its curve, or only those whose label is in `rows`. Lines share it if they differ only in the
    seed. It begins with pe and the options that were changed at test time. The config file and the
    flags follow, except for those that all lines share, as in "pope --pope_delta=uniform" or
    "rope@rope_scaling=ntk,rope_factor=8". If lines would share a label but differ in the step or
    the settings, the label ends with these."""
    names = [parts_of_name(line) for line in lines]
    shared = set.intersection(*map(set, names)) if names else set()  # what all have says nothing
    found = []
    for line, (pe, *others) in zip(lines, names):
        label = " ".join([pe, *(part for part in others if part not in shared)])
        found.append({**line, "label": label})
    # other steps, or a config file that was edited between two runs
    for field in ("step", "settings"):
        for same in grouped(found, "beside", "label").values():
            if len({line[field] for line in same} - {None}) > 1:
                for line in same:
                    line["label"] += f" ({field} {line[field]})"
    return [line for line in found if not rows or line["label"] in rows]

def parts_of_name(line):
    """Returns the words of which a label may consist, of which the first is always part of it."""
    name = [runs.with_options(line["pe"], line["options"]), os.path.basename(line["config"])]
    for flag, value in line["flags"].items():
        if flag == "init_from":  # its name may say the same method and seed
            value = value.removesuffix(f"_seed{line['seed']}")
            before, method, changed = f"{value}_".partition(f"_{line['pe']}_")
            if method:
                value = f"{before}_*"
            if changed:  # options of that run, as in out/echo_small_cope_cope_npos=16
                name.append(f"from {changed.removesuffix('_')}")
        name.append(f"--{runs.assignment(flag, value)}")
    return name
