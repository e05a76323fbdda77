"""One thread per process: the models are tiny, and several processes with several threads each would queue for the
cores. Set before torch is imported, so that it holds for the processes that tests start, too."""
import os

os.environ["OMP_NUM_THREADS"] = "1"
