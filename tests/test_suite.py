"""eval/suite.py: two steps of training on the smallest experiment, in a copy of the project."""
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sample
import train
from config import Mistake
from config.runs import read_checkpoint, read_records
from eval import suite

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
    for wrong in ("rope --n_layr=1", "rope --out_dir=foo", "rope --cope_npos=3"):
        process = start(project, f"rope {TINY}", wrong)
        assert wrong.split("=")[0][7:] in process.communicate()[1]
        assert not (project / "out").exists()
    words = [f"rope {TINY}", f"cope {TINY} --learning_rate=1e38", "--seeds=2"]
    out, errors = start(project, *words).communicate()
    assert "out/recall_small_cope_" in out and "is not finite" not in out
    assert "failed: train.py: error: the " in out and "2 of 4 runs failed" in errors
    assert "x16 (a spread is " in out  # where the row stands
    assert out.index("out/recall_small_rope_n_embd=16_max_iters=2 is measured:\n  out/") < (
        out.index("| row |"))
    rows = [line for line in out.splitlines() if line.startswith("| **")]
    assert len(rows) == 2  # the losses and the wrong answers
    for row in rows:
        assert row.startswith("| **rope --n_embd=16 --max_iters=2** | 2 | ")
    assert "| `alibi` | 5 | 0.0 | 0.0 | 0.0 | 0.0 | 1.2 (0.0–3.0) |" in out
    assert ", sorted by x16\n" in out
    assert (project / "out" / "suite.png").exists()
    folder = project / "out" / "recall_small_rope_n_embd=16_max_iters=2"
    records = read_records(folder / "results.jsonl")
    assert [record["split"] for record in records] == ["val", "x2", "x4", "x8", "x16"]
    before = (folder / "ckpt.pt").stat().st_mtime_ns, (folder / "results.jsonl").read_text()
    os.utime(project / "model.py")
    out, _ = start(project, *words).communicate()
    assert before == ((folder / "ckpt.pt").stat().st_mtime_ns,
                      (folder / "results.jsonl").read_text())
    assert "model.py has changed since this run was trained" in out
    assert f"delete the run and start again: rm -r out/{folder.name}\n" in out

@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_suite(project, number):
    """The runs save and stop, before the suite ends, and the same command resumes them. Of a run
    that is half trained, it says if model.py has changed meanwhile."""
    words = ["rope --max_iters=2000 --eval_interval=1000", "--jobs=1"]
    folder = project / "out" / "recall_small_rope_max_iters=2000"
    reached = []
    for _ in range(2):
        process = start(project, *words)
        while not (folder / "log.jsonl").exists() or (folder / "log.jsonl").read_text().count(
                '"lr"') < 3 * (1 + len(reached)):
            time.sleep(0.1)
            assert process.poll() is None
        process.send_signal(number)
        out, errors = process.communicate()
        assert "stopped; the same command resumes" in errors
        assert ("has changed since" in out) == bool(reached)
        reached.append(read_checkpoint(folder)["step"])
        os.utime(project / "model.py")
    assert 0 < reached[0] < reached[1] < 2000

def test_a_run_is_measured_once(stream, tmp_path, monkeypatch):
    """Somebody may have measured it in another way, which does not count. A stream is measured at
    several lengths."""
    monkeypatch.chdir(tmp_path)
    method = (f"rope --data={stream} --max_iters=1 --eval_batches=1 --n_layer=1 --n_embd=16 "
              "--block_size=16")
    called = []
    call = suite.Job.call
    monkeypatch.setattr(suite.Job, "call", lambda job, *words: called.append(words) or call(
        job, *words))
    job = suite.Job(method, "config/quickstart.py", 0)
    train.main(job.words)
    sample.main([job.folder, "--extrapolate=1", "--device=cpu", "--eval_tokens=512"])
    for times in (1, 2):
        again = suite.Job(method, "config/quickstart.py", 0)
        again.finish()
        assert again.is_trained and again.reason is None
        assert [words[0] for words in called] == ["train.py", "sample.py"]
    records = read_records(f"{job.folder}/results.jsonl")
    assert [record["multiple"] for record in records] == [1, 1, 2, 4, 8]

def test_an_edited_config_file_is_another_run(stream, tmp_path, monkeypatch):
    """Otherwise the numbers of the old file would be shown for the new one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    mine = tmp_path / "config" / "mine.py"
    mine.write_text(f"data = {str(stream)!r}\nn_layer = n_head = 1\nn_embd = block_size = 16\n"
                    "max_iters = 1\neval_batches = 1\n")
    train.main(suite.Job("rope", "config/mine.py", 0).words)
    assert suite.Job("rope", "config/mine.py", 0).is_trained
    mine.write_text(mine.read_text() + "learning_rate = 1.0\n")
    with pytest.raises(Mistake, match="config/mine.py has changed since out/mine_rope"):
        suite.Job("rope", "config/mine.py", 0)


PARITY = '''"""Parity of a few bits."""
import numpy as np

from data import command
from data.rows import write_rows

WRITTEN_BY_TRAIN = True
UNIT = "bit"

def generate(rng, rows, bits):
    tokens = rng.integers(0, 2, (rows, bits + 1))
    tokens[:, -1] = tokens[:, :-1].sum(1) % 2
    mask = np.zeros_like(tokens)
    mask[:, -1] = 1
    return tokens, mask

def prepare(
    folder,
    bits: int = 12,  # per row of train
):
    splits = dict(train=(600, dict(bits=bits)), val=(50, dict(bits=bits)))
    splits["x2"] = 50, dict(bits=2 * bits)
    write_rows(folder, ["0", "1"], 0, generate, **splits)

def place(split, length, given):
    return dict(kind="")

if __name__ == "__main__":
    command(prepare, __doc__)
'''

@pytest.mark.slow
def test_a_new_task(project):
    """A task is a script in data/ and a config file. It gets its table, and a picture with its own
    title and unit, without any other change."""
    (project / "data" / "parity.py").write_text(PARITY)
    (project / "config" / "parity_small.py").write_text(
        'title = "the parity of bits"\ndata = "parity"\nn_layer = 1\nn_head = 2\nn_embd = 16\n'
        "block_size = 12\nmax_iters = 2\neval_batches = 1\n")
    words = [sys.executable, "-m", "eval.suite", "rope", "alibi", "--only=parity_small"]
    done = subprocess.run(words, cwd=project, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "parity_small, on parity, trained on 12 tokens at a time" in done.stdout
    assert "| row | seeds | val | x2 |" in done.stdout and "| `alibi` | 1 | " in done.stdout
    code = ("from eval import draw, report\n"
            "draw.save = lambda figure, path: print([(ax.get_title('left'), ax.get_xlabel()) "
            "for ax in figure.axes])\n"
            "report.main(['out/parity_small_rope', 'out/parity_small_alibi'])")
    done = subprocess.run([sys.executable, "-c", code], cwd=project, text=True, capture_output=True)
    picture = [("the parity of bits", "length, bits; dashed: trained length")]
    assert str(picture) in done.stdout, done.stderr
    assert (project / "out" / "suite.png").exists()
