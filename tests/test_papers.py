"""The configs against the papers' numbers, and config/README.md's tables against the configs."""
import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import config
import model
from model import GPT, GPTConfig
from train import TrainConfig

VOCABULARY = {  # where a config leaves it to the data
    "wikitext103": 50257, "fineweb_edu": 50257, "code": 32000, "fineweb": 32000,
    "human_genome": 4107, "maestro": 328, "jsb": 90, "data/c4_llama": 32000,
    "data/wordcount_llama": 32000, "data/wordcount_hard_llama": 32000,
    "data/fineweb_edu_mistral": 32768,
    "flip_flop": 5, "selective_copy": 16, "counting": 18, "indirect_indexing": 66,
}
NAMES = [path.stem for path in config.files()]
FULL_SIZE = [name for name in NAMES if name != "quickstart" and not name.endswith("_small")]

def load(name, *flags):
    """The TrainConfig of a config. Fine-tuning configs take the model that they start from."""
    from_file, from_flags = config.read(TrainConfig, [f"config/{name}.py", *flags])
    origin = {}
    if name.startswith("cope_wordcount"):
        origin = model_fields(config.load(TrainConfig, ["config/cope_1b4.py"]))
    cfg = TrainConfig(**{**origin, **from_file, **from_flags})
    cfg.vocab_size = cfg.vocab_size or VOCABULARY[cfg.data.partition("@")[0]]
    return cfg

def model_fields(cfg):
    return {field.name: getattr(cfg, field.name) for field in dataclasses.fields(GPTConfig)}

def parameters(cfg):
    """Counted in a model with no memory for its weights."""
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(GPTConfig(**model_fields(cfg))).parameters())

def length(cfg):
    """Tokens of a training sequence."""
    return 767 if cfg.data.startswith("selective_copy") else cfg.block_size  # test rows are longer

GPT2 = "--vocab_size=50257"  # the papers count without the ids that round it up

@pytest.mark.parametrize("name, flags, printed", [  # with the digits that the papers print
    ("pope_124m", [GPT2], "124M"), ("pope_253m", [GPT2], "253M"),
    ("pope_774m", [GPT2], "772M"),  # the paper says 774, which is GPT-2's
    ("pope_774m", [GPT2, "--pe=learned", "--norm=layernorm", "--bias=True"], "774M"),
    ("cope_wikitext103", [], "123.7M"), ("cope_wikitext103", ["--pe=learned"], "124.4M"),
    ("cope_wikitext103", ["--cope_gates=sep-keys", "--cope_shared=False"], "130.8M"),
    ("cope_code_20m", [], "20.8M"), ("cope_code_20m", ["--pe=rope"], "19.8M"),
    ("cope_code_20m", ["--cope_shared=False", "--cope_npos=1024"], "20.8M"),  # its other reading
    ("cope_1b4", [], "1.4B"), ("carope_124m", [], "124M"),
    ("carope_44m", [], "44.7M"), ("carope_44m", ["--pe=learned"], "44.9M"),  # the paper says 44
    ("expe_35m", [], "35M"), ("expe_135m", [], "135M"), ("expe_342m", [], "342M"),
])
def test_parameters_of_the_papers(name, flags, printed):
    unit = {"M": 1e6, "B": 1e9}[printed[-1]]
    digits = len(printed[:-1].partition(".")[2])
    assert f"{parameters(load(name, *flags)) / unit:.{digits}f}" == printed[:-1]

def test_tables_of_cope():
    """In section 5.7, 4 layers have 64 positions of width 2048. The released code for counting has
    513 positions in each layer."""
    cope, rope = parameters(load("cope_1b4")), parameters(load("cope_1b4", "--pe=rope"))
    assert cope - rope == 4 * 64 * 2048
    relative = parameters(load("cope_counting", "--pe=relative"))
    assert parameters(load("cope_counting")) == relative + 4 * 64 * 513 - 64 * 511 == 3_295_488

