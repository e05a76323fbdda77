"""What the READMEs state: the tables of eval/README.md, and README's code."""
import functools
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
from eval import records, report, tables

DOCUMENTS = "eval/README.md", "eval/papers.md"

@pytest.mark.parametrize("path", DOCUMENTS)
def test_tables(path):
    """The tables of a document are those that `python -m eval.tables` writes into it, and no other
    table has a column of seeds."""
    text = Path(path).read_text("utf-8")
    assert tables.with_tables(text, records.read(["eval/results.jsonl"])) == text, (
        f"run python -m eval.tables {path}")
    assert len(re.findall(r"\| row \| seeds ", text)) == len(tables.TABLE.findall(text))

def test_a_new_result_changes_the_table(tmp_path, capsys):
    """And nothing else."""
    before = Path("eval/README.md").read_text("utf-8")
    document = tmp_path / "README.md"
    document.write_text(before, "utf-8")
    results = Path("eval/results.jsonl").read_text("utf-8")
    old = '"loss": 1.597585368748601, "window_loss"'  # of alibi, at 1x
    assert old in results
    changed = tmp_path / "results.jsonl"
    changed.write_text(results.replace(old, '"loss": 2.597585368748601, "window_loss"'), "utf-8")
    tables.main([str(document), f"--results={changed}"])
    assert capsys.readouterr().out.endswith(" tables, changed\n")
    rows = zip(before.splitlines(), document.read_text("utf-8").splitlines(), strict=True)
    found = {line.split(" | ")[0] for line, other in rows if line != other}
    assert "| `alibi`" in found and all("`alibi" in row or "`" in row for row in found)
    again = document.read_text("utf-8")
    assert tables.with_tables(again, records.read([changed])) == again

BESIDE_PAPERS = [  # config, its splits and metric
    ("cope_flip_flop", ("val", "sparse"), "token_error"),
    ("cope_flip_flop_small", ("val", "sparse"), "token_error"),
    ("cope_selective_copy_small", ("val", "dense", "sparse"), "sequence_error"),
    ("cope_counting_small", ("test", "pass100", "pass10"), "token_error"),
    ("pope_indirect_small", ("test",), "token_error"),
    ("pope_jsb", ("test",), "loss"),
    ("cope_code_small", ("val",), "loss"),
]

@pytest.mark.parametrize("experiment, splits, metric", BESIDE_PAPERS)
def test_numbers_beside_the_papers(experiment, splits, metric):
    """The table has each of the measured rows once, and no other."""
    lines = [line for line in records.read(["eval/results.jsonl"])
             if line["experiment"] == experiment and line["metric"] == metric
             and "counting@steps=60" not in line["data"]]  # a trial with other initial values
    lines = records.labelled(lines)
    measured = records.grouped(lines, "label", "split")
    text = Path("eval/papers.md").read_text("utf-8")
    table = text[text.index(f"(../config/{experiment}.py)") :].split("\n\n")[0]
    rows = [row for row in table.split("(../config/")[1].splitlines() if " | " in row]
    names = []
    for row in rows:
        *_, name, _, cells, seeds = row.rstrip("| ").split(" | ")
        name = name.strip("`")
        names.append(name)
        found = [[line["value"] for line in measured[name, split]] for split in splits]
        assert cells == " / ".join(report.cell(values, metric, len(values)) for values in found)
        assert {len(values) for values in found} == {int(seeds)}
    assert sorted(names) == sorted({label for label, _ in measured})

