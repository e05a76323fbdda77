"""
Fills a disk of its own, which needs the right to mount, so the suite leaves it out:

    pytest tests/torture.py
"""
import shutil
import subprocess

import pytest
from conftest import TINY, fails

import checkpoint
import train


@pytest.fixture
def disk(tmp_path):
    """The folder of an empty disk of 1 MB."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)  # the log is still open

def test_a_full_disk(stream, disk):
    """A run ends with one line and keeps its checkpoint. Once there is space, it resumes."""
    path = disk / "run" / "ckpt.pt"
    words = [f"--data={stream}", *TINY, "--eval_interval=1000000", "--checkpoint_interval=5",
             f"--out_dir={disk / 'run'}", "--resume=True"]
    train.main([*words, "--max_iters=5"])
    before = path.read_bytes()
    (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - len(before) // 2))
    assert "No space left on device" in fails("train.py", *words, "--max_iters=20")
    assert path.read_bytes() == before
    (disk / "filler").unlink()
    train.main([*words, "--max_iters=20"])
    assert checkpoint.read(path.parent)["step"] == 20
