"""The format of data/, its reader, writer and commands, against plain arrays, token by token.

Text corpora are in test_corpora.py.
"""
import contextlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import contents, fails, one_line

from data import command, flip_flop, locate, prepare_if_missing, shards, stdlib
from data.shards import Split, Writer
from data.text import tokenizer

ROOT = Path(__file__).parent.parent

def stream(folder, tokens=1000, vocab_size=500, shard_tokens=170, loss=None):
    """Writes a stream of one split in several shards, and returns its tokens."""
    values = np.random.default_rng(0).integers(0, vocab_size, tokens)
    with Writer(folder, shard_tokens) as writer:
        for i in range(0, tokens, 37):  # the last one is shorter
            mask = None if loss is None else loss[i : i + 37]
            writer.write("train", values[i : i + 37], mask)
        writer.finish(vocab_size=vocab_size, tokenizer="bytes")
    return values

def drawn_set(folder, seed):
    """Writes a set of drawn splits in drawn chunks, one split's among another's. Returns
    {split: (tokens, mask)}, (n,) of a stream and (n, row_length) of rows, and what meta.json must
    say. The mask is None in a set without masks."""
    dice = np.random.default_rng(seed)
    vocab_size = int(dice.choice([2, 300, 65536]))
    is_masked = bool(dice.integers(2))
    shard_tokens = int(dice.integers(20, 300))
    splits = {}
    lengths = {}
    shard_sizes = {}
    for split in ("test", "test_ood", "val")[: dice.integers(1, 4)]:
        shape = [int(dice.integers(2, 600))]
        if dice.integers(2):
            lengths[split] = int(dice.integers(2, 30))
            shape.append(lengths[split])
        tokens = dice.integers(0, vocab_size, shape)
        mask = dice.integers(0, 2, shape) if is_masked else None
        splits[split] = tokens, mask
        shard_sizes[split] = [0]
    begins = dict.fromkeys(splits, 0)
    with Writer(folder, shard_tokens) as writer:
        while begins:
            split = str(dice.choice(list(begins)))
            tokens, mask = splits[split]
            chunk = slice(begins[split], begins[split] + int(dice.integers(0, 90)))
            writer.write(split, tokens[chunk], None if mask is None else mask[chunk])
            begins[split] = chunk.stop
            if chunk.stop >= len(tokens):
                del begins[split]
            if split not in lengths:  # a shard ends with the write that fills it
                if shard_sizes[split][-1] >= shard_tokens:
                    shard_sizes[split].append(0)
                shard_sizes[split][-1] += len(tokens[chunk])
        writer.finish(vocab_size, tokenizer="bytes", separator=1)
    for split, length in lengths.items():  # a shard has as many whole rows as fit, but at least one
        rows = max(shard_tokens // length, 1)
        total = len(splits[split][0])
        shard_sizes[split] = [length * min(rows, total - i) for i in range(0, total, rows)]
    named = {}
    for split, sizes in shard_sizes.items():
        for i, size in enumerate(sizes):
            named[f"{split}_{i:06d}.bin"] = size
    meta = {"vocab_size": vocab_size, "tokenizer": "bytes", "separator": 1, "row_length": lengths,
            "loss": "mask" if is_masked else "all", "shards": dict(sorted(named.items()))}
    return splits, meta

# reading

@pytest.mark.parametrize("seed", range(12))
def test_what_is_read_is_what_was_written(tmp_path, seed):
    splits, meta = drawn_set(tmp_path / "set", seed)
    files = contents(tmp_path / "set")
    assert json.loads(files["meta.json"]) == meta
    dice = np.random.default_rng(seed)
    for name, (tokens, mask) in splits.items():
        length = meta["row_length"].get(name, 0)
        shard_names = [shard for shard in meta["shards"] if shard.rpartition("_")[0] == name]
        raw = b"".join(files[shard] for shard in shard_names)
        assert raw == b"".join(int(token).to_bytes(2, "little") for token in tokens.flat)
        split = Split(tmp_path / "set", name)
        rows = len(tokens) if length else 0
        assert (split.tokens, split.row_length, split.rows) == (tokens.size, length, rows)
        assert all(isinstance(array, np.memmap) for array in split.bins)  # a batch reads little
        flat = tokens.reshape(-1)
        targets = flat if mask is None else np.where(mask.reshape(-1), flat, -1)
        for size in (1, 2, int(dice.integers(1, len(flat))), len(flat) - 1):
            if length and size < length - 1:
                continue
            size = length - 1 if length else size
            starts = dice.integers(0, len(flat) - size, 20)
            x, y = split.read(starts, size)
            assert x.dtype == y.dtype == np.int64
            for i, start in enumerate(starts):
                assert np.array_equal(x[i], flat[start : start + size])
                assert np.array_equal(y[i], targets[start + 1 : start + size + 1])

@pytest.mark.parametrize("seed", range(8))
def test_evaluation_windows_share_no_target(tmp_path, seed):
    splits, meta = drawn_set(tmp_path / "set", seed)
    dice = random.Random(seed)
    for name, (tokens, _) in splits.items():
        split = Split(tmp_path / "set", name)
        length = meta["row_length"].get(name, 0) - 1
        size = length if length > 0 else dice.randint(1, tokens.size - 1)
        every = split.windows(size)
        assert every.dtype == np.int64
        assert len(every) == (len(tokens) if length > 0 else (tokens.size - 1) // size)
        for count in (1, 2, dice.randint(1, 50), 10**6):
            starts = split.windows(size, count)
            assert len(starts) == min(count, len(every)) and starts[0] == 0
            gaps = np.diff(starts)
            assert (gaps >= size).all() and starts[-1] + size < tokens.size
            if length > 0:
                assert not (starts % (length + 1)).any()
            elif len(starts) > 1:
                assert starts[-1] == tokens.size - 1 - size and np.ptp(gaps) <= 1  # end to end

@pytest.mark.parametrize("seed", range(8))
def test_batches_depend_on_seed_and_step_alone(tmp_path, seed):
    """Otherwise a resumed run, or one on several machines, would train on other data."""
    splits, meta = drawn_set(tmp_path / "set", seed)
    dice = random.Random(seed)
    for name, (tokens, _) in splits.items():
        size = meta["row_length"].get(name, dice.randint(2, tokens.size)) - 1
        batch_size = dice.choice([4, 8, 24])
        split = Split(tmp_path / "set", name)
        straight = [split.batch(step, batch_size, size, seed) for step in range(6)]
        others = [split.batch(step, batch_size, size, seed + 1) for step in range(6)]
        assert tokens.size - size < 9 or str(others) != str(straight)
        resumed = Split(tmp_path / "set", name)
        for step in (5, 2, 3, 0):
            want = straight[step]
            for world in (1, 2, 4):
                ranks = [resumed.batch(step, batch_size, size, seed, rank, world)
                         for rank in range(world)]
                for i in (0, 1):
                    assert np.array_equal(np.concatenate([rank[i] for rank in ranks]), want[i])

@pytest.mark.parametrize("batch_size", [1, 8, 50])
def test_epochs_hold_every_row_once(tmp_path, batch_size):
    rows = np.random.default_rng(1).integers(0, 90, (23, 6))
    rows[:, 0] = np.arange(23)
    with Writer(tmp_path, 25) as writer:
        writer.write("train", rows)
        writer.finish(vocab_size=100, tokenizer="bytes")
    split = Split(tmp_path, "train")
    steps = -(-6 * 23 // batch_size)
    x = np.concatenate([split.batch(step, batch_size, 100, seed=9)[0] for step in range(steps)])
    orders = [tuple(x[start : start + 23, 0]) for start in range(0, 6 * 23, 23)]
    assert all(sorted(order) == list(range(23)) for order in orders) and len(set(orders)) == 6
    assert np.array_equal(x, rows[x[:, 0], :-1])

def test_random_windows_are_uniform(tmp_path):
    with Writer(tmp_path, 30) as writer:
        writer.write("train", np.arange(101))  # a token is its offset, so x[0] is the start
        writer.finish(vocab_size=101, tokenizer="bytes")
    split = Split(tmp_path, "train")
    starts = [split.batch(step, 96, 5, seed=0)[0][:, 0] for step in range(300)]
    counts = np.bincount(np.concatenate(starts), minlength=101)
    assert not counts[96:].any() and (abs(counts[:96] - 300) < 5 * 300**0.5).all()

def test_a_set_of_older_code_is_read(tmp_path):
    """Its meta.json has other entries beside those that are read."""
    values = stream(tmp_path / "set")
    path = tmp_path / "set" / "meta.json"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps(meta | {"words": {"train": 9}, "asked": {"tokenizer": "bytes"}}))
    assert Split(tmp_path / "set", "train").read([0], 999)[0].tolist() == [values[:-1].tolist()]
    with pytest.raises(ValueError, match="by older code; delete it to start over"):
        Writer(tmp_path / "set", settings={"tokenizer": "bytes"})

# errors: one line that names the value and the mend

def test_missing_set_names_its_command(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "my file.txt").write_text("text")
    for name, words in {
        "nowhere": f"python -m data.NAME --out={tmp_path / 'nowhere'}`, where NAME is one of c4, ",
        "empty": "python -m data.NAME",
        "stdlib": f"python -m data.stdlib --out={tmp_path / 'stdlib'}`",
        "flip_flop@length=8,seed=1": "python -m data.flip_flop --length=8 --seed=1 --out=",
        "my file.txt": f"python -m data.text '--source={tmp_path / 'my file.txt'}'`",
    }.items():
        with pytest.raises(FileNotFoundError) as error:
            Split(tmp_path / name, "train")
        one_line(error, words)

def test_files_that_are_not_those_of_meta(tmp_path):
    """Otherwise a run would continue on a part of the data, or with shifted masks."""
    stream(tmp_path, loss=np.ones(1000))
    with pytest.raises(ValueError) as error:
        Split(tmp_path, "vla")
    one_line(error, "no split 'vla'; it has: train", "--eval_splits")
    for name in ("train_000003.bin", "train_000003.loss"):
        path = tmp_path / name
        whole = path.read_bytes()
        for content in (None, b"", whole[:-1], whole + b"\0"):
            path.unlink()
            fault = "is missing"
            if content is not None:
                path.write_bytes(content)
                fault = f"has {len(content)} bytes instead of {len(whole)}"
            with pytest.raises(ValueError) as error:
                Split(tmp_path, "train")
            one_line(error, name, fault, "delete", f"python -m data.NAME --out={tmp_path}")
            path.write_bytes(whole)
    Split(tmp_path, "train")

def test_token_beyond_the_vocabulary(tmp_path):
    stream(tmp_path)
    shard = np.memmap(tmp_path / "train_000002.bin", dtype="<u2", mode="r+")
    shard[380 - 2 * 185] = 500
    shard.flush()
    split = Split(tmp_path, "train")
    split.read([320, 381], 59)
    for start in (320, 380):  # as the last target, and as the first input
        with pytest.raises(ValueError) as error:
            split.read([0, start], 60)
        one_line(error, str(tmp_path), "token 500", "vocab_size=500")

def test_block_sizes_that_do_not_fit(tmp_path):
    stream(tmp_path / "s")
    with Writer(tmp_path / "t") as writer:
        writer.write("train", np.ones((9, 6)))
        writer.finish(vocab_size=2, tokenizer="bytes")
    for name, size, need in (("s", 1000, "block_size < 1000"), ("t", 4, "block_size >= 5")):
        split = Split(tmp_path / name, "train")
        for call in (lambda: split.batch(0, 2, size, seed=0), lambda: split.windows(size)):
            with pytest.raises(ValueError) as error:
                call()
            one_line(error, "split 'train'", "tokens", f"{need}, got {size}")

# writing

def test_writer_refuses_what_does_not_fit(tmp_path):
    for tokens, found in (([-1, 5], "-1 to 5"), ([65536], "65536 to 65536")):
        with pytest.raises(ValueError) as error, Writer(tmp_path / "a") as writer:
            writer.write("train", tokens)
        one_line(error, "[0, 65535]", found)
    for tokens, vocab_size in (([1, 500], 500), ([1, 500], 65537), ([], 5)):
        with pytest.raises(ValueError) as error, Writer(tmp_path / "a") as writer:
            writer.write("train", tokens)
            writer.finish(vocab_size=vocab_size, tokenizer="bytes")
        one_line(error, str(tmp_path / "a"), f"vocab_size={vocab_size}")
    assert not (tmp_path / "a").exists()

def test_a_set_gets_its_name_when_it_is_complete(tmp_path):
    unfinished = tmp_path / "set.part"
    with Writer(tmp_path / "set", 20) as writer:
        writer.write("train", np.ones((9, 6)), np.ones((9, 6)))
        assert len(contents(unfinished)) == 6 and not (tmp_path / "set").exists()
    # what an error or a kill leaves does not get into the next set
    for name in ("train_000001.bin.tmp", "meta.json.tmp", "val_000007.loss"):
        (unfinished / name).write_bytes(b"{")
    with Writer(tmp_path / "set") as writer:
        assert not contents(unfinished)
        writer.write("train", [1, 2, 3])
        writer.finish(vocab_size=4, tokenizer="bytes")
    assert set(contents(tmp_path / "set")) == {"meta.json", "train_000000.bin"}
    assert not unfinished.exists()

def everything(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}

@pytest.mark.parametrize("name, named", [
    ("set/notes.txt", "set"), ("set/train_000000.bin", "set"), ("set", "set"),
    ("set.part/notes_1.bin", "set.part/notes_1.bin"), ("set.part/a/b", "set.part/a")])
def test_other_files_are_left_alone(tmp_path, name, named):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(b"mine")
    before = everything(tmp_path)
    with pytest.raises(ValueError) as error:
        Writer(tmp_path / "set")
    one_line(error, str(tmp_path / named), "in the way", "--out")
    assert everything(tmp_path) == before

def test_links(tmp_path):
    """A linked file is not written through. The set's own folder may be a link to another disk."""
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "set.part").mkdir()
    for name in ("train_000000.bin", "meta.json.tmp"):
        (tmp_path / "set.part" / name).symlink_to(tmp_path / "mine")
    stream(tmp_path / "set")
    assert (tmp_path / "mine").read_bytes() == b"mine"
    (tmp_path / "disk").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "disk")
    stream(tmp_path / "linked")
    assert contents(tmp_path / "disk") == contents(tmp_path / "set")
    assert (tmp_path / "linked").is_symlink()

