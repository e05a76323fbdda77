"""The first lesson: its page is not stale, and what it states is so."""
import contextlib
import io
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import model

pytest.importorskip("matplotlib")
sys.path.append("eval")  # where walk.py finds its two modules
import walk_parts  # noqa: E402
import walk_render  # noqa: E402

PAGE = Path("eval/walk.md").read_text("utf-8")
PICTURES = sorted(Path("eval/walk_files").iterdir())
STALE = "run `python eval/walk_render.py`, because walk.md lacks"
TRAINED = ("rope:", "pope:", "rope  ", "pairs", "linear", "ntk", "peak")  # where lines
# begin whose numbers training decides

def code_of(*beginnings):
    """Returns the first cells that contain these texts, as one script."""
    codes = [text for kind, text in walk_render.cells() if kind == "code"]
    return "\n".join(next(text for text in codes if beginning in text) for beginning in beginnings)

def run(code):
    """Returns what a script prints, and its variables."""
    names = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, names)
    return printed.getvalue(), names

def changed(code, line, other):
    """Returns the code after an exercise's change, which must be possible in one place."""
    assert code.count(line) == 1, line
    return code.replace(line, other)

def weights(line):
    """Returns {word: weight} of a line that `read` has printed."""
    return {word: float(weight) for word, weight in re.findall(r"(\S+) (\d\.\d\d)", line)}

def answer(n):
    """Returns the answer of section n's exercise."""
    return re.findall(r"<summary>Answer</summary>\n\n(.*?)\n</details>", PAGE, re.S)[n - 1]

# --- the page -------------------------------------------------------------------------------------

def test_the_page_has_the_text_and_code_of_the_walk():
    """All cells are there in order. Between them are only outputs, which are indented, and
    pictures."""
    at = 0
    between = ""
    for kind, cell in walk_render.cells():
        if kind == "code":
            cell = f"```python\n{cell}\n```"
        begin = PAGE.find(cell, at)
        assert begin >= 0, f"{STALE}\n{cell}"
        between += PAGE[at:begin]
        at = begin + len(cell)
    for line in (between + PAGE[at:]).splitlines():
        assert not line.strip() or line.startswith(("    ", "![")), line

def test_prose_and_code_are_short():
    assert sum(len(text.split()) for _, text in walk_render.cells()) <= 3300

def test_each_section_has_a_question_and_an_exercise():
    """What is still wrong at the end of a section leads to the next one."""
    _, *sections = re.split(r"^## ", PAGE, flags=re.M)
    assert len(sections) == 9
    for number, section in enumerate(sections, 1):
        assert re.match(rf"{number}\. [^\n]+\?\n", section)
        assert section.count("**Exercise.**") == 1 == section.count("</details>")
        assert section.count("**Still wrong:**") == (number < len(sections))

def test_the_page_has_all_pictures():
    """Each says what it shows, and is small."""
    named = re.findall(r"^!\[(.+)\]\(walk_files/(\w+\.png)\)$", PAGE, re.M)
    assert sorted(name for _, name in named) == [path.name for path in PICTURES]
    assert min(len(what) for what, _ in named) > 30
    assert max(path.stat().st_size for path in PICTURES) < 60_000

def test_the_links_of_the_page():
    for target in re.findall(r"\]\(([\w./:-]+)(?:#[\w-]+)?\)", PAGE):
        assert target.startswith("https://") or (Path("eval") / target).exists(), target
    text = Path("eval/README.md").read_text("utf-8")
    headings = [re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-"))
                for heading in re.findall(r"^#+ (.*)$", text, re.M)]
    for anchor in re.findall(r"\]\(README\.md#([^)]+)\)", PAGE):
        assert anchor in headings, anchor

