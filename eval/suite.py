"""
Shows where a method stands: trains it on small experiments, measures it, and prints its rows among
the published ones.

    python -m eval.suite slope                          each experiment with one seed
    python -m eval.suite slope rope --seeds=3           two methods, with three seeds
    python -m eval.suite "rope --rope_fraction=0.5"     a method with options of train.py
    python -m eval.suite slope --only=recall_small,copy_small --jobs=4

A method with one seed takes 10 to 15 minutes of one core. Ctrl-C saves the runs and stops, the same
command resumes them, and nothing that is finished is repeated. The runs are in out/, each with what
it printed in output.txt, and the picture is out/suite.png.

--only takes the names of other config files, too. Their runs are measured on all splits but train,
so one command makes the rows of a paper's table.
"""
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch

import config
from config import ROOT, Mistake
from data import locate, write_if_missing
from data.shards import Split, split_of
from eval import report
from eval.curves import grouped, read_log
from model import GPT
from sample import comma_separated
from train import TrainConfig, read_options


class Experiment(NamedTuple):
    """How the runs of a config file are measured, and which ones are published."""
    measure: str = ""  # the option of sample.py; empty: --evaluate of all splits but train
    seed: int | None = None  # the first one, from which the others count up; None: the config's
    seconds: int = 300  # that a run takes on one core, compared with those of the others
    by_default: bool = True  # without --only

EXPERIMENTS = {  # the longest begins first, so that all processes end at about the same time
    "quickstart": Experiment("--extrapolate=1,2,4,8", 1337, 330),
    "lookup_small": Experiment(
        "--evaluate=content,position,content_x2,position_x2,content_x3,position_x3", 1337, 105),
    "copy_small": Experiment("--evaluate=val,x1.5,x2,x3,x4", 0, 50),
    "recall_small": Experiment("--evaluate=val,x2,x4,x8,x16", 0, 20),
    "text_small": Experiment("--extrapolate=1,2,4,8", 1337, 3300, by_default=False),
}

def main(words):
    by_default = [name for name, experiment in EXPERIMENTS.items() if experiment.by_default]
    parser = config.Parser(__doc__)
    parser.add_argument("methods", nargs="+", metavar="METHOD",
                        help="a value of --pe, with other options of train.py in the same quotes")
    parser.add_argument("--seeds", type=config.integer, default=1, metavar="N",
                        help="runs of each method in each experiment [1]")
    parser.add_argument("--only", type=comma_separated, default=by_default,
                        metavar="NAMES", help="config files, without config/ and .py "
                                              f"[{','.join(by_default)}]")
    parser.add_argument("--jobs", type=config.integer, default=2, metavar="N",
                        help="processes at a time, each with one thread [2]")
    args = parser.parse_intermixed_args(words)
    by_folder = {}  # a method may be given twice
    for n in range(args.seeds):
        for name in args.only:
            for method in args.methods:
                run = Run(method, name, n)
                by_folder[run.folder] = run
    runs = list(by_folder.values())
    for run in runs:
        run.prepare()
    warn_of_older_runs(runs)
    work(runs, args.jobs)
    show(runs)
    reasons = [f"{run.folder} failed: {run.reason}" for run in runs if run.reason]
    if reasons:
        print("\n".join(reasons))
        raise Mistake(f"{len(reasons)} of {len(runs)} runs failed; the same command tries again")

# --- training and measuring -----------------------------------------------------------------------