def test_what_separates_methods():
    """The ratios that eval/README.md states for each experiment, in the order of its columns."""
    lines = [line for line in records.read(["eval/results.jsonl"])
             if not line["options"] and not line["flags"] and line["pe"] != "learned"]
    text = Path("eval/README.md").read_text("utf-8")
    text = text[text.index("## What one seed can say") : text.index("## Commands")]
    stated = {}  # {experiment: its ratios}
    for row in text.splitlines():
        if row.startswith("| "):
            name, cell, *_ = row.strip("| ").split(" | ")
            stated[name] = re.findall(r"\d+\.\d", cell)

    def ratios(experiment, metric, splits="", without=None):
        found = []
        chosen = [line for line in lines if (line["experiment"], line["metric"]) == (
            experiment, metric) and line["pe"] != without]
        for (split, _), column in records.grouped(chosen, "split", "multiple").items():
            methods = [[line["value"] for line in method]
                       for method in records.grouped(column, "pe").values()]
            methods = [values for values in methods if len(values) > 1]
            means = statistics.stdev(map(statistics.fmean, methods))
            seeds = statistics.fmean(map(statistics.variance, methods)) ** 0.5
            if split.startswith(splits):
                found.append(f"{means / seeds:.1f}")
        return found

    at64_128, *in_long_rows = ratios("echo_small", "loss", "at")
    copying = ratios("copy_small", "token_error")
    copying += ratios("copy_small", "token_error", without="alibi")[1:]
    for name, want in (
        ("text", ratios("quickstart", "loss")),
        ("finding copies", [at64_128, *in_long_rows]),
        ("lookup by position", ratios("lookup_small", "token_error", "position")),
        ("copying", copying),
        ("lookup by content", ratios("lookup_small", "token_error", "content")),
        ("recall", ratios("recall_small", "token_error")),
    ):
        assert stated[name] == want, name

CLAIMS = [  # what README.md states of a row: its config, metric, label, and {column: text}
    ("text_small", "loss", "rope", {1.0: "1.063", 8.0: "3.148"}),
    ("text_small", "loss", "learned", {1.0: "1.032"}),
    ("text_small", "loss", "cope", {1.0: "1.074"}),
    ("text_small", "loss", "alibi", {8.0: "0.929"}),
    ("text_small", "loss", "fox", {8.0: "0.942"}),
    ("text_small", "loss", "t5", {8.0: "1.006"}),
    ("text_small", "loss", "t5 --pe_lr=10", {8.0: "1.033"}),
    ("quickstart", "loss", "rope", {8.0: "2.441"}),
    ("quickstart", "loss", "rope --rope_p=0.375 --learning_rate=0.004", {8.0: "1.96"}),
    ("quickstart", "loss", "rope@rope_scaling=ntk,rope_factor=8", {8.0: "2.108"}),
    ("echo_small", "loss", "alibi", {"at900_1024": "1.330", 8.0: "1.30"}),
    ("echo_small", "loss", "fox --learning_rate=0.002",
     {"at900_1024": "0.54", "new_1024": "1.85", 8.0: "1.24"}),
    ("echo_small", "loss", "t5 --pe_lr=10", {"at900_1024": "1.11", 8.0: "1.27"}),
    ("echo_small", "loss", "cope --cope_npos=16", {8.0: "1.50"}),
    ("echo_small", "loss", "rope", {"at900_1024": "2.966", 8.0: "2.27"}),
    ("echo_long_small", "loss", "rope", {1.0: "1.178", "at900_1024": "1.63"}),
    ("echo_long_small", "loss", "rope --rope_scaling=yarn --rope_factor=8",
     {1.0: "1.15", "at900_1024": "0.55"}),
    ("echo_long_small", "loss", "rope --rope_scaling=ntk --rope_factor=8",
     {1.0: "1.14", "at900_1024": "0.90"}),
    ("echo_long_small", "loss", "t5 --pe_lr=10", {1.0: "1.13", "at900_1024": "0.37"}),
    ("echo_long_small", "loss", "cope from cope_npos=16", {1.0: "1.13", "at900_1024": "0.45"}),
    ("echo_long_small", "loss", "fox", {"at900_1024": "0.66"}),
    ("recall_small", "token_error", "alibi", {"x16": "1%"}),
    ("recall_small", "token_error", "fox", {"x16": "27%"}),
    ("recall_small", "token_error", "pope", {"x16": "55%"}),
    ("recall_small", "token_error", "rope", {"x16": "67%"}),
    ("lookup_small", "token_error", "t5", {"position": "43%"}),
    ("lookup_small", "token_error", "fox", {"position": "60%"}),
    ("lookup_small", "token_error", "rope", {"position_x3": "22.4%"}),
    ("lookup_small", "token_error", "carope", {"position_x3": "20.5%"}),
    ("lookup_small", "token_error", "cope", {"position_x3": "4.9%"}),
    ("copy_small", "token_error", "alibi", {"x4": "27%"}),
    ("copy_small", "token_error", "nope", {"x4": "86.9%"}),
]
# the same of the rows that are the best of a method: the first word of the row
BEST = [("t5", {1.0: "1.42", 8.0: "1.40"}), ("relative", {1.0: "1.42"}),
        ("rope", {1.0: "1.46", 8.0: "2.59"}), ("pope", {1.0: "1.45", 8.0: "2.98"}),
        ("cope", {1.0: "1.45", 8.0: "1.44"}), ("alibi", {1.0: "1.60", 8.0: "1.57"}),
        ("fox", {8.0: "1.48"})]

