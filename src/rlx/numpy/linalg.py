"""The names of `numpy.linalg`, on arrays and on traced arrays."""

from rlx.functional.dispatch import missing_linalg_name as __getattr__  # noqa: F401
from rlx.functional.linalg import cholesky as cholesky
from rlx.functional.linalg import cond as cond
from rlx.functional.linalg import det as det
from rlx.functional.linalg import eigh as eigh
from rlx.functional.linalg import eigvalsh as eigvalsh
from rlx.functional.linalg import inv as inv
from rlx.functional.linalg import lstsq as lstsq
from rlx.functional.linalg import matrix_norm as matrix_norm
from rlx.functional.linalg import matrix_rank as matrix_rank
from rlx.functional.linalg import norm as norm
from rlx.functional.linalg import pinv as pinv
from rlx.functional.linalg import qr as qr
from rlx.functional.linalg import slogdet as slogdet
from rlx.functional.linalg import solve as solve
from rlx.functional.linalg import solve_triangular as solve_triangular
from rlx.functional.linalg import svd as svd
from rlx.functional.linalg import svdvals as svdvals
from rlx.functional.linalg import vector_norm as vector_norm
from rlx.functional.products import cross as cross
from rlx.functional.products import matmul as matmul
from rlx.functional.products import matrix_power as matrix_power
from rlx.functional.products import multi_dot as multi_dot
from rlx.functional.products import outer as outer
from rlx.functional.products import tensordot as tensordot
from rlx.functional.products import vecdot as vecdot
from rlx.functional.shapes import diagonal as diagonal
from rlx.functional.shapes import matrix_transpose as matrix_transpose
from rlx.functional.shapes import trace as trace