@pytest.fixture
def few_steps(tmp_path, monkeypatch):
    """A copy of walk.py that trains for two steps, with less text to test on, and without methods
    of a user's own."""
    source = changed(walk_render.SOURCE.read_text("utf-8"), "STEPS = 300\n", "STEPS = 2\n")
    path = tmp_path / "walk.py"
    path.write_text(source, "utf-8")
    monkeypatch.setattr(walk_render, "SOURCE", path)
    monkeypatch.setattr(walk_parts, "folder", None)  # the renderer changes it
    train, unseen = walk_parts.texts()
    monkeypatch.setattr(walk_parts, "texts", lambda: (train, unseen[:2]))
    published = re.findall(r"^\| \[?`(\w+)`", Path("README.md").read_text("utf-8"), re.M)
    methods = {name: cls for name, cls in model.PES.items() if name in published}
    for module in (model, walk_parts):
        monkeypatch.setattr(module, "PES", methods)
    return path

def test_the_walk_prints_what_the_page_says(few_steps):
    """Apart from what training decides."""
    walk_render.render()
    page = few_steps.with_suffix(".md").read_text("utf-8")
    pictures = sorted(path.name for path in few_steps.with_name("walk_files").iterdir())
    assert pictures == [path.name for path in PICTURES]
    lines = [line for line in page.splitlines() if line.startswith("    ")]
    untrained = [line for line in lines if not line.strip().startswith(TRAINED)]
    assert len(untrained) > 50
    for line in untrained:
        if "STEPS = " not in line:
            assert f"\n{line}\n" in PAGE, f"{STALE}\n{line}"
    assert "-0 " not in page and "-0.00" not in page

@pytest.mark.slow
def test_rendering_twice_gives_the_same_bytes(few_steps):
    def everything():
        walk_render.render()
        model.PES.pop("peak")
        folder = few_steps.with_name("walk_files")
        return few_steps.with_suffix(".md").read_bytes(), [
            path.read_bytes() for path in sorted(folder.iterdir())]

    assert everything() == everything()

@pytest.mark.slow
def test_the_walk_is_a_script(few_steps, tmp_path):
    """A reader's terminal shows lines that explain themselves, and where the pictures are."""
    environment = dict(os.environ, PYTHONPATH=str(Path("eval").resolve()))
    done = subprocess.run([sys.executable, few_steps], cwd=tmp_path, env=environment, text=True,
                          check=True, capture_output=True)
    drawn = re.findall(r"^picture (\S+): ", done.stdout, re.M)
    assert sorted(Path(path).name for path in drawn) == [path.name for path in PICTURES]
    assert all((tmp_path / path).exists() for path in drawn)
    assert done.stdout.startswith("nope") and not done.stderr

# --- the answers of the exercises -----------------------------------------------------------------

def test_answer_1():
    printed, _ = run(changed(code_of("WORDS ="), 'short, swapped = "dog bites man ?"',
                             'short, swapped = "dog dog bites man ?"'))
    dog, second, _, man, _ = re.findall(r"\d\.\d\d", printed.splitlines()[0])
    assert dog == second == man == "0.31" and "= 0.31" in answer(1)
    assert round(2 * math.exp(2) / (3 * math.exp(2) + 2), 2) == 0.61 and "0.61" in answer(1)

def test_answer_2():
    code = changed(code_of("WORDS =", "def rotate("), "(q + w[j + 3]) @ (noun + w[j])",
                   "w[j + 3] @ w[j]")
    _, names = run(code)
    assert [round(logit.item(), 4) for logit in names["logits"]] == [-1] * 4

def test_answer_3():
    code = changed(code_of("WORDS =", 'read("alibi"'), "0.5 * torch.arange",
                   "math.log(2) / 2 * torch.arange")
    printed, _ = run(code)
    got = weights(printed.splitlines()[-1])
    assert (got["dog"], got["man"]) == (0.28, 0.56)
    assert "get 0.28 and 0.56" in answer(3).replace("\n", " ")
    assert "= 0.35" in answer(3) and round(math.log(2) / 2, 2) == 0.35

