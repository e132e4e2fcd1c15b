"""Tests of the CUDA backend have a mark of their own: without a GPU they compile and emulate, which takes minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("gpu") is None:
            item.add_marker(pytest.mark.cuda)
