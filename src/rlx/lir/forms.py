"""All loop forms, by group. Importing this module fills the table; the scheduler imports a group when it meets one."""

from rlx.lir import activations as activations
from rlx.lir import attention as attention
from rlx.lir import cache as cache
from rlx.lir import control as control
from rlx.lir import conv as conv
from rlx.lir import custom as custom
from rlx.lir import elementwise as elementwise
from rlx.lir import fused as fused
from rlx.lir import gated_delta_net as gated_delta_net
from rlx.lir import grouped as grouped
from rlx.lir import index as index
from rlx.lir import int8 as int8
from rlx.lir import linear as linear
from rlx.lir import loss as loss
from rlx.lir import norm as norm
from rlx.lir import position as position
from rlx.lir import quant as quant
from rlx.lir import random as random
from rlx.lir import reduce as reduce
from rlx.lir import remat as remat
from rlx.lir import sampling as sampling
from rlx.lir import sequence as sequence
from rlx.lir import shape as shape
from rlx.lir import update as update