@functools.cache
def published():
    """Returns {(config, metric, label, split or multiple of the trained length): mean over the
    seeds}."""
    lines = [line for line in records.read(["eval/results.jsonl"])
             if line["window"] in (None, 128)]  # some rows have windows of 256, too
    found = {}
    for (experiment, metric), table in records.grouped(lines, "experiment", "metric").items():
        table = records.labelled(table)
        for (label, split, multiple), cell in records.grouped(
                table, "label", "split", "multiple").items():
            mean = statistics.fmean(line["value"] for line in cell)
            found[experiment, metric, label, multiple or split] = mean
    return found

def test_claims_of_the_readme():
    """Each number in README's table is the mean over the seeds. Of all other methods at copying,
    the best gets more than 86% wrong."""
    text = Path("README.md").read_text("utf-8")
    found = published()
    for experiment, metric, label, columns in CLAIMS:
        for column, stated in columns.items():
            decimals = len(stated.strip("%").partition(".")[2])
            mean = found[experiment, metric, label, column]
            assert f"{mean:.{decimals}f}" == stated.strip("%"), (label, column)
            assert stated in text or stated == "86.9%", stated
    for pe, columns in BEST:
        (label,) = [row for row in best_rows() if row.split(" ")[0] == pe]
        for column, stated in columns.items():
            mean = found["quickstart", "loss", label, column]
            assert f"{mean:.2f}" == stated and stated in text, (label, column)
    others = [mean for (experiment, metric, label, column), mean in found.items()
              if (experiment, metric, column) == ("copy_small", "token_error", "x4")]
    assert sorted(others)[1] > 86

def best_rows():
    """Returns the names of the rows of the table of each method at its best."""
    text = Path("eval/README.md").read_text("utf-8")
    table = text.split("### Each method at its best")[1].split("<!-- end of table -->")[0]
    return re.findall(r"^\| `(.*?)` \|", table, re.M)

def test_the_search():
    """Each row of the table of the best settings is the best one of its method in the search, by
    its seed and with the margin that the text names. T5 or relative is the first at the trained
    length, and T5 at eight times that."""
    text = Path("eval/README.md").read_text("utf-8")
    searched = set(re.search(r"--options=(learning_rate\S+)", text)[1].split(","))
    losses = {}  # {pe: {label: loss}} of the seed that chose
    for line in records.labelled([line for line in records.read(["eval/results.jsonl"])
                                  if (line["experiment"], line["trained"]) == ("quickstart", 128)]):
        if (line["metric"] == "loss" and line["multiple"] == 1 and line["seed"] == 1337
                and not line["options"] and line["flags"].keys() <= searched):
            losses.setdefault(line["pe"], {})[line["label"]] = line["value"]
    rows = best_rows()
    not_searched = {"cope_mlp", "t5+rope", "relative+t5", "alibi+rope", "fox+rope", "rope,nope",
                    "rope,rope,rope,nope", "rope,rope,rope,cope"}
    assert sorted(row.split(" ")[0] for row in rows) == sorted({*losses} - not_searched)
    for row in rows:
        of_method = losses[row.split(" ")[0]]
        assert of_method[row] - min(of_method.values()) < 0.005, row
    mean = published()
    for multiple, first in ((1.0, {"t5", "relative"}), (8.0, {"t5"})):
        found = [row for row in rows if ("quickstart", "loss", row, multiple) in mean]
        best = min(found, key=lambda row: mean["quickstart", "loss", row, multiple])
        assert best.split(" ")[0] in first