def test_answer_4():
    _, names = run(code_of("WORDS =", "longer =", "def rotate(", "def rope("))
    q = names["rotate"](names["q"], torch.tensor(-names["theta"]))
    assert [round(x, 2) for x in q.tolist()] == [1, -1.73] and "(1, -1.73)" in answer(4)
    wave = names["rope"](names["nouns"], q).flip(0)
    distance = torch.arange(10)
    assert wave[:6].argmax() == 1
    assert torch.allclose(wave, 2 * torch.cos((distance - 1) * math.pi / 3), atol=1e-5)

def test_answer_5():
    code = code_of("WORDS =", "STEPS =")
    found = {}
    for key in ("k = torch.randn(64, 1, 16, 16)", "k = 1 + torch.randn(64, 1, 16, 16)"):
        printed, _ = run(changed(code, "k = torch.randn(64, 1, 16, 16)", key))
        found[key] = [float(weight) for weight in re.findall(r"gets (\S+)$", printed, re.M)]
    (rope, pope), (rope_plus, pope_plus) = found.values()
    assert rope < 0.08 and pope > 0.2 and rope_plus > 0.2 and pope_plus > pope
    want = [float(number) for number in re.findall(r"has (\d\.\d+)| PoPE (\d\.\d+)", answer(5))
            for number in number if number]
    assert [rope_plus, pope_plus] == pytest.approx(want, abs=0.03)

@pytest.mark.slow
def test_answer_6_and_the_five_seeds():
    """Which pairs do the harm. If the fast ones stop, it may be more or less, but it remains."""
    code = code_of("WORDS =", "STEPS =", "def small_gpt(").split("\ngpt = small_gpt")[0]
    code = changed(code, "    torch.manual_seed(0)\n    gpt =", "    gpt =")
    _, names = run(code)
    harm = {"rope": [], "fast": [], "slow": []}
    for seed in range(5):
        torch.manual_seed(seed)
        gpt = names["small_gpt"]("rope")
        stops = {"rope": [], "fast": [0, 1, 2], "slow": [3, 4, 5, 6, 7], "pair 3": [3],
                 "others": [4, 5, 6, 7]}
        last = {name: walk_parts.losses_of(walk_parts.stopped(
            gpt, pairs, names["angles_if_far"]))[-64:].mean().item()
            for name, pairs in stops.items()}
        window = walk_parts.loss_in_windows(gpt)
        for name in harm:
            harm[name].append(last[name] - window)
        assert last["pair 3"] < window + 0.3 * (last["rope"] - window)
        assert last["others"] > window + 0.75 * (last["rope"] - window)
        if seed == 0:
            numbers = re.findall(r"\d\.\d\d", answer(6))
            assert [last["pair 3"], last["others"]] == pytest.approx(
                [float(number) for number in numbers], abs=0.1)
    numbers = re.findall(r"\d\.\d\d", re.search(r"\(With five seeds.*?\)", PAGE, re.S)[0])
    want = []
    for values in harm.values():
        want += [min(values), max(values)]
    assert [float(number) for number in numbers] == pytest.approx(want, abs=0.1)

def test_when_pairs_make_half_a_rotation():
    """In training, neither comes near to it, and pairs 5 to 7 do not within 512 bytes."""
    theta = model.RoPE(walk_parts.SMALL).theta(torch.zeros(1))
    for pair, sentence in ((3, "At 99 bytes, it has made half a rotation"),
                           (4, "Pair 4 needs 314 bytes")):
        assert f" {math.floor(math.pi / theta[pair].item())} bytes" in sentence
        assert sentence in answer(6).replace("\n", " ")
    assert (63 * theta[3:] < 0.64 * math.pi).all() and (511 * theta[5:] < math.pi).all()

def test_answer_7():
    code = code_of("WORDS =", "longer =", "def rotate(", "def rope(", "is_noun =")
    _, names = run(changed(code, "0.01 if word", "0.5 if word"))
    cat, dog = names["weights"]["fox reads"][[0, 3]].tolist()
    assert cat == pytest.approx(dog / 2)
    assert f"the cat gets {cat:.2f} and the dog {dog:.2f}" in answer(7)

