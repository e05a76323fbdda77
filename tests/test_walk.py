"""The first lesson: eval/walk.md is what eval/walk.py says, prints and draws. These tests need
neither jupytext nor nbconvert."""
import functools
import re
import sys
from pathlib import Path

import pytest
import torch

import model

pytest.importorskip("matplotlib")
from eval import draw, walk_parts  # noqa: E402

SOURCE = Path("eval/walk.py").read_text("utf-8")
PAGE = Path("eval/walk.md").read_text("utf-8")
PICTURES = sorted(Path("eval/walk_files").iterdir())
DECIDED_BY_TRAINING = ("alibi: loss", "slope: loss", "slopes of layer 1:")
PUBLISHED = [pe for pe in draw.COLORS if "+" not in pe]

def cells():
    """Returns the cells of walk.py as they stand on the page."""
    for cell in SOURCE.split("# %%")[1:]:
        kind, _, body = cell.partition("\n")
        body = body.strip()
        if kind.strip() == "[markdown]":
            yield body.removeprefix("r").removeprefix('"""').removesuffix('"""').strip()
        else:
            yield f"```python\n{body}\n```"

def test_the_page_has_the_text_and_code_of_the_walk():
    """All cells are there in order. Between them are only outputs, which are indented, and
    pictures."""
    at = 0
    between = ""
    for cell in cells():
        begin = PAGE.find(cell, at)
        assert begin >= 0, f"render eval/walk.md again (walk.py says how), because it lacks\n{cell}"
        between += PAGE[at:begin]
        at = begin + len(cell)
    for line in (between + PAGE[at:]).splitlines():
        assert not line.strip() or line.startswith(("    ", "![")), line

def test_the_page_has_all_pictures():
    """Each says what it shows, and is small."""
    named = re.findall(r"^!\[(.+)\]\(walk_files/(\w+\.png)\)$", PAGE, re.M)
    assert sorted(name for _, name in named) == [path.name for path in PICTURES]
    assert min(len(what) for what, _ in named) > 40
    assert max(path.stat().st_size for path in PICTURES) < 90_000

@pytest.fixture
def in_a_script(tmp_path, monkeypatch):
    """Runs the walk in an empty folder, with fewer steps and less text, and with the published
    methods only, so that a method of a user's own does not count."""
    methods = {name: cls for name, cls in model.PES.items() if name in PUBLISHED}
    monkeypatch.setattr(model, "PES", methods)
    monkeypatch.setattr(walk_parts, "PES", methods)
    train, unseen = walk_parts.texts()
    monkeypatch.setattr(walk_parts, "texts", lambda: (train, unseen[:2]))
    monkeypatch.setattr(walk_parts, "train", functools.partial(walk_parts.train, steps=2))
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["walk.py", *words])
        exec(compile(SOURCE, "walk.py", "exec"), {"__name__": "__main__"})

    return run

def test_the_walk_prints_what_the_page_says(in_a_script, tmp_path, capsys):
    """Apart from what training decides. It also says what each section shows, and where its picture
    is."""
    in_a_script()
    printed = capsys.readouterr().out
    parts = printed.strip().split("\n\n")
    sections = [int(part[0]) for part in parts if part[0] != " "]
    assert sorted(set(sections)) == list(range(1, 9)) and sections == sorted(sections)
    drawn = re.findall(r"^\d\. (out/walk_\w+\.png) shows ", printed, re.M)
    assert sorted(drawn) == [f"out/walk_{path.name}" for path in PICTURES]
    assert sorted(path.name for path in Path("out").iterdir()) == sorted(
        f"walk_{path.name}" for path in PICTURES)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    results = [line for part in parts for line in part.splitlines()[1:]
               if not line.startswith("   ")]
    assert len(results) > 30
    for line in results:
        if not line.startswith(DECIDED_BY_TRAINING):
            assert f"\n    {line}\n" in PAGE, f"render eval/walk.md again: it lacks {line!r}"

def test_help_trains_nothing(in_a_script, monkeypatch, capsys):
    monkeypatch.setattr(model.GPT, "forward", None)
    with pytest.raises(SystemExit) as stop:
        in_a_script("--help")
    assert not stop.value.code
    assert "A first lesson in positional encodings" in capsys.readouterr().out

# --- the picture of all methods -------------------------------------------------------------------

