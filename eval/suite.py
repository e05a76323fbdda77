"""
Shows where a method stands: trains it on small experiments, measures it, and prints its rows among
the published ones.

    python -m eval.suite slope                          each experiment with one seed
    python -m eval.suite slope rope --seeds=3           two methods, with three seeds
    python -m eval.suite "slope --pe_lr=10"             a method with options of train.py
    python -m eval.suite slope --only=recall_small,copy_small --jobs=4

A method with one seed takes 10 to 20 minutes of one core. Ctrl-C saves the runs and stops, the same
command resumes them, and nothing that is finished is repeated. The runs are in out/, each with what
it printed in output.txt, and the picture is out/suite.png.

--only takes the names of other config files, too. A run on text is measured at 1 to 8 times the
trained length, and any other on all splits but train.
"""
import os
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import config
from config import ROOT, Mistake, require, runs
from data import locate
from data.shards import Split
from eval import report
from train import TrainConfig, read_options

EXPERIMENTS = ["quickstart", "lookup_small", "copy_small", "recall_small"]  # the longest first
MEASURED = "the suite has measured this run\n"  # at the end of output.txt

def main(words):
    parser = config.Parser(__doc__)
    parser.add_argument("methods", nargs="+", metavar="METHOD",
                        help="a value of --pe, with other options of train.py in the same quotes")
    parser.add_argument("--seeds", type=config.count, default=1, metavar="N",
                        help="runs of each method in each experiment [1]")
    parser.add_argument("--only", type=config.comma_separated, default=EXPERIMENTS, metavar="NAMES",
                        help=f"config files, without config/ and .py [{','.join(EXPERIMENTS)}]")
    parser.add_argument("--jobs", type=config.count, default=2, metavar="N",
                        help="processes at a time, each with one thread [2]")
    args = parser.parse_intermixed_args(words)
    # a mistake in any of the runs is refused before the first one is trained
    jobs = [Job(method, f"config/{name}.py", n) for n in range(args.seeds) for name in args.only
            for method in args.methods]
    jobs = list({job.folder: job for job in jobs}.values())  # a method may be given twice
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which raises KeyboardInterrupt
    with ThreadPoolExecutor(args.jobs) as pool:
        try:
            list(pool.map(Job.finish, jobs))
        except KeyboardInterrupt:
            for number in (signal.SIGINT, signal.SIGTERM):  # they may come again
                signal.signal(number, signal.SIG_IGN)
            pool.shutdown(wait=False, cancel_futures=True)
            for job in jobs:
                job.stop()
            raise Mistake("stopped; the same command resumes") from None
    measured = [job.folder for job in jobs if not job.reason]
    if measured:
        report.main([*measured, f"--beside={ROOT / 'eval' / 'results.jsonl'}",
                     "--metrics=loss,token_error", "--out=out/suite.png"])
    failed = [f"{job.folder} failed: {job.reason}" for job in jobs if job.reason]
    if failed:
        print("\n".join(failed))
        raise Mistake(f"{len(failed)} of {len(jobs)} runs failed; the same command tries again")

class Job:
    """A training run and its measurement, each of which is a process of its own."""

    def __init__(self, method, path, n):
        pe, *options = shlex.split(method)
        for option in options:
            name = option.partition("=")[0]
            require(name not in ("--pe", "--seed", "--device", "--resume", "--out_dir"),
                    f"{method!r}: the suite itself sets {name}")
        seed = config.load(TrainConfig, [path]).seed + n
        self.words = [path, f"--pe={pe}", *options, f"--seed={seed}", "--device=cpu", "--resume"]
        self.cfg, identity, _ = read_options(self.words)
        self.folder = self.cfg.out_dir
        self.output = Path(self.folder, "output.txt")
        self.process = None
        self.reason = None  # why it failed
        self.is_trained = False
        if Path(self.folder, "ckpt.pt").exists():
            self.look_at_checkpoint(identity)

    def look_at_checkpoint(self, identity):
        """Finds out whether the run is finished, and warns of what has changed meanwhile."""
        saved = runs.read_checkpoint(self.folder)
        require(saved.get("settings") == identity["settings"],
                f"{self.cfg.config} has changed since {self.folder} was trained; delete that "
                "directory, or change the file back")
        self.is_trained = saved["step"] >= self.cfg.max_iters
        if os.path.getmtime(ROOT / "model.py") > os.path.getmtime(f"{self.folder}/ckpt.pt"):
            print("model.py has changed since this run was trained. If its method has changed, "
                  f"delete the run and start again: rm -r {shlex.quote(self.folder)}", flush=True)

    def finish(self):
        """Trains and measures the run, unless that is done. If one of the two fails, `reason` is
        the last line that it printed."""
        os.makedirs(self.folder, exist_ok=True)
        printed = self.output.read_text("utf-8", "replace") if self.output.exists() else ""
        if self.is_trained and printed.endswith(MEASURED):
            return
        print(f"training {self.folder}; what it prints is in {self.output}", flush=True)
        if not self.call("train.py", *self.words):
            return
        meta = Split(locate(self.cfg.data), "train").meta
        is_text = meta["loss"] == "all" and not meta["row_length"]
        if is_text:
            measured = self.call("sample.py", self.folder, "--device=cpu", "--extrapolate=1,2,4,8")
        else:
            measured = self.call("eval/scores.py", self.folder, "--device=cpu")
        if measured:
            with open(self.output, "a") as file:
                file.write(MEASURED)
            print(f"{self.folder} is measured:", *self.numbers(), sep="\n  ", flush=True)

    def call(self, script, *words):
        """Runs a script with one thread, because the models are too small for more. Returns whether
        it succeeded."""
        with open(self.output, "a") as file:
            self.process = subprocess.Popen(
                [sys.executable, ROOT / script, *words], stdout=file, stderr=file,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
        if self.process.wait():
            lines = [line for line in self.output.read_text("utf-8", "replace").split("\n") if line]
            self.reason = lines[-1] if lines else "it printed nothing"
        return self.reason is None

    def numbers(self):
        """Returns what the last call has printed of the run: one line for each loss or split."""
        lines = self.output.read_text("utf-8", "replace").split("\n")
        found = [line for line in lines if line.startswith(self.folder) and " reads " not in line]
        return found[-8:]

    def stop(self):
        if self.process:
            self.process.terminate()  # Ctrl-C has reached it already, but no other signal

if __name__ == "__main__":
    config.run(main)
