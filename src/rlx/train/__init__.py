"""Training: optimisers, and one compiled call that does forward, backward and update in place."""

from typing import NoReturn

from rlx.errors import nearest
from rlx.train.optimisers import Optimiser as Optimiser
from rlx.train.optimisers import adamw as adamw
from rlx.train.optimisers import sgd as sgd
from rlx.train.schedules import constant as constant
from rlx.train.schedules import cosine as cosine
from rlx.train.schedules import linear as linear
from rlx.train.step import TrainStep as TrainStep
from rlx.train.step import step as step
from rlx.train.step import step_graph as step_graph

OPTIMISERS = ("adamw", "sgd", "constant", "cosine", "linear", "step")


def __getattr__(name: str) -> NoReturn:
    """Raise, with a hint for the names of other libraries."""
    hint = "adamw(lr, weight_decay=0) is Adam" if name.lower() == "adam" else nearest(name, OPTIMISERS)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}" + (f": {hint}" if hint else ""))