def saved(pe):
    """Returns what a copy saves at each distance, as in copies.png."""
    without = walk_parts.published(pe, "echo", "new_1024", "loss")
    return {distance: without - walk_parts.published(pe, "echo", f"at{distance}_1024", "loss")
            for distance in (64, 128, 256, 512, 900)}

def test_answer_8():
    """The lines of T5 and CoPE are lowest at 128 bytes and highest at the start of the text. No
    other line rises."""
    for pe in ("t5", "cope"):
        line = saved(pe)
        assert min(line, key=line.get) == 128 and max(line, key=line.get) == 900
    for pe in ("rope", "pope", "alibi", "fox"):
        line = saved(pe)
        assert line[900] < line[64], pe

@pytest.mark.slow
def test_answer_9():
    code = code_of("WORDS =", "STEPS =", "def small_gpt(").split("\ngpt = small_gpt")[0]
    own = changed(code_of("class Peak"), "torch.nn.Parameter(torch.arange(self.H).float()"
                  ".view(-1, 1, 1))", "torch.zeros(1)")
    try:
        printed, _ = run(f"{code}\n{own}")
    finally:
        model.PES.pop("peak")
    first = float(re.search(r"^peak +(\S+)", printed, re.M)[1])
    assert float(re.search(r"\d\.\d\d", answer(9))[0]) == pytest.approx(first, abs=0.05)

# --- what the prose states ------------------------------------------------------------------------

def test_what_copies_save():
    """Section 8 says this of the lines of copies.png."""
    fox, alibi, rope, pope = (saved(pe) for pe in ("fox", "alibi", "rope", "pope"))
    assert max(fox.values()) - min(fox.values()) < 0.05
    assert list(alibi.values()) == sorted(alibi.values(), reverse=True)
    assert max(rope.values()) < 0.15
    assert min(pope[64], pope[128]) > 0.4 and max(pope[256], pope[512], pope[900]) < 0.1
    losses = sorted(record["values"]["loss"] for record in walk_parts.records()
                    if (record["config"], record["pe"], record["split"])
                    == ("config/echo_small.py", "fox", "at64_1024") and not record.get("flags"))
    assert len(losses) == 3 and losses[1] + 0.5 < losses[2]

def test_who_gains_from_distant_code():
    """Of the five methods that are drawn, only ALiBi and FoX do, and hardly without copies."""
    def gain(values):
        return values["window_loss"] - values["loss"]

    for pe in ("rope", "pope", "cope", "alibi", "fox"):
        values = {metric: walk_parts.published(pe, "stdlib", "val", metric)
                  for metric in ("loss", "window_loss")}
        assert (gain(values) > 0.1) == (pe in ("alibi", "fox"))
        assert gain(values) > 0.1 or gain(values) < 0
    without_copies = [
        gain(record["values"]) for record in walk_parts.records()
        if record["pe"] in ("alibi", "fox") and "window_loss" in record["values"]
        and (record["data"], record["split"], record["length"]) == ("stdlib", "val", 1024)
        and "echo" not in record["config"] and "echo" not in str(record.get("flags"))]
    assert len(without_copies) > 5
    assert f"[{max(without_copies):.2f} at most]" in PAGE.replace("\n", " ")

def test_a_flat_loss_is_of_no_use():
    """Section 8 repeats two numbers of section 6."""
    last, window = re.search(r"^    pairs 3 to 7 stop +\S+ +(\S+) +(\S+)$", PAGE, re.M).groups()
    said = f"reached {last} with all text and {window} with at most the last 64 bytes"
    assert said in PAGE.replace("\n", " ") and last > window

