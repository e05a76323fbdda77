"""
Ends training in ways that take minutes or a disk of its own, and checks that nothing is lost:

    python tests/torture.py    needs the right to mount

First the disk of a run is filled. Then training is interrupted as in tests/test_train.py: 40 times
each by kills, by signals, and by signals with two processes.
"""
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.chdir(ROOT)
os.environ["INTERRUPTIONS"] = "40"

from conftest import TINY, write_stream  # noqa: E402

import checkpoint  # noqa: E402


def train(*words):
    """Returns the exit status of a training run, and what it wrote to stderr."""
    done = subprocess.run([sys.executable, "train.py", *words], stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, text=True)
    return done.returncode, done.stderr.strip()

def try_disks(small, data):  # small is a folder on a disk of 1 MB
    out = small / "run"
    words = [f"--data={data}", *TINY, "--checkpoint_interval=5", "--eval_interval=1000000",
             f"--out_dir={out}", "--resume=True"]
    assert train(*words, "--max_iters=5") == (0, "")
    before = (out / "ckpt.pt").read_bytes()
    (small / "filler").write_bytes(bytes(shutil.disk_usage(small).free - len(before) // 2))
    status, line = train(*words, "--max_iters=20")
    assert status == 1 and "No space left on device" in line and "\n" not in line, line
    assert (out / "ckpt.pt").read_bytes() == before
    (small / "filler").unlink()
    assert train(*words, "--max_iters=20") == (0, "")
    assert checkpoint.read(str(out))["step"] == 20

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        data = write_stream(Path(folder) / "data")
        small = Path(folder) / "small"
        small.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], check=True)
        try:
            try_disks(small, data)
        finally:
            subprocess.run(["umount", small])
    print("a full disk: one line, and nothing lost")
    sys.exit(pytest.main(["-q", "tests/test_train.py", "-k", "random_moments"]))
