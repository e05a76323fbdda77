"""The synthetic tasks of data/. Every row is read from the files only with numpy, spelled in its
symbols, taken apart and solved again by a plain loop."""
import hashlib
import importlib
import itertools
import json
import random
import re
import shutil
import string
import sys

import numpy as np
import pytest
from conftest import TINY, contents

import data
import train
from data.strings import TASKS

FILLERS = ".,;:!?-+*/=<>@#%"

def read(folder):
    """Returns {split: [(the row's symbols, its mask), ...]} of a set."""
    meta = json.loads((folder / "meta.json").read_text())
    symbols = meta["tokenizer"]["symbols"]
    assert (meta["loss"], meta["separator"]) == ("mask", None)
    assert meta["vocab_size"] == len(symbols) == len(set(symbols))
    splits = {}
    for name, count in sorted(meta["shards"].items()):
        split = name.rpartition("_")[0]
        length = meta["row_length"][split]
        tokens = np.fromfile(folder / name, "<u2").reshape(-1, length)
        loss = np.fromfile(folder / name.replace(".bin", ".loss"), "u1").reshape(-1, length)
        assert tokens.size == loss.size == count
        rows = splits.setdefault(split, [])
        for row, mask in zip(tokens.tolist(), loss.tolist()):
            rows.append(([symbols[i] for i in row], mask))
    return splits

def prepare(name, folder, **options):
    importlib.import_module(f"data.{name}").prepare(folder, **options)
    return read(folder)

# Each of these solves a row again. It fails if the row breaks a rule of its task, and returns the
# positions of the targets

def flip_flop(split, row, length, **_):
    assert len(row) == length and (row[0], row[-2]) == ("w", "r")
    reads = []
    for t in range(0, length, 2):
        instruction, bit = row[t], row[t + 1]
        assert instruction in ("w", "r", "i") and bit in ("0", "1")
        if instruction == "w":
            held = bit
        if instruction == "r":
            assert bit == held
            reads.append(t + 1)
    return reads

