"""The format of data/, its reader, writer and commands, against plain arrays, token by token.

Text corpora are in test_corpora.py.
"""
import json
import math
import multiprocessing
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import contents, fails, one_line

from data import command, flip_flop, stdlib
from data.shards import Split, Writer, prepare
from data.text import tokenizer

ROOT = Path(__file__).parent.parent

def stream(folder, tokens=1000, vocab_size=500, shard_tokens=170, loss=None):
    """Write a stream of one split in several shards -> its tokens as a plain array."""
    values = np.random.default_rng(0).integers(0, vocab_size, tokens)
    with Writer(folder, shard_tokens) as writer:
        for i in range(0, tokens, 37):  # the last one is shorter
            writer.write("train", values[i : i + 37], None if loss is None else loss[i : i + 37])
        writer.finish(vocab_size=vocab_size, tokenizer="bytes")
    return values

def table(folder, mask=False):
    """Write 23 rows of 6 tokens in shards of four rows -> rows, mask. Row i begins with token i."""
    values = np.random.default_rng(1).integers(0, 90, (23, 6))
    values[:, 0] = np.arange(23)
    loss = np.random.default_rng(2).integers(0, 2, values.shape) if mask else None
    with Writer(folder, 25) as writer:
        for part in (slice(0, 5), slice(5, 23)):
            writer.write("train", values[part], None if loss is None else loss[part])
        writer.finish(vocab_size=100, tokenizer={"symbols": [str(i) for i in range(100)]})
    return values, loss

def forked(function, *args):
    """A process that calls a function, without the time that imports take."""
    process = multiprocessing.get_context("fork").Process(target=function, args=args)
    process.start()
    return process

# reading

