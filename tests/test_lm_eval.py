"""The lm-evaluation-harness in sample.py, against float64 sums token by token."""
import functools
import json

import pytest
import torch
from conftest import TINY, fails

pytest.importorskip("lm_eval")

import datasets
from lm_eval import tasks
from lm_eval.api.instance import Instance

import sample
import train
from data.shards import Writer
from eval import results
from eval.harness import Model
from model import GPT, GPTConfig

BYTES = dict(tokenizer="bytes", separator=256)
LONG = "for a in range(3): print(a, end=' ');"  # the model has 16 positions
PAIRS = [("", "a"), ("", "def f():"), ("print", "(a)"), (LONG, "r"), (LONG, "sixteen tokens. "),
         ("two  ", "spaces"), ("é", "ü"), (LONG * 2, ": " * 5), ("  ", "only spaces")]

@pytest.fixture
def own_tasks(monkeypatch):
    """Skips the harness's own task files, because reading them takes 6 s."""
    manager = functools.partial(tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(tasks, "TaskManager", manager)

@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run trained for a few steps at 16 bytes. With `learned`, a 17th position is an error."""
    folder = tmp_path_factory.mktemp("lm_eval")
    writer = Writer(folder / "text")
    for split in ("train", "val"):
        writer.write(split, [*(LONG + "\n").encode() * 20, 256])
    writer.finish(vocab_size=257, **BYTES)
    train.main([f"--data={folder / 'text'}", f"--out_dir={folder / 'run'}", *TINY, "--pe=learned",
                "--max_iters=40"])
    return str(folder / "run")

@pytest.fixture
def net(run):
    return sample.load(run, "cpu")[0]

def logps(net, context, targets):
    """Each target's log-probability, by a forward pass of its own, and whether it is the most
    probable. The model sees the 16 tokens before the last target."""
    tokens = context + targets
    found, right = [], []
    for at in range(len(context), len(tokens)):
        inputs = tokens[max(0, len(tokens) - 17) : at]
        with torch.no_grad():
            p = net(torch.tensor([inputs]))[0][0, -1].log_softmax(-1)
        found.append(p[tokens[at]].item())
        right.append(p.argmax().item() == tokens[at])
    return found, right

def by_hand(net, context, continuation):
    """The sum, and whether all are the most probable. Spaces before the continuation belong to it,
    as in the harness."""
    before, targets = context.rstrip(), (context + continuation)[len(context.rstrip()) :]
    p, right = logps(net, list(before.encode()) or [256], list(targets.encode()))
    return sum(p), all(right)

@pytest.mark.parametrize("pe", ["learned", "cope+rope"])
def test_log_likelihood(pe):
    """Of empty and long contexts and continuations, whatever else is in the batch. The last
    continuation is what the model writes."""
    torch.manual_seed(0)
    net = GPT(GPTConfig(16, 257, 2, 2, 16, pe=pe)).eval()
    torch.nn.init.normal_(net.lm_head.weight[:128], std=0.5)  # far from uniform, for ASCII only
    written = net.generate(torch.tensor([list(b"print")]), 3, temperature=0)[0, 5:].tolist()
    different = [*PAIRS, ("print", bytes(written).decode())]
    pairs = different * 60  # more than a batch
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    got = Model(net, BYTES).loglikelihood(asked, disable_tqdm=True)
    exact = net.double()
    for i, score in enumerate(got):
        if i < len(different):
            logp, greedy = by_hand(exact, *pairs[i])
            assert score[0] == pytest.approx(logp, abs=1e-5) and score[1] == greedy
        assert score == pytest.approx(got[i % len(different)])
    assert [score.tokens for score in got[: len(different)]] == [1, 8, 3, 1, 16, 8, 2, 10, 13, 3]
    assert got[len(different) - 1][1]

def test_a_task_from_a_file(run, net, own_tasks, tmp_path, capsys):
    """Three questions, each after a solved example."""
    docs = [dict(q="for a in", choices=[" range(3)", " xyz(3)"], gold=0),
            dict(q="print", choices=["(", "é", "a"], gold=2),
            dict(q="", choices=["f", "()"], gold=1)]
    (tmp_path / "docs.jsonl").write_text("\n".join(map(json.dumps, docs)))
    (tmp_path / "task.yaml").write_text(f"""
task: three_questions
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "docs.jsonl"}}}, cache_dir: {tmp_path / "cache"}}}
test_split: test
fewshot_split: test
fewshot_config: {{sampler: first_n}}
output_type: multiple_choice
doc_to_text: q
doc_to_choice: choices
doc_to_target: gold
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
""")
    sample.main([run, f"--tasks={tmp_path / 'task.yaml'}", "--device=cpu", "--fewshot=1"])
    right = []
    for doc in docs:
        context = "for a in range(3)\n\n" + doc["q"]
        sums = [by_hand(net.double(), context, choice)[0] for choice in doc["choices"]]
        right.append(sums.index(max(sums)) == doc["gold"])
    lines = results.records(run, "results.jsonl")
    (value,) = [line["value"] for line in lines
                if (line["metric"], line["split"]) == ("acc,none", "three_questions, 1-shot")]
    assert value == pytest.approx(sum(right) / len(right))
    assert "|acc" in capsys.readouterr().out

def test_cbt(run, net, own_tasks, monkeypatch):
    """The mean per token decides; here a sum would decide otherwise. The space before a word, if
    there is one, is scored with it."""
    tale = [f"line {i} of a tale ." for i in range(20)]
    context = " ".join(tale).replace(" .", ".")
    docs = []  # (row, the option with the highest mean, the option with the highest sum)
    for question, before, after, options in (
        ("The XXXXX 's .", " The ", "'s.", ["for a in", "a", "print", ""]),
        ("`` XXXXX ?", ' "', "?", ["end='", "é", "in range(3)"]),
    ):
        means, sums = {}, {}
        for option in filter(None, options):
            targets = before[len(before.rstrip()) :] + option + after
            p, _ = logps(net.double(), list((context + before.rstrip()).encode()),
                         list(targets.encode()))
            means[option], sums[option] = sum(p) / len(p), sum(p)
        best = max(means, key=means.get), max(sums, key=sums.get)
        assert best[0] != best[1]
        docs.append((dict(sentences=tale, question=question, options=options), *best))

    def load(path, name):
        right = [dict(row, answer=mean) for row, mean, _ in docs]
        wrong = [dict(row, answer=total) for row, _, total in docs]
        kinds = dict(CN=right, NE=[right[0], wrong[1]], P=[wrong[0], right[1]], V=wrong[:1])
        return datasets.DatasetDict(test=datasets.Dataset.from_list(kinds[name]))

    monkeypatch.setattr(datasets, "load_dataset", load)
    sample.main([run, "--tasks=cbt", "--device=cpu"])
    found = {line["split"].partition(",")[0].rpartition("_")[2]: line["value"]
             for line in results.records(run, "results.jsonl")
             if "cbt" in line["split"] and line["metric"] == "acc,none"}
    assert found == dict(cn=1.0, ne=0.5, p=0.5, v=0.0, cbt=0.5)  # each kind counts the same

def test_what_cannot_be_scored(run, net, own_tasks):
    line = fails("sample.py", run, "--tasks=cbtt", "--device=cpu")
    assert "'cbtt' is neither a task of the harness nor a yaml file; did you mean 'cbt" in line
    with pytest.raises(ValueError, match="need a model of text, but this one's data set has no"):
        Model(net, BYTES | dict(separator=None))
