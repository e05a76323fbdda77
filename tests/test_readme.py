"""The tables of eval/README.md and config/README.md, compared with the CSV files in eval/."""
import collections
import csv
import importlib
import math
import re
import statistics
from pathlib import Path

import numpy as np
import oracles
import pytest
import torch
from conftest import TINY

import model
import train

LOSSES = [(f"val {times}x", "loss") for times in (1, 2, 4, 8)] + [("val 8x", "window_loss")]
LOOKUP = ["content", "position", "content_x2", "position_x2", "content_x3", "position_x3"]
TABLES = {  # config: its columns, decimals
    "quickstart": (LOSSES, 3),
    "recall_small": ([(split, "token_error") for split in ("val", "x2", "x4", "x8", "x16")], 1),
    "copy_small": ([(split, "token_error") for split in ("val", "x1.5", "x2", "x3", "x4")], 1),
    "addition_small": ([(split, "token_error") for split in ("val", "x1.5", "x2", "x3", "x4")], 1),
    "lookup_small": ([(split, "token_error") for split in LOOKUP], 1),
}
SMALL = [  # config, its splits, metric, decimals
    ("cope_flip_flop_small", ("val", "sparse"), "token_error", 1),
    ("cope_selective_copy_small", ("val", "dense", "sparse"), "sequence_error", 1),
    ("cope_selective_copy_small", ("val", "dense", "sparse"), "token_error", 1),
    ("cope_counting_small", ("test", "pass100", "pass10"), "token_error", 1),
    ("pope_indirect_small", ("test",), "token_error", 1),
    ("pope_jsb", ("test",), "loss", 3),
    ("cope_code_small", ("val",), "ppl", 3),
    ("quickstart", ("val 1x", "val 2x", "val 4x", "val 8x"), "loss", 3),
]

MORE = {  # runs of text_more.csv: the beginning of their row
    "quickstart_pope_uniform": "pope --pope_delta=uniform",
    "quickstart_drope": "nope --init_from=ROPE",
}

def read(name, config):
    """{row: {(split, metric): [value, ...]}} of one config. A row begins with the pe and the
    options at test time, as in "rope@rope_scaling=ntk,rope_factor=8", or with what MORE says."""
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for line in csv.DictReader(Path(f"eval/{name}.csv").read_text("utf-8").splitlines()):
        if line["config"] == f"config/{config}.py":
            run, at, options = line["run"].partition("@")
            run = re.sub(r"^out/|_seed\d+$", "", run)
            row = found[MORE.get(run, line["pe"]) + at + options]
            row[line["split"], line["metric"]].append(float(line["value"]))
    return found

def cell(values, decimals):
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):.{decimals}f}"  # exact, so that all Pythons round alike
    low, high = f"{min(values):.{decimals}f}", f"{max(values):.{decimals}f}"
    return mean if low == high else f"{mean} ({low}–{high})"

@pytest.mark.parametrize("config", TABLES)
def test_table(config):
    """The rows of a config's table are sorted by the result at the last length, the best first."""
    columns, decimals = TABLES[config]
    rows = []
    for pe, values in (read("results", config) | read("text_more", config)).items():
        seeds = {len(values[column]) for column in columns} - {0}  # 0: it cannot go there
        assert len(seeds) == 1, f"{config} {pe}: some columns have fewer seeds"
        last = values[columns[-1] if decimals == 1 else columns[-2]] or [math.inf]
        cells = [cell(values[column], decimals) for column in columns]
        rows.append((statistics.fmean(last), f"| `{pe}` | {seeds.pop()} | {' | '.join(cells)} |"))
    table = "\n".join(["", *(row for _, row in sorted(rows)), ""])
    head, found, rest = Path("eval/README.md").read_text("utf-8").partition(table)
    assert found and head.endswith("| --- |") and not rest.startswith("|")