def test_where_expe_finds_a_noun():
    """With up to one word before the first noun, which gets as much as the first word if there are
    two, and less if there are three."""
    _, names = run(code_of("WORDS ="))
    for before, found in ((0, True), (1, True), (2, False), (3, False)):
        k = names["keys"](" ".join(["today"] * before + ["dog", "bites", "man", "?"]))
        k[:, 1] = torch.arange(len(k))
        logits = k @ torch.tensor([2.0, -1.0])
        others = torch.cat((logits[:before], logits[before + 1 :]))
        assert (logits[before] > others.max()) == found

def test_pairs_that_met_all_angles():
    theta = model.RoPE(walk_parts.SMALL).theta(torch.zeros(1))
    assert (64 * theta >= 2 * math.pi).tolist() == [True] * 3 + [False] * 5

def test_the_rule_of_ntk():
    """It divides the frequency of pair c by s^(c/(n-1))."""
    plain = model.RoPE(walk_parts.SMALL).theta(torch.zeros(1))
    changes = dict(rope_scaling="ntk", rope_factor=8.0)
    scaled = model.RoPE(walk_parts.replace(walk_parts.SMALL, **changes)).theta(torch.zeros(1))
    assert torch.allclose(plain / scaled, 8 ** (torch.arange(8) / 7))
    slower = (plain / scaled)[3].item()
    assert f"pair 3 is only {slower:.1f} times slower" in PAGE.replace("\n", " ")
    met, rotates = 63 * plain[3], 511 * scaled[3]
    assert rotates > 2 * math.pi > 2 * met  # most of its full rotation is new