def numbers_after(path, words, n):
    """Returns the first n numbers with two or more decimals that follow these words in a file."""
    text = " ".join(Path(path).read_text("utf-8").split())
    return re.findall(r"\d\.\d\d+", text[text.index(words) :])[:n]

def test_finding_copies():
    """Of what a copy saves in rows of 128 bytes, RoPE and the methods of absolute positions keep
    hardly anything in rows of 1024, PoPE only at near copies, FoX, ALiBi and CoPE at all distances,
    and T5 and relative most at the row's start. After further training, T5 keeps most of the
    farthest copies, and of six methods only RoPE and PoPE keep hardly anything."""
    def fractions_kept(experiment, pe):
        def loss(split):
            return published()[experiment, "loss", pe, split]

        saved = loss("new_128") - loss("at64_128")
        return [(loss("new_1024") - loss(f"at{distance}_1024")) / saved
                for distance in (64, 128, 256, 512, 900)]

    kept = {pe: fractions_kept("echo_small", pe)
            for pe in ("rope", "expe", "exqpe", "sinusoidal", "pope", "carope", "cope", "cope+rope",
                       "fox", "alibi", "t5", "relative")}
    for pe in ("rope", "expe", "exqpe", "sinusoidal"):
        assert max(kept[pe]) < 0.08
    assert min(kept["pope"][:2]) > 0.3 and max(kept["pope"][2:]) < 0.1
    assert kept["cope+rope"][0] > 0.5 and max(kept["cope+rope"][1:]) < 0.2
    assert 0.2 < kept["carope"][0] == max(kept["carope"]) < 0.3
    assert min(kept["fox"]) > 0.4 and max(kept["fox"]) - min(kept["fox"]) < 0.05
    assert kept["alibi"] == sorted(kept["alibi"], reverse=True) and kept["alibi"][-1] > 0.2
    assert min(kept["cope"]) > 0.2
    kept_by_t5 = fractions_kept("echo_small", "t5 --pe_lr=10")[1:]
    assert min(kept_by_t5) > 0.4 and max(kept_by_t5) - min(kept_by_t5) < 0.05
    for pe in ("cope", "t5", "relative"):
        assert 0.6 < kept[pe][-1] == max(kept[pe])
    at_900 = {pe: fractions_kept("echo_long_small", pe)[-1]
              for pe in ("rope", "pope", "cope", "fox", "alibi", "t5 --pe_lr=10")}
    assert max(at_900, key=at_900.get) == "t5 --pe_lr=10"
    assert [pe for pe in at_900 if at_900[pe] < 0.4] == ["rope", "pope"]
    assert max(at_900["rope"], at_900["pope"]) < 0.1
    from_the_start = {(line["pe"], line["split"]): line["value"]
                      for line in records.read(["eval/results.jsonl"])
                      if line["metric"] == "loss" and line["experiment"] == "echo_small"
                      and line["trained"] == 1024}
    assert numbers_after("eval/README.md", "Training on long rows from the start fails", 4) == [
        f"{from_the_start[pe, split]:.2f}" for pe in ("rope", "cope")
        for split in ("at64_1024", "new_1024")]

