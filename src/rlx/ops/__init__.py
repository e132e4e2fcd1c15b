"""The meaning of each op, by group. Importing this package fills the registry."""

from rlx.ops import activations as activations
from rlx.ops import attention as attention
from rlx.ops import cache as cache
from rlx.ops import control as control
from rlx.ops import conv as conv
from rlx.ops import custom as custom
from rlx.ops import elementwise as elementwise
from rlx.ops import fused as fused
from rlx.ops import grouped as grouped
from rlx.ops import index as index
from rlx.ops import int8 as int8
from rlx.ops import leaf as leaf
from rlx.ops import linear as linear
from rlx.ops import loss as loss
from rlx.ops import norm as norm
from rlx.ops import position as position
from rlx.ops import quant as quant
from rlx.ops import random as random
from rlx.ops import reduce as reduce
from rlx.ops import remat as remat
from rlx.ops import sampling as sampling
from rlx.ops import sequence as sequence
from rlx.ops import shape as shape
from rlx.ops import update as update