def test_every_published_method_has_a_panel():
    rows = [name for methods in walk_parts.ANSWERS.values() for name in methods]
    assert sorted([*rows, "nope"]) == sorted(PUBLISHED)
    assert set(PUBLISHED) <= set(model.PES)

def test_what_each_method_depends_on():
    """The headings of the rows are true. What depends only on the distance is the same along each
    diagonal, and only the last row changes with the letters that are heeded."""
    heeded = torch.tensor([True, False, True, False, False, False, True, True, *[False] * 3])
    others = heeded.flip(0)
    assert len(walk_parts.ANSWERS) == 3
    for n, methods in enumerate(walk_parts.ANSWERS.values()):
        for name in methods:
            effect = walk_parts.effect(name, heeded)
            assert (effect.isnan() == torch.ones(11, 11).triu(1).bool()).all(), name
            diagonals = [effect.diagonal(-distance) for distance in range(11)]
            is_relative = all(torch.allclose(y, y[0], atol=1e-5) for y in diagonals)
            assert is_relative == (n == 1), name
            changes = not torch.equal(effect.tril(), walk_parts.effect(name, others).tril())
            assert changes == (n == 2), name

def test_what_counts():
    """In a panel of cope's kinds and of fox, keys have the same colour if as many heeded letters
    lie between them and the query. cope counts the key too."""
    heeded = torch.tensor([True, False, True, False, False, False, True, True, *[False] * 3])
    seen = torch.ones(11, 11).tril().bool()
    until = heeded.cumsum(0)
    for name in ("fox", "cope", "cope_mlp", "cope_alibi"):
        count = until[:, None] - until
        if name != "fox":
            count = count + heeded.long()
        effect = walk_parts.effect(name, heeded)
        groups = [effect[seen & (count == c)] for c in count[seen].unique()]
        for group in groups:
            assert torch.allclose(group, group[0], atol=0.03), name
        means = torch.stack([group.mean() for group in groups]).sort().values
        assert means.diff().min() > 0.05, name

def test_panels_differ():
    """No two panels look alike. The most similar ones are those of expe and exqpe, whose
    correlation is 0.96. Panels in opposite colours count as different."""
    effects = []
    for methods in walk_parts.ANSWERS.values():
        for name in methods:
            heeded = walk_parts.IS_A if name == "fox" else walk_parts.BEGINS_WORD
            effects.append(walk_parts.effect(name, heeded))
    seen = ~effects[0].isnan()
    similarity = torch.stack([effect[seen] for effect in effects]).corrcoef()
    assert similarity.fill_diagonal_(0).max() < 0.97

# --- the other pictures ---------------------------------------------------------------------------

@torch.no_grad()
def test_stopped_pairs_stop():
    """With all pairs stopped, a distance above 63 has the logits of 63. With none stopped, the
    logits are RoPE's."""
    source = SOURCE[SOURCE.index("class Stopped") : SOURCE.index('PES["stopped"]')]
    names = dict(vars(model), torch=torch)
    exec(source, names)
    pe = names["Stopped"](walk_parts.SMALL)
    q = torch.randn(1, 4, 1, 16).expand(-1, -1, 100, -1)  # the same content everywhere
    k = torch.randn(1, 4, 1, 16).expand(-1, -1, 100, -1)
    pos = torch.arange(100)
    rotated_q, rotated_k = pe.encode_qk(q, k, None, pe.per_position(q, pos), {})
    logits = model.scaled_dot_products(rotated_q, rotated_k, 16)
    for pairs, far in ((range(8), 63), ([], 99)):
        pe.pairs = list(pairs)
        found = logits + pe.logit_bias(q, logits, pos[:, None], pos, rotated_k)
        distance = (pos[:, None] - pos).clamp(0, far)
        want = logits[:, :, distance, 0]
        assert torch.allclose(found.tril(), want.tril(), atol=1e-4)

def test_the_row_in_the_docstring_of_cope():
    """It is that of the page, where p is not clamped yet."""
    rows = {name: values.split("  summed")[0].split("  z at")[0].split()
            for name, values in re.findall(r"^ {8}(gate|p|bias) +(.*)$", model.CoPE.__doc__, re.M)}
    page = dict(re.findall(r"^    (gate|p|bias) +([\d. ]+)$", PAGE, re.M))
    for name, values in rows.items():
        want = [min(float(value), 3.0) for value in page[name].split()]
        assert [float(value) for value in values] == want and len(values) == 6
