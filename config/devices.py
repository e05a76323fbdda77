"""Where a run computes: the device, its threads, and how batches get there."""
import os

import torch

from config import require


def pick_device(name):
    """Returns the torch.device "cpu", "cuda", "mps" or, for "auto", the fastest that is available.
    If there are several GPUs, each process that torchrun starts gets its own."""
    # Denormal numbers (near 1e-40) are slow on CPUs. Without this, pe=fox takes 1.2 to 1.5 times as
    # long. Threads inherit the setting, so it comes before the first computation
    torch.set_flush_denormal(True)
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        name = next(kind for kind in available if available[kind])
    require(available[name], f"device={name!r}, but PyTorch sees none; use --device=cpu")
    if name == "cuda":
        return torch.device(name, int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device(name)

def set_threads(device, n_embd):
    """Gives a small model on a CPU one thread, unless OMP_NUM_THREADS says how many. On two cores
    without other work, a second thread saves two fifths of the time. But beside one busy process,
    the threads wait for each other, and the quickstart took 14 times as long with two as with
    one."""
    if device.type == "cpu" and n_embd <= 256 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)

def to_device(device, *arrays):
    """Returns the numpy arrays as tensors on the device."""
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type == "cuda":  # pinned memory is copied while the GPU computes
        return [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
    return [tensor.to(device) for tensor in tensors]
