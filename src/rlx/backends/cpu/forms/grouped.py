"""Grouped matmuls as launches: the matmul kernel selects matrices by row, or pieces of k by offset."""

from rlx.lir.forms.matmul_launch import grouped_matmul as grouped_matmul
from rlx.lir.forms.matmul_launch import outer_of_runs as outer_of_runs
