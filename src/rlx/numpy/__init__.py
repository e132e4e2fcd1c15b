"""NumPy's names: `import rlx.numpy as np` computes on arrays, and records in the graph while a function is traced.

NumPy's own functions do the same with traced arrays. Listed in docs/numpy.md.
"""

from math import e as e
from math import inf as inf
from math import nan as nan
from math import pi as pi

from numpy import bool_ as bool_
from numpy import float16 as float16
from numpy import float32 as float32
from numpy import float64 as float64
from numpy import int8 as int8
from numpy import int16 as int16
from numpy import int32 as int32
from numpy import int64 as int64
from numpy import ndarray as ndarray
from numpy import newaxis as newaxis
from numpy import uint8 as uint8
from numpy import uint32 as uint32

from rlx.functional.dispatch import missing_name as __getattr__  # noqa: F401
from rlx.functional.numpy import *  # noqa: F403
from rlx.numpy import linalg as linalg
