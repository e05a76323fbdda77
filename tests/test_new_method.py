"""A method that somebody adds, as README says. The tests that hold for every method accept it, and
each of these wrong versions of it fails one of them."""
import re
import shutil
import subprocess
import sys
from pathlib import Path

import oracles
import pytest
import test_model
import torch
from torch import nn

from model import PE, PES, at_least_float32

ROOT = Path(__file__).parent.parent

class Slope(PE):
    """ALiBi with learned slopes, which must not favour distant keys."""
    bounds = {"m": (0.0, float("inf"))}

    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        self.m = nn.Parameter(torch.zeros(self.H, 1, 1))

    def slope(self, q):
        return self.m.to(at_least_float32(q))

    def logit_bias(self, q, logits, i, j, per_key):
        return self.slope(q) * (j - i)

class InBfloat16(Slope):
    def logit_bias(self, q, logits, i, j, per_key):
        return (self.m * (j - i)).to(at_least_float32(q))

class ProductUnderAutocast(Slope):
    def logit_bias(self, q, logits, i, j, per_key):
        distance = (j - i)[..., None].to(at_least_float32(q))  # (t, s, 1)
        return (distance @ self.slope(q).view(1, self.H)).permute(2, 0, 1).to(at_least_float32(q))

class RotationInBfloat16(PE):
    def per_position(self, x, pos):
        return (pos[:, None] * 0.5 ** torch.arange(self.d // 2).to(x.dtype)).to(at_least_float32(x))

    def encode_qk(self, q, k, x, angle, cache):
        turn = torch.cat((angle.cos(), angle.sin()), -1).to(q.dtype)
        return q * turn, k * turn

class Buffer(Slope):
    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        del self.m
        self.register_buffer("m", torch.rand(self.H, 1, 1))

class FrozenClamp(Slope):
    bounds = {}

    def slope(self, q):
        return self.m.clamp(min=0).to(at_least_float32(q))

class ForgottenClamp(Slope):
    bounds = {}

class StartsOutside(Slope):
    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        self.m = nn.Parameter(-torch.ones(self.H, 1, 1))

class NearOnly(Slope):
    def logit_bias(self, q, logits, i, j, per_key):
        return self.slope(q) * (j - i).clamp(min=-100)

class NotInTraining(Slope):
    def logit_bias(self, q, logits, i, j, per_key):
        return self.slope(q) * (j - i) * (not self.training)

class LogInBfloat16(PE):
    """KERPLE's logarithm, without the cast."""
    def logit_bias(self, q, logits, i, j, per_key):
        distance = (i - j).clamp(min=0).to(q.dtype)
        return -torch.log1p(distance).to(at_least_float32(q))

class BothAtZero(Slope):
    """Two factors that may both become 0, where neither has a gradient."""
    bounds = {"m": (0.0, float("inf")), "n": (0.0, float("inf"))}

    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        self.m = nn.Parameter(torch.ones(self.H, 1, 1))
        self.n = nn.Parameter(torch.ones(self.H, 1, 1))

    def slope(self, q):
        return (self.m * self.n).to(at_least_float32(q))

class Shared(Slope):
    def __init__(self, cfg, shared_from=None):
        super().__init__(cfg)
        if shared_from:
            self.m = shared_from.m

class SeesTheFuture(Slope):
    def logit_bias(self, q, logits, i, j, per_key):
        return self.slope(q) * (j - i) * logits.amax(-1, keepdim=True)

def failures(cls, monkeypatch):
    """The names of the tests for every method that fail if this class is the method "slope"."""
    def bias(cfg, name, p, h, x, q, v, scores, pos, others=oracles.bias):
        if name != "slope":
            return others(cfg, name, p, h, x, q, v, scores, pos)
        m = p("m")[h].item() * (p("n")[h].item() if cls is BothAtZero else 1)
        assert m >= 0, "the slope is negative"
        return oracles.causal(len(x), lambda i, j: -m * (i - j))

    monkeypatch.setitem(PES, "slope", cls)
    monkeypatch.setitem(test_model.CASES, "slope", dict(pe="slope"))
    monkeypatch.setattr(oracles, "BIAS", (*oracles.BIAS, "slope"))
    monkeypatch.setattr(oracles, "bias", bias)
    found = []
    for name, test in vars(test_model).items():
        if getattr(test, "pytestmark", []) in ([test_model.EVERY.mark], [test_model.NAMES.mark]):
            try:
                test("slope")
            except Exception:
                found.append(name)
    return found

class AsKeyBias(Slope):
    """The same, fused."""
    logit_bias = PE.logit_bias

    def key_bias(self, j, per_key):
        return self.m[:, 0] * j

@pytest.mark.parametrize("cls", [Slope, AsKeyBias])
def test_a_new_method_passes(cls, monkeypatch):
    assert failures(cls, monkeypatch) == []

@pytest.mark.parametrize("cls, caught_by", [
    (InBfloat16, "test_far_positions_in_bfloat16"),
    (ProductUnderAutocast, "test_far_positions_in_bfloat16"),
    (RotationInBfloat16, "test_far_positions_in_bfloat16"),
    (LogInBfloat16, "test_far_positions_in_bfloat16"),
    (BothAtZero, "test_bounds_do_not_freeze_each_other"),
    (Buffer, "test_what_is_saved_is_what_learns"),
    (FrozenClamp, "test_bounds_hold_and_freeze_nothing"),
    (ForgottenClamp, "test_forward_equals_the_equations"),
    (StartsOutside, "test_training_from_the_start"),
    (NearOnly, "test_long_texts_equal_the_equations"),
    (NotInTraining, "test_forward_equals_the_equations"),
    (Shared, "test_layers_share_what_the_paper_shares"),
    (SeesTheFuture, "test_no_position_sees_the_future"),
])
def test_wrong_methods_fail(cls, caught_by, monkeypatch):
    assert caught_by in failures(cls, monkeypatch)

@pytest.mark.slow
def test_readmes_method_breaks_no_test(tmp_path):
    """In a copy of the project, README's method is added as README says, and all tests pass that do
    not train for long."""
    folder = shutil.copytree(ROOT, tmp_path / "project", ignore=shutil.ignore_patterns(
        ".git", "out", "downloads", "*.bin", "__pycache__", "*.part"))
    method = re.search(r"```python\n(class Slope.*?)```", (folder / "README.md").read_text(), re.S)
    source = (folder / "model.py").read_text()
    assert source.count("\nPES = {") == 1
    source = source.replace("\nPES = {", f'\n{method[1]}\nPES = {{\n    "slope": Slope,')
    (folder / "model.py").write_text(source)
    oracle = (folder / "tests" / "oracles.py").read_text()
    oracle = oracle.replace('BIAS = (', 'BIAS = ("slope", ').replace(
        '    if name == "relative":\n', '    if name == "slope":\n'
        '        return causal(len(pos), lambda i, j: p("m")[h].item() * (pos[j] - pos[i]))\n'
        '    if name == "relative":\n', 1)
    (folder / "tests" / "oracles.py").write_text(oracle)

    def pytest_of(*words):
        return subprocess.run([sys.executable, "-m", "pytest", "-q", *words], cwd=folder, text=True,
                              stdout=subprocess.PIPE)

    # test_model.py asks every method the same. The answers of the others are those of other tests
    asked = pytest_of("tests/test_model.py", "--collect-only").stdout.splitlines()
    asked = [name for name in asked if "::" in name and ("[" not in name or "slope" in name)]
    assert sum("slope" in name for name in asked) >= 10, asked
    files = [f"tests/test_{name}.py" for name in ("readme", "figures", "walk", "config")]
    done = pytest_of(*asked, *files)
    assert done.returncode == 0, done.stdout[-3000:]