def test_a_mounted_disk_is_refused_first(tmp_path, monkeypatch):
    """The finished folder could not be renamed to it."""
    def busy(path):
        raise OSError("Device or resource busy")

    (tmp_path / "set").mkdir()
    monkeypatch.setattr(Path, "rmdir", busy)
    with pytest.raises(ValueError) as error:
        Writer(tmp_path / "set")
    one_line(error, str(tmp_path / "set"), "in the way", "--out")

def test_a_whole_set_is_never_written_over(tmp_path):
    stream(tmp_path, loss=np.ones(1000))
    before = contents(tmp_path)
    for attempt in (lambda: Writer(tmp_path), lambda: flip_flop.prepare(tmp_path, train=3)):
        with pytest.raises(FileExistsError) as error:
            attempt()
        one_line(error, str(tmp_path), "is complete; delete it")
    assert contents(tmp_path) == before

def test_without_fcntl(tmp_path, monkeypatch):
    """Windows has no fcntl, cannot open folders, and has another separator in paths."""
    def files_only(path, *arguments):
        assert not os.path.isdir(path)
        return os_open(path, *arguments)

    stream(tmp_path / "want")
    os_open = os.open
    monkeypatch.setattr(shards, "fcntl", None)
    monkeypatch.setattr(os, "open", files_only)
    values = stream(tmp_path / "set")
    assert contents(tmp_path / "set") == contents(tmp_path / "want")
    assert Split(tmp_path / "set", "train").read([0], 999)[0].tolist() == [values[:-1].tolist()]
    monkeypatch.setattr(os, "sep", "\\")
    for path in ("a/b", "a\\b"):
        assert locate(path) == Path(path)
    source = "import sys; sys.modules['fcntl'] = None; import data.shards"
    assert subprocess.run([sys.executable, "-c", source], cwd=ROOT).returncode == 0

