"""Attention and its gradient as launches: the kernels take every mask and stride."""

from rlx.lir.forms.attention_launch import attention as attention
from rlx.lir.forms.attention_launch import attention_grad as attention_grad