def selective_copy(split, row, copy, blanks, **_):
    blanks = {"dense": blanks // 2, "sparse": 2 * blanks}.get(split, blanks)
    letters = [symbol for symbol in row[: copy + blanks] if symbol != "."]
    assert row[copy + blanks :] == letters and len(letters) == copy
    return range(copy + blanks, 2 * copy + blanks)

def counting(split, row, steps, length, **_):
    words = list(itertools.takewhile(lambda word: word != "_", row))
    assert row[len(words) :] == ["_"] * (length - len(words))
    program, variable, answer = re.fullmatch(r"(.*)print (\w) (\d+)", " ".join(words)).groups()
    if len(words) == length:  # the beginning may have been cut off
        _, was_set, since = program.rpartition(f"{variable} = 0 ;")
        count = since.count(f"{variable} ++;")
        assert count == int(answer) or (not was_set and count < int(answer))
        return [length - 1]
    operations = re.findall(r"pass;|\w = 0 ;|\w \+\+;", program)
    assert " ".join([*operations, ""]) == program and 3 <= len(operations) <= steps
    values = {}
    for operation in operations:
        name = operation[0]
        if operation.endswith("= 0 ;"):
            values[name] = 0
        elif operation != "pass;":
            values[name] += 1  # a KeyError if it was never set
            assert values[name] <= 10
    assert values[variable] == int(answer)
    return [len(words) - 1]

def indirect_indexing(split, row, letters, shortest, longest, shift, **_):
    assert len(row) == longest + 8
    shape = r"([a-zA-Z]+),([a-zA-Z]),([+-](?:0|[1-9]\d?)),([a-zA-Z])_*"
    text, letter, moved, target = re.fullmatch(shape, "".join(row)).groups()
    place = text.index(letter) + int(moved)
    assert place >= 0 and text[place] == target
    assert shortest <= len(text) == len(set(text)) <= longest
    assert abs(int(moved)) <= shift and moved != "-0"
    assert set(text) <= set(string.ascii_letters[:letters])
    return [len("".join(row).rstrip("_")) - 1]

def recall(split, row, length, pairs, queries, filler, **_):
    if split.startswith("x"):
        length *= int(split[1:])
    text, asked = "".join(row[:length]), row[length::2]
    values = dict(re.findall(r"([a-z])(\d)", text))
    assert len(values) == pairs and len(re.findall("[a-z]", text)) == pairs
    assert len(row) == length + 2 * queries and len(set(asked)) == queries
    assert set(re.sub(r"[a-z]\d", "", text)) <= set(FILLERS[:filler])
    assert row[length + 1 :: 2] == [values[key] for key in asked]
    return range(length + 1, len(row), 2)

def lookup(split, row, items, questions, **_):
    kind, _, times = split.partition("_x")
    length = items * int(times or 1)
    keys = [item[0] for item in row[:length]]
    assert len(row) == length + 2 * questions and len(set(keys)) == length
    asked = []
    for t in range(length, len(row), 2):
        by_content = row[t].endswith("?")
        place = keys.index(row[t][0]) if by_content else t - int(row[t][:-1])
        assert row[t + 1] == row[place][1]
        assert kind == "train" or by_content == (kind == "content")
        asked.append(place)
    assert len(set(asked)) == questions
    assert length - items <= min(asked) and max(asked) < length
    return range(length + 1, len(row), 2)

def strings(split, row, task, longest, **_):
    question, answer = "".join(row).rstrip("_").split("=")
    n = len(question)
    want = question
    if "addition" in task:
        a, b = question.split("+")
        n = len(a)
        total = str(int(a) + int(b)).zfill(n + 1)
        assert len(b) == n
        want = total[::-1] if task == "reversed_addition" else total
    assert answer == want
    ends = [0, longest, 3 * longest // 2, 2 * longest, 3 * longest, 4 * longest]
    place = ["val", "x1.5", "x2", "x3", "x4"].index(split.replace("train", "val"))
    assert ends[place] < n <= ends[place + 1]
    return range(len(question) + 1, len(question) + 1 + len(answer))

SOLVERS = dict(flip_flop=flip_flop, selective_copy=selective_copy, counting=counting,
               indirect_indexing=indirect_indexing, recall=recall, lookup=lookup, strings=strings)

# A task, its options and the beginning of a hash of its shards. Published runs were trained on
# such bytes, so these must never change
SETS = [
    ("flip_flop", dict(length=64, train=1500, val=20, sparse=20, dense=20), "f2e1a268138a62d7"),
    ("selective_copy", dict(copy=3, blanks=4, vocabulary=6, train=1500, val=40, dense=40,
                            sparse=40), "affb37bcb74662e3"),
    ("counting", dict(variables=3, steps=40, length=50, train=1500, val=40, test=40),
     "0be78dc79fa1195b"),
    ("indirect_indexing", dict(letters=8, shortest=4, longest=6, shift=3, train=1500, val=40,
                               test=40), "1775f2c937a2ef0b"),
    ("recall", dict(length=12, pairs=3, queries=2, filler=8, train=1500, val=40, test=20),
     "9bf6ac72a171dfdc"),
    ("lookup", dict(items=4, questions=2, train=1500, test=40), "3a4f1e6fb2a35879"),
    ("strings", dict(task="reversed_addition", longest=2, train=1500, val=40, test=20),
     "9c6629d65b169f18"),
    ("strings", dict(task="addition", longest=9, train=1500, val=200, test=60, seed=1),
     "a68ef49786d34b98"),
    ("strings", dict(task="copy", longest=9, train=1500, val=40, test=20), "2b457c3f8e330f47"),
]

def drawn_options(task, seed):
    """Returns options of a task, small but with enough rows for all splits."""
    dice = random.Random(seed)
    n = dice.randint
    shift, shortest, longest, letters = sorted(dice.sample(range(3, 53), 4))
    queries, pairs = sorted([n(1, 26), n(1, 26)])
    options = {
        "flip_flop": dict(length=2 * n(6, 30)),
        "selective_copy": dict(copy=n(4, 9), blanks=n(2, 9), vocabulary=n(6, 27)),
        "counting": dict(variables=n(1, 26), steps=n(20, 60), length=n(20, 90)),
        "indirect_indexing": dict(letters=letters, shortest=shortest, longest=longest, shift=shift),
        "recall": dict(length=2 * pairs + n(9, 40), pairs=pairs, queries=queries, filler=n(1, 16)),
        "lookup": dict(items=n(4, 8), questions=n(2, 4)),
        "strings": dict(task=[*TASKS][seed % len(TASKS)], longest=n(8, 12)),
    }[task]
    types = importlib.import_module(f"data.{task}").prepare.__annotations__
    for split in ("val", "test", "sparse", "dense"):
        if split in types:
            options[split] = n(0, 60)
    return dict(options, train=n(100, 500), seed=seed)

DRAWN = [(task, drawn_options(task, seed), None) for task in SOLVERS for seed in range(5)]

@pytest.mark.parametrize("task, options, digest", SETS + DRAWN)
def test_rows_are_right_and_not_in_train(tmp_path, task, options, digest):
    splits = prepare(task, tmp_path / "set", **options)
    for split, rows in splits.items():
        assert len(rows) == options.get(split, options.get("test"))
        for row, mask in rows:
            targets = SOLVERS[task](split, row, **options)
            assert mask == [int(t in targets) for t in range(len(row))]
    trained = {" ".join(row).rstrip("_ ") for row, _ in splits.pop("train")}
    for split, rows in splits.items():
        assert not trained & {" ".join(row).rstrip("_ ") for row, _ in rows}, split
    files = contents(tmp_path / "set")
    total = hashlib.sha256()
    for name in sorted(files.keys() - {"meta.json"}):
        total.update(name.encode() + files[name])
    assert digest is None or total.hexdigest()[:16] == digest
    # a smaller train split is the start of a larger one
    prepare(task, tmp_path / "less", **{**options, "train": options["train"] // 2})
    smaller = contents(tmp_path / "less")
    for name in ("train_000000.bin", "train_000000.loss"):
        assert files[name].startswith(smaller[name])

def test_training_prepares_the_set_once(monkeypatch, tmp_path, capsys):
    """The command names the set after the same options, so it does not write it again. A run does
    not resume on a set that has the same name and another seed."""
    monkeypatch.setattr("data.__file__", str(tmp_path / "data.py"))  # sets are located beside it
    flags = ["--task=copy", "--longest=6", "--train=64", "--val=7", "--test=7"]
    name = "strings@" + ",".join(flags).replace("--", "")
    words = [*TINY, f"--data={name}", "--block_size=100", "--max_iters=1",
             f"--out_dir={tmp_path / 'run'}"]
    train.main(words)
    script = importlib.import_module("data.strings")
    monkeypatch.setattr(sys, "argv", ["strings.py", *flags])
    data.command(script.prepare, "")
    assert f"{tmp_path / name} is complete" in capsys.readouterr().out
    shutil.rmtree(tmp_path / name)
    sys.argv += ["--seed=1", f"--out={tmp_path / name}"]
    data.command(script.prepare, "")
    with pytest.raises(ValueError, match="was trained with other data"):
        train.main([*words, "--resume=True"])
