"""Training: optimisers, and one compiled call that does forward, backward and update in place."""

from rlx.train.optimisers import Optimiser as Optimiser
from rlx.train.optimisers import adamw as adamw
from rlx.train.optimisers import sgd as sgd
from rlx.train.schedules import constant as constant
from rlx.train.schedules import cosine as cosine
from rlx.train.schedules import linear as linear
from rlx.train.step import TrainStep as TrainStep
from rlx.train.step import step as step
from rlx.train.step import step_graph as step_graph