def test_what_distant_text_is_worth():
    """The loss with the last 128 bytes in view, minus that with all 1024: to the models of the
    echoes, on ordinary code, and to models that were trained on 1024 bytes of ordinary code."""
    mean = published()
    gains = {"echo_small": {}, "echo_long_small": {}}  # {config: {pe: gain}} at 1024 bytes
    for (experiment, metric, pe, column), in_windows in mean.items():
        if experiment in gains and metric == "window_loss" and pe != "learned":  # it sees only 128
            if column == {"echo_small": 8.0, "echo_long_small": 1.0}[experiment]:
                gains[experiment][pe] = in_windows - mean[experiment, "loss", pe, column]
    worth = gains["echo_small"]
    slow = "--learning_rate=0.002"
    assert {pe for pe in worth if worth[pe] > 0.02} == {
        "alibi", f"alibi {slow}", "fox", f"fox {slow}", "fox+rope", "t5 --pe_lr=10",
        f"t5 {slow} --pe_lr=10"}
    assert max(worth, key=worth.get) == "t5 --pe_lr=10"
    assert f"{worth['alibi --data=stdlib']:.3f}" == "0.006"
    at_8x = {pe: mean["echo_small", "loss", pe, 8.0] for pe in worth if "--data" not in pe}
    assert min(at_8x, key=at_8x.get) == f"fox {slow}"
    lines = records.labelled([line for line in records.read(["eval/results.jsonl"])
                              if (line["experiment"], line["trained"]) == ("echo_small", 128)])
    at_1x = {line["label"]: line["value"] for line in lines if (
        line["metric"], line["data"], line["multiple"], line["seed"]) == (
            "loss", "stdlib", 1, 1337)}
    for better, worse in (
            ("t5 --pe_lr=10", "t5"), (f"fox {slow}", "fox"), ("cope --cope_npos=16", "cope"),
            ("pope --pope_delta=uniform", "pope"), ("relative --pe_lr=3", "relative"),
            ("rope", "rope --rope_p=0.375"), ("alibi", f"alibi {slow}"), ("rope", f"rope {slow}"),
            ("t5 --pe_lr=10", f"t5 {slow} --pe_lr=10"),
            ("cope --cope_npos=16", f"cope --cope_npos=16 {slow}"),
            ("pope --pope_delta=uniform", f"pope --pope_delta=uniform {slow}")):
        assert at_1x[better] < at_1x[worse] - 0.005
    for words, rows in (
            ("With ALiBi and FoX it does", ["alibi", "cope --cope_npos=16", "rope"]),
            ("With ALiBi and FoX it does", [f"fox {slow}"]),
            ("T5 does worse by", ["t5", "t5 --pe_lr=10"]),
            ("PoPE does worse by", ["pope", "pope --pope_delta=uniform"])):
        stated = numbers_after("README.md", words, len(rows))
        assert stated == [f"{abs(worth[row]):.2f}" for row in rows]
    by_loss = sorted(gains["echo_long_small"],
                     key=lambda pe: mean["echo_long_small", "loss", pe, 1.0])
    six = {"t5 --pe_lr=10", "cope from cope_npos=16", "rope", "pope", "alibi", "fox"}
    of_six = [pe for pe in by_loss if pe in six]
    assert len(of_six) == 6 and of_six[:3] == ["t5 --pe_lr=10", "cope from cope_npos=16", "rope"]
    gains = sorted(gains["echo_long_small"].values())
    for path, words in (("README.md", "lowers the loss of all six"),
                        ("eval/README.md", "all six methods gain")):
        assert numbers_after(path, words, 2) == [f"{gains[0]:.2f}", f"{gains[-1]:.2f}"]
    lines = [line for line in records.read(["eval/results.jsonl"])
             if line["experiment"] == "quickstart" and line["trained"] == 1024]
    worth = {}
    for (pe, steps), row in records.grouped(lines, "pe", "step").items():
        at_the_end = {line["metric"]: line["value"] for line in row if line["multiple"] == 1}
        worth[pe, steps] = at_the_end["window_loss"] - at_the_end["loss"]
    for pe, steps, stated in (("rope", 1600, 0.007), ("rope", 4800, 0.007), ("pope", 4800, 0.007),
                              ("alibi", 4800, 0.044), ("fox", 4800, 0), ("rope", 16000, 0.017)):
        assert round(worth[pe, steps], 3) == stated

