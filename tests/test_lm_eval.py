"""Tests eval/tasks.py against float64 sums, token by token."""
import functools

import pytest
import torch
from conftest import TINY

pytest.importorskip("lm_eval")

import datasets
import lm_eval.tasks
from lm_eval.api.instance import Instance

import train
from config import Mistake
from config.runs import TrainedRun, read_records
from data.shards import Writer
from eval import cbt, tasks
from eval.tasks import Model
from model import GPT, GPTConfig

BYTES = dict(tokenizer="bytes", separator=256)
LONG = "for a in range(3): print(a, end=' ');"  # the model has 16 positions
PAIRS = [("", "a"), ("", "def f():"), ("print", "(a)"), (LONG, "r"), (LONG, "sixteen tokens. "),
         ("two  ", "spaces"), ("é", "ü"), (LONG * 2, ": " * 5), ("  ", "only spaces")]

@pytest.fixture
def own_tasks(monkeypatch):
    """Skips the harness's own task files, because reading them takes 6 s."""
    manager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", manager)

@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run trained for a few steps at 16 bytes. With `learned`, a 17th position is an error."""
    folder = tmp_path_factory.mktemp("lm_eval")
    with Writer(folder / "text", vocab_size=257, **BYTES) as writer:
        for split in ("train", "val"):
            writer.write(split, [*(LONG + "\n").encode() * 20, 256])
    train.main([f"--data={folder / 'text'}", f"--out_dir={folder / 'run'}", *TINY, "--pe=learned",
                "--max_iters=40"])
    return str(folder / "run")

def logps(net, context, targets):
    """Returns each target's log-probability, by a forward pass of its own, and whether it is the
    most probable. The model sees nothing before the last 17 tokens."""
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
    """Returns the sum of the targets' log-probabilities, and whether all are the most probable.
    Spaces before the continuation belong to it, as in the harness."""
    before, targets = context.rstrip(), (context + continuation)[len(context.rstrip()) :]
    p, right = logps(net, list(before.encode()) or [256], list(targets.encode()))
    return sum(p), all(right)

@pytest.mark.parametrize("pe", ["learned", "cope+rope"])
def test_log_likelihood(pe):
    """Contexts may be empty, and texts may be longer than the model's context, whatever else is in
    the batch. The last continuation is what the model writes."""
    torch.manual_seed(0)
    net = GPT(GPTConfig(16, 257, 2, 2, 16, pe=pe)).eval()
    torch.nn.init.normal_(net.lm_head.weight[:128], std=0.5)  # far from uniform, for ASCII only
    written = net.generate(torch.tensor([list(b"print")]), 3, temperature=0)[0, 5:].tolist()
    different = [*PAIRS, ("print", bytes(written).decode())]
    pairs = different * 60  # more than a batch
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    got = Model(net, BYTES, 16).loglikelihood(asked, disable_tqdm=True)
    exact = net.double()
    for i, score in enumerate(got):
        if i < len(different):
            logp, greedy = by_hand(exact, *pairs[i])
            assert score[0] == pytest.approx(logp, abs=1e-5) and score[1] == greedy
        assert score == pytest.approx(got[i % len(different)])
    assert [score.tokens for score in got[: len(different)]] == [1, 8, 3, 1, 16, 8, 2, 10, 13, 3]
    assert got[len(different) - 1][1]

def test_quotes_of_cbt():
    assert cbt.plain("`` I say ` no ' , '' he did n't say .") == "\"I say 'no',\" he didn't say."

def test_cbt(run, own_tasks, monkeypatch, capsys):
    """The mean per token decides; here a sum would decide otherwise. The space before a word is
    scored with it."""
    row = dict(sentences=[f"line {i} of a tale ." for i in range(20)], question="The XXXXX 's .",
               options=["for a in", "a", "print", ""])
    context = " ".join(row["sentences"]).replace(" .", ".") + " The"
    net = TrainedRun(run, device="cpu").model.double()
    means, sums = {}, {}
    for option in row["options"][:3]:
        p, _ = logps(net, list(context.encode()), list(f" {option}'s.".encode()))
        means[option] = sum(p) / len(p)
        sums[option] = sum(p)
    right = dict(row, answer=max(means, key=means.get))
    wrong = dict(row, answer=max(sums, key=sums.get))
    assert right != wrong
    kinds = dict(CN=[right], NE=[right, wrong], P=[wrong, wrong], V=[wrong])

    def load(path, name):
        return datasets.DatasetDict(test=datasets.Dataset.from_list(kinds[name]))

    monkeypatch.setattr(datasets, "load_dataset", load)
    tasks.main([run, "--tasks=cbt", "--device=cpu"])
    found = {record["data"].rpartition("_")[2]: record["values"]["acc,none"]
             for record in read_records(f"{run}/results.jsonl")}
    assert "|acc" in capsys.readouterr().out
    assert found == dict(cn=1.0, ne=0.5, p=0.0, v=0.0, cbt=0.375)  # each kind counts the same

def test_the_length_that_is_read(run):
    """With learned positions, which end at 16, nothing longer can be read. --length may be less."""
    lengths = []
    net = TrainedRun(run, device="cpu").model
    net.register_forward_pre_hook(lambda _, arguments: lengths.append(arguments[0].size(1)))
    for longest in (16, 7):
        model = Model(net, BYTES, longest)
        model.loglikelihood([Instance("loglikelihood", {}, (LONG, LONG), 0)], disable_tqdm=True)
        assert max(lengths) == longest
        lengths.clear()

def test_what_cannot_be_scored(run, own_tasks):
    with pytest.raises(Mistake, match="'cbtt' is neither a task of the harness nor a yaml file"):
        tasks.main([run, "--tasks=cbtt", "--device=cpu"])
    with pytest.raises(Mistake, match="need a model of text"):
        Model(None, BYTES | dict(separator=None), 16)