class Run:
    """A training run and its measurement, each of which is a process of its own."""

    def __init__(self, method, name, n):
        pe, *options = shlex.split(method)
        for option in options:
            if option.partition("=")[0] in ("--pe", "--seed", "--device", "--resume", "--out_dir"):
                raise Mistake(f"{method!r}: the suite itself sets {option.partition('=')[0]}")
        path = f"config/{name}.py"
        self.experiment = EXPERIMENTS.get(name, Experiment())
        seed = self.experiment.seed
        if seed is None:
            seed = config.load(TrainConfig, [path]).seed
        self.words = [path, f"--pe={pe}", *options, f"--seed={seed + n}", "--device=cpu",
                      "--resume"]
        # refuses mistakes in all runs before any of them is trained
        self.cfg, identity, saved, _, lock = read_options(self.words)
        if lock:
            lock.close()  # the process that trains needs it
        self.folder = self.cfg.out_dir
        if saved and saved.get("settings") != identity["settings"]:
            raise Mistake(f"{path} has changed since {self.folder} was trained; delete that "
                          "directory, or change the file back")
        self.is_trained = saved is not None and saved["step"] >= self.cfg.max_iters
        self.process = None
        self.reason = None  # why it failed

    def prepare(self):
        """Writes the data set if it is missing, and finds out what is to be measured, and whether
        it has been."""
        write_if_missing(self.cfg.data, self.cfg.block_size)
        split = Split(locate(self.cfg.data), "train")
        self.cfg.vocab_size = self.cfg.vocab_size or split.vocab_size
        self.metric = "token_error" if split.masks else "loss"
        measure = self.experiment.measure
        if not measure:
            names = list(split.meta["row_length"])  # in the order in which they were written
            names += self.cfg.eval_splits.split(",")
            names += [split_of(shard) for shard in split.meta["shards"]]  # text has no rows
            names = [name for name in dict.fromkeys(names) if name != "train"]
            measure = f"--evaluate={','.join(names)}"
        self.to_measure = ["sample.py", self.folder, "--device=cpu", measure]
        option, _, values = measure.partition("=")
        if option == "--evaluate":
            wanted = {(name, None) for name in values.split(",")}
        else:
            name = self.cfg.eval_splits.split(",")[0]
            wanted = {(name, float(value)) for value in values.split(",")}
        path = os.path.join(self.folder, "results.jsonl")
        found = set()
        for line in report.lines_of(path, self.folder) if os.path.exists(path) else []:
            if (line["step"], line["options"], line["fingerprint"]) == (
                    self.cfg.max_iters, {}, split.fingerprint):
                found.add((line["split"], line["multiple"]))
        self.is_measured = self.is_trained and found >= wanted

    def finish(self):
        """Trains, if that is not done yet, and measures. Sets `reason` if one of the two fails."""
        os.makedirs(self.folder, exist_ok=True)
        output = Path(self.folder, "output.txt")
        commands = [self.to_measure]
        if not self.is_trained:
            commands.insert(0, ["train.py", *self.words])
        for script, *words in commands:
            with open(output, "a") as file:  # the models are too small for more than one thread
                self.process = subprocess.Popen(
                    [sys.executable, ROOT / script, *words], stdout=file, stderr=file,
                    env={**os.environ, "OMP_NUM_THREADS": "1"})
            status = self.process.wait()
            if status:
                lines = [line for line in output.read_text("utf-8", "replace").split("\n") if line]
                self.reason = lines[-1] if lines else f"status {status}"
                return
        self.is_measured = True

def warn_of_older_runs(runs):
    """A run whose method has changed meanwhile would be resumed, and be a mixture of the two."""
    changed = os.path.getmtime(ROOT / "model.py")
    older = []
    for run in runs:
        path = os.path.join(run.folder, "ckpt.pt")
        if os.path.exists(path) and os.path.getmtime(path) < changed:
            older.append(run.folder)
    if older:
        print("model.py has changed since the checkpoints of these runs. If their method has "
              f"changed, delete them and start again:\nrm -r {shlex.join(older)}")

