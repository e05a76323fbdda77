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
import re
import shlex
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import config
from config import Mistake
from data import locate, write_if_missing
from data.shards import Split, split_of
from eval import report
from sample import comma_separated
from train import StopSignal, TrainConfig, default_directory, read_options, read_records

ROOT = Path(__file__).parent.parent

class Experiment(NamedTuple):
    """How the runs of a config file are measured, and which ones are published."""
    measure: str = ""  # the option of sample.py; empty: --evaluate of all splits but train
    seed: int | None = None  # the first one, from which the others count up; None: the config's
    seconds: int = 300  # that a run takes on one core, more or less

EXPERIMENTS = {  # the longest begins first, so that all processes end at about the same time
    "quickstart": Experiment("--extrapolate=1,2,4,8", 1337, 330),
    "lookup_small": Experiment(
        "--evaluate=content,position,content_x2,position_x2,content_x3,position_x3", 1337, 105),
    "addition_small": Experiment("--evaluate=val,x1.5,x2,x3,x4", 0, 75),
    "copy_small": Experiment("--evaluate=val,x1.5,x2,x3,x4", 0, 50),
    "recall_small": Experiment("--evaluate=val,x2,x4,x8,x16", 0, 20),
}
# without addition_small, which hardly tells methods apart
DEFAULT = "quickstart,lookup_small,copy_small,recall_small"

def main(words):
    parser = config.Parser(__doc__)
    parser.add_argument("methods", nargs="+", metavar="METHOD",
                        help="a value of --pe, with other options of train.py in the same quotes")
    parser.add_argument("--seeds", type=config.integer, default=1, metavar="N",
                        help="runs of each method in each experiment [1]")
    parser.add_argument("--only", type=comma_separated, default=DEFAULT.split(","),
                        metavar="NAMES",
                        help=f"config files, without config/ and .py [{DEFAULT}]")
    parser.add_argument("--jobs", type=config.integer, default=2, metavar="N",
                        help="processes at a time, each with one thread [2]")
    args = parser.parse_intermixed_args(words)
    for name in ("seeds", "jobs"):
        if getattr(args, name) < 1:
            raise Mistake(f"--{name}={getattr(args, name)} must be at least 1")
    by_folder = {}
    for n in range(args.seeds):
        for name in args.only:
            for method in args.methods:
                run = Run(method, name, n)
                by_folder[run.folder] = run
    runs = list(by_folder.values())
    for run in runs:
        run.look_at_what_is_there()
    warn_of_older_runs(runs)
    stop_signal = StopSignal()
    work(runs, args.jobs, stop_signal)
    if stop_signal.number:
        raise Mistake("stopped; the same command resumes")
    show(runs)
    reasons = [f"{run.folder} failed: {run.reason}" for run in runs if run.reason]
    if reasons:
        print("\n".join(reasons))
        raise Mistake(f"{len(reasons)} of {len(runs)} runs failed; the same command tries again")

# --- training and measuring -----------------------------------------------------------------------

