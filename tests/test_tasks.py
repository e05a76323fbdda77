"""The synthetic tasks of data/, against brute force.

Every row is read from the files with numpy alone, spelled out in its symbols and solved by a plain
loop. Frequencies must lie within five standard deviations of the documented ones.
"""
import itertools
import json
import math
import re
import string
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from conftest import TINY, contents, fails

import config
import data
import train
from data import counting, flip_flop, indirect_indexing, selective_copy, shards

ROOT = Path(__file__).parent.parent
TASKS = {"flip_flop": flip_flop, "selective_copy": selective_copy, "counting": counting,
         "indirect_indexing": indirect_indexing}
OTHERS = {"flip_flop": ["val", "sparse", "dense"], "selective_copy": ["val", "sparse", "dense"],
          "counting": ["val", "test"], "indirect_indexing": ["val", "test"]}

def read(folder):
    """A written set -> {split: [(the row's symbols, its mask as 0 and 1), ...]}."""
    meta, splits = json.loads((folder / "meta.json").read_text()), {}
    symbols = meta["tokenizer"]["symbols"]
    assert (meta["loss"], meta["separator"]) == ("mask", None)
    assert meta["vocab_size"] == len(symbols) == len(set(symbols))
    for name, count in sorted(meta["shards"].items()):
        split = re.fullmatch(r"(\w+)_\d{6}\.bin", name)[1]
        n = meta["row_length"][split]
        tokens = np.fromfile(folder / name, "<u2")
        loss = np.fromfile(folder / name.replace(".bin", ".loss"), "u1")
        assert len(tokens) == len(loss) == count
        for row, mask in zip(tokens.reshape(-1, n).tolist(), loss.reshape(-1, n).tolist()):
            splits.setdefault(split, []).append(([symbols[token] for token in row], mask))
    return splits

def write(folder, task, **options):
    """Write a set and read it back. It has as many rows as were asked for."""
    TASKS[task].prepare(folder, **options)
    splits = read(folder)
    for split, rows in splits.items():
        assert len(rows) == options.get(split, options.get("test"))
    return splits

def fit(counts, expected):
    """Asserts that `counts`, {value: times}, are likely if chance brings each value `expected`
    times on average: each within five standard deviations, and all together, by chi-squared (as a
    normal variate: Wilson and Hilferty)."""
    total, n = sum(expected.values()), len(expected) - 1
    assert counts.keys() <= expected.keys() and abs(sum(counts.values()) - total) < 1e-6 * total
    assert min(expected.values()) > 4  # otherwise it would be no test
    for value, mean in expected.items():
        deviation = abs(counts[value] - mean) / math.sqrt(mean * (1 - mean / total))
        assert deviation <= 5, (value, counts[value], mean)
    chi2 = sum((counts[value] - mean) ** 2 / mean for value, mean in expected.items())
    deviation = ((chi2 / n) ** (1 / 3) - 1 + 2 / (9 * n)) / math.sqrt(2 / (9 * n))
    assert abs(deviation) <= 5, (deviation, dict(counts))  # too even would be as wrong as uneven

def uniform(counts, values):
    values = list(values)
    fit(counts, {value: sum(counts.values()) / len(values) for value in values})

def all_different(splits):
    """No row occurs twice, in one split or in two."""
    rows = ["".join(row) for split in splits.values() for row, _ in split]
    assert len(set(rows)) == len(rows)

# flip-flop

def flip_flop_row(row, mask):
    """-> [(instruction, bit, the bit that was written last before it), ...] of a row that obeys
    the rules."""
    assert row[0] == "w" and row[-2] == "r"
    pairs, held, want = [], None, []
    for instruction, bit in zip(row[::2], row[1::2]):
        assert instruction in ("w", "r", "i") and bit in ("0", "1")
        pairs.append((instruction, bit, held))
        if instruction == "w":
            held = bit
        elif instruction == "r":
            assert bit == held
        want += [0, int(instruction == "r")]
    assert mask == want
    return pairs

