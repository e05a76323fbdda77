"""data/recall.py and data/strings.py, whose test rows are longer than train's, against brute force.
Every row is read from the files with numpy alone, spelled in its symbols and solved by a loop."""
import itertools
import json
import re
import string
from collections import Counter

import numpy as np
import pytest
from conftest import TINY, contents, fails
from test_tasks import fit, uniform

import train
from data import recall, strings

FILLERS = ".,;:!?-+*/=<>@#%"
ALPHABET = {"copy": string.ascii_lowercase, "reverse": string.ascii_lowercase,
            "addition": string.digits, "reversed_addition": string.digits, "parity": "01"}
SETS = [(recall, dict(length=16, pairs=4, queries=2)), (strings, dict(task="copy", longest=6)),
        (strings, dict(task="addition", longest=6))]

def read(folder):
    """A written set -> {split: [(the row's symbols in one string, its mask as 0 and 1), ...]}."""
    meta, splits = json.loads((folder / "meta.json").read_text()), {}
    symbols = meta["tokenizer"]["symbols"]
    assert meta["loss"] == "mask" and meta["vocab_size"] == len(symbols) == len(set(symbols))
    for name, count in meta["shards"].items():
        split = name[: name.index("_0")]
        n = meta["row_length"][split]
        tokens = np.fromfile(folder / name, "<u2")
        loss = np.fromfile(folder / name.replace(".bin", ".loss"), "u1")
        assert len(tokens) == len(loss) == count
        for row, mask in zip(tokens.reshape(-1, n).tolist(), loss.reshape(-1, n).tolist()):
            splits.setdefault(split, []).append(("".join(symbols[token] for token in row), mask))
    return splits

def write(folder, module, **options):
    """Writes a set and reads it back. It has as many rows as were asked for."""
    module.prepare(folder, **options)
    splits = read(folder)
    for split, rows in splits.items():
        assert len(rows) == options.get(split, options["test"])
    return splits

# --- recall ---------------------------------------------------------------------------------------

def times(split):
    """How many times longer than train's a split's rows are, without their queries."""
    return int(split[1:]) if split.startswith("x") else 1

def recall_row(row, mask, length, pairs, queries):
    """-> the places of the pairs, [(key, value), ...] in this order, the keys asked for, the
    fillers. Fails for a row that breaks the rules."""
    assert len(row) == length + 2 * queries
    places, table, fillers, t = [], {}, [], 0
    while t < length:
        if row[t] in string.ascii_lowercase:
            assert row[t] not in table and row[t + 1] in string.digits and t + 1 < length
            table[row[t]] = row[t + 1]
            places.append(t)
            t += 2
        else:
            assert row[t] in FILLERS
            fillers.append(row[t])
            t += 1
    asked = []
    for t in range(length, len(row), 2):
        assert row[t + 1] == table[row[t]] and row[t] not in asked
        asked.append(row[t])
    assert len(places) == pairs and len(asked) == queries
    assert mask == [int(t > length and (t - length) % 2 == 1) for t in range(len(row))]
    return tuple(places), list(table.items()), asked, fillers