def test_numbers_of_the_papers():
    text = Path("eval/README.md").read_text("utf-8").split("## Numbers of the papers")[1]
    for pe, values in read("papers", "cope_flip_flop").items():
        (val,), (sparse,) = (values[split, "token_error"] for split in ("val", "sparse"))
        assert re.search(rf"\| `{pe}` \| [\d.]+ \| {val:.2f} \| [\d.]+ \| {sparse:.1f} \|\n", text)

def positions_apart(name, l, theta):
    """Returns how many different vectors expe or exqpe writes for 8192 positions in bfloat16."""
    pe = model.PES[name](model.GPTConfig(n_head=1, n_embd=l, expe_l=l, expe_theta=theta))
    x = torch.zeros(1, 8192, l, dtype=torch.bfloat16)
    return len(pe.inputs(x, torch.arange(8192))[0].unique(dim=0))

def test_positions_in_bfloat16():
    rows = []
    for l in (1, 8, 24, 96):
        counts = [positions_apart("expe", l, 1 / steps) for steps in (1000, 2048, 3000)]
        counts.append(positions_apart("exqpe", l, 1 / 2048))
        rows.append(f"| {l} | {' | '.join(f'{count:,}' for count in counts)} |")
    assert "\n".join(rows) in Path("eval/README.md").read_text("utf-8")

@pytest.mark.parametrize("config, splits, metric, decimals", SMALL)
def test_small_runs(config, splits, metric, decimals):
    text = Path("config/README.md").read_text("utf-8").splitlines()
    table = [line for line in text if line.count("|") == 7][2:]  # without its head
    tables = [row[0] for row in SMALL]
    assert {re.search(r"`(\w+)\.py", line)[1] for line in table} == set(tables)
    default, found = importlib.import_module(f"config.{config}").pe, read("small", config)
    rows = sum(f"`{config}.py" in line for line in table)
    assert rows == len(found) * tables.count(config) and len(found) > 1
    for pe, values in found.items():
        cells = " / ".join(cell(values[split, metric], decimals) for split in splits)
        (seeds,) = {len(values[split, metric]) for split in splits} - {0}  # 0: it cannot go there
        flag = "" if pe == default else f" --pe={pe}"
        row = f"| {cells} | {seeds} | `{config}.py{flag}` |"
        assert sum(line.endswith(row) for line in table) == 1

def test_python_blocks(stream, tmp_path, monkeypatch):
    """README's method trains, and its attention with PoPE has the weights of the equation."""
    readme = Path("README.md").read_text("utf-8")
    method, attention = re.findall(r"```python\n(.*?)```", readme, re.S)
    exec(method, vars(model))
    monkeypatch.setitem(model.PES, "slope", model.Slope)
    run = tmp_path / "a"
    train.main([f"--data={stream}", f"--out_dir={run}", *TINY, "--max_iters=3", "--pe=slope"])
    assert (torch.load(run / "ckpt.pt")["model"]["h.0.attn.pes.0.m"] != 0).all()
    found = {}
    exec(attention.replace("q, k = pope", "q0, k0, v0 = q, k, v\nq, k = pope"), found)
    q, k, v = (found[name][1, 2].double().numpy() for name in ("q0", "k0", "v0"))
    scores = oracles.pope_scores(q, k, range(len(q)), [0.0] * q.shape[1], found["pope"].cfg)
    weights = torch.from_numpy(np.where(np.tri(len(q)), scores, -np.inf)).softmax(-1)
    assert (found["y"][1, 2] - weights @ torch.from_numpy(v)).abs().max() < 1e-5

def test_the_walk_runs(tmp_path, monkeypatch, capsys):
    """From an empty folder, with fewer steps. CoPE counts words from the end of its sentence."""
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.setattr(model, "PES", dict(model.PES))  # the walk adds a method
    source, count = re.subn(r"\bsteps=\d+", "steps=2", Path("eval/walk.py").read_text("utf-8"))
    assert count == 1
    monkeypatch.chdir(tmp_path)
    exec(compile(source, "walk.py", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert "can count words\n88877777777766655444433222211111100000\n" in printed
    assert sorted(path.name for path in Path("out").iterdir()) == [
        "walk_length.png", "walk_methods.png"]
