"""Holds data/ against brute force: plain arrays that are cut, counted and compared one token at a
time.

The tokenizers need no download. Text corpora are in test_corpora.py.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import contents, fails, one_line

from data import flip_flop, stdlib
from data.shards import Split, Writer, prepare
from data.text import tokenizer

ROOT = Path(__file__).parent.parent


def stream(folder, tokens=1000, vocab_size=500, shard_tokens=170, loss=None, seed=0):
    """A one-split stream in several shards -> its tokens as a plain array."""
    values = np.random.default_rng(seed).integers(0, vocab_size, tokens)
    writer = Writer(folder, shard_tokens)
    for i in range(0, tokens, 37):  # pieces that divide nothing
        writer.write("train", values[i : i + 37], None if loss is None else loss[i : i + 37])
    writer.finish(vocab_size=vocab_size, tokenizer="bytes")
    return values


def table(folder, rows=23, row_length=6, shard_tokens=25, mask=False):
    """A row-wise split in shards of four rows; row i begins with token i -> its rows as a plain
    array."""
    values = np.random.default_rng(1).integers(0, 90, (rows, row_length))
    values[:, 0] = np.arange(rows)
    loss = np.random.default_rng(2).integers(0, 2, values.shape) if mask else None
    writer = Writer(folder, shard_tokens)
    writer.write("train", values[:5], None if loss is None else loss[:5])
    writer.write("train", values[5:], None if loss is None else loss[5:])
    writer.finish(vocab_size=100, tokenizer={"symbols": [str(i) for i in range(100)]})
    return values, loss


# reading


def test_format_is_the_documented_one(tmp_path):
    values = stream(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert meta == {
        "vocab_size": 500,
        "tokenizer": "bytes",
        "separator": None,
        "row_length": {},
        "loss": "all",
        "shards": {f"train_{i:06d}.bin": n for i, n in enumerate([170] * 5 + [150])},
    }
    raw = b"".join((tmp_path / name).read_bytes() for name in meta["shards"])
    assert raw == b"".join(int(v).to_bytes(2, "little") for v in values)
    split = Split(tmp_path, "train")
    assert (split.tokens, split.rows, split.vocab_size, split.meta) == (1000, 0, 500, meta)


def test_every_window_across_every_shard_boundary(tmp_path):
    values = stream(tmp_path)
    split = Split(tmp_path, "train")
    for length in (1, 5, 169, 170, 400, 999):  # up to windows over four shards, and the whole split
        x, y = split.read(np.arange(1000 - length), length)
        assert x.dtype == y.dtype == np.int64 and x.shape == y.shape == (1000 - length, length)
        for start in range(1000 - length):
            assert x[start].tolist() == values[start : start + length].tolist()
            assert y[start].tolist() == values[start + 1 : start + length + 1].tolist()


def test_batch_is_a_function_of_seed_and_step(tmp_path):
    values = stream(tmp_path, tokens=5000, vocab_size=60000, shard_tokens=1300)
    split = Split(tmp_path, "train")
    straight = [split.batch(step, 4, 16, seed=3) for step in range(20)]
    resumed = Split(tmp_path, "train")
    for step in (19, 7, 8, 0):  # any order, any start
        for got, want in zip(resumed.batch(step, 4, 16, seed=3), straight[step]):
            assert np.array_equal(got, want)
    text = values.tolist()
    for x, y in straight:
        for row, target in zip(
            x.tolist(), y.tolist()
        ):  # each row is somewhere in the text, targets one further
            assert any(
                text[i : i + 16] == row and text[i + 1 : i + 17] == target for i in range(4984)
            )
    rows = {tuple(row) for x, _ in straight for row in x.tolist()}
    assert len(rows) > 70  # steps differ; a few of the 80 windows may coincide
    for step in (0, 1):  # nor is one seed's batch another's of the step after
        assert not np.array_equal(split.batch(0, 4, 16, seed=4)[0], straight[step][0])


@pytest.mark.parametrize("make", [stream, table])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_together_read_the_global_batch(tmp_path, make, world):
    make(tmp_path)
    for step in range(9):  # 9 x 8 rows: the epochs of 23 rows end inside a batch
        whole = Split(tmp_path, "train").batch(step, 8, 5, seed=1)
        parts = [
            Split(tmp_path, "train").batch(step, 8, 5, seed=1, rank=r, world=world)
            for r in range(world)
        ]
        assert all(x.shape == (8 // world, 5) for x, _ in parts)
        for k in (0, 1):
            assert np.array_equal(np.concatenate([part[k] for part in parts]), whole[k])


def test_random_windows_are_uniform(tmp_path):
    writer = Writer(tmp_path, 30)
    writer.write(
        "train", np.arange(101)
    )  # token = offset, so that x[0] tells the start: 96 of them with T = 5
    writer.finish(vocab_size=101, tokenizer="bytes")
    split = Split(tmp_path, "train")
    starts = np.concatenate([split.batch(step, 96, 5, seed=0)[0][:, 0] for step in range(500)])
    counts = np.bincount(starts, minlength=101)
    assert counts[96:].sum() == 0 and counts[:96].min() > 0
    chi2 = ((counts[:96] - 500) ** 2 / 500).sum()
    assert 50 < chi2 < 150  # 95 degrees of freedom: 95 +- 14; too even would be as wrong as uneven
    first, second = starts[0::2], starts[1::2]
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03  # and independent within a batch


def test_masked_targets_are_minus_one(tmp_path):
    loss = np.random.default_rng(5).integers(0, 2, 1000)
    values = stream(tmp_path, loss=loss)
    assert sorted(p.name for p in tmp_path.glob("*.loss")) == [
        f"train_{i:06d}.loss" for i in range(6)
    ]
    split = Split(tmp_path, "train")
    assert split.meta["loss"] == "mask"
    x, y = split.read(np.arange(0, 900, 7), 90)
    for i, start in enumerate(range(0, 900, 7)):
        for t in range(90):
            assert x[i, t] == values[start + t]
            assert y[i, t] == (values[start + t + 1] if loss[start + t + 1] else -1)


@pytest.mark.parametrize("batch_size", [1, 4, 8, 50])
def test_epochs_hold_every_row_once(tmp_path, batch_size):
    values, loss = table(tmp_path, mask=True)
    split = Split(tmp_path, "train")
    assert split.rows == 23 and split.meta["row_length"] == {"train": 6}
    assert split.meta["shards"] == {f"train_{i:06d}.bin": 24 for i in range(5)} | {
        "train_000005.bin": 18
    }
    steps = math.ceil(23 * 6 / batch_size)
    batches = [split.batch(step, batch_size, 100, seed=9) for step in range(steps)]
    x, y = (np.concatenate(arrays) for arrays in zip(*batches))
    orders = []
    for epoch in range(6):
        order = x[epoch * 23 : epoch * 23 + 23, 0].tolist()
        assert sorted(order) == list(range(23))
        orders.append(tuple(order))
    assert len(set(orders)) == 6
    assert np.array_equal(x, values[x[:, 0], :-1])
    assert np.array_equal(y, np.where(loss, values, -1)[x[:, 0], 1:])
    first, other = (split.batch(0, 23, 100, seed=seed)[0][:, 0].tolist() for seed in (9, 10))
    assert tuple(first) == orders[0] and other != first
    again = Split(tmp_path, "train").batch(
        steps - 1, batch_size, 5, seed=9
    )  # no earlier epoch was ever drawn
    assert np.array_equal(again[0], batches[-1][0])


def test_evaluation_windows(tmp_path):
    stream(tmp_path)
    split = Split(tmp_path, "train")
    for length in (1, 10, 99, 333, 999):
        every = split.windows(length)
        assert every.dtype == np.int64 and every[0] == 0 and len(every) == 999 // length
        for count in (1, 2, 3, 7, 50, 10**6):
            starts = split.windows(length, count)
            assert len(starts) == min(count, len(every))
            targets = [t for s in starts for t in range(s + 1, s + length + 1)]
            assert len(set(targets)) == len(targets) and max(targets) < 1000  # no target twice
            if len(starts) > 1:
                assert starts[0] == 0 and starts[-1] == 999 - length  # from end to end
                assert np.ptp(np.diff(starts)) <= 1  # evenly
    x, _ = split.read(split.windows(99), 99)
    assert x.shape == (10, 99)


def test_evaluation_windows_of_rows(tmp_path):
    values, _ = table(tmp_path)
    split = Split(tmp_path, "train")
    for count, want in [(None, range(23)), (99, range(23)), (2, [0, 11]), (5, [0, 4, 9, 13, 18])]:
        x, y = split.read(split.windows(64, count), 64)
        assert (
            x.tolist() == values[list(want), :-1].tolist()
            and y.tolist() == values[list(want), 1:].tolist()
        )


def test_a_batch_reads_little(tmp_path):
    """No work that grows with the split: a batch of ten million tokens costs what one of ten
    thousand does."""
    costs = []
    for tokens in (10_000, 10_000_000):
        writer = Writer(tmp_path / str(tokens))
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
    for name, command in {
        "nowhere": f"python -m data.NAME --out={tmp_path / 'nowhere'}",
        "empty": "python -m data.NAME",
        "stdlib": "python -m data.stdlib`",
        "flip_flop@length=8,seed=1": "python -m data.flip_flop --length=8 --seed=1`",
    }.items():
        with pytest.raises(FileNotFoundError) as error:
            Split(tmp_path / name, "train")
        one_line(error, command)
        assert ("; NAME is one of c4, code, counting, " in str(error.value)) == ("NAME" in command)


def test_files_that_are_not_those_of_meta(tmp_path):
    stream(tmp_path, loss=np.ones(1000))
    with pytest.raises(ValueError) as error:
        Split(tmp_path, "vla")
    one_line(error, "'vla'", "train")

    def broken(*parts):
        with pytest.raises(ValueError) as error:
            Split(tmp_path, "train")
        one_line(error, *parts, "delete", f"python -m data.NAME --out={tmp_path}")

    foreign = tmp_path / "train_000006.bin"
    foreign.write_bytes(b"\0\0")
    broken("train_000006.bin", "not in meta.json")
    foreign.rename(tmp_path / "train_more_000000.bin")  # another split's: none of our business
    (tmp_path / "train_000006.bin.tmp").write_bytes(b"\0")
    Split(tmp_path, "train")

    for name in ("train_000003.bin", "train_000003.loss"):
        path = tmp_path / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        broken(name, str(len(whole) - 1), str(len(whole)))
        path.write_bytes(whole + b"\0")
        broken(name, str(len(whole) + 1), str(len(whole)))
        path.unlink()
        broken(name, "missing")
        path.write_bytes(whole)
    Split(tmp_path, "train")


def test_token_beyond_the_vocabulary(tmp_path):
    stream(tmp_path)
    shard = np.memmap(tmp_path / "train_000002.bin", dtype="<u2", mode="r+")
    shard[20] = 500  # offset 360
    shard.flush()
    split = Split(tmp_path, "train")
    split.read([300, 361], 59)
    for start in (300, 301, 359, 360):  # first as the last target, at the end as the first input
        with pytest.raises(ValueError) as error:
            split.read([0, start], 60)
        one_line(error, "train_000002.bin", "token 500", "vocab_size=500")
    with pytest.raises(ValueError):
        for step in range(100):
            split.batch(step, 8, 64, seed=0)


def test_arguments_that_do_not_fit(tmp_path):
    stream(tmp_path / "s")
    table(tmp_path / "t")
    split, rows = Split(tmp_path / "s", "train"), Split(tmp_path / "t", "train")
    calls = [
        (lambda: split.batch(0, 2, 1000, seed=0), "1000 tokens", "1001"),
        (lambda: split.windows(1000), "1000 tokens", "1001"),
        (lambda: split.batch(0, 6, 10, seed=0, world=4), "batch_size=6", "world=4"),
        (lambda: split.read([0, 901], 99), "[0, 901)", "901"),
        (lambda: split.read([-1], 99), "[0, 901)", "-1"),
        (lambda: rows.batch(0, 2, 4, seed=0), "block_size >= 5", "got 4"),
        (lambda: rows.windows(4), "block_size >= 5", "got 4"),
    ]
    for call, *parts in calls:
        with pytest.raises(ValueError) as error:
            call()
        one_line(error, *parts)


# writing


def test_writer_refuses_what_does_not_fit(tmp_path):
    for bad in ([-1, 5], [65536]):
        with pytest.raises(ValueError) as error:
            Writer(tmp_path).write("train", bad)
        one_line(error, "[0, 65535]", str(bad[0]))
    writer = Writer(tmp_path)
    writer.write("train", [1, 500])
    for vocab_size in (500, 65537):
        with pytest.raises(ValueError) as error:
            writer.finish(vocab_size=vocab_size, tokenizer="bytes")
        one_line(error, "[501, 65536]", str(vocab_size))
    for tokens, loss in (([[1, 2]], None), ([1, 2], [1, 1]), ([[[1]]], None)):
        with pytest.raises(ValueError) as error:
            writer.write("train", tokens, loss)
        one_line(error, "one kind")
    with pytest.raises(ValueError) as error:
        Writer(tmp_path).write("train", [1, 2], [1])
    one_line(error, "(2,)", "(1,)")
    with pytest.raises(ValueError) as error:
        Writer(tmp_path).finish(vocab_size=2, tokenizer="bytes")
    one_line(error, "nothing was written")
    assert not list(tmp_path.iterdir())  # no meta.json of an unfinished set, no leftovers


def test_writer_covers_the_range_of_uint16(tmp_path):
    writer = Writer(tmp_path)
    writer.write("train", np.arange(65536))
    writer.write("train", [])
    writer.finish(vocab_size=65536, tokenizer="bytes", separator=7)
    split = Split(tmp_path, "train")
    assert split.read([0], 65535)[1].tolist() == [list(range(1, 65536))]
    assert split.meta["separator"] == 7


def test_splits_of_one_set_may_have_rows_of_their_own_length(tmp_path):
    rng, writer = np.random.default_rng(3), Writer(tmp_path, 20)
    values = {
        "train": rng.integers(0, 9, (7, 6)),
        "val": rng.integers(0, 9, (4, 9)),
        "long": rng.integers(0, 9, 50),
    }
    for split, tokens in values.items():
        writer.write(split, tokens, np.ones_like(tokens))
    writer.finish(vocab_size=9, tokenizer="bytes")
    for name, tokens in values.items():
        split = Split(tmp_path, name)
        length = tokens.shape[1] if tokens.ndim == 2 else 0
        assert (split.row_length, split.rows) == (length, len(tokens) if length else 0)
        x, y = split.read(split.windows(49), 49)
        assert (
            x.tolist() == np.atleast_2d(tokens)[:, :-1].tolist()
            and y.tolist() == np.atleast_2d(tokens)[:, 1:].tolist()
        )
    with pytest.raises(ValueError) as error:
        Writer(tmp_path / "b").write("train", [[1, 2]]) or writer.write(
            "val", rng.integers(0, 9, (4, 8)), np.ones((4, 8))
        )
    one_line(error, "'val'", "(9, True)", "(8, True)")


def test_splits_interleave_and_shard_like_one_at_a_time(tmp_path):
    rng = np.random.default_rng(0)
    writer, want = Writer(tmp_path / "a", 64), {"train": [], "val": [], "test_ood": []}
    for _ in range(60):
        split, tokens = rng.choice(list(want)), rng.integers(0, 9, rng.integers(0, 150))
        writer.write(split, tokens)
        want[str(split)].extend(tokens.tolist())
    writer.finish(vocab_size=9, tokenizer="bytes")
    other = Writer(tmp_path / "b", 64)
    for split, tokens in want.items():
        other.write(split, tokens)
        got = Split(tmp_path / "a", split)
        assert got.tokens == len(tokens) and got.read([0], len(tokens) - 1)[0].tolist() == [
            tokens[:-1]
        ]
    other.finish(vocab_size=9, tokenizer="bytes")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_writing_again_leaves_nothing_of_the_unfinished_set(tmp_path):
    first = Writer(tmp_path, 170)
    first.write("train", np.arange(1000), np.ones(1000))  # the last shard is open, and stays so
    assert {path.suffix for path in tmp_path.iterdir()} == {"", ".bin", ".loss", ".tmp"}
    assert not (tmp_path / "meta.json").exists()  # from the first moment on the set is not whole
    (tmp_path / "meta.json.tmp").write_text("{")
    writer = Writer(tmp_path)
    writer.write("train", [1, 2, 3])
    writer.finish(vocab_size=4, tokenizer="bytes")
    assert set(contents(tmp_path)) == {"meta.json", "train_000000.bin"}


@pytest.mark.parametrize(
    "name", ["notes_1.bin", "notes_123456.bin", "train_000000.bin", "meta.json.tmp", "a/b", ".x"]
)
@pytest.mark.parametrize("unfinished", [False, True])
def test_a_folder_with_other_files_is_left_alone(tmp_path, name, unfinished):
    if unfinished:
        Writer(tmp_path).write("train", [1, 2, 3])
        if name not in ("notes_1.bin", "a/b", ".x"):
            return  # it looks like a part of the set
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"mine")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    with pytest.raises(ValueError) as error:
        Writer(tmp_path)
    one_line(error, str(tmp_path / name.partition("/")[0]), "--out")
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


def test_a_whole_set_is_never_written_over(tmp_path):
    stream(tmp_path, loss=np.ones(1000))
    before = contents(tmp_path)
    for attempt in (
        lambda: Writer(tmp_path),
        lambda: flip_flop.prepare(tmp_path, train=3),
        lambda: stdlib.prepare(tmp_path),
    ):
        with pytest.raises(FileExistsError) as error:
            attempt()
        one_line(error, str(tmp_path), "whole", "delete")
    assert contents(tmp_path) == before


# tokenizers


def test_bytes_round_trip():
    bytewise = tokenizer({"tokenizer": "bytes"})
    text = "def naïve(): return 'κόσμε 🐍 \x00\r\n\t'  "
    assert bytewise.encode(text) == list(text.encode())
    assert bytewise.decode(bytewise.encode(text)) == text
    assert bytewise.encode("a<|endoftext|>b") == [97, 256, 98]
    assert bytewise.decode([97, 256, 98]) == "a<|endoftext|>b"
    everything = "".join(chr(c) for c in range(0x3000) if not 0xD800 <= c < 0xE000)
    assert bytewise.decode(bytewise.encode(everything)) == everything
    assert bytewise.decode(np.array([0xCE, 0xBA], dtype=np.int64)) == "κ"


def test_symbols_round_trip():
    symbols = tokenizer({"tokenizer": {"symbols": ["w", "r", "i", "0", "1"]}})
    assert symbols.encode("w 1  i 0\nr 1") == [0, 4, 2, 3, 1, 4]
    assert symbols.decode([0, 4, 2, 3, 1, 4]) == "w 1 i 0 r 1"
    assert symbols.decode(np.array([1, 4])) == "r 1"
    with pytest.raises(ValueError) as error:
        symbols.encode("w 2")
    one_line(error, "'2'", "w r i 0 1")


def test_tokenizer_that_cannot_be_loaded(monkeypatch):
    with pytest.raises(ValueError) as error:
        tokenizer({"tokenizer": "gpt-nothing"})
    one_line(error, "'gpt-nothing'", "TIKTOKEN_CACHE_DIR")

    def offline(name):
        raise OSError("no network\nat all")

    monkeypatch.setattr("tiktoken.get_encoding", offline)
    with pytest.raises(ValueError) as error:
        tokenizer({"tokenizer": "gpt2"})
    one_line(error, "'gpt2'", "OSError", "network")


# the standard library


def test_stdlib_splits_by_file(tmp_path, monkeypatch):
    library = (
        tmp_path / "lib" / "python3.x" / "site-packages" / "lib"
    )  # a path may pass through such a folder
    for i in range(25):
        path = library / f"p{i % 3}" / f"m{i:02d}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"" if i == 4 else f"# файл {i}\n".encode() + bytes([255, 0, 13, 10]) * i)
    for other in ("site-packages/x.py", "dist-packages/y/z.py", "p0/notes.txt"):
        path = library / other
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"not ours")
    monkeypatch.setattr(stdlib.sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    stdlib.prepare(tmp_path / "out")
    want = {"train": [], "val": []}
    names = sorted(f"p{i % 3}/m{i:02d}.py" for i in range(25))
    for place, name in enumerate(names, 1):
        want["train" if place % 10 else "val"] += [*(library / name).read_bytes(), 256]
    for split, tokens in want.items():
        got = Split(tmp_path / "out", split)
        assert got.tokens == len(tokens) and got.meta["separator"] == 256 and got.vocab_size == 257
        x, y = got.read([0], len(tokens) - 1)
        assert [*x[0], y[0, -1]] == tokens
    before = contents(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    stdlib.prepare(tmp_path / "out")
    assert contents(tmp_path / "out") == before
    assert not stdlib.DOWNLOAD

    (tmp_path / "bare").mkdir()
    monkeypatch.setattr(stdlib.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "bare")})
    with pytest.raises(FileNotFoundError) as error:
        stdlib.prepare(tmp_path / "out")
    one_line(error, "bare")


# sets that are damaged, interrupted, or written twice at once


def damages():
    """Pairs of a name and a function that damages a masked set of rows of six tokens, in a folder."""

    def meta(**changes):
        def damage(folder):
            content = json.loads((folder / "meta.json").read_text())
            for key, value in changes.items():
                if value is None:
                    del content[key]
                else:
                    content[key] = value
            (folder / "meta.json").write_text(json.dumps(content))

        return damage

    def raw(data):
        def damage(folder):
            (folder / "meta.json").write_bytes(data)

        return damage

    def file(name, data):
        def damage(folder):
            path = folder / name
            if data is None:
                path.unlink()
            else:
                path.write_bytes(data)

        return damage

    def folder_for(name):
        def damage(folder):
            (folder / name).unlink()
            (folder / name).mkdir()

        return damage

    for key in ("vocab_size", "tokenizer", "separator", "row_length", "loss", "shards"):
        yield f"no {key}", meta(**{key: None})
    for value in (0, -1, 65537, 1.5, "100", True, [100], {}):
        yield f"vocab_size {value!r}", meta(vocab_size=value)
    for value in ({}, {"symbols": "abc"}, {"symbols": ["a"]}, 7, ["a"]):
        yield f"tokenizer {value!r}", meta(tokenizer=value)
    for value in (-1, 0.5, "x", [1]):
        yield f"separator {value!r}", meta(separator=value)
    for value in ("none", 1, ["mask"], {}):
        yield f"loss {value!r}", meta(loss=value)
    for value in ([], 6, {"train": 0}, {"train": "6"}, {"train": 7}, {"train": None}):
        yield f"row_length {value!r}", meta(row_length=value)
    for value in (
        [],
        {},
        "train_000000.bin",
        {"train_000000.bin": 0},
        {"train_000000.bin": -24},
        {"train_000000.bin": "24"},
        {"train_000000.bin": 24.0},
        {"../train_000000.bin": 24},
        {"train.bin": 24},
        {"train_000000.loss": 24},
        {"train_000009.bin": 24},
        {"val_000000.bin": 24},
    ):
        yield f"shards {value!r}", meta(shards=value)
    for data in (b"", b"{", b"null", b"[]", b"7", b'"x"', b"\xff\xfe", b"[" * 10**5, b"{} {}"):
        yield f"meta.json {data[:9]!r}", raw(data)
    yield "meta.json is a folder", folder_for("meta.json")
    yield "a shard is a folder", folder_for("train_000001.bin")
    yield "a mask is a folder", folder_for("train_000001.loss")
    for name in ("train_000001.bin", "train_000001.loss"):
        for data in (None, b"", b"\0", b"\0" * 10**4):
            yield f"{name} {data and len(data)}", file(name, data)
    yield "a shard too many", file("train_000007.bin", b"\0\0")


@pytest.mark.parametrize("name, damage", [pytest.param(*pair, id=pair[0]) for pair in damages()])
def test_a_damaged_set_is_one_line(tmp_path, name, damage):
    folder = tmp_path / "set"
    table(folder, mask=True)
    damage(folder)
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        Split(folder, "train")
    one_line(error, str(folder), "; ")
    assert len(str(error.value)) < 1000
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


def test_masks_that_are_all_zero(tmp_path):
    writer = Writer(tmp_path, 1000)
    writer.write("train", np.zeros(5000), np.zeros(5000))
    writer.write("val", np.zeros(5000), np.arange(5000) == 4999)  # one is enough, even the last
    writer.finish(vocab_size=1, tokenizer="bytes")
    with pytest.raises(ValueError) as error:
        Split(tmp_path, "train")
    one_line(error, "train_000000.loss", "zero")
    assert (Split(tmp_path, "val").read([4000], 999)[1] != -1).sum() == 1


def test_a_missing_split_says_what_helps(tmp_path):
    writer = Writer(tmp_path)
    writer.write("test", [1, 2, 3])
    writer.finish(vocab_size=4, tokenizer="bytes")
    for split, parts in (("train", ["train.py needs one", "--data"]), ("val", ["--eval_splits"])):
        with pytest.raises(ValueError) as error:
            Split(tmp_path, split)
        one_line(error, f"no split {split!r}; it has: test", *parts)


def test_a_text_file_is_no_set(tmp_path):
    (tmp_path / "input.txt").write_text("text")
    with pytest.raises(ValueError) as error:
        Split(tmp_path / "input.txt", "train")
    one_line(error, f"python -m data.text --source={tmp_path / 'input.txt'}")


def test_files_are_on_the_disk_before_they_have_their_names(tmp_path, monkeypatch):
    synced, named, events = {}, [], []
    fsync, replace = os.fsync, os.replace

    def recording_fsync(descriptor):
        fsync(descriptor)
        state = os.fstat(descriptor)
        synced[state.st_ino] = state.st_size
        events.append(state.st_ino)

    def recording_replace(source, target):
        state = os.stat(source)
        assert synced[state.st_ino] == state.st_size  # to the last byte
        replace(source, target)
        named.append(Path(target).name)
        events.append(Path(target).name)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "replace", recording_replace)
    stream(tmp_path, loss=np.ones(1000))
    assert sorted(named) == sorted(contents(tmp_path)) and named[-1] == "meta.json"
    folder = tmp_path.stat().st_ino
    for i, event in enumerate(events):
        if isinstance(event, str):
            assert events[i + 1] == folder  # and the name is on the disk before anything follows


LITTLE_DISK = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))  # to the writer like a disk that is full
from data import flip_flop
from data.shards import command
command(flip_flop.prepare, "")
"""