def test_format_is_the_documented_one(tmp_path):
    values = stream(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    # a shard ends where a write does, with the first 37 tokens that bring it to 170
    sizes = {f"train_{i:06d}.bin": n for i, n in enumerate([185] * 5 + [75])}
    assert meta == {"vocab_size": 500, "tokenizer": "bytes", "separator": None, "row_length": {},
                    "loss": "all", "shards": sizes}
    raw = b"".join((tmp_path / name).read_bytes() for name in meta["shards"])
    assert raw == b"".join(int(v).to_bytes(2, "little") for v in values)
    split = Split(tmp_path, "train")
    assert (split.tokens, split.rows, split.vocab_size, split.meta) == (1000, 0, 500, meta)

def test_every_window_across_every_shard_boundary(tmp_path):
    values = stream(tmp_path)
    split = Split(tmp_path, "train")
    for length in (1, 5, 184, 185, 400, 999):  # up to windows over four shards, and the whole split
        x, y = split.read(np.arange(1000 - length), length)
        assert x.dtype == y.dtype == np.int64
        every = np.lib.stride_tricks.sliding_window_view(values, length)
        assert np.array_equal(x, every[:-1]) and np.array_equal(y, every[1:])

def test_batch_is_a_function_of_seed_and_step(tmp_path):
    """Otherwise a resumed run would train on other data."""
    values = stream(tmp_path, tokens=5000, vocab_size=60000, shard_tokens=1300)
    split = Split(tmp_path, "train")
    straight = [split.batch(step, 4, 16, seed=3) for step in range(20)]
    resumed = Split(tmp_path, "train")
    for step in (19, 7, 8, 0):  # any order, any start
        for got, want in zip(resumed.batch(step, 4, 16, seed=3), straight[step]):
            assert np.array_equal(got, want)
    windows = {tuple(values[i : i + 17].tolist()) for i in range(4984)}
    rows = [(*row, last) for x, y in straight for row, last in zip(x.tolist(), y[:, -1].tolist())]
    assert set(rows) <= windows and len(set(rows)) > 70  # steps differ; a few windows may coincide
    assert all(np.array_equal(x[:, 1:], y[:, :-1]) for x, y in straight)
    for step in (0, 1):  # nor is one seed's batch another's of the step after
        assert not np.array_equal(split.batch(0, 4, 16, seed=4)[0], straight[step][0])

@pytest.mark.parametrize("make", [stream, table])
def test_ranks_together_read_the_global_batch(tmp_path, make):
    make(tmp_path)
    split = Split(tmp_path, "train")
    for step in range(9):  # 9 x 8 rows: the epochs of 23 rows end inside a batch
        want = split.batch(step, 8, 5, seed=1)
        for world in (2, 4):
            parts = [split.batch(step, 8, 5, seed=1, rank=r, world=world) for r in range(world)]
            assert all(x.shape == (8 // world, 5) for x, _ in parts)
            for k in (0, 1):
                assert np.array_equal(np.concatenate([part[k] for part in parts]), want[k])

def test_random_windows_are_uniform(tmp_path):
    with Writer(tmp_path, 30) as writer:
        writer.write("train", np.arange(101))  # token = offset, so x[0] tells the start
        writer.finish(vocab_size=101, tokenizer="bytes")
    split = Split(tmp_path, "train")
    starts = np.concatenate([split.batch(step, 96, 5, seed=0)[0][:, 0] for step in range(300)])
    counts = np.bincount(starts, minlength=101)
    assert counts[96:].sum() == 0 and counts[:96].min() > 0
    chi2 = ((counts[:96] - 300) ** 2 / 300).sum()
    assert 50 < chi2 < 150  # 95 degrees of freedom: 95 +- 14; too even would be as wrong as uneven
    first, second = starts[0::2], starts[1::2]
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03  # and independent within a batch

def test_masked_targets_are_minus_one(tmp_path):
    loss = np.random.default_rng(5).integers(0, 2, 1000)
    values = stream(tmp_path, loss=loss)
    names = [f"train_{i:06d}.loss" for i in range(6)]
    assert sorted(p.name for p in tmp_path.glob("*.loss")) == names
    split, want = Split(tmp_path, "train"), np.where(loss, values, -1)
    assert split.meta["loss"] == "mask"
    starts = range(0, 900, 7)
    x, y = split.read(starts, 90)
    for i, start in enumerate(starts):
        assert x[i].tolist() == values[start : start + 90].tolist()
        assert y[i].tolist() == want[start + 1 : start + 91].tolist()

@pytest.mark.parametrize("batch_size", [1, 8, 50])
def test_epochs_hold_every_row_once(tmp_path, batch_size):
    """In another order each time, each row with its own mask."""
    values, loss = table(tmp_path, mask=True)
    split = Split(tmp_path, "train")
    assert split.rows == 23 and split.meta["row_length"] == {"train": 6}
    sizes = {f"train_{i:06d}.bin": n for i, n in enumerate([24] * 5 + [18])}
    assert split.meta["shards"] == sizes
    steps = math.ceil(23 * 6 / batch_size)
    batches = [split.batch(step, batch_size, 100, seed=9) for step in range(steps)]
    x, y = (np.concatenate(arrays) for arrays in zip(*batches))
    orders = [tuple(x[start : start + 23, 0].tolist()) for start in range(0, 6 * 23, 23)]
    assert all(sorted(order) == list(range(23)) for order in orders) and len(set(orders)) == 6
    assert np.array_equal(x, values[x[:, 0], :-1])
    assert np.array_equal(y, np.where(loss, values, -1)[x[:, 0], 1:])
    first, other = (split.batch(0, 23, 100, seed=seed)[0][:, 0].tolist() for seed in (9, 10))
    assert tuple(first) == orders[0] and other != first
    # no earlier epoch was ever drawn
    again = Split(tmp_path, "train").batch(steps - 1, batch_size, 5, seed=9)
    assert np.array_equal(again[0], batches[-1][0])

def test_evaluation_windows_share_no_target(tmp_path):
    stream(tmp_path)
    split = Split(tmp_path, "train")
    for length in (1, 10, 99, 333, 999):
        every = split.windows(length)
        assert every.dtype == np.int64 and every[0] == 0 and len(every) == 999 // length
        for count in (1, 2, 3, 7, 50, 10**6):
            starts = split.windows(length, count)
            assert len(starts) == min(count, len(every))
            targets = [t for s in starts for t in range(s + 1, s + length + 1)]
            assert len(set(targets)) == len(targets) and max(targets) < 1000
            if len(starts) > 1:
                assert starts[0] == 0 and starts[-1] == 999 - length  # from end to end
                assert np.ptp(np.diff(starts)) <= 1  # evenly

def test_evaluation_windows_of_rows(tmp_path):
    values, _ = table(tmp_path)
    split = Split(tmp_path, "train")
    for count, want in [(None, range(23)), (99, range(23)), (2, [0, 11]), (5, [0, 4, 9, 13, 18])]:
        x, y = split.read(split.windows(64, count), 64)
        assert x.tolist() == values[list(want), :-1].tolist()
        assert y.tolist() == values[list(want), 1:].tolist()

def test_a_batch_reads_little(tmp_path):
    """A batch takes as long from a split of ten million tokens as from one of ten thousand."""
    costs = []
    for tokens in (10_000, 10_000_000):
        with Writer(tmp_path / str(tokens)) as writer:
            writer.write("train", np.zeros(tokens, dtype=np.uint16))
            writer.finish(vocab_size=1, tokenizer="bytes")
        split, best = Split(tmp_path / str(tokens), "train"), float("inf")
        for _ in range(3):
            began = time.process_time()
            for step in range(50):
                split.batch(step, 8, 64, seed=0)
            best = min(best, time.process_time() - began)
        costs.append(best)
    assert costs[1] < 5 * costs[0]  # reading all 20 MB costs 30 times as much as a batch

# errors: one line that names the value and the mend

def test_missing_set_names_its_command(tmp_path):
    (tmp_path / "empty").mkdir()
    for name, words in {
        "nowhere": f"python -m data.NAME --out={tmp_path / 'nowhere'}`; NAME is one of c4, code, ",
        "empty": "python -m data.NAME",
        "stdlib": f"python -m data.stdlib --out={tmp_path / 'stdlib'}`",
        "flip_flop@length=8,seed=1": "python -m data.flip_flop --length=8 --seed=1 --out=",
    }.items():
        with pytest.raises(FileNotFoundError) as error:
            Split(tmp_path / name, "train")
        one_line(error, words)

def test_files_that_are_not_those_of_meta(tmp_path):
    """Otherwise a run would continue on part of the data, or with shifted masks."""
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
    for start in (320, 321, 379, 380):  # first as the last target, at the end as the first input
        with pytest.raises(ValueError) as error:
            split.read([0, start], 60)
        one_line(error, str(tmp_path), "token 500", "vocab_size=500")
    with pytest.raises(ValueError):
        for step in range(100):
            split.batch(step, 8, 64, seed=0)

def test_block_sizes_that_do_not_fit(tmp_path):
    stream(tmp_path / "s")
    table(tmp_path / "t")
    for name, size, need in (("s", 1000, "block_size < 1000"), ("t", 4, "block_size >= 5")):
        split = Split(tmp_path / name, "train")
        for call in (lambda: split.batch(0, 2, size, seed=0), lambda: split.windows(size)):
            with pytest.raises(ValueError) as error:
                call()
            one_line(error, "split 'train'", "tokens", f"{need}, got {size}")

# writing

def test_writer_refuses_what_does_not_fit(tmp_path):
    for tokens, part in (([-1, 5], "-1 to 5"), ([65536], "65536 to 65536")):
        with pytest.raises(ValueError) as error, Writer(tmp_path / "a") as writer:
            writer.write("train", tokens)
        one_line(error, "[0, 65535]", part)
    for tokens, vocab_size in (([1, 500], 500), ([1, 500], 65537), ([], 5)):
        with pytest.raises(ValueError) as error, Writer(tmp_path / "a") as writer:
            writer.write("train", tokens)
            writer.finish(vocab_size=vocab_size, tokenizer="bytes")
        one_line(error, str(tmp_path / "a"), f"vocab_size={vocab_size}")
    assert not (tmp_path / "a").exists()

def test_writer_covers_the_range_of_uint16(tmp_path):
    with Writer(tmp_path) as writer:
        writer.write("train", np.arange(65536))
        writer.write("train", [])
        writer.finish(vocab_size=65536, tokenizer="bytes", separator=7)
    split = Split(tmp_path, "train")
    assert split.read([0], 65535)[1].tolist() == [list(range(1, 65536))]
    assert split.meta["separator"] == 7

def test_splits_of_one_set_may_have_rows_of_their_own_length(tmp_path):
    values = {}
    with Writer(tmp_path, 20) as writer:
        for split, shape in (("train", (7, 6)), ("val", (4, 9)), ("long", (50,))):
            values[split] = np.random.default_rng(3).integers(0, 9, shape)
            writer.write(split, values[split], np.ones(shape))
        writer.finish(vocab_size=9, tokenizer="bytes")
    for name, tokens in values.items():
        split = Split(tmp_path, name)
        length = tokens.shape[1] if tokens.ndim == 2 else 0
        assert (split.row_length, split.rows) == (length, len(tokens) if length else 0)
        x, y = split.read(split.windows(49), 49)
        assert x.tolist() == np.atleast_2d(tokens)[:, :-1].tolist()
        assert y.tolist() == np.atleast_2d(tokens)[:, 1:].tolist()

def test_splits_interleave_and_shard_like_one_at_a_time(tmp_path):
    """A name that begins with another's has its own shards and numbers."""
    rng, want = np.random.default_rng(0), {"test": [], "val": [], "test_ood": []}
    with Writer(tmp_path / "a", 64) as writer:
        for _ in range(60):
            split, tokens = str(rng.choice(list(want))), rng.integers(0, 9, rng.integers(0, 150))
            writer.write(split, tokens)
            want[split].append(tokens)
        writer.finish(vocab_size=9, tokenizer="bytes")
    with Writer(tmp_path / "b", 64) as writer:
        for split, parts in want.items():
            for tokens in parts:
                writer.write(split, tokens)
            tokens, got = np.concatenate(parts).tolist(), Split(tmp_path / "a", split)
            assert got.tokens == len(tokens) and len(got.bins) > 1
            assert got.read([0], len(tokens) - 1)[0].tolist() == [tokens[:-1]]
        writer.finish(vocab_size=9, tokenizer="bytes")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")

def test_a_set_gets_its_name_when_it_is_complete(tmp_path):
    part = tmp_path / "set.part"
    with Writer(tmp_path / "set", 20) as writer:
        writer.write("train", np.ones((9, 6)), np.ones((9, 6)))
        assert len(contents(part)) == 6 and not (tmp_path / "set").exists()
    # what stays, and what a kill leaves, does not get into the next set
    for name in ("train_000001.bin.tmp", "meta.json.tmp", "val_000007.loss"):
        (part / name).write_bytes(b"{")
    with Writer(tmp_path / "set") as writer:
        assert not contents(part)
        writer.write("train", [1, 2, 3])
        writer.finish(vocab_size=4, tokenizer="bytes")
    assert set(contents(tmp_path / "set")) == {"meta.json", "train_000000.bin"}
    assert not part.exists()

def everything(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}

@pytest.mark.parametrize("name", ["set/notes.txt", "set/train_000000.bin", "set.part/notes_1.bin",
                                  "set.part/a/b"])
def test_other_files_are_left_alone(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_bytes(b"mine")
    before = everything(tmp_path)
    with pytest.raises(ValueError) as error:
        Writer(tmp_path / "set")
    one_line(error, str(tmp_path / "/".join(name.split("/")[:2])), "in the way", "--out")
    assert everything(tmp_path) == before

def test_links_are_not_followed(tmp_path):
    """Except for the set's own folder, which may be on another disk."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train_000000.bin").write_bytes(b"mine")
    (tmp_path / "set.part").symlink_to(tmp_path / "mine")
    before = everything(tmp_path)
    with pytest.raises(ValueError, match="in the way"):
        Writer(tmp_path / "set")
    (tmp_path / "other.part").mkdir()
    for name in ("train_000000.bin", "train_000000.bin.tmp", "meta.json.tmp"):
        link = tmp_path / "other.part" / name
        link.symlink_to(tmp_path / "mine" / "train_000000.bin")
        with pytest.raises(ValueError, match="in the way"):
            Writer(tmp_path / "other")
        link.unlink()
    (tmp_path / "other.part").rmdir()
    assert everything(tmp_path) == before
    (tmp_path / "disk").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "disk")
    values = stream(tmp_path / "linked")
    assert Split(tmp_path / "linked", "train").read([0], 999)[0].tolist() == [values[:-1].tolist()]
    assert len(contents(tmp_path / "disk")) == 7 and (tmp_path / "linked").is_symlink()

def test_a_mount_point_is_refused_first(tmp_path, monkeypatch):
    """The finished folder could not be renamed to it."""
    monkeypatch.setattr("os.path.ismount", lambda path: str(path) == str(tmp_path / "set"))
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

# tokenizers

def test_bytes_round_trip():
    bytewise = tokenizer({"tokenizer": "bytes"})
    text = "def naïve(): return 'κόσμε 🐍 \x00\r\n\t'  "
    assert bytewise.encode(text) == list(text.encode())
    assert bytewise.encode("a<|endoftext|>b") == [97, 256, 98]
    assert bytewise.decode([97, 256, 98]) == "a<|endoftext|>b"
    every = "".join(chr(c) for c in range(0x3000) if not 0xD800 <= c < 0xE000)
    assert bytewise.decode(bytewise.encode(every)) == every
    assert bytewise.decode(np.array([0xCE, 0xBA], dtype=np.int64)) == "κ"

def test_symbols_round_trip():
    symbols = tokenizer({"tokenizer": {"symbols": ["w", "r", "i", "0", "1"]}})
    assert symbols.encode("w 1  i 0\nr 1") == [0, 4, 2, 3, 1, 4]
    assert symbols.decode(np.array([0, 4, 2, 3, 1, 4])) == "w 1 i 0 r 1"
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
    one_line(error, "'gpt2'", "OSError: no network", "needs the network")

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

    (tmp_path / "bare").mkdir()
    monkeypatch.setattr(stdlib.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "bare")})
    with pytest.raises(FileNotFoundError) as error:
        stdlib.prepare(tmp_path / "out")
    one_line(error, "bare")

# interrupted, or written twice at once

def test_files_are_on_the_disk_before_they_have_their_names(tmp_path, monkeypatch):
    """Otherwise a power cut could leave a half-written file under a final name."""
    synced, named = {}, []
    fsync, replace, rename = os.fsync, os.replace, os.rename

    def recording_fsync(descriptor):
        fsync(descriptor)
        synced[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def recording_replace(source, target):
        assert synced[os.stat(source).st_ino] == os.stat(source).st_size  # to the last byte
        replace(source, target)
        named.append(Path(target).name)

    def recording_rename(source, target):
        assert sorted(named) == sorted(contents(source)) and named[-1] == "meta.json"
        rename(source, target)
        named.append(Path(target).name)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "replace", recording_replace)
    monkeypatch.setattr(os, "rename", recording_rename)
    stream(tmp_path / "set", loss=np.ones(1000))
    assert len(named) == 14 and named[-1] == "set"

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
    path = tmp_path / "set.part" / "dense_000000.loss"
    one_line(error, str(path), "make room there or use --out")
    assert "train_000000.bin" in contents(tmp_path / "set.part")
    assert not list(tmp_path.glob("set.part/*.tmp"))
    flip_flop.prepare(tmp_path / "set", **how, dense=9)
    assert Split(tmp_path / "set", "dense").rows == 9 and not (tmp_path / "set.part").exists()

def test_starts_at_once_make_a_set_once(tmp_path, capfd):
    name = "flip_flop@train=30000,length=64,val=9,sparse=9,dense=9"
    prepare(name, tmp_path / "direct")
    capfd.readouterr()
    starts = [forked(prepare, name, tmp_path / "set") for _ in range(3)]
    for process in starts:
        process.join()
        assert process.exitcode == 0
    assert capfd.readouterr().out.count(" train, ") == 1  # one has written it
    assert contents(tmp_path / "set") == contents(tmp_path / "direct")

@pytest.mark.parametrize("end", ["finished", "killed", "gone"])
def test_a_start_waits_for_another(tmp_path, monkeypatch, capfd, end):
    """Whether the other finishes, is killed, or gives up and removes the .part folder."""
    def prepare(folder):
        with Writer(folder) as writer:
            while not (tmp_path / "go").exists():
                time.sleep(0.01)
            writer.write("train", [1, 2])
            writer.finish(vocab_size=3, tokenizer="bytes")

    monkeypatch.setattr(sys, "argv", ["script", f"--out={tmp_path / 'set'}"])
    first = forked(command, prepare, "")
    while not (tmp_path / "set.part").exists():
        time.sleep(0.01)
    time.sleep(0.1)
    second, out = forked(command, prepare, ""), ""
    while f"waiting for the process that writes {tmp_path / 'set'}\n" not in out:
        out += capfd.readouterr().out
        time.sleep(0.01)
    if end == "gone":
        (tmp_path / "set.part").rmdir()
    if end != "finished":
        first.kill()
        first.join()
    (tmp_path / "go").touch()
    first.join()
    second.join(30)
    assert (first.exitcode == 0) == (end == "finished") and second.exitcode == 0
    assert ("is complete" in capfd.readouterr().out) == (end == "finished")
    assert set(contents(tmp_path / "set")) == {"meta.json", "train_000000.bin"}
    assert not (tmp_path / "set.part").exists()

@pytest.mark.parametrize("data", ["text", "../data/stdlib", "..", "", "@", "stdlib/", "nothing"])
def test_names_that_are_no_sets(tmp_path, data):
    """prepare ignores them. Split says what is wrong."""
    prepare(data, tmp_path / "set")
    assert not list(tmp_path.iterdir())

COMMANDS = [
    ["flip_flop", "--length=7"], ["flip_flop", "--train=-1"], ["flip_flop", "--seed=-1"],
    ["flip_flop", "--lenght=8"], ["flip_flop", "--length=eight"], ["flip_flop", "--length"],
    ["flip_flop", "length"], ["flip_flop", "--train=100000000000000"],
    ["flip_flop", "--out={set}"], ["flip_flop", "--out={other}"],
    ["flip_flop", "--out={file}"], ["flip_flop", "--out={file}/x"],
    ["text", "--source={nothing}"], ["text", "--source={file}", "--val=2"],
    ["text", "--source={file}", "--out={set}"], ["text", "--source={file}", "--out={other}"],
    ["text", "--source={file}", "--tokenizer=no.json"], ["text", "--source={latin}"],
    ["code", "--source={empty}", "--tokenizer=bytes", "--out={new}"],
    ["human_genome", "--source={nothing}", "--out={new}"],
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

@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_bad_command_is_one_line(places, words, capfd):
    """It writes nothing."""
    before, in_data = everything(places), sorted((ROOT / "data").iterdir())
    names = ("set", "empty", "other", "file", "latin", "nothing", "new")
    script, *flags = (word.format(**{name: places / name for name in names}) for word in words)
    line = fails(str(ROOT / "data" / f"{script}.py"), *flags)
    assert any(flag[2:].partition("=")[2] in line for flag in flags), line
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
