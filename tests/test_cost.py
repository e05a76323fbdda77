"""eval/cost.py, at tiny sizes."""
import re

import pytest
import torch

from eval import cost

CPU = torch.device("cpu")

@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(cost.SIZES, "cpu", dict(n_layer=1, n_head=2, n_embd=16, vocab_size=29))
    monkeypatch.setitem(cost.TOKENS, "cpu", 64)

def test_a_row_for_each_method(capsys, monkeypatch):
    """With rope first, to which the others are compared, whatever was asked for."""
    monkeypatch.setattr(cost, "is_too_large", lambda pe, length, device: (pe, length) == ("t5", 32))
    cost.main(["alibi", "t5", "cope+rope", "--lengths=16,32", "--rounds=3", "--device=cpu"])
    heading, _, *rows = [line.strip("| ").split(" | ") for line
                         in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert heading == ["method", "time, 16 tokens", "memory, 16 tokens", "time, 32 tokens",
                       "memory, 32 tokens"]
    assert [row[0] for row in rows] == ["`rope`", "`alibi`", "`t5`", "`cope+rope`"]
    for name, *cells in rows:
        for time, memory in zip(cells[::2], cells[1::2]):
            if name == "`rope`":
                assert re.fullmatch(r"\d+ ms", time) and re.fullmatch(r"\d+ MiB", memory)
            elif name == "`t5`" and cells[2:] == [time, memory]:
                assert (time, memory) == ("–", "–")
            else:
                assert re.fullmatch(r"\d+\.\d\d \(\d+\.\d\d–\d+\.\d\d\)", time)
                assert float(memory) > 1

def test_memory_is_what_autograd_keeps(monkeypatch):
    """Of y = (x W)^2, where W is a parameter: x and x W. The square keeps x W, which the product
    has made, and no tensor counts twice."""
    step = cost.Step("nope", 16, CPU)
    model = torch.nn.Linear(10, 20, bias=False)
    x = torch.randn(5, 10, requires_grad=True)

    def loss():
        y = model(x)
        return (y * y).sum()

    monkeypatch.setattr(step, "model", model)
    monkeypatch.setattr(step, "loss", loss)
    assert step.memory() == 4 * (5 * 10 + 5 * 20)

def test_a_step_trains():
    step = cost.Step("pope", 16, CPU)
    before = [p.clone() for p in step.model.parameters()]
    assert step.take() > 0
    assert all(not torch.equal(p, old) for p, old in zip(step.model.parameters(), before))
    assert all(p.grad is None for p in step.model.parameters())

def test_what_is_too_large(monkeypatch):
    """The memory of many short sequences, times how much longer the others are."""
    monkeypatch.setattr(cost, "SHORT", 16)
    kept = cost.Step("cope", 16, CPU).memory()
    for length, limit, found in ((16, kept / 2, False), (32, 2 * kept + 1, False),
                                 (32, 2 * kept - 1, True)):
        monkeypatch.setattr(cost, "LARGEST", limit)
        assert cost.is_too_large("cope", length, CPU) == found

def test_a_wrong_kernel_is_noticed(monkeypatch):
    plain, other = cost.Step("alibi", 16, CPU), cost.Step("alibi", 16, CPU)
    cost.compare_losses(plain, other)
    attention = type(other.model.h[0].attn)
    right = attention.attend
    monkeypatch.setattr(other.model.h[0].attn, "attend", lambda *args: 0 * right(
        other.model.h[0].attn, *args))
    with pytest.raises(ValueError, match="wrong: with attention: "):
        cost.compare_losses(plain, other)
