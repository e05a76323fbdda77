"""
Text, for ten times the steps of quickstart.py. A run takes 25 to 50 minutes on one core.

    python train.py config/text_small.py              # PoPE
    python train.py config/text_small.py --pe=rope    # or another of PES
    python sample.py out/text_small_{pope,rope} --extrapolate=1,2,4,8

Our choices. This is not an experiment from a paper. After the quickstart's steps, a method may be
behind only because it learns more slowly, and hardly any has learned to use distant text.
"""
from config.quickstart import *  # noqa: F403

title = "predicting text, after ten times the steps"

max_iters = 16000

eval_interval = 4000
log_interval = 400
