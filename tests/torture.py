"""
Ends training in ways that take minutes or a separate disk, and checks that nothing is lost:

    python tests/torture.py [kills] [signals] [pairs] [disk]    all of them by default

kills    SIGKILL 40 times at random moments, then the same weights as without
signals  the same with SIGTERM, Ctrl-C and SIGHUP, where each must leave a checkpoint
pairs    the same signals to one of two processes
disk     a full disk and a read-only one (needs the right to mount)
"""
import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.chdir(ROOT)

from conftest import SIGNALS, TINY, write_stream  # noqa: E402
from test_train import interrupt_often  # noqa: E402

import checkpoint  # noqa: E402


def train(words, status=0):
    """Trains, and returns the errors, which are one line if the status is 1."""
    done = subprocess.run([sys.executable, "train.py", *words], stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    assert status == 0 or done.stderr.count("\n") == 1, done.stderr
    return done.stderr.strip()

def interrupt(numbers, folder, ranks=1):
    with contextlib.redirect_stdout(io.StringIO()):
        reached = interrupt_often(folder / "data", folder, 40, numbers, ranks)
    return f"40 times, {len(set(reached))} checkpoints up to step {reached[-1]}, no bit lost"

def disk(folder):
    small = folder / "small"
    flags = ["--checkpoint_interval=5", "--eval_interval=1000000"]
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], check=True)
    try:
        out, filler = small / "run", small / "filler"
        words = [f"--data={folder / 'data'}", *TINY, *flags]
        here = [*words, f"--out_dir={out}", "--resume=True"]
        train([*here, "--max_iters=5"])
        before = (out / "ckpt.pt").read_bytes()
        filler.write_bytes(bytes(shutil.disk_usage(small).free - len(before) // 2))
        full = train(here, 1)
        assert "No space left on device" in full, full
        assert (out / "ckpt.pt").read_bytes() == before
        assert sorted(os.listdir(out)) == ["ckpt.pt", "log.jsonl"]
        filler.unlink()
        subprocess.run(["mount", "-o", "remount,ro", small], check=True)
        line = train(here, 1)
        assert "Read-only file system" in line, line
        subprocess.run(["mount", "-o", "remount,rw", small], check=True)
        train([*here, "--max_iters=20"])
        assert checkpoint.read(str(out))["step"] == 20
    finally:
        subprocess.run(["umount", small])
    return f"{full!r}; one line if read-only; the run went on afterwards"

TESTS = {
    "kills": partial(interrupt, [signal.SIGKILL]),
    "signals": partial(interrupt, list(SIGNALS)),
    "pairs": partial(interrupt, list(SIGNALS), ranks=2),
    "disk": disk,
}

if __name__ == "__main__":
    chosen = sys.argv[1:] or list(TESTS)
    if not set(chosen) <= TESTS.keys():
        sys.exit(__doc__.strip())
    for name in chosen:
        with tempfile.TemporaryDirectory() as temporary:
            write_stream(Path(temporary) / "data")
            print(f"{name}: {TESTS[name](Path(temporary))}", flush=True)