def test_the_small_gpt_is_that_of_the_pictures():
    """dials.png shows the frequencies of walk_parts.SMALL."""
    options = re.search(r"GPTConfig\(pe=pe, (.*?)\)", code_of("def small_gpt("))[1]
    assert eval(f"dict({options})") == {
        name: getattr(walk_parts.SMALL, name)
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")}

@torch.no_grad()
def test_the_methods_by_hand_are_those_of_the_model():
    """RoPE (with 1 radian per position), ALiBi, CoPE's counts and bias, and FoX's bias."""
    _, names = run(code_of("WORDS =", "longer =", "def rotate(", "def rope(", "is_noun ="))
    q, k = names["q"], names["k"]
    T = len(k)
    pos = torch.arange(T)
    cfg = model.GPTConfig(n_head=1, n_embd=2, cope_npos=4)

    rope = model.RoPE(cfg)
    names["theta"] = 1.0
    all_q = q.expand(1, 1, T, 2)
    turned_q, turned_k = rope.encode_qk(all_q, k[None, None], None, rope.per_position(k, pos), {})
    want = (turned_k @ turned_q[0, 0, -1])[0, 0]
    assert torch.allclose(names["rope"](k, q), want, atol=1e-5)

    alibi = model.ALiBi(model.GPTConfig(n_head=8, n_embd=16))  # its first slope is 1/2
    bias = alibi.logit_bias(torch.zeros(1, 8, T, 2), None, pos[:, None], pos, None)[0, -1]
    assert torch.allclose((k @ q + bias).softmax(0), (k @ q + 0.5 * pos).softmax(0))

    cope = model.CoPE(cfg)
    cope.e.copy_(names["e"].T)
    p = cope.positions(names["is_noun"].expand(1, 1, T, T))
    assert torch.equal(p[0, 0, -1], names["count"])
    bias = cope.bias_at(p, all_q)[0, 0, -1]
    assert torch.equal(k @ q + bias, names["logits"]["cope"])

    fox = model.FoX(cfg)
    sums = names["log_keep"].cumsum(0)[None, None]
    bias = fox.logit_bias(all_q, None, pos[:, None], pos, sums)[0, 0, -1]
    assert torch.allclose(bias, names["fade"], atol=1e-6)

@torch.no_grad()
def test_the_row_in_the_docstring_of_cope():
    """p may stand there before it is clamped or after."""
    rows = {name: [float(value) for value in values.split("  summed")[0].split("  z at")[0].split()]
            for name, values in re.findall(r"^ {8}(gate|p|bias) +(.*)$", model.CoPE.__doc__, re.M)}
    cope = model.CoPE(model.GPTConfig(n_head=1, n_embd=1, cope_npos=4))
    cope.e[:] = torch.tensor([0.0, 2, 1, 3])
    p = cope.positions(torch.tensor(rows["gate"])[None, None, None])
    bias = cope.bias_at(p, torch.ones(1, 1, 1, 1))
    assert [min(value, 3) for value in rows["p"]] == p.clamp(max=3).flatten().tolist()
    assert rows["bias"] == bias.flatten().tolist()

# --- the pictures ---------------------------------------------------------------------------------

def test_what_each_method_depends_on():
    """The headings of the rows are true. What depends only on the distance is the same along each
    diagonal, and only the last row changes with the words that count."""
    counts, others = walk_parts.NOUNS, walk_parts.STOP
    T = len(counts)
    assert len(walk_parts.ANSWERS) == 3
    for n, methods in enumerate(walk_parts.ANSWERS.values()):
        for name in methods:
            effect = walk_parts.effect(name, counts)
            assert (effect.isnan() == torch.ones(T, T).triu(1).bool()).all(), name
            diagonals = [effect.diagonal(-distance) for distance in range(T)]
            is_relative = all(torch.allclose(y, y[0], atol=1e-5) for y in diagonals)
            assert is_relative == (n == 1), name
            changes = not torch.equal(effect.tril(), walk_parts.effect(name, others).tril())
            assert changes == (n == 2), name

def test_what_counts():
    """In the panels of cope and fox, keys have the same colour if as many counted words lie between
    them and the query. cope counts the key, too."""
    for name, counts in (("cope", walk_parts.NOUNS), ("fox", walk_parts.STOP)):
        T = len(counts)
        seen = torch.ones(T, T).tril().bool()
        until = counts.cumsum(0)
        count = until[:, None] - until
        if name == "cope":
            count = count + counts.long()
        effect = walk_parts.effect(name, counts)
        groups = [effect[seen & (count == c)] for c in count[seen].unique()]
        for group in groups:
            assert torch.allclose(group, group[0], atol=0.05), name
        means = torch.stack([group.mean() for group in groups]).sort().values
        assert means.diff().min() > 0.05, name

@torch.no_grad()
def test_stopped_pairs_stop():
    """With all pairs stopped, distant keys have the logits of distance 63. With none stopped, the
    model is RoPE's, and in any case it is so within the trained length."""
    _, names = run(code_of("def angles_if_far(").split("\ndef loss_of_text")[0])
    torch.manual_seed(0)
    gpt = model.GPT(walk_parts.replace(walk_parts.SMALL, pe="rope"))
    tokens = torch.randint(256, (1, 100))
    want, _ = gpt(tokens, tokens)
    q, k = torch.randn(2, 1, 4, 1, 16).expand(-1, -1, -1, 100, -1)  # the same content everywhere
    pos = torch.arange(100)
    for pairs, farthest in (([], 99), (list(range(8)), 63)):
        stopped = walk_parts.stopped(gpt, pairs, names["angles_if_far"])
        found, _ = stopped(tokens, tokens)
        assert torch.allclose(found[:, :64], want[:, :64], atol=1e-4)
        assert torch.allclose(found, want, atol=1e-4) == (not pairs)

        pe = stopped.h[0].attn.pes[0]
        rotated_q, rotated_k = pe.encode_qk(q, k, None, pe.per_position(q, pos), {})
        logits = model.scaled_dot_products(rotated_q, rotated_k, 16)
        bias = pe.logit_bias(q, logits, pos[:, None], pos, rotated_k)
        distance = (pos[:, None] - pos).clamp(0, farthest)
        at_distance = logits[:, :, distance, 0]  # of query `distance` and key 0
        assert torch.allclose((logits + bias).tril(), at_distance.tril(), atol=1e-4)
