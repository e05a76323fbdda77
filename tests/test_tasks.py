"""The synthetic tasks of data/. Every row is read from the files with numpy alone, spelled in its
symbols, taken apart and solved again by a plain loop."""
import hashlib
import importlib
import itertools
import json
import random
import re
import string
import sys
from collections import Counter

import numpy as np
import pytest
from conftest import TINY, contents, fails

import data
import train

FILLERS = ".,;:!?-+*/=<>@#%"

def read(folder):
    """Returns {split: [(the row's symbols, its mask), ...]} of a set."""
    meta = json.loads((folder / "meta.json").read_text())
    symbols = meta["tokenizer"]["symbols"]
    assert (meta["loss"], meta["separator"]) == ("mask", None)
    assert meta["vocab_size"] == len(symbols) == len(set(symbols))
    splits = {}
    for name, count in sorted(meta["shards"].items()):
        split = re.fullmatch(r"(.+)_\d{6}\.bin", name)[1]
        length = meta["row_length"][split]
        tokens = np.fromfile(folder / name, "<u2")
        loss = np.fromfile(folder / name.replace(".bin", ".loss"), "u1")
        assert len(tokens) == len(loss) == count
        for row, mask in zip(tokens.reshape(-1, length).tolist(), loss.reshape(-1, length)):
            splits.setdefault(split, []).append(([symbols[i] for i in row], mask.tolist()))
    return splits

def prepare(name, folder, **options):
    importlib.import_module(f"data.{name}").prepare(folder, **options)
    return read(folder)

# Each of these takes a row apart, and fails if the row breaks the rules of its task. It returns
# what was drawn at random, by name, and the positions of the targets.

def flip_flop(split, row, length, **_):
    assert len(row) == length and (row[0], row[-2]) == ("w", "r")
    instructions = row[::2]
    for instruction, bit in zip(instructions, row[1::2]):
        assert instruction in ("w", "r", "i") and bit in ("0", "1")
        if instruction == "w":
            held = bit
        assert instruction != "r" or bit == held
    drawn = {f"instruction of {split}": instructions[1:-1]}
    return drawn, [2 * i + 1 for i, instruction in enumerate(instructions) if instruction == "r"]

