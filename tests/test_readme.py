"""What the READMEs state: the tables of eval/README.md, README's code, and the walk."""
import re
from pathlib import Path

import numpy as np
import oracles
import pytest
import torch
from conftest import TINY

import model
import train
from eval import report


def test_tables(capsys, tmp_path):
    """The tables with seeds are, to the letter, those that the report prints of
    eval/results.jsonl."""
    report.print_tables(report.read(["eval/results.jsonl"]))
    printed = capsys.readouterr().out
    text = Path("eval/README.md").read_text("utf-8")
    tables = re.findall(r"(\| row \| seeds .*\n(?:\|.*\n)+)", text)
    assert len(tables) >= 5
    for table in tables:
        assert table in printed

def test_numbers_of_the_papers():
    text = Path("eval/README.md").read_text("utf-8").split("## Numbers of the papers")[1]
    lines = [line for line in report.read(["eval/results.jsonl"])
             if line["experiment"] == "cope_flip_flop" and line["metric"] == "token_error"]
    found = {}
    for line in lines:
        found.setdefault(line["pe"], {})[line["split"]] = line["value"]
    for pe, errors in found.items():
        cells = rf"[\d.]+ \| {errors['val']:.2f} \| [\d.]+ \| {errors['sparse']:.1f}"
        assert re.search(rf"\| `{pe}` \| {cells} \|\n", text)

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
    """From an empty folder, with fewer steps, and fewer pieces to evaluate. CoPE counts words from
    the end of its sentence."""
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.setattr(model, "PES", dict(model.PES))  # the walk adds a method
    source = Path("eval/walk.py").read_text("utf-8")
    for long, short in (("steps=300", "steps=2"), ("length - 1, 64)", "length - 1, 2)")):
        assert source.count(long) == 1
        source = source.replace(long, short)
    monkeypatch.chdir(tmp_path)
    exec(compile(source, "walk.py", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert "can count words\n88877777777766655444433222211111100000\n" in printed
    assert sorted(path.name for path in Path("out").iterdir()) == [
        "walk_length.png", "walk_methods.png"]
