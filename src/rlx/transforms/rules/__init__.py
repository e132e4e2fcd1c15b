"""Derivative and vmap rules, by group of ops. Importing this package fills the tables."""

from rlx.transforms.rules import attention as attention
from rlx.transforms.rules import causal_conv as causal_conv
from rlx.transforms.rules import control as control
from rlx.transforms.rules import conv as conv
from rlx.transforms.rules import custom as custom
from rlx.transforms.rules import elementwise as elementwise
from rlx.transforms.rules import fake_quant as fake_quant
from rlx.transforms.rules import gated_delta_net as gated_delta_net
from rlx.transforms.rules import gated_linear_attention as gated_linear_attention
from rlx.transforms.rules import grouped as grouped
from rlx.transforms.rules import index as index
from rlx.transforms.rules import int8 as int8
from rlx.transforms.rules import kv_cache as kv_cache
from rlx.transforms.rules import linear as linear
from rlx.transforms.rules import loss as loss
from rlx.transforms.rules import norm as norm
from rlx.transforms.rules import quant as quant
from rlx.transforms.rules import quantised_activations as quantised_activations
from rlx.transforms.rules import random as random
from rlx.transforms.rules import reduce as reduce
from rlx.transforms.rules import remat as remat
from rlx.transforms.rules import rope as rope
from rlx.transforms.rules import sampling as sampling
from rlx.transforms.rules import selective_scan as selective_scan
from rlx.transforms.rules import shape as shape
from rlx.transforms.rules import softmax as softmax