def test_ten_times_the_steps():
    """Which methods gain from distant text after 16,000 steps, and which are the best and the worst
    at the trained length. Two seeds of RoPE differ by more than what lies between T5 and CoPE."""
    mean = published()
    methods = [label for experiment, metric, label, multiple in mean
               if (experiment, metric, multiple) == ("text_small", "loss", 1.0)
               and "--" not in label]

    def loss(pe, multiple, metric="loss"):
        return mean["text_small", metric, pe, multiple]

    assert [pe for pe in methods if pe != "learned"
            and loss(pe, 8.0) < loss(pe, 8.0, "window_loss")] == ["alibi", "fox"]
    first, second, *_, last_but_one, last = sorted(methods, key=lambda pe: loss(pe, 1.0))
    assert [first, second, last_but_one, last] == ["learned", "t5", "cope", "nope"]
    of_rope = [line["value"] for line in records.read(["eval/results.jsonl"])
               if (line["experiment"], line["pe"], line["metric"], line["multiple"])
               == ("text_small", "rope", "loss", 1)]
    spread = max(of_rope) - min(of_rope)
    assert spread > loss("cope", 1.0) - loss("t5", 1.0)
    assert f"{loss('cope', 1.0) - loss('learned', 1.0):.3f}" == f"{spread:.3f}" == "0.042"
    for path, words in (("README.md", "the two seeds of `rope` differ by"),
                        ("eval/README.md", "RoPE's two seeds differ by")):
        assert numbers_after(path, words, 1) == ["0.042"]

def test_costs():
    """README's multiples are those of eval/README's table of the wider model, which eval.cost has
    printed."""
    table = Path("eval/README.md").read_text("utf-8").split("--width=384")[1]
    costs = {}  # {method: (time, memory) at 1024 tokens}
    for row in re.findall(r"^\| `.*", table.split("The second table is for")[0], re.M):
        name, *cells = row.strip("| ").split(" | ")
        costs[name.strip("`")] = [cells[2].split(" ")[0], cells[3]]
    rows = Path("README.md").read_text("utf-8").split("| you want |")[1].split("\n\n")[0]
    prices = 0
    for row in rows.splitlines()[2:]:
        _, choose, _, price = row.strip("| ").split(" | ")
        stated = re.search(r"([\d.]+) times the time, ([\d.]+) times the memory", price)
        if stated:
            names = re.findall(r"`(\w+)`", price if price.startswith("`") else choose)
            highest = [max(float(costs[name][n]) for name in names) for n in (0, 1)]
            assert list(stated.groups()) == [f"{cost:.1f}" for cost in highest], row
            prices += 1
    assert prices == 7

def positions_apart(name, l, theta):
    """Returns how many different vectors expe or exqpe writes for 8192 positions in bfloat16."""
    pe = model.PES[name](model.GPTConfig(n_head=1, n_embd=l, expe_l=l, expe_theta=theta))
    x = torch.zeros(1, 8192, l, dtype=torch.bfloat16)
    return len(pe.inputs(x, torch.arange(8192))[0].unique(dim=0))

def test_positions_in_bfloat16():
    """With few dimensions, bfloat16 tells apart only some of 8,192 positions, and hardly more with
    ExQPE. With the 96 of the 135M model, it tells all of them apart, as its config file says."""
    assert positions_apart("expe", 8, 1 / 2048) == 4030
    assert positions_apart("exqpe", 8, 1 / 2048) == 4096
    assert positions_apart("expe", 96, 1 / 3000) == positions_apart("exqpe", 96, 1 / 2048) == 8192

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