# tokenizers

def test_bytes_round_trip():
    bytewise = tokenizer({"tokenizer": "bytes"})
    text = "def naïve(): return 'κόσμε 🐍 \x00\r\n\t'  "
    assert bytewise.encode(text) == list(text.encode())
    assert bytewise.encode("a<|endoftext|>b") == [97, 256, 98]
    assert bytewise.decode([97, 256, 98, 257, 60000]) == "a<|endoftext|>b"
    assert bytewise.decode(bytewise.encode(text)) == text
    assert bytewise.decode(np.array([0xCE, 0xBA], dtype=np.int64)) == "κ"

def test_symbols_round_trip():
    symbols = tokenizer({"tokenizer": {"symbols": ["w", "r", "i", "0", "1"]}})
    assert symbols.encode("w 1  i 0\nr 1") == [0, 4, 2, 3, 1, 4]
    assert symbols.decode(np.array([0, 4, 2, 3, 1, 4, 5])) == "w 1 i 0 r 1"
    with pytest.raises(ValueError) as error:
        symbols.encode("w 2")
    one_line(error, "'2'", "w r i 0 1")

def test_tokenizer_that_cannot_be_loaded(monkeypatch):
    def offline(name):
        raise OSError("no network\nat all")

    with pytest.raises(ValueError) as error:
        tokenizer({"tokenizer": "gpt-nothing"})
    one_line(error, "'gpt-nothing'", "check its name")
    monkeypatch.setattr("tiktoken.get_encoding", offline)
    with pytest.raises(ValueError) as error:
        tokenizer({"tokenizer": "gpt2"})
    one_line(error, "'gpt2'", "OSError: no network", "needs a network")

