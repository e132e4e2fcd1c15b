"""The type of NumPy arrays in signatures: any shape and element type, both checked at run time."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