def test_flip_flop(tmp_path):
    splits = write(tmp_path, "flip_flop", length=40, train=3000, val=2000, sparse=3500, dense=1500)
    two_bits = list(itertools.product("01", repeat=2))
    for split, p_i in dict(train=0.8, val=0.8, sparse=0.98, dense=0.1).items():
        p = {"i": p_i, "w": (1 - p_i) / 2, "r": (1 - p_i) / 2}
        rows = [flip_flop_row(row, mask) for row, mask in splits[split]]
        between = [[instruction for instruction, _, _ in row[1:-1]] for row in rows]
        fit(Counter(itertools.chain(*between)), {k: 18 * len(rows) * p[k] for k in p})
        # independent of the neighbour and of the place in the row
        noise = {True: p_i, False: 1 - p_i}
        pairs = ((a == "i", b == "i") for row in between for a, b in zip(row[::2], row[1::2]))
        both = {(a, b): noise[a] * noise[b] for a in noise for b in noise}
        fit(Counter(pairs), {key: 9 * len(rows) * chance for key, chance in both.items()})
        for which in "wr":
            places = (t for row in between for t, k in enumerate(row) if k == which)
            uniform(Counter(places), range(18))
        # bits that are not read: fair coins, whatever was written before and whatever bit is next
        for which in "wi":
            bits = ((bit, held) for row in rows for k, bit, held in row[1:] if k == which)
            uniform(Counter(bits), two_bits)
        uniform(Counter(row[0][1] for row in rows), "01")
        bits = ((a[1], b[1]) for row in rows for a, b in zip(row, row[1:]) if b[0] != "r")
        uniform(Counter(bits), two_bits)

def test_flip_flop_at_its_size(tmp_path):
    splits = write(tmp_path, "flip_flop", train=2100, val=100, sparse=100, dense=100)
    for row, mask in itertools.chain(*splits.values()):
        assert len(flip_flop_row(row, mask)) == 256
    all_different(splits)
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert meta["tokenizer"]["symbols"] == ["w", "r", "i", "0", "1"]

# selective copy

def selective_copy_row(row, mask, copy, blanks):
    """-> the letters, and the places that they stand in, of a row that obeys the rules."""
    assert len(row) == copy + blanks + copy
    places = [t for t, symbol in enumerate(row[: copy + blanks]) if symbol != "."]
    letters = [row[t] for t in places]
    assert row[copy + blanks :] == letters and len(letters) == copy and "." not in letters
    assert mask == [0] * (copy + blanks) + [1] * copy
    return letters, tuple(places)

def test_selective_copy(tmp_path):
    rows = dict(train=4000, val=1500, dense=1000, sparse=4000)
    splits = write(tmp_path, "selective_copy", copy=3, blanks=4, vocabulary=6, **rows)
    for split, blanks in dict(train=4, val=4, dense=2, sparse=8).items():
        rows = [selective_copy_row(row, mask, 3, blanks) for row, mask in splits[split]]
        # every word is equally likely, and so is every choice of places, whatever letter they hold
        words = map("".join, itertools.product("abcde", repeat=3))
        uniform(Counter("".join(letters) for letters, _ in rows), words)
        places = itertools.product("abcde", itertools.combinations(range(3 + blanks), 3))
        uniform(Counter((letters[2], places) for letters, places in rows), places)