def work(runs, jobs):
    """Does what is left to do, with `jobs` processes at a time. If a signal stops it, this raises
    Mistake after the runs have saved their checkpoints."""
    waiting = [run for run in runs if not run.is_measured]
    left = total = sum(run.experiment.seconds for run in waiting)
    if waiting:
        print(f"{len(waiting)} runs are to be trained or measured, each with an output.txt in its "
              f"directory, such as {waiting[0].folder}", flush=True)
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which raises KeyboardInterrupt
    with ThreadPoolExecutor(jobs) as pool:
        started = {pool.submit(run.finish): run for run in waiting}
        try:
            for n, future in enumerate(as_completed(started), 1):
                future.result()
                left -= started[future].experiment.seconds
                pace = (time.monotonic() - begin) / (total - left)
                print(f"{n} of {len(waiting)} runs are finished, about "
                      f"{timedelta(seconds=round(pace * left))} left", flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for run in waiting:
                if run.process:
                    run.process.terminate()  # Ctrl-C has reached it already, but no other signal
            raise Mistake("stopped; the same command resumes") from None

# --- tables, sentences and a picture --------------------------------------------------------------

def show(runs):
    """Prints a table for each experiment, with the new rows in bold, and what it says of them, and
    draws the picture."""
    measured = [run for run in runs if run.is_measured]
    if not measured:
        return
    own = [line for line in report.read([run.folder for run in measured]) if not line["options"]]
    published = [line for line in report.read([ROOT / "eval" / "results.jsonl"])
                 if not line["flags"] and not line["options"]]
    lines = own + report.comparable(published, own)
    for path, metric in dict.fromkeys((run.cfg.config, run.metric) for run in measured):
        table = [line for line in lines if line["config"] == path]
        report.print_tables(table, [metric])
        print()
        for run in measured:
            if run.cfg.config == path:
                print(f"{run.folder}: {price(run)}")
        for column in grouped([line for line in table if line["metric"] == metric],
                              *report.COLUMN).values():
            print(where_it_stands(column))
    print("\nBold rows are yours. The others come from another CPU, which rounds differently. To "
          "see how much that matters, add one of their methods, such as rope.\n")
    try:
        report.draw(lines, "out/suite.png")
    except Mistake as mistake:  # without matplotlib
        print(f"no picture, because {mistake}")

def price(run):
    """Returns how large the model of a run is, and how long a step took."""
    with torch.device("meta"):
        parameters = GPT(run.cfg).get_num_params()
    _, records = read_log(run.folder)
    ms = [record["ms"] for record in records if "ms" in record]
    step = f", {statistics.median(ms):.0f} ms per step" if ms else ""
    return f"{parameters / 1e6:.3f}M parameters{step}"

def where_it_stands(column):
    """Returns sentences about the own rows in a column, whose lines are given. They give the
    distance to the two nearest published rows, divided by the standard deviation between the seeds
    of a published method, the spread."""
    heading, = report.headings([tuple(column[0][field] for field in report.COLUMN)])
    means = {}  # {(is it published, label): mean}
    variances = []
    for (beside, label), row in grouped(column, "beside", "label").items():
        values = [line["value"] for line in row]
        means[bool(beside), label] = statistics.fmean(values)
        if beside and len(values) > 1:
            variances.append(statistics.variance(values))
    others = {label: mean for (beside, label), mean in means.items() if beside}
    spread = statistics.fmean(variances) ** 0.5 if variances else 0.0
    if len(others) < 2 or not spread:
        return f"{heading}: there is too little to compare with."
    sentences = []
    for (beside, label), mean in means.items():
        if not beside:
            near = sorted(others, key=lambda other: abs(others[other] - mean))[:2]
            words = []
            for other in near:
                distance = (mean - others[other]) / spread
                if not distance:
                    words.append(f"equal to {other}")
                    continue
                than = "worse than" if distance > 0 else "better than"
                words.append(f"{abs(distance):.1f} spreads {than} {other}")
            sentences.append(f"{label} is {' and '.join(words)}.")
    if statistics.stdev(others.values()) < 2 * spread:
        sentences.append("One seed says little here, because the methods lie so close together.")
    return f"{heading} (a spread is {spread:.3g}): {' '.join(sentences)}"

if __name__ == "__main__":
    config.run(main)