def test_recall(tmp_path):
    options = dict(length=6, pairs=2, queries=1, filler=3)
    splits = write(tmp_path, recall, **options, train=4000, val=2000, test=3000)
    assert splits.keys() == {"train", "val", "x2", "x4", "x8", "x16"}
    for split, rows in splits.items():
        length = 6 * times(split)
        rows = [recall_row(row, mask, length, 2, 1) for row, mask in rows]
        # every choice of places is equally likely, whichever of the pairs is asked for
        places = [(a, b) for a, b in itertools.combinations(range(length - 1), 2) if b > a + 1]
        if length < 25:
            uniform(Counter((at, table[0][0] in asked) for at, table, asked, _ in rows),
                    itertools.product(places, (True, False)))
        else:  # so many choices are counted by the quarters of the row that they are in
            expected = Counter((4 * a // length, 4 * b // length) for a, b in places)
            fit(Counter((4 * a // length, 4 * b // length) for (a, b), _, _, _ in rows),
                {where: len(rows) * n / len(places) for where, n in expected.items()})
        for i in (0, 1):
            uniform(Counter(table[i][0] for _, table, _, _ in rows), string.ascii_lowercase)
        uniform(Counter((table[0][1], table[1][1]) for _, table, _, _ in rows),
                itertools.product(string.digits, repeat=2))
        uniform(Counter(tuple(fillers[-2:]) for _, _, _, fillers in rows),
                itertools.product(FILLERS[:3], repeat=2))

@pytest.mark.parametrize("length, pairs, queries, filler", [
    (256, 16, 16, 16), (52, 26, 26, 16), (2, 1, 1, 1), (53, 26, 26, 1)])
def test_recall_at_its_size_and_at_its_limits(tmp_path, length, pairs, queries, filler):
    splits = write(tmp_path, recall, length=length, pairs=pairs, queries=queries, filler=filler,
                   train=30, val=5, test=5)
    for split, rows in splits.items():
        for row, mask in rows:
            recall_row(row, mask, length * times(split), pairs, queries)
    rows = [row for part in splits.values() for row, _ in part]
    assert len(set(rows)) == len(rows) or length == 2  # whose train has few rows to draw from

def test_recall_asks_in_every_order(tmp_path):
    options, asked = dict(length=20, pairs=4, queries=3, filler=1), Counter()
    splits = write(tmp_path, recall, **options, train=3000, val=10, test=10)
    for row, mask in splits["train"]:
        _, table, keys, _ = recall_row(row, mask, 20, 4, 3)
        asked[tuple([key for key, _ in table].index(key) for key in keys)] += 1
    uniform(asked, itertools.permutations(range(4), 3))

# --- strings --------------------------------------------------------------------------------------

def solve(task, question):
    if task == "copy":
        return question
    if task == "reverse":
        return question[::-1]
    if task == "parity":
        return str(question.count("1") % 2)
    a, b = question.split("+")
    assert len(a) == len(b)
    total = str(int(a) + int(b)).zfill(len(a) + 1)
    return total if task == "addition" else total[::-1]

def strings_row(task, row, mask):
    """-> (n, the question) of a row that obeys the rules."""
    question, answer, pads = re.fullmatch(r"(.+)=([^_]+)(_*)", row).groups()
    assert answer == solve(task, question)
    assert mask == [0] * (len(question) + 1) + [1] * len(answer) + [0] * len(pads)
    drawn = question.replace("+", "")
    assert set(drawn) <= set(ALPHABET[task])
    return len(drawn) // (2 if "addition" in task else 1), drawn

@pytest.mark.parametrize("task", ALPHABET)
def test_strings(tmp_path, task):
    n = 20 if task == "parity" else 6  # enough questions for none to be held out
    splits = write(tmp_path / "train", strings, task=task, longest=n, train=4000, val=0, test=0)
    # without rows in train, none is drawn again: questions of every length are equally likely
    splits |= write(tmp_path / "test", strings, task=task, longest=n, train=0, val=1500, test=1500)
    ranges = {"train": (1, n), "val": (1, n), "x1.5": (n + 1, 3 * n // 2),
              "x2": (3 * n // 2 + 1, 2 * n), "x3": (2 * n + 1, 3 * n), "x4": (3 * n + 1, 4 * n)}
    assert splits.keys() == ranges.keys()
    for split, (low, high) in ranges.items():
        rows = [strings_row(task, row, mask) for row, mask in splits[split]]
        uniform(Counter(n for n, _ in rows), range(low, high + 1))
        width = 2 * high + 1 if task in ("copy", "reverse") else 3 * high + 3
        assert len(splits[split][0][0]) == (high + 2 if task == "parity" else width)
        uniform(Counter(itertools.chain(*(drawn for _, drawn in rows))), ALPHABET[task])
        for at in (0, -1):
            uniform(Counter(drawn[at] for _, drawn in rows), ALPHABET[task])

def test_a_tenth_of_few_questions_is_held_out(tmp_path):
    """Train draws each of the others equally often, and val each held-out one."""
    for task, drawn in (("copy", 2), ("parity", 8)):
        splits = write(tmp_path / task, strings, task=task, longest=drawn, train=24_000, val=1500,
                       test=0)
        texts = {split: [strings_row(task, row, mask)[1] for row, mask in rows]
                 for split, rows in splits.items()}
        assert not set(texts["train"]) & set(texts["val"])
        train, val = (Counter(text for text in texts[split] if len(text) == drawn)
                      for split in ("train", "val"))
        every = set(map("".join, itertools.product(ALPHABET[task], repeat=drawn)))
        assert set(train) | set(val) == every and 0.06 < len(val) / len(every) < 0.14
        uniform(train, set(train))
        uniform(val, set(val))

def test_a_task_without_rows_for_val_is_refused(tmp_path):
    with pytest.raises(ValueError, match="val=5.*hardly any row.*take fewer train rows or a"):
        recall.prepare(tmp_path / "set", length=2, pairs=1, queries=1, train=20_000, val=5, test=5)

# --- both of them ---------------------------------------------------------------------------------

@pytest.mark.parametrize("module, options", SETS)
def test_rows_are_a_function_of_the_seed(tmp_path, module, options):
    """The same seed gives the same bytes, another seed others. A smaller set is the start of a
    larger one. Val and the longer splits also depend on train, as they hold no row of it."""
    def make(name, **more):
        module.prepare(tmp_path / name, **options | dict(train=990, val=7, test=7) | more)
        return contents(tmp_path / name)

    once = make("once")
    assert make("twice", seed=0) == once
    other = make("other", seed=1)
    assert all(other[name] != once[name] for name in once if name.endswith(".bin"))
    fewer, more = make("fewer", val=3, test=3), make("more", val=1007, test=9)
    for name in set(once) - {"meta.json"}:
        assert once[name].startswith(fewer[name]) and more[name].startswith(once[name])
    fewer, more = make("one", train=1), make("thousand", train=1003)
    for name in ("train_000000.bin", "train_000000.loss"):
        assert once[name].startswith(fewer[name]) and more[name].startswith(once[name])

@pytest.mark.parametrize("module, options", [
    (recall, dict(queries=0)), (recall, dict(queries=3, pairs=2)), (recall, dict(pairs=27)),
    (recall, dict(length=31, pairs=16)), (recall, dict(filler=0)), (recall, dict(filler=17)),
    (strings, dict(task="sort")), (strings, dict(longest=1))])
def test_options_that_make_no_task(tmp_path, module, options):
    with pytest.raises(ValueError) as error:
        module.prepare(tmp_path / "set", **options)
    text = str(error.value)
    assert "\n" not in text and all(f"{name}={value!r}" in text for name, value in options.items())
    assert not list(tmp_path.iterdir())

@pytest.mark.parametrize("module, options", SETS[:2])
def test_training_prepares_the_set(monkeypatch, tmp_path, module, options):
    monkeypatch.setattr("data.__file__", str(tmp_path / "data.py"))  # sets are located beside it
    options = options | dict(train=64, val=7, test=7)
    given = ",".join(f"{key}={value}" for key, value in options.items())
    name = f"{module.__name__.removeprefix('data.')}@{given}"
    longer = "x2,x16" if module is recall else "x1.5,x4"
    train.main([*TINY, f"--data={name}", "--block_size=300", "--max_iters=2",
                f"--eval_splits=val,{longer}", f"--out_dir={tmp_path / 'run'}"])
    module.prepare(tmp_path / "direct", **options)
    assert contents(tmp_path / name) == contents(tmp_path / "direct")
    records = [json.loads(line) for line in open(tmp_path / "run" / "log.jsonl")]
    found = {record["split"] for record in records if "split" in record}
    assert found == {"val", *longer.split(",")}

def test_training_with_wrong_options_ends_with_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr("data.__file__", str(tmp_path / "data.py"))
    line = fails("train.py", *TINY, "--data=recall@pairs=40", f"--out_dir={tmp_path / 'run'}")
    assert "pairs=40" in line and "26" in line