class Run:
    """A training run and its measurement, each of which is a process."""

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
        self.words = [path, f"--pe={pe}", *options, f"--seed={seed + n}", "--device=cpu"]
        self.folder = default_directory(config.load(TrainConfig, self.words))
        for option in options:  # most of which train.py leaves out of the name of a directory
            self.folder += "_" + re.sub(r"[^\w.,=+-]", "_", option.removeprefix("--"))
        self.words += ["--resume", f"--out_dir={self.folder}"]
        self.reason = None  # why it failed
        # refuses mistakes in all runs before any of them is trained
        self.cfg, saved, _, lock = read_options(self.words)
        if lock:
            lock.close()  # the processes need it
        self.is_trained = saved is not None and saved["step"] >= self.cfg.max_iters

    def look_at_what_is_there(self):
        """Finds out what is to be measured, for which the data set must exist, and whether it has
        been."""
        write_if_missing(self.cfg.data, self.cfg.block_size)
        split = Split(locate(self.cfg.data), "train")
        self.metric = "token_error" if split.masks else "loss"
        self.measure = self.experiment.measure
        if not self.measure:
            names = self.cfg.eval_splits.split(",")
            names += [split_of(shard) for shard in split.meta["shards"]]
            names = [name for name in dict.fromkeys(names) if name != "train"]
            self.measure = f"--evaluate={','.join(names)}"
        option, _, values = self.measure.partition("=")
        field = "split" if option == "--evaluate" else "multiple"
        found = {str(record[field]) for record in self.records("results.jsonl")
                 if record["step"] == self.cfg.max_iters and not record["options"]}
        wanted = values.split(",")
        if field == "multiple":
            wanted = [str(float(value)) for value in wanted]
        self.is_measured = self.is_trained and found.issuperset(wanted)

    def records(self, name):
        path = os.path.join(self.folder, name)
        return read_records(path) if os.path.exists(path) else []

    @property
    def is_finished(self):
        return self.is_measured or self.reason is not None

    def start(self):
        """Starts the next process. The models are so small that more threads would not help."""
        words = ["train.py", *self.words]
        if self.is_trained:
            words = ["sample.py", self.folder, "--device=cpu", self.measure]
        os.makedirs(self.folder, exist_ok=True)
        with open(os.path.join(self.folder, "output.txt"), "a") as file:
            return subprocess.Popen([sys.executable, ROOT / words[0], *words[1:]], stdout=file,
                                    stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def end(self, status):
        """Notes that its process has ended with this status."""
        if status:
            output = Path(self.folder, "output.txt").read_text("utf-8", "replace").split("\n")
            self.reason = next((line for line in reversed(output) if line), f"status {status}")
        elif self.is_trained:
            self.is_measured = True
        else:
            self.is_trained = True

    def seconds_left(self):
        """Returns how long the rest takes on our machine. A tenth of it is measuring."""
        if self.is_finished:
            return 0.0
        steps = [record["step"] for record in self.records("log.jsonl") if "step" in record]
        done = min(1.0, max(steps, default=0) / max(self.cfg.max_iters, 1))
        return self.experiment.seconds * (1 - 0.9 * done)

def warn_of_older_runs(runs):
    model = os.path.getmtime(ROOT / "model.py")
    older = [run.folder for run in runs
             if run.is_trained and os.path.getmtime(f"{run.folder}/ckpt.pt") < model]
    if older:
        print("model.py has changed since these runs were trained. If their method has changed, "
              f"delete them and start again:\nrm -r {shlex.join(dict.fromkeys(older))}")

def work(runs, jobs, stop_signal):
    """Does what is left to do, with `jobs` processes at a time, until a signal comes."""
    active = {}  # {run: its process}
    begin = time.monotonic()
    at_first = sum(run.seconds_left() for run in runs)
    printed = None
    while not stop_signal.number and not all(run.is_finished for run in runs):
        waiting = [run for run in runs if not run.is_finished and run not in active]
        for run in waiting[: jobs - len(active)]:
            active[run] = run.start()
        time.sleep(0.5)
        for run, process in list(active.items()):
            if process.poll() is not None:
                del active[run]
                if not stop_signal.number:  # which has reached the processes, too
                    run.end(process.returncode)
        finished = sum(run.is_finished for run in runs)
        if finished != printed or sys.stdout.isatty():
            left = sum(run.seconds_left() for run in runs)
            pace = 1 / min(jobs, len(active) or 1)
            if at_first - left > 20:  # enough to measure the pace of this machine
                pace = (time.monotonic() - begin) / (at_first - left)
            print(f"{finished} of {len(runs)} runs are finished, the others take about "
                  f"{timedelta(seconds=round(pace * left))}",
                  end="   \r" if sys.stdout.isatty() else "\n", flush=True)
            printed = finished
    for process in active.values():
        process.terminate()  # a Ctrl-C has reached it already, but no other signal has
    for process in active.values():
        process.wait()

# --- tables and a picture -------------------------------------------------------------------------

def show(runs):
    """Prints a table for each experiment, with the new rows in bold, and draws the picture."""
    measured = [run.folder for run in runs if run.is_measured]
    if not measured:
        return
    lines = report.read(measured)
    lines = [line for line in lines if not line["options"]]
    lines += report.comparable(report.read([ROOT / "eval" / "results.jsonl"]), lines)
    for experiment, metric in {(run.cfg.config, run.metric): None for run in runs}:
        name = Path(experiment).stem
        report.print_tables([line for line in lines if line["experiment"] == name], [metric])
    print("\nBold rows are yours. The others come from another CPU, which rounds differently. To "
          "see how much that matters, add one of their methods, such as rope.\n")
    plain = [line for line in lines
             if not line.get("beside") or not line["flags"] and not line["options"]]
    try:
        report.draw_by_length(plain, "out/suite.png")
    except Mistake as mistake:  # without matplotlib
        print(f"no picture, because {mistake}")

if __name__ == "__main__":
    config.run(main)