PAPERS = {
    # width, heads, layers and, if printed, block_size (PoPE Tables 6 and 7, CoPE section 5, ExPE
    # Tables 6 and 8, CARoPE section 3.2); what is printed of learning_rate, min_lr, warmup_iters,
    # max_iters, batch_size, dropout, weight_decay, grad_clip, beta2 (PoPE Tables 6 and 7, CARoPE
    # section 3, CoPE appendix C, ExPE Tables 5, 8 and 9)
    "pope_indirect": ((512, 8, 8), (2e-4, 2e-5, 4000, 100_000, 64, 0.0, 0.01, 1.0, 0.99)),
    "pope_124m": ((768, 12, 12, 1024), (6e-4, 6e-5, 1000, 100_000, 64, 0.0, 0.01, 1.0, 0.95)),
    "pope_253m": ((1024, 16, 16, 1024), (6e-4, 6e-5, 1000, 100_000, 64, 0.0, 0.01, 1.0, 0.95)),
    "pope_774m": ((1280, 20, 36, 1024), (6e-4, 6e-5, 1000, 100_000, 64, 0.0, 0.01, 1.0, 0.95)),
    "pope_jsb": ((256, 8, 6, 2048), (6e-4, 6e-5, 10, 3000, 4, 0.2, 0.01, 1.0, 0.99)),
    "pope_maestro": ((384, 8, 6, 2048), (6e-4, 6e-5, 500, 60_000, 16, 0.1, 0.01, 1.0, 0.99)),
    "pope_genome": ((1024, 16, 16, 1000),
                    (2.5e-4, 2.5e-5, 4000, 100_000, 64, 0.1, 0.01, 1.0, 0.999)),
    "carope_44m": ((512, 8, 6, 512), (6e-4, 6e-5, 750, 19_000, 524_288 // 512)),
    # 12 heads, because the paper's 10 do not divide 768
    "carope_124m": ((768, 12, 12, 512), (6e-4, 6e-5, 750, 19_000, 524_288 // 512)),
    "cope_flip_flop": ((256, 4, 4), (3e-4, 0.0, 50, 10_000, 16)),
    "cope_selective_copy": ((64, 2, 2), ()),
    "cope_wikitext103": ((768, 12, 12, 1024), ()),
    "cope_code_20m": ((256, 8, 4, 4096), ()),
    "cope_1b4": ((2048, 16, 24, 4096), ()),
    # the warm-up is that of cope_1b4
    "cope_wordcount": ((2048, 16, 24, 4096), (1e-4, 1e-5, 2000, 5722, 262_144 // 4096)),
    "expe_35m": ((384, 12, 6, 512), (1e-3, 3e-6, round(0.1 * 2289), 2289, 512)),
    "expe_135m": ((768, 12, 12, 512), (6e-4, 6e-5, round(0.05 * 19_073), 19_073, 1024)),
    "expe_342m": ((1024, 16, 24, 512), (3e-4, 3e-5, round(0.05 * 19_073), 19_073, 1024)),
}

@pytest.mark.parametrize("name", PAPERS)
def test_settings_of_the_papers(name):
    shape, values = PAPERS[name]
    cfg = load(name)
    assert (cfg.n_embd, cfg.n_head, cfg.n_layer, cfg.block_size)[: len(shape)] == shape
    ours = (cfg.learning_rate, cfg.min_lr, cfg.warmup_iters, cfg.max_iters, cfg.batch_size,
            cfg.dropout, cfg.weight_decay, cfg.grad_clip, cfg.beta2)
    assert ours[: len(values)] == values and (cfg.beta1 == 0.9 or not values)
    if name.startswith("pope"):
        on_text = name.startswith(("pope_124m", "pope_253m", "pope_774m"))
        assert cfg.norm == "rmsnorm" and cfg.pope_delta == ("zero" if on_text else "uniform")

@pytest.mark.parametrize("name, tokens", [  # CoPE sections 5.4 to 5.7; ExPE Table 9, section 3.1
    ("cope_wordcount", 1.5e9), ("cope_wikitext103", 100 * 117.8e6), ("cope_code_20m", 100e9),
    ("cope_1b4", 1e12), ("expe_135m", 10e9), ("expe_342m", 10e9), ("expe_35m", 600e6),
])
def test_tokens_of_the_papers(name, tokens):
    assert trained_tokens(load(name)) == pytest.approx(tokens, rel=1e-3)

def test_defaults_of_the_papers():
    """The configs rely on them: PoPE section 3, CoPE Listing 1, ExPE sections 2.1 and 2.3, T5."""
    cfg = GPTConfig()
    assert (cfg.base, cfg.pope_mu, cfg.pope_delta) == (10_000, "softplus", "zero")
    assert (cfg.cope_npos, cfg.cope_gates) == (64, "keys")
    assert (cfg.cope_scale_z, cfg.cope_shared) == (False, True)
    assert (cfg.expe_l, cfg.expe_S, cfg.expe_theta, cfg.expe_theta2) == (0, 0, 2**-11, 2**-4)
    assert (cfg.t5_buckets, cfg.t5_max_distance, cfg.relative_capped) == (32, 128, False)

# --- config/README.md -----------------------------------------------------------------------------

def table():
    """{config: {column: cell}} of the first table in config/README.md."""
    text = Path("config/README.md").read_text(encoding="utf-8")
    lines = [line for line in text.split("\n\n**")[0].splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {re.match(r"\[`(\w+)`\]\(\1\.py\)", row[0])[1]: dict(zip(head, row)) for row in rows}

def rounded(x, digits):
    return f"{float(f'{x:.{digits}g}'):,g}"

def trained_tokens(cfg):
    return cfg.max_iters * cfg.batch_size * length(cfg)

@pytest.mark.parametrize("name", FULL_SIZE)
def test_cost_in_the_readme(name):
    """A token costs 6 FLOPs a parameter that is not only looked up, and 12 L C T (PaLM, app. B)."""
    cfg = load(name)
    size = parameters(cfg)
    looked_up = 0 if cfg.tie else cfg.vocab_size * cfg.n_embd
    a_token = 6 * (size - looked_up) + 12 * cfg.n_layer * cfg.n_embd * length(cfg)
    flops = a_token * trained_tokens(cfg)

    row = table()[name]
    assert row["parameters, M"] == rounded(size / 1e6, 4)
    assert row["tokens, 10⁹"] == rounded(trained_tokens(cfg) / 1e9, 3)
    assert row["H100, hours"] == rounded(flops / (0.4 * 989e12) / 3600, 2)

def activations(cfg, recompute=True):
    """Returns the bytes that a forward pass keeps for the backward pass. Fake tensors take none.
    Without recompute, all logits are kept."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with FakeTensorMode(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        net = GPT(GPTConfig(**model_fields(cfg)))
        for block in net.h:
            block.attn.recompute &= recompute
        idx = torch.zeros(cfg.micro_batch or cfg.batch_size, length(cfg), dtype=torch.long)
        with torch.autocast("cpu", torch.bfloat16, enabled=cfg.dtype == "auto"):
            net(idx, idx)
    for weight in net.parameters():
        kept.pop(weight.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in kept.values())

@pytest.mark.parametrize("name", FULL_SIZE)
def test_memory_in_the_readme(name, monkeypatch):
    """Memory is 16 bytes per parameter, what a forward pass keeps for the backward pass, and 6
    bytes per logit for its gradient in float32 and in bfloat16. Layers with the same methods keep
    the same. If a method computes its logits again, there is also the largest chunk of them."""
    cfg = load(name)
    attention = F.scaled_dot_product_attention
    can_fuse = model.Attention.can_fuse

    def fused(q, k, v, mask, dropout, **options):
        return attention(q, k, v, mask, **options)  # with dropout, a CPU would not fuse it

    monkeypatch.setattr(F, "scaled_dot_product_attention", fused)
    monkeypatch.setattr(model.Attention, "can_fuse", lambda attn, device, *others: can_fuse(
        attn, torch.device("cuda"), *others))
    pattern = cfg.pe.count(",") + 1  # layers, after which the methods repeat
    one, two = (activations(dataclasses.replace(cfg, n_layer=n * pattern)) for n in (1, 2))
    kept = one + (cfg.n_layer // pattern - 1) * (two - one)
    tokens = (cfg.micro_batch or cfg.batch_size) * length(cfg)
    first_layer = dataclasses.replace(cfg, n_layer=1, pe=cfg.pe.split(",")[-1])
    chunks = activations(first_layer, recompute=False) - activations(first_layer)
    n = 2 * math.ceil(length(cfg) / model.CHUNK)
    kept += chunks * 2 / (n + 1)  # of n chunks with 1/n, 2/n .. of the keys, the last
    memory = 16 * parameters(cfg) + kept + 6 * tokens * cfg.vocab_size
    printed = table()[name]["memory, GB"]
    assert printed.endswith(f" ({cfg.micro_batch or cfg.batch_size})")
    assert float(printed.split()[0]) == pytest.approx(memory / 1e9, rel=0.05)

def test_readme_names_every_config():
    assert set(table()) == set(FULL_SIZE)