def selective_copy(split, row, copy, blanks, **_):
    blanks = {"dense": blanks // 2, "sparse": 2 * blanks}.get(split, blanks)
    letters = [symbol for symbol in row[: copy + blanks] if symbol != "."]
    assert row[copy + blanks :] == letters and len(letters) == copy
    return {"letter": letters}, range(copy + blanks, 2 * copy + blanks)

def counting(split, row, steps, length, **_):
    words = list(itertools.takewhile(lambda word: word != "_", row))
    assert row[len(words) :] == ["_"] * (length - len(words))
    if len(words) == length:  # it may have been cut
        assert words[-3] == "print"
        return {}, [length - 1]
    values = {}
    program, variable, answer = re.fullmatch(r"(.*)print (\w) (\d+)", " ".join(words)).groups()
    operations = re.findall(r"pass;|\w = 0 ;|\w \+\+;", program)
    assert " ".join([*operations, ""]) == program and 3 <= len(operations) <= steps
    for operation in operations:
        name = operation[0]
        if operation.endswith("= 0 ;"):
            values[name] = 0
        elif operation != "pass;":
            values[name] += 1  # a KeyError if it was never set
            assert values[name] <= 10
    assert values[variable] == int(answer)
    return {f"operations of {split}": [len(operations)]}, [len(words) - 1]

def indirect_indexing(split, row, letters, shortest, longest, shift, **_):
    assert len(row) == longest + 8
    shape = r"([a-zA-Z]+),([a-zA-Z]),([+-](?:0|[1-9]\d?)),([a-zA-Z])_*"
    text, letter, moved, target = re.fullmatch(shape, "".join(row)).groups()
    place = text.index(letter)
    assert text[place:][int(moved)] == target if moved[0] == "+" else (
        place + int(moved) >= 0 and text[place + int(moved)] == target)
    assert shortest <= len(text) == len(set(text)) <= longest and moved != "-0"
    assert abs(int(moved)) <= shift and set(text) <= set(string.ascii_letters[:letters])
    return {"length": [len(text)], "shift": [moved]}, [len("".join(row).rstrip("_")) - 1]

def recall(split, row, length, pairs, queries, filler, **_):
    if split.startswith("x"):
        length *= int(split[1:])
    text, asked = "".join(row[:length]), row[length::2]
    values = dict(re.findall(r"([a-z])(\d)", text))
    assert len(values) == pairs and len(re.findall("[a-z]", text)) == pairs
    assert len(row) == length + 2 * queries and len(set(asked)) == queries
    assert set(re.sub(r"[a-z]\d", "", text)) <= set(FILLERS[:filler])
    assert row[length + 1 :: 2] == [values[key] for key in asked]
    return {"value": values.values(), "key": values}, range(length + 1, len(row), 2)

def strings(split, row, task, longest, **_):
    question, answer, pads = re.fullmatch(r"(.+)=([^_]+)(_*)", "".join(row)).groups()
    n = len(question)
    if "addition" in task:
        a, b = question.split("+")
        n = len(a)
        total = str(int(a) + int(b)).zfill(n + 1)
        assert len(b) == n and answer == (total if task == "addition" else total[::-1])
    elif task == "parity":
        assert set(question) <= {"0", "1"} and int(answer) == question.count("1") % 2
    else:
        assert question.isalpha() and answer == (question if task == "copy" else question[::-1])
    ends = {"val": longest, "x1.5": 3 * longest // 2, "x2": 2 * longest, "x3": 3 * longest,
            "x4": 4 * longest}
    before = dict(zip(ends, [0, *ends.values()]))
    split = "val" if split == "train" else split
    assert before[split] < n <= ends[split]
    return {f"n of {split}": [n]}, range(len(question) + 1, len(question) + 1 + len(answer))

def drawn_options(task, dice):
    """Returns options of a task, at its limits now and then."""
    def between(low, high):
        return dice.choice([low, high, dice.randint(low, high)])

    if task == "flip_flop":
        return dict(length=2 * between(12, 30), train=between(1, 1500), val=400, sparse=200,
                    dense=between(0, 300))
    if task == "selective_copy":
        return dict(copy=between(4, 9), blanks=between(3, 9), vocabulary=between(9, 27),
                    train=between(1, 1500), val=400, dense=200, sparse=between(0, 300))
    sizes = dict(train=between(1, 1500), val=200, test=between(0, 100))
    if task == "counting":
        lengths = dict(steps=between(20, 40), length=between(40, 90))
        return dict(variables=between(1, 26), **lengths, **sizes)
    if task == "indirect_indexing":
        shift = between(0, 15)
        shortest = shift + between(4, 6)
        longest = shortest + between(0, 9)
        return dict(shift=shift, shortest=shortest, longest=longest,
                    letters=between(longest, 52), **sizes)
    if task == "recall":
        pairs = between(3, 26)
        return dict(length=2 * pairs + between(0, 9), pairs=pairs, queries=between(1, pairs),
                    filler=between(1, 16), **sizes)
    name = dice.choice(["copy", "reverse", "addition", "reversed_addition", "parity"])
    return dict(task=name, longest=between(9, 16) if name == "parity" else between(2, 9), **sizes)

SOLVERS = dict(flip_flop=flip_flop, selective_copy=selective_copy, counting=counting,
               indirect_indexing=indirect_indexing, recall=recall, strings=strings)

@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("task", SOLVERS)
def test_rows_are_right_and_not_in_train(tmp_path, task, seed):
    options = drawn_options(task, random.Random(f"{task} {seed}"))
    splits = prepare(task, tmp_path / "set", **options, seed=seed)
    for split, rows in splits.items():
        assert len(rows) == options.get(split, options.get("test"))
        for row, mask in rows:
            _, targets = SOLVERS[task](split, row, **options)
            assert mask == [int(t in targets) for t in range(len(row))]
    known = {" ".join(row).rstrip("_ ") for row, _ in splits.pop("train")}
    for split, rows in splits.items():
        assert not known & {" ".join(row).rstrip("_ ") for row, _ in rows}, split
    # a function of the seed, whose smaller train split is the start of a larger one
    whole = contents(tmp_path / "set")
    less = dict(options, train=options["train"] // 2, seed=seed)
    prepare(task, tmp_path / "less", **less)
    for name in ("train_000000.bin", "train_000000.loss"):
        assert options["train"] == 1 or whole[name].startswith(contents(tmp_path / "less")[name])
    prepare(task, tmp_path / "other", **dict(less, seed=seed + 1))
    assert contents(tmp_path / "other") != contents(tmp_path / "less")

# what was published was trained on these bytes, so they must never change
PUBLISHED = [
    ("flip_flop", dict(length=64, train=1500, val=20, sparse=20, dense=20), "58c14f74d82b0c14"),
    ("selective_copy", dict(copy=3, blanks=4, vocabulary=6, train=1500, val=40, dense=40,
                            sparse=40), "6d2607d38b162501"),
    ("counting", dict(variables=3, steps=40, length=50, train=1500, val=40, test=40),
     "7fd69dc33e8dcd87"),
    ("indirect_indexing", dict(letters=8, shortest=4, longest=6, shift=3, train=1500, val=40,
                               test=40), "b26c22289a18e3a9"),
    ("recall", dict(length=12, pairs=3, queries=2, train=1500, val=40, test=20),
     "a9a2643a7d9405d2"),
    ("strings", dict(task="reversed_addition", longest=2, train=1500, val=40, test=20),
     "4609ebb12a14bcd4"),
]

@pytest.mark.parametrize("task, options, want", PUBLISHED)
def test_the_bytes_of_a_task_stay(tmp_path, task, options, want):
    prepare(task, tmp_path / "set", **options)
    total = hashlib.sha256()
    for name, content in contents(tmp_path / "set").items():
        total.update(name.encode() + content)
    assert total.hexdigest().startswith(want)

# what is drawn: (task, options, the name of what is drawn, {value: probability})
FIFTH = 1 / 5
FREQUENCIES = [
    ("flip_flop", dict(length=60), "instruction of train", dict(i=0.8, w=0.1, r=0.1)),
    ("flip_flop", dict(length=60), "instruction of sparse", dict(i=0.98, w=0.01, r=0.01)),
    ("flip_flop", dict(length=60), "instruction of dense", dict(i=0.1, w=0.45, r=0.45)),
    ("selective_copy", dict(copy=4, blanks=4, vocabulary=6), "letter",
     dict.fromkeys("abcde", FIFTH)),
    ("counting", dict(variables=2, steps=22, length=99), "operations of train",
     dict.fromkeys(range(3, 23), FIFTH / 4)),
    ("indirect_indexing", dict(letters=30, shortest=9, longest=13, shift=2), "length",
     dict.fromkeys(range(9, 14), FIFTH)),
    ("indirect_indexing", dict(letters=30, shortest=9, longest=13, shift=2), "shift",
     dict.fromkeys(["-2", "-1", "+0", "+1", "+2"], FIFTH)),
    ("recall", dict(length=12, pairs=3, queries=2, filler=4), "value",
     dict.fromkeys(string.digits, FIFTH / 2)),
    ("strings", dict(task="reverse", longest=8), "n of x1.5", dict.fromkeys(range(9, 13), 1 / 4)),
]

def likely(counts, probabilities):
    """Asserts that each value was drawn as often as its probability says, within five standard
    deviations, and no other value."""
    total = counts.total()
    assert counts.keys() <= probabilities.keys()
    for value, p in probabilities.items():
        assert abs(counts[value] - total * p) < 5 * (total * p * (1 - p)) ** 0.5, value

def uniform(counts, values):
    values = list(values)
    likely(counts, dict.fromkeys(values, 1 / len(values)))

@pytest.mark.parametrize("task, options, name, probabilities", FREQUENCIES)
def test_frequencies_are_the_documented_ones(tmp_path, task, options, name, probabilities):
    names = ["train", "val", "sparse", "dense"] if task in ("flip_flop", "selective_copy") else (
        ["train", "val", "test"])
    splits = prepare(task, tmp_path / "set", **options, **dict.fromkeys(names, 1000))
    counts = Counter()
    for split, rows in splits.items():
        for row, _ in rows:
            counts.update(SOLVERS[task](split, row, **options)[0].get(name, []))
    assert counts.total() >= 1000
    likely(counts, probabilities)

def test_counting_keeps_the_last_tokens(tmp_path):
    """Programs depend only on the seed, so a set of long enough rows has the same ones, uncut."""
    how = dict(variables=2, steps=30, train=300, val=0, test=0)
    whole = prepare("counting", tmp_path / "long", **how, length=130)["train"]
    cut = prepare("counting", tmp_path / "short", **how, length=40)["train"]
    for (long, _), (short, mask) in zip(whole, cut):
        words = [word for word in long if word != "_"]
        kept = words[-40:]
        assert short == kept + ["_"] * (40 - len(kept))
        assert mask == [int(t == len(kept) - 1) for t in range(40)]
    assert {len(row) for row, _ in whole} == {130}

def test_a_tenth_of_few_questions_is_held_out(tmp_path):
    """Train draws all of the others, and val all of the held-out ones."""
    splits = prepare("strings", tmp_path, task="parity", longest=8, train=12_000, val=1500, test=0)
    train, val = ({"".join(row[:8]) for row, _ in splits[split] if row[8] == "="}
                  for split in ("train", "val"))
    assert train | val == set(map("".join, itertools.product("01", repeat=8)))
    assert not train & val and 0.06 < len(val) / 2**8 < 0.14

def test_a_task_without_rows_for_val_is_refused(tmp_path):
    with pytest.raises(ValueError, match="val=5: hardly any row.*take fewer train rows or a"):
        prepare("recall", tmp_path / "set", length=2, pairs=1, queries=1, train=20_000, val=5)

@pytest.mark.parametrize("task, options", [
    ("flip_flop", dict(length=7)), ("flip_flop", dict(length=2)),
    ("selective_copy", dict(copy=0)), ("selective_copy", dict(blanks=-1)),
    ("selective_copy", dict(vocabulary=1)), ("selective_copy", dict(vocabulary=28)),
    ("counting", dict(variables=0)), ("counting", dict(variables=27)),
    ("counting", dict(steps=2)), ("counting", dict(length=7)),
    ("indirect_indexing", dict(shift=-1)), ("indirect_indexing", dict(shift=20)),
    ("indirect_indexing", dict(shortest=41)), ("indirect_indexing", dict(letters=39)),
    ("indirect_indexing", dict(letters=53)),
    ("recall", dict(queries=0)), ("recall", dict(queries=3, pairs=2)), ("recall", dict(pairs=27)),
    ("recall", dict(length=31, pairs=16)), ("recall", dict(filler=0)), ("recall", dict(filler=17)),
    ("strings", dict(task="sort")), ("strings", dict(longest=1)),
])
def test_options_that_make_no_task(tmp_path, task, options):
    with pytest.raises(ValueError) as error:
        prepare(task, tmp_path / "set", **options)
    text = str(error.value)
    assert "\n" not in text and all(f"{name}={value!r}" in text for name, value in options.items())
    assert not list(tmp_path.iterdir())

@pytest.mark.parametrize("task, options", [
    ("flip_flop", dict(length=4)),
    ("selective_copy", dict(copy=1, blanks=0, vocabulary=2)),
    ("counting", dict(variables=26, steps=3, length=8)),
    ("indirect_indexing", dict(letters=1, shortest=1, longest=1, shift=0)),
    ("indirect_indexing", dict(letters=52, shortest=52, longest=52, shift=51)),
    ("recall", dict(length=52, pairs=26, queries=26, filler=16)),
    ("recall", dict(length=2, pairs=1, queries=1, filler=1)),
    ("strings", dict(task="copy", longest=2)),
])
def test_options_at_their_limits(tmp_path, task, options):
    # so few rows exist that train could take them all
    others = dict.fromkeys(("val", "sparse", "dense"), 0)
    if task not in ("flip_flop", "selective_copy"):
        others = dict(val=0, test=0)
    rows = prepare(task, tmp_path / "set", **options, **others, train=300)["train"]
    assert len(rows) == 300
    for row, mask in rows:
        _, targets = SOLVERS[task]("train", row, **options)
        assert mask == [int(t in targets) for t in range(len(row))]

# the command line, and training

def test_command_names_the_set_after_its_options(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("data.__file__", str(tmp_path / "data.py"))  # sets are located beside it
    options = dict(length=64, val=7, sparse=7, dense=7, train=30, seed=5)
    flags = [f"--{name}={value}" for name, value in options.items()]
    script = importlib.import_module("data.flip_flop")
    for more in ([], [f"--out={tmp_path / 'set'}"], []):
        monkeypatch.setattr(sys, "argv", ["flip_flop.py", *flags, *more])
        data.command(script.prepare, "")
    assert "is complete" in capsys.readouterr().out
    script.prepare(tmp_path / "direct", **options)
    named = tmp_path / f"flip_flop@{','.join(flags).replace('--', '')}"
    assert contents(named) == contents(tmp_path / "set") == contents(tmp_path / "direct")

def test_training_prepares_the_set_once(monkeypatch, tmp_path):
    monkeypatch.setattr("data.__file__", str(tmp_path / "data.py"))  # sets are located beside it
    options = dict(task="copy", longest=6, train=64, val=7, test=7)
    name = "strings@" + ",".join(f"{key}={value}" for key, value in options.items())
    words = [*TINY, f"--data={name}", "--block_size=100", "--max_iters=1", "--eval_splits=val,x1.5"]
    times = []
    for out in (tmp_path / "run", tmp_path / "again"):
        train.main([*words, f"--out_dir={out}"])
        log = [json.loads(line) for line in open(out / "log.jsonl")]
        assert {record["split"] for record in log if "split" in record} == {"val", "x1.5"}
        times.append({path: path.stat().st_mtime_ns for path in (tmp_path / name).iterdir()})
    assert times[0] == times[1]
    prepare("strings", tmp_path / "direct", **options)
    assert contents(tmp_path / name) == contents(tmp_path / "direct")

@pytest.mark.parametrize("data, parts", [
    ("flip_flop@lenght=8", ["'lenght'", "did you mean 'length'"]),
    ("flip_flop@length=eight", ["length='eight'", "not of type int"]),
    ("flip_flop@train=8,length", ["'length'", "has no value"]),
    ("flip_flop@length=7", ["length=7", "even"]),
    ("recall@pairs=40", ["pairs=40", "26"]),
    ("flipflop@length=8", ["no meta.json", "flipflop"]),
])
def test_options_in_training_that_do_not_exist(monkeypatch, tmp_path, data, parts):
    monkeypatch.setattr("data.__file__", str(tmp_path / "data.py"))
    line = fails("train.py", *TINY, f"--data={data}", f"--out_dir={tmp_path / 'run'}")
    assert all(part in line for part in parts), line
    assert not list(tmp_path.iterdir())