# the standard library

def test_stdlib_splits_by_file(tmp_path, monkeypatch):
    # a path may pass through a folder of that name
    library = tmp_path / "lib" / "python3.x" / "site-packages" / "lib"
    files = {}
    for i in range(25):
        files[f"p{i % 3}/m{i:02d}.py"] = f"# файл {i}\n".encode() + bytes([255, 0, 13, 10]) * i
    files["p1/m04.py"] = b""
    others = dict.fromkeys(("site-packages/x.py", "dist-packages/y/z.py", "p0/notes.txt"), b"other")
    for name, content in (files | others).items():
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_bytes(content)
    monkeypatch.setattr(stdlib.sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    stdlib.prepare(tmp_path / "out")
    want = {"train": [], "val": []}
    for place, name in enumerate(sorted(files), 1):
        want["train" if place % 10 else "val"] += [*files[name], 256]
    for split, tokens in want.items():
        got = Split(tmp_path / "out", split)
        assert got.tokens == len(tokens) and got.meta["separator"] == 256 and got.vocab_size == 257
        x, y = got.read([0], len(tokens) - 1)
        assert [*x[0], y[0, -1]] == tokens
    assert not stdlib.DOWNLOAD
    shutil.rmtree(library)
    library.mkdir()
    with pytest.raises(FileNotFoundError) as error:
        stdlib.prepare(tmp_path / "none")
    one_line(error, "no *.py files in")

# interrupted, or written twice at once

def test_files_are_on_the_disk_before_the_set_has_its_name(tmp_path, monkeypatch):
    """Otherwise a power cut could leave a set with half-written files."""
    synced = {}
    renamed = []
    fsync, rename = os.fsync, os.rename

    def recording_fsync(descriptor):
        fsync(descriptor)
        synced[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def recording_rename(source, target):
        for path in Path(source).iterdir():
            assert synced[path.stat().st_ino] == path.stat().st_size  # to the last byte
            renamed.append(path.name)
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "rename", recording_rename)
    stream(tmp_path / "set", loss=np.ones(1000))
    assert sorted(renamed) == sorted(contents(tmp_path / "set")) and len(renamed) == 13

def test_a_full_disk_is_one_line(tmp_path):
    """What is saved stays, and the next start succeeds."""
    how = dict(length=64, train=2000, val=9, sparse=9)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))  # a larger file does not fit
    try:
        with pytest.raises(OSError) as error:
            flip_flop.prepare(tmp_path / "set", **how, dense=5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    path = tmp_path / "set.part" / "dense_000000.bin"
    one_line(error, str(path), "make room there or use --out")
    assert "train_000000.bin" in contents(tmp_path / "set.part") and not path.exists()
    flip_flop.prepare(tmp_path / "set", **how, dense=9)
    assert Split(tmp_path / "set", "dense").rows == 9 and not (tmp_path / "set.part").exists()

def start(source, *words):
    """A process that runs Python code in the repository's root."""
    return subprocess.Popen([sys.executable, "-c", source, *map(str, words)], cwd=ROOT, text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)

def test_starts_at_once_make_a_set_once(tmp_path, capsys):
    name = "flip_flop@train=30000,length=64,val=9,sparse=9,dense=9"
    prepare_if_missing(name, tmp_path / "direct")
    source = "import sys, data; data.prepare_if_missing(*sys.argv[1:])"
    processes = [start(source, name, tmp_path / "set") for _ in range(3)]
    printed = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert "".join(printed).count(" train, ") == 1  # one has written it
    assert contents(tmp_path / "set") == contents(tmp_path / "direct")

WRITING = """
import sys
from data import command
from data.shards import Writer
def prepare(folder):
    with Writer(folder) as writer:
        print("writing", flush=True)
        sys.stdin.readline()
        writer.write("train", [1, 2])
        writer.finish(vocab_size=3, tokenizer="bytes")
command(prepare, "")
"""

@pytest.mark.parametrize("end", ["finished", "killed", "gone"])
def test_a_start_waits_for_another(tmp_path, end):
    """Whether the other finishes, is killed, or gives up and removes the .part folder."""
    with contextlib.ExitStack() as stack:
        first, second = [stack.enter_context(start(WRITING, f"--out={tmp_path / 'set'}"))
                         for _ in range(2)]
        try:
            lines = {process: process.stdout.readline() for process in (first, second)}
            if lines[first] != "writing\n":
                first, second = second, first
            assert lines[first] == "writing\n"
            assert lines[second] == f"waiting for the process that writes {tmp_path / 'set'}\n"
            if end == "gone":
                shutil.rmtree(tmp_path / "set.part")
            if end == "finished":
                first.communicate("\n", timeout=30)
            else:
                first.kill()
                first.wait()
            printed = second.communicate("\n", timeout=30)[0]
        finally:
            first.kill()
            second.kill()
    assert second.returncode == 0 and ("is complete" in printed) == (end == "finished")
    assert set(contents(tmp_path / "set")) == {"meta.json", "train_000000.bin"}
    assert not (tmp_path / "set.part").exists()

@pytest.mark.parametrize("data", ["text", "../data/stdlib", "..", "", "@", "stdlib/", "nothing"])
def test_names_that_are_no_sets(tmp_path, data):
    """prepare_if_missing ignores them. Split says what is wrong."""
    prepare_if_missing(data, tmp_path / "set")
    assert not list(tmp_path.iterdir())

COMMANDS = [  # the words of a bad command, and what its one line must say
    ("flip_flop --length=7", "length=7"), ("flip_flop --train=-1", "train=-1"),
    ("flip_flop --seed=-1", "seed=-1"), ("flip_flop --lenght=8", "did you mean 'length'"),
    ("flip_flop --length=eight", "not of type int"), ("flip_flop --length", "has no value"),
    ("flip_flop length", "has no value"), ("flip_flop --train=100000000000000", "GB free"),
    ("flip_flop --out={set}", "is complete"), ("flip_flop --out={other}", "in the way"),
    ("flip_flop --out={file}", "in the way"), ("flip_flop --out={file}/x", "file"),
    ("text", "with --source="), ("text {file}", "write --source={file}"),
    ("text --source={nothing}", "does not exist"), ("text --source={empty}", "holds no text"),
    ("text --source={file} --val=2", "val=2.0"), ("text --source={latin}", "latin is not UTF-8"),
    ("text --source={file} --out={set}", "by another script"),
    ("text --source={file} --out={other}", "in the way"),
    ("text --source={file} --tokenizer=no.json", "'no.json'"),
    ("text --source={file}/flip_flop@x", "does not exist"),
    ("code --source={empty} --tokenizer=bytes --out={new}", "no source code"),
    ("wikitext103 --source={empty} --tokenizer=bytes", "slash"),
    ("human_genome --source={nothing} --out={new}", "nothing"),
    ("c4 --tokenizer=bytes --out={new}", "pip install datasets"),
]

@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("places")
    stream(folder / "set")
    for name in ("empty", "other"):
        (folder / name).mkdir()
    (folder / "other" / "notes_123456.bin").write_bytes(b"mine")
    (folder / "file").write_text("a text")
    (folder / "latin").write_bytes(b"caf\xe9")
    return folder

@pytest.mark.parametrize("words, part", COMMANDS)
def test_a_bad_command_is_one_line(places, words, part, capfd, monkeypatch):
    """It writes nothing."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    before, in_data = everything(places), sorted((ROOT / "data").iterdir())
    named = {name: places / name for name in
             ("set", "empty", "other", "file", "latin", "nothing", "new")}
    script, *flags = words.format(**named).split()
    line = fails(str(ROOT / "data" / f"{script}.py"), *flags)
    assert part.format(**named) in line
    assert not capfd.readouterr().err
    assert everything(places) == before and sorted((ROOT / "data").iterdir()) == in_data

def test_a_script_run_as_a_file_says_how_to_run_it():
    """Even one that imports numpy before `data`, which Python then finds in data/."""
    words = [sys.executable, str(ROOT / "data" / "flip_flop.py")]
    run = subprocess.run(words, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr == "run it from the folder above: `python -m data.flip_flop`\n"

def test_help_has_every_key(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["flip_flop", "--help"])
    with pytest.raises(SystemExit) as stop:
        command(flip_flop.prepare, flip_flop.__doc__)
    printed = capsys.readouterr().out
    assert not stop.value.code and flip_flop.__doc__.strip() in printed
    assert "--length (int), --train (int)" in printed and "--out (str)" in printed
