"""
Measures what a method costs: the time of a training step, and the memory that PyTorch keeps for its
backward pass, compared with RoPE.

    python -m eval.cost                      all methods, at 128 and 1024 tokens, in a few minutes
    python -m eval.cost slope cope+rope      these and rope
    python -m eval.cost fox --lengths=4096   at other lengths, with the same tokens per step

On a CPU it takes the quickstart's model and one thread. On a GPU it takes a GPT of 124M parameters
in bfloat16, eager and compiled, with and without the Triton kernels, whose loss must be that of
PyTorch's own code.

Other work on a machine slows all methods alike. So each of them takes one step in every round, in
an order that is drawn anew, and its time is the median over the rounds of its ratio to rope's in
the same round. The numbers in brackets are the quartiles. A method that would need more than 8 GiB
on a CPU is left out (–).
"""
import copy
import random
import statistics
import time

import torch

import config
from model import GPT, PES, GPTConfig, why_no_kernel
from sample import comma_separated
from train import pick_device

SIZES = {  # of the models on each kind of device
    "cpu": dict(n_layer=4, n_head=4, n_embd=128, vocab_size=257),
    "cuda": dict(n_layer=12, n_head=12, n_embd=768, vocab_size=50304),
}
TOKENS = {"cpu": 1024, "cuda": 16384}  # per step
LARGEST = 8 * 2**30  # bytes that a CPU should keep for a backward pass
SHORT = 128  # tokens; at this length, it is found out whether a longer one would need more

def main(words):
    parser = config.Parser(__doc__)
    parser.add_argument("methods", nargs="*", metavar="METHOD", default=[*PES, "cope+rope"],
                        help="values of --pe [all methods]")
    parser.add_argument("--lengths", type=comma_separated, default=["128", "1024"],
                        help="tokens per sequence [128,1024]")
    parser.add_argument("--rounds", type=config.integer, default=15, metavar="N",
                        help="steps of each method at each length [%(default)s]")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="[a CUDA GPU if there is one]")
    args = parser.parse_intermixed_args(words)
    device = pick_device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "one thread of a CPU"
    print(f"{name}, torch {torch.__version__}, {args.rounds} rounds\n", flush=True)
    rows = {}  # {name of a method: its cells}
    lengths = sorted(map(int, args.lengths))  # a method that is too large for one is so for longer
    for length in lengths:
        steps = {}
        for pe in dict.fromkeys(["rope", *args.methods]):
            if not is_too_large(pe, length, device):
                steps.update(variants(pe, length, device))
        for name, cells in measure(steps, args.rounds).items():
            rows.setdefault(name, []).extend(cells)
    headings = []
    for length in lengths:
        headings += [f"time, {length} tokens", f"memory, {length} tokens"]
    print(f"| method | {' | '.join(headings)} |\n{'| --- ' * (1 + len(headings))}|")
    for name, cells in rows.items():
        cells += ["–"] * (len(headings) - len(cells))
        print(f"| {name} | {' | '.join(cells)} |")

# --- a training step ------------------------------------------------------------------------------

class Step:
    """A training step of a model with the method pe, on random sequences of `length` tokens."""

    def __init__(self, pe, length, device, kernels="off", compiled=False):
        cfg = GPTConfig(pe=pe, block_size=length, norm="rmsnorm", bias=False, **SIZES[device.type])
        torch.manual_seed(0)
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = GPT(cfg).to(device)
        self.kernels = kernels
        self.attention = self.model.use_kernels(self.dtype, kernels)  # in words
        self.optimizer = self.model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), device.type)
        self.forward = torch.compile(self.model, dynamic=False) if compiled else self.model
        batch = max(1, TOKENS[device.type] // length)
        self.idx = torch.randint(cfg.vocab_size, (batch, length), device=device)

    def loss(self, model=None, reduction="mean"):
        model = model or self.forward
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return model(self.idx, self.idx, return_logits=False, reduction=reduction)[1]

    def take(self):
        """Returns the seconds that the step takes. On a CPU, these are the process's own."""
        clock = time.process_time
        if self.device.type == "cuda":
            clock = time.perf_counter
            torch.cuda.synchronize()
        start = clock()
        self.loss().backward()
        self.optimizer.step()
        self.model.clamp_parameters()
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return clock() - start

    def memory(self):
        """Returns the bytes that the forward pass keeps for the backward pass, apart from the
        parameters."""
        own = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        kept = {}  # {address: bytes}, because several operations may keep the same tensor

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.loss().backward()
        self.optimizer.zero_grad()
        return sum(kept.values())

def variants(pe, length, device):
    """Returns {name: Step} of a method: by PyTorch, with the kernels if they can compute it, and on
    a GPU each of them compiled, too."""
    found = {f"`{pe}`": Step(pe, length, device)}
    plain = found[f"`{pe}`"]
    if any(why_no_kernel(block.attn, plain.dtype) is None for block in plain.model.h):
        found[f"`{pe}`, kernels"] = Step(pe, length, device, "auto")
        compare_losses(*found.values())
    if device.type == "cuda":
        for name, step in list(found.items()):
            found[f"{name}, compiled"] = Step(pe, length, device, step.kernels, compiled=True)
    return found

@torch.no_grad()
def compare_losses(plain, other):
    """Raises ValueError if the losses of the tokens differ between two steps. The weights are so
    large that attention matters."""
    losses = []
    for step in (plain, other):
        model = copy.deepcopy(step.model)
        torch.manual_seed(0)
        for p in model.parameters():
            torch.nn.init.normal_(p, std=len(p) ** -0.5)
        model.clamp_parameters()
        losses.append(step.loss(model, reduction="none"))
    error = (losses[1] - losses[0]).square().mean().sqrt() / losses[0].std()
    if not error < 0.1:  # in bfloat16; without attention, it is 0.2 and more
        raise ValueError(f"wrong: with {other.attention}, the losses are off by {error:.3g} of the "
                         f"deviation of those with {plain.attention}")

def is_too_large(pe, length, device):
    """Returns whether a step would need more than LARGEST bytes on a CPU. They grow at most as fast
    as the length, because a step has the same number of tokens."""
    if device.type != "cpu" or length <= SHORT:
        return False
    return Step(pe, SHORT, device).memory() * length / SHORT > LARGEST

# --- all of them ----------------------------------------------------------------------------------

def measure(steps, rounds):
    """Returns {name: (time, memory)} of the steps {name: Step}, as texts. Those of rope are in
    milliseconds and MiB, and the others are multiples of them."""
    seconds = {name: [] for name in steps}
    memory = {name: step.memory() for name, step in steps.items()}
    for step in steps.values():
        step.take()  # the first one also allocates memory, and compiles
    for _ in range(rounds):
        for name in random.sample(list(steps), len(steps)):
            seconds[name].append(steps[name].take())
    found = {}
    for name in steps:
        ratios = [a / b for a, b in zip(seconds[name], seconds["`rope`"])]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found[name] = (f"{middle:.2f} ({low:.2f}–{high:.2f})",
                       f"{memory[name] / memory['`rope`']:.2f}")
    found["`rope`"] = (f"{1000 * statistics.median(seconds['`rope`']):.0f} ms",
                       f"{memory['`rope`'] / 2**20:.0f} MiB")
    return found

if __name__ == "__main__":
    config.run(main)
