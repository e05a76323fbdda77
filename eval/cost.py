"""
Measures what a method costs: the time of a training step, and the memory that its forward and
backward passes need at their peak, compared with RoPE.

    python -m eval.cost                      all methods, at 128 and 1024 tokens, in a few minutes
    python -m eval.cost slope cope+rope      these and rope
    python -m eval.cost fox --lengths=4096   at other lengths, with the same tokens per step
    python -m eval.cost fox --width=384      in a model of another width

On a CPU it takes one thread and a model of four layers with heads of width 32; the quickstart's is
128 wide. On a GPU it takes a GPT of 124M parameters in bfloat16, eager and compiled, with and
without the Triton kernels, whose loss must be that of PyTorch's own code.

Other work on the machine slows methods down, and not all alike: those that move much memory suffer
most. Each method takes one step in every round, in an order that is drawn anew, and its time is the
median over the rounds of its ratio to rope's in the same round. The numbers in brackets are the
quartiles. So compare methods on an idle machine. A method that would need more than 8 GiB on a CPU
is left out (–).
"""
import copy
import multiprocessing
import random
import statistics
import sys
import time

import torch

import config
from config import Mistake, devices
from model import GPT, PES, GPTConfig, why_no_kernel

TOKENS = {"cpu": 1024, "cuda": 16384}  # per step
LARGEST = 8 * 2**30  # bytes that a step may need on a CPU
SHORT = 128  # tokens, at which memory predicts whether longer ones would need more than LARGEST

def sizes(device, width):
    """Returns the options of the model to measure."""
    if device.type == "cuda":
        return dict(n_layer=12, n_head=12, n_embd=768, vocab_size=50304)
    return dict(n_layer=4, n_head=max(1, width // 32), n_embd=width, vocab_size=257)

def main(words):
    parser = config.Parser(__doc__)
    parser.add_argument("methods", nargs="*", metavar="METHOD", default=[*PES, "cope+rope"],
                        help="values of --pe [all methods]")
    parser.add_argument("--lengths", type=config.counts, default=[128, 1024],
                        help="tokens per sequence [128,1024]")
    parser.add_argument("--width", type=config.count, default=128, metavar="N",
                        help="of the model, a multiple of 32 [%(default)s]")
    parser.add_argument("--rounds", type=config.count, default=15, metavar="N",
                        help="steps of each method at each length [%(default)s]")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="[a CUDA GPU if there is one]")
    args = parser.parse_intermixed_args(words)
    config.require(args.rounds > 1, "--rounds=1 has no quartiles; take more")
    device = devices.pick_device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "one thread of a CPU"
    print(f"{name}, torch {torch.__version__}, width {sizes(device, args.width)['n_embd']}, "
          f"{args.rounds} rounds\n", flush=True)
    rows = {}  # {name of a method: its cells}
    lengths = sorted(args.lengths)  # a method that is too large for one is so for longer ones
    methods = list(dict.fromkeys(["rope", *args.methods]))
    for length in lengths:
        for group in [methods] if device.type == "cpu" else [[pe] for pe in methods]:
            steps = {}
            for pe in group:
                if not is_too_large(pe, length, args.width, device):
                    steps.update(variants(pe, length, args.width, device))
            if "`rope`" not in steps:  # with which all are compared
                steps["`rope`"] = Step("rope", length, args.width, device)
            for name, cells in compare(steps, args.rounds).items():
                if name != "`rope`" or "rope" in group:
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

    def __init__(self, pe, length, width, device, kernels="off", compiled=False, tokens=None):
        cfg = GPTConfig(pe=pe, block_size=length, norm="rmsnorm", bias=False,
                        **sizes(device, width))
        torch.manual_seed(0)
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = GPT(cfg).to(device)
        self.kernels = kernels
        self.attention = self.model.use_kernels(self.dtype, kernels)  # in words
        self.optimizer = self.model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), device.type)
        self.forward = torch.compile(self.model, dynamic=False) if compiled else self.model
        batch = max(1, (tokens or TOKENS[device.type]) // length)
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
        """Returns the bytes that the forward and backward passes need at their peak, besides the
        parameters."""
        if self.device.type == "cuda":
            self.take()  # the first step also allocates the optimizer's moments
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.take()
            return torch.cuda.max_memory_allocated() - before
        # A process of its own, because memory that this one has freed may still count as resident
        fork = multiprocessing.get_context("fork")
        receiver, sender = fork.Pipe(False)
        process = fork.Process(target=lambda: sender.send(growth(self)))
        process.start()
        sender.close()  # so that recv notices if the process dies
        try:
            return receiver.recv()
        except EOFError:
            raise Mistake(f"a step of pe={self.model.cfg.pe!r} failed") from None
        finally:
            process.join()

def growth(step):
    """Returns the bytes by which a forward and a backward pass raise the largest resident memory of
    this process, if the model is not the first one that it uses."""
    import resource  # Windows has no such module

    def largest():
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    Step("rope", 8, 32, step.device, tokens=8).loss().backward()  # the libraries allocate, too
    before = largest()
    step.loss().backward()
    return max(1, largest() - before)

def variants(pe, length, width, device):
    """Returns {name: Step} of a method: by PyTorch, with the kernels if they can compute it, and on
    a GPU each of them compiled, too."""
    found = {f"`{pe}`": Step(pe, length, width, device)}
    plain = found[f"`{pe}`"]
    if any(why_no_kernel(block.attn, plain.dtype) is None for block in plain.model.h):
        found[f"`{pe}`, kernels"] = Step(pe, length, width, device, "auto")
        compare_losses(*found.values())
    if device.type == "cuda":
        for name, step in list(found.items()):
            found[f"{name}, compiled"] = Step(
                pe, length, width, device, step.kernels, compiled=True)
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

def is_too_large(pe, length, width, device):
    """Returns whether a step would need more than LARGEST bytes on a CPU, or whether it is cope_mlp
    on a GPU. They grow at most as fast as the length, because a step has the same number of tokens.
    """
    if device.type != "cpu":
        return "cope_mlp" in pe  # whose hidden units for all pairs would take 500 GB
    if length <= SHORT:
        return False
    return Step(pe, SHORT, width, device).memory() * length / SHORT > LARGEST

# --- all of them ----------------------------------------------------------------------------------

def compare(steps, rounds):
    """Returns {name: (time, memory)} of the steps {name: Step}, as texts. Those of rope are in
    milliseconds and MiB, and the others are multiples of them."""
    memory = {name: step.memory() for name, step in steps.items()}
    seconds = {name: [] for name in steps}
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
