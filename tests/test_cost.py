"""eval/cost.py, at tiny sizes."""
import re

import pytest
import torch

from eval import cost

CPU = torch.device("cpu")

@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(cost, "sizes", lambda device, width: dict(
        n_layer=1, n_head=2, n_embd=width, vocab_size=29))
    monkeypatch.setitem(cost.TOKENS, "cpu", 64)

def test_a_row_for_each_method(capsys, monkeypatch):
    """With rope first, to which the others are compared, whatever was asked for."""
    monkeypatch.setattr(cost, "is_too_large", lambda pe, length, *_: (pe, length) == ("t5", 32))
    # a step of so tiny a model may need no new memory, so what it needs is given here
    monkeypatch.setattr(cost.Step, "memory", lambda step: 2**22 // (
        1 if step.model.cfg.pe == "rope" else 2))
    cost.main(["alibi", "t5", "cope+rope", "--lengths=16,32", "--width=16", "--rounds=3",
               "--device=cpu"])
    heading, _, *rows = [line.strip("| ").split(" | ") for line
                         in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert heading == ["method", "time, 16 tokens", "memory, 16 tokens", "time, 32 tokens",
                       "memory, 32 tokens"]
    assert [row[0] for row in rows] == ["`rope`", "`alibi`", "`t5`", "`cope+rope`"]
    for name, *cells in rows:
        for time, memory in zip(cells[::2], cells[1::2]):
            if name == "`rope`":
                assert re.fullmatch(r"\d+ ms", time) and memory == "4 MiB"
            elif name == "`t5`" and cells[2:] == [time, memory]:
                assert (time, memory) == ("–", "–")
            else:
                assert re.fullmatch(r"\d+\.\d\d \(\d+\.\d\d–\d+\.\d\d\)", time)
                assert memory == "0.50"

def test_memory_is_that_of_the_peak(monkeypatch):
    """Of two tensors that exist at the same time, and of a third one after them."""
    step = cost.Step("nope", 16, 16, CPU)
    size = 50 * 2**20  # bytes

    def loss():
        first, second = torch.ones(2, size // 4)
        del first, second
        return torch.ones(size // 4, requires_grad=True).sum()

    monkeypatch.setattr(step, "loss", loss)
    assert 2 * size < step.memory() < 2.5 * size

def test_memory_without_what_the_libraries_take():
    """The first step of a process allocates tens of MiB for them."""
    assert cost.Step("rope", 16, 16, CPU).memory() < 8 * 2**20

def test_a_step_that_fails_is_one_line(monkeypatch):
    """It fails in a process of its own, whose end must be noticed."""
    step = cost.Step("rope", 16, 16, CPU)
    monkeypatch.setattr(step, "loss", None)
    with pytest.raises(cost.Mistake, match="a step of pe='rope' failed"):
        step.memory()

def test_a_step_trains():
    step = cost.Step("pope", 16, 16, CPU)
    before = [p.clone() for p in step.model.parameters()]
    assert step.take() > 0
    assert all(not torch.equal(p, old) for p, old in zip(step.model.parameters(), before))
    assert all(p.grad is None for p in step.model.parameters())

def test_what_is_too_large(monkeypatch):
    """The memory of many short sequences, times how much longer the others are."""
    monkeypatch.setattr(cost, "SHORT", 16)
    monkeypatch.setattr(cost.Step, "memory", lambda step: 1000)
    monkeypatch.setattr(cost, "LARGEST", 2001)
    assert [cost.is_too_large("cope", length, 16, CPU) for length in (16, 32, 48)] == [
        False, False, True]

def test_a_wrong_kernel_is_noticed(monkeypatch):
    plain, other = cost.Step("alibi", 16, 16, CPU), cost.Step("alibi", 16, 16, CPU)
    cost.compare_losses(plain, other)
    attention = type(other.model.h[0].attn)
    right = attention.attend
    monkeypatch.setattr(other.model.h[0].attn, "attend", lambda *args: 0 * right(
        other.model.h[0].attn, *args))
    with pytest.raises(ValueError, match="wrong: with attention: "):
        cost.compare_losses(plain, other)
