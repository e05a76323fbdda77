"""eval/suite.py: two steps of training on the smallest experiment, in a copy of the project."""
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eval import suite
from model import read_checkpoint
from train import read_records

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parent.parent
TINY = "--max_iters=2 --eval_batches=1 --n_embd=16"

@pytest.fixture
def project(tmp_path):
    """A copy of the project without its runs and data sets."""
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    for folder in ("config", "data", "eval"):
        (tmp_path / folder).mkdir()
        for path in (ROOT / folder).glob("*.*"):
            if path.is_file():
                shutil.copy(path, tmp_path / folder)
    return tmp_path

def as_in_a_terminal():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nohup and `&` ignore it

def start(project, *words):
    return subprocess.Popen([sys.executable, "-m", "eval.suite", *words, "--only=recall_small"],
                            cwd=project, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            preexec_fn=as_in_a_terminal)

@pytest.mark.slow
def test_the_suite(project):
    """A mistake in one method is refused before anything is trained. A run that fails is named,
    with its reason, and does not stop the others. The same command repeats only that one."""
    for wrong in ("rope --n_layr=1", "rope --out_dir=foo"):
        process = start(project, f"rope {TINY}", wrong)
        assert wrong.split()[1][:9] in process.communicate()[1] and not (project / "out").exists()
    words = [f"rope {TINY}", f"cope {TINY} --learning_rate=1e38", "--seeds=2"]
    out, errors = start(project, *words).communicate()
    assert "out/recall_small_cope_seed1_" in out and "is not finite" not in out
    assert "failed: train.py: error: the " in out and "2 of 4 runs failed" in errors
    (row,) = [line for line in out.splitlines() if line.startswith("| **")]
    assert row.startswith("| **rope --n_embd=16 --max_iters=2** | 2 | ")
    assert "| `alibi` | 5 | 0.0 | 0.0 | 0.0 | 0.0 | 1.2 (0.0–3.0) |" in out
    assert (project / "out" / "suite.png").exists()
    (folder,) = project.glob("out/recall_small_rope_seed0*")
    assert [line["split"] for line in read_records(folder / "results.jsonl")
            if line["metric"] == "loss"] == ["val", "x2", "x4", "x8", "x16"]
    before = (folder / "ckpt.pt").stat().st_mtime_ns, (folder / "results.jsonl").read_text()
    os.utime(project / "model.py")
    out, _ = start(project, *words).communicate()
    assert before == ((folder / "ckpt.pt").stat().st_mtime_ns,
                      (folder / "results.jsonl").read_text())
    assert "model.py has changed since these runs were trained" in out and str(folder.name) in out

@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_suite(project, number):
    """The runs save and stop, before the suite ends, and the same command resumes them."""
    words = ["rope --max_iters=2000 --eval_interval=1000", "--jobs=1"]
    folder = project / "out" / "recall_small_rope_seed0_max_iters=2000_eval_interval=1000"
    reached = []
    for _ in range(2):
        process = start(project, *words)
        while not (folder / "log.jsonl").exists() or (folder / "log.jsonl").read_text().count(
                '"lr"') < 3 * (1 + len(reached)):
            time.sleep(0.1)
            assert process.poll() is None
        process.send_signal(number)
        assert "stopped; the same command resumes" in process.communicate()[1]
        reached.append(read_checkpoint(folder)["step"])
    assert 0 < reached[0] < reached[1] < 2000

def test_what_is_measured():
    """Every experiment's config exists, and what it measures has a split or is a list of
    multiples."""
    for name, experiment in suite.EXPERIMENTS.items():
        assert (ROOT / "config" / f"{name}.py").exists()
        assert experiment.measure.startswith(("--evaluate=", "--extrapolate="))