def test_selective_copy_at_its_size(tmp_path):
    splits = write(tmp_path, "selective_copy", train=1100, val=50, dense=50, sparse=50)
    for split, blanks in dict(train=256, val=256, dense=128, sparse=512).items():
        rows = [selective_copy_row(row, mask, 256, blanks) for row, mask in splits[split]]
        letters = Counter(itertools.chain(*(letters for letters, _ in rows)))
        uniform(letters, string.ascii_lowercase[:15])
        eighths = Counter(t * 8 // (256 + blanks) for _, places in rows for t in places)
        uniform(eighths, range(8))
    all_different(splits)
    assert json.loads((tmp_path / "meta.json").read_text())["vocab_size"] == 16

# counting

def counting_row(row, mask):
    """-> the operations, [("pass", None) or ("set", variable) or ("increment", variable), ...],
    the values of the set variables before each of them, the answer's variable, and the values at
    the end, of an uncut row that obeys the rules."""
    words = list(itertools.takewhile(lambda word: word != "_", row))
    assert row[len(words) :] == ["_"] * (len(row) - len(words))
    assert mask == [int(t == len(words) - 1) for t in range(len(row))]
    operations, states, values, text = [], [], {}, " ".join(words)
    program, variable, answer = re.fullmatch(r"(.*)print (\w) (\d+)", text).groups()
    shapes, at = re.compile(r"(pass;|(\w) = 0 ;|(\w) \+\+;) "), 0
    while at < len(program):
        word, cleared, grown = shapes.match(program, at).groups()
        at += len(word) + 1
        states.append(dict(values))
        if cleared:
            values[cleared] = 0
            operations.append(("set", cleared))
        elif grown:
            values[grown] += 1  # a KeyError where it was never set
            assert values[grown] <= 10
            operations.append(("increment", grown))
        else:
            operations.append(("pass", None))
    assert values[variable] == int(answer)
    return operations, states, variable, values

@pytest.mark.parametrize("variables, steps", [(1, 120), (3, 80)])
def test_counting(tmp_path, variables, steps):
    how = dict(variables=variables, steps=steps, length=4 * steps + 3)
    splits = write(tmp_path, "counting", **how, train=1000, val=1000, test=1000)
    names, states_seen, answers_seen = string.ascii_lowercase[:variables], set(), set()
    for split, w_pass in dict(train=50, val=50, test=50, pass100=100, pass10=10).items():
        rows = [counting_row(row, mask) for row, mask in splits[split]]
        uniform(Counter(len(operations) for operations, _, _, _ in rows), range(3, steps + 1))
        kinds, picked, answers = defaultdict(Counter), defaultdict(Counter), defaultdict(Counter)
        cleared, first, first_expected = Counter(), Counter(), Counter()
        for operations, states, variable, values in rows:
            n, begin = len(operations), [kind for kind, _ in operations].index("set")
            # before the first set there are only passes, and programs without one were drawn
            # again: a geometric law, cut at n
            first[min(begin // 6, 4)] += 1
            q = w_pass / (1 + w_pass)
            for t in range(0, min(n, 30), 6):
                end = n if t == 24 else min(t + 6, n)
                first_expected[t // 6] += (q**t - q**end) / (1 - q**n)
            cleared[operations[begin][1]] += 1
            for (kind, which), state in zip(operations[begin + 1 :], states[begin + 1 :]):
                grow = sorted(name for name in state if state[name] < 10)
                kinds[len(state), len(grow)][kind] += 1
                if kind == "set":
                    cleared[which] += 1
                elif kind == "increment":
                    picked[len(grow)][grow.index(which)] += 1
            answers[len(values)][sorted(values).index(variable)] += 1
        fit(first, first_expected)
        for (n_set, n_grow), counts in kinds.items():
            # an increment picks among the set variables, and is drawn again if that one is at 10
            weights = {"pass": w_pass, "set": 1, "increment": 7 * n_grow / n_set}
            times = sum(counts.values()) / sum(weights.values())
            if times > 5:
                states_seen.add((n_set, n_grow))
                fit(counts, {kind: times * weight for kind, weight in weights.items() if weight})
        if variables > 1:
            uniform(cleared, names)
        for table in (picked, answers):
            for n, counts in table.items():
                if n > 1 and sum(counts.values()) > 5 * n:
                    uniform(counts, range(n))
        answers_seen |= {n for n, counts in answers.items() if sum(counts.values()) > 100}
    three = {(2, 2), (2, 1), (3, 3), (3, 2)} if variables == 3 else set()
    assert states_seen >= {(1, 1), (1, 0)} | three
    assert answers_seen == set(range(1, variables + 1))

@pytest.mark.parametrize("steps, length, variables", [(512, 512, 1), (12, 8, 2)])
def test_counting_keeps_the_last_tokens(tmp_path, steps, length, variables):
    """Programs depend on the seed alone, so a set of long enough rows has the same ones, uncut."""
    how = dict(variables=variables, steps=steps, train=300, val=0, test=0)
    long = write(tmp_path / "long", "counting", **how, length=4 * steps + 3)["train"]
    short = write(tmp_path / "short", "counting", **how, length=length)["train"]
    cut = padded = 0
    for (row, mask), (long_row, long_mask) in zip(short, long):
        assert len(counting_row(long_row, long_mask)[0]) >= 3
        words = [word for word in long_row if word != "_"]
        kept = words[max(len(words) - length, 0) :]
        assert row == kept + ["_"] * (length - len(kept))
        assert mask == [int(t == len(kept) - 1) for t in range(length)]
        cut, padded = cut + (len(words) > length), padded + (len(words) < length)
    assert cut > 20 and (padded > 20 or length == 8)  # the shortest program has nine words

# indirect indexing

def indirect_indexing_row(row, mask, longest):
    """-> the string, the place of its letter, the shift, of a row that obeys the rules."""
    assert len(row) == longest + 8 and set(map(len, row)) == {1}
    shape = r"([a-zA-Z]+),([a-zA-Z]),([+-](?:0|[1-9]\d?)),([a-zA-Z])_*"
    text, letter, shift, target = re.fullmatch(shape, "".join(row)).groups()
    assert shift != "-0" and len(set(text)) == len(text)
    place, end = text.index(letter), len("".join(row).rstrip("_"))
    assert 0 <= place + int(shift) < len(text) and text[place + int(shift)] == target
    assert mask == [int(t == end - 1) for t in range(len(row))]
    return text, place, int(shift)

def test_indirect_indexing(tmp_path):
    how = dict(letters=6, shortest=3, longest=5, shift=2, train=5000, val=0, test=0)
    splits = write(tmp_path, "indirect_indexing", **how)
    rows = [indirect_indexing_row(row, mask, 5) for row, mask in splits["train"]]
    places = {}
    for length, shift in itertools.product((3, 4, 5), range(-2, 3)):
        for place in range(length):
            if 0 <= place + shift < length:
                places[length, place, shift] = 5000 / 15 / (length - abs(shift))
    fit(Counter((len(text), place, shift) for text, place, shift in rows), places)
    for k in (slice(3), slice(-3, None)):  # every string is as likely as every other
        strings = map("".join, itertools.permutations("abcdef", 3))
        uniform(Counter(text[k] for text, _, _ in rows), strings)

def test_indirect_indexing_at_its_size(tmp_path):
    splits = write(tmp_path, "indirect_indexing", train=8000, val=1000, test=1000)
    rows = [indirect_indexing_row(row, mask, 40) for row, mask in itertools.chain(*splits.values())]
    uniform(Counter(len(text) for text, _, _ in rows), range(20, 41))
    uniform(Counter(shift for _, _, shift in rows), range(-15, 16))
    for k in (0, 19, -1):
        uniform(Counter(text[k] for text, _, _ in rows), string.ascii_letters)
    ends, expected = Counter(), Counter()  # how often the leftmost and the rightmost place
    for text, place, shift in rows:
        low, high = max(0, -shift), min(len(text), len(text) - shift) - 1
        for name, chance in (("low", 1), ("high", 1), ("between", high - low - 1)):
            expected[name] += chance / (high - low + 1)
        ends["low" if place == low else "high" if place == high else "between"] += 1
    fit(ends, expected)
    all_different(splits)
    assert json.loads((tmp_path / "meta.json").read_text())["vocab_size"] == 66

# all of them

@pytest.mark.parametrize("task", TASKS)
def test_rows_are_a_function_of_the_seed(tmp_path, task):
    def make(name, **options):
        few = dict.fromkeys(OTHERS[task], 0) | dict(train=30)
        return write(tmp_path / name, task, **few | options)["train"]

    once = make("once")
    assert once == make("again") != make("other", seed=1)

def test_fewer_rows_are_the_first_of_more(tmp_path):
    """The other splits also depend on train, which holds no row of theirs."""
    def make(name, **options):
        few = dict(length=64, val=7, sparse=7, dense=7, train=990)
        flip_flop.prepare(tmp_path / name, **few | options)
        return contents(tmp_path / name)

    once, fewer, more = make("once"), make("fewer", val=0), make("more", val=1007)
    make("other", seed=1)
    first, second = read(tmp_path / "once"), read(tmp_path / "other")
    all_different(first | {f"{split} of the other": rows for split, rows in second.items()})
    assert not any(name.startswith("val") for name in fewer)
    assert len(read(tmp_path / "more")["val"]) == 1007
    for name in set(fewer) - {"meta.json"}:
        assert once[name] == fewer[name]
    for name in set(once) - {"meta.json"}:
        assert more[name].startswith(once[name])
    longer = make("longer", train=1003)
    for name in ("train_000000.bin", "train_000000.loss"):
        assert longer[name].startswith(once[name])

@pytest.mark.parametrize("task, options", [
    ("flip_flop", dict(length=7)), ("flip_flop", dict(length=2)),
    ("selective_copy", dict(copy=0)), ("selective_copy", dict(blanks=-1)),
    ("selective_copy", dict(vocabulary=1)), ("selective_copy", dict(vocabulary=28)),
    ("counting", dict(variables=0)), ("counting", dict(variables=27)),
    ("counting", dict(steps=2)), ("counting", dict(length=7)),
    ("indirect_indexing", dict(shift=-1)), ("indirect_indexing", dict(shift=20)),
    ("indirect_indexing", dict(shortest=41)), ("indirect_indexing", dict(letters=39)),
    ("indirect_indexing", dict(letters=53)),
])
def test_options_that_make_no_task(tmp_path, task, options):
    with pytest.raises(ValueError) as error:
        TASKS[task].prepare(tmp_path / "set", **options)
    text = str(error.value)
    assert "\n" not in text and all(f"{name}={value}" in text for name, value in options.items())
    assert not list(tmp_path.iterdir())

@pytest.mark.parametrize("task, options", [
    ("flip_flop", dict(length=4)),
    ("selective_copy", dict(copy=1, blanks=0, vocabulary=2)),
    ("selective_copy", dict(copy=1, blanks=1, vocabulary=27)),
    ("counting", dict(variables=26, steps=3, length=8)),
    ("indirect_indexing", dict(letters=1, shortest=1, longest=1, shift=0)),
    ("indirect_indexing", dict(letters=52, shortest=52, longest=52, shift=51)),
])
def test_options_at_their_limits(tmp_path, task, options):
    # as few rows as these exist once, so either train has them or the other splits do
    none, some = dict.fromkeys(OTHERS[task], 0), dict.fromkeys(OTHERS[task], 300)
    splits = write(tmp_path / "train", task, **options, **none, train=300)
    splits |= write(tmp_path / "others", task, **options, **some, train=0)
    for split, rows in splits.items():
        for row, mask in rows:
            if task == "flip_flop":
                assert len(flip_flop_row(row, mask)) == 2
            elif task == "selective_copy":
                blanks = options["blanks"]
                others = dict(dense=blanks // 2, sparse=2 * blanks)
                selective_copy_row(row, mask, 1, others.get(split, blanks))
            elif task == "indirect_indexing":
                text, place, shift = indirect_indexing_row(row, mask, options["longest"])
                assert len(text) == options["longest"]
            elif "_" in row:  # not cut
                assert len(counting_row(row, mask)[0]) == 3

SMALL = [path for path in (ROOT / "config").glob("*_small.py") if "stdlib" not in path.read_text()]

@pytest.mark.parametrize("name", sorted({config.assignments(str(p))["data"] for p in SMALL}))
def test_no_row_of_another_split_is_in_train(tmp_path, name):
    """Otherwise a small config would be evaluated on rows it has seen."""
    shards.prepare(name, tmp_path / "set")
    meta, rows = json.loads((tmp_path / "set" / "meta.json").read_text()), {}
    symbols = meta["tokenizer"]["symbols"]
    pad = symbols.index("_") if "_" in symbols else len(symbols)
    for path in (tmp_path / "set").glob("*.bin"):
        split = path.name.rpartition("_")[0]
        table = np.fromfile(path, "<u2").reshape(-1, meta["row_length"][split])
        ends = table.shape[1] - (table[:, ::-1] != pad).argmax(axis=1)  # pads aside
        rows[split] = [row[:end].tobytes() for row, end in zip(table, ends)]
    known = set(rows.pop("train"))
    assert len(known) > 100 and len(rows) > 1
    assert {split: len(known & set(part)) for split, part in rows.items()} == dict.fromkeys(rows, 0)

# the command line, and training

def test_command_names_the_set_after_its_options(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("data.__file__", str(tmp_path / "data.py"))  # sets are located beside it
    options = dict(length=64, val=7, sparse=7, dense=7, train=30, seed=5)
    flags = [f"--{name}={value}" for name, value in options.items()]
    for more in ([], [f"--out={tmp_path / 'set'}"]):
        monkeypatch.setattr(sys, "argv", ["flip_flop.py", *flags, *more])
        data.command(flip_flop.prepare, "")
    monkeypatch.setattr(sys, "argv", ["flip_flop.py", *flags])
    with pytest.raises(SystemExit) as stop:
        data.command(flip_flop.prepare, "")
    assert stop.value.code is None and "is complete" in capsys.readouterr().out
    flip_flop.prepare(tmp_path / "direct", **options)
    named = tmp_path / f"flip_flop@{','.join(flags).replace('--', '')}"
    assert contents(named) == contents(tmp_path / "set") == contents(tmp_path / "direct")

def test_training_prepares_the_set_once(monkeypatch, tmp_path):
    monkeypatch.setattr("data.__file__", str(tmp_path / "data.py"))  # sets are located beside it
    options = dict(length=64, val=7, sparse=7, dense=7, train=64)
    name = "flip_flop@" + ",".join(f"{key}={value}" for key, value in options.items())
    words = [*TINY, f"--data={name}", "--block_size=128", "--max_iters=2", "--eval_interval=2"]
    losses, times = [], []
    for out in (tmp_path / "run", tmp_path / "again"):
        train.main([*words, f"--out_dir={out}"])
        log = [json.loads(line) for line in open(out / "log.jsonl")]
        losses.append([record["loss"] for record in log if record.get("split") == "val"])
        times.append({path: path.stat().st_mtime_ns for path in (tmp_path / name).iterdir()})
    assert losses[0] == losses[1] and losses[0] and all(0 < loss < 10 for loss in losses[0])
    assert times[0] == times[1]
    flip_flop.prepare(tmp_path / "direct", **options)
    assert contents(tmp_path / name) == contents(tmp_path / "direct")

@pytest.mark.parametrize("data, parts", [
    ("flip_flop@lenght=8", ["'lenght'", "did you mean 'length'"]),
    ("flip_flop@length=eight", ["length='eight'", "not of type int"]),
    ("flip_flop@train=8,length", ["'length'", "has no value"]),
    ("flip_flop@length=7", ["length=7", "even"]),
    ("flipflop@length=8", ["no meta.json", "flipflop"]),
])
def test_options_in_training_that_do_not_exist(monkeypatch, tmp_path, data, parts):
    monkeypatch.setattr("data.__file__", str(tmp_path / "data.py"))
    line = fails("train.py", *TINY, f"--data={data}", f"--out_dir={tmp_path / 'run'}")
    assert all(part in line for part in parts), line
    assert not list(tmp_path.iterdir())