def test_a_full_disk_is_one_line(tmp_path):
    """Where the disk is full, no temporary file stays; the next start goes through."""
    command = [
        sys.executable,
        "-c",
        LITTLE_DISK,
        f"--out={tmp_path / 'set'}",
        "--length=64",
        "--val=0",
    ]
    run = subprocess.run([*command, "--train=5000"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1 and len(run.stderr.splitlines()) == 1, run.stderr
    assert str(tmp_path / "set") in run.stderr and "make room there" in run.stderr
    assert [path.name for path in (tmp_path / "set").iterdir()] == ["unfinished"]
    run = subprocess.run([*command, "--train=500"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1  # the split sparse has its 100,000 rows
    small = ["--train=500", "--sparse=500", "--dense=500"]
    run = subprocess.run([*command, *small], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and Split(tmp_path / "set", "sparse").rows == 500


def test_a_disk_too_small_is_seen_first(tmp_path):
    for rows in (10**14, 10**11):
        with pytest.raises(ValueError) as error:
            flip_flop.prepare(tmp_path / "set", train=rows, length=64)
        one_line(error, str(tmp_path / "set"), "GB free", "--out")
    assert not list(tmp_path.iterdir())


PREPARING = """
import sys
from data.shards import Split, prepare
prepare("flip_flop@train=30000,length=64,val=9,sparse=9,dense=9", sys.argv[1])
print(Split(sys.argv[1], "train").rows)
"""


def test_starts_at_once_make_a_set_once(tmp_path):
    flip_flop.prepare(tmp_path / "direct", train=30000, length=64, val=9, sparse=9, dense=9)
    for trial in range(3):
        folder = tmp_path / str(trial)
        command = [sys.executable, "-c", PREPARING, str(folder)]
        runs = [
            subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for _ in range(4)
        ]
        ends = [run.communicate() for run in runs]
        assert all(run.returncode == 0 for run in runs), ends
        assert all(out.splitlines()[-1] == "30000" for out, _ in ends)
        assert sum(" train, " in out for out, _ in ends) == 1  # one has written it
        assert contents(folder) == contents(tmp_path / "direct")


def test_a_killed_writer_leaves_its_place_to_the_next(tmp_path):
    command = [sys.executable, "-c", PREPARING, str(tmp_path / "set")]
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    while not list(tmp_path.glob("set/*.tmp")):
        assert first.poll() is None
        time.sleep(0.001)
    first.kill()
    first.wait()
    with pytest.raises(FileNotFoundError):
        Split(tmp_path / "set", "train")
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 0 and again.stdout.endswith("\n30000\n")
    assert not list(tmp_path.glob("set/*.tmp")) and not (tmp_path / "set" / "unfinished").exists()


@pytest.mark.parametrize(
    "data", ["shards", "text", "../data/stdlib", "..", ".", "", "@", "stdlib/", "nothing"]
)
def test_names_that_are_no_sets(tmp_path, data):
    """prepare makes nothing of them and raises nothing; Split says what is wrong."""
    prepare(data, tmp_path / "set")
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError) as error:
        Split(tmp_path / "set", "train")
    one_line(error, "no meta.json", "python -m data.")


COMMANDS = [
    ["flip_flop", "--out="],
    ["flip_flop", "--length=7"],
    ["flip_flop", "--length=0"],
    ["flip_flop", "--train=100000000000000"],
    ["flip_flop", "--train=-1"],
    ["flip_flop", "--out={set}"],
    ["flip_flop", "--out={other}"],
    ["flip_flop", "--out={file}"],
    ["flip_flop", "--out={file}/x"],
    ["flip_flop", "--seed=-1"],
    ["counting", "--variables=0"],
    ["selective_copy", "--vocabulary=1"],
    ["indirect_indexing", "--shift=99"],
    ["stdlib", "--out={set}"],
    ["stdlib", "--out={other}"],
    ["text", "--source={nothing}"],
    ["text", "--source={empty}"],
    ["text", "--source={file}", "--val=2"],
    ["text", "--source={file}", "--val=0"],
    ["text", "--source={file}", "--val=nan"],
    ["text", "--source={file}", "--out="],
    ["text", "--source={file}", "--out={set}"],
    ["text", "--source={file}", "--out={other}"],
    ["text", "--source={file}", "--tokenizer=no.json"],
    ["text", "--source={latin}"],
    ["code", "--source={empty}", "--tokenizer=bytes", "--out={new}"],
    ["jsb", "--source={file}", "--out={new}"],
    ["human_genome", "--source={nothing}", "--out={new}"],
    ["wordcount", "--stories={empty}", "--tokenizer=bytes", "--out={new}"],
    ["wikitext103", "--source={empty}", "--tokenizer=bytes", "--out={new}"],
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
    def everything():
        return {path: path.is_file() and path.read_bytes() for path in places.rglob("*")}

    before, in_data = everything(), sorted((ROOT / "data").iterdir())
    names = {
        name: places / name for name in ("set", "empty", "other", "file", "latin", "nothing", "new")
    }
    script, *flags = (word.format(**names) for word in words)
    fails(str(ROOT / "data" / f"{script}.py"), *flags)
    assert not capfd.readouterr().err
    assert everything() == before and sorted((ROOT / "data").iterdir()) == in_data
