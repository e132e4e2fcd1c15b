"""Devices by name: one backend for each, and clear errors for those that are not there."""

from __future__ import annotations

import pytest

import rlx
from rlx.backends import base
from rlx.backends.toy import ToyBackend
from rlx.errors import CapabilityError


def test_a_device_has_a_name_and_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyBackend, "device_count", lambda self: 2)
    first, second = base.device("toy"), base.device("toy:1")
    assert (str(first), str(second), second.name, second.index) == ("toy", "toy:1", "toy", 1)
    assert first.backend is base.backend("toy") and second.backend is base.backend("toy", 1)
    assert first.backend is not second.backend and second.backend.index == 1
    g = rlx.Graph("one")
    g.set_outputs([g.input("x", (2,)) + 1.0])
    assert rlx.compile(g, "toy:1").device == "toy:1"


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("toy:7", "'toy:7' is asked for, 'toy' has 1 device here", None),
        ("cpu:1", "'cpu:1' is asked for, 'cpu' has 1 device here", None),
        ("abacus", "'abacus' is not known", "known: cpu, cuda, reference, toy"),
        ("cup", "'cup' is not known", "'cpu'"),
        ("cpu:x", "expected a name such as 'cpu' or 'cuda:1', found 'cpu:x'", None),
        ("", "expected a name such as 'cpu' or 'cuda:1', found ''", None),
        (3, "expected a name such as 'cpu' or 'cuda:1', found 3", None),
    ],
)
def test_devices_that_are_not_there(text: str, message: str, hint: str | None) -> None:
    with pytest.raises(CapabilityError) as caught:
        rlx.Session(text)
    assert message in str(caught.value) and (hint is None or hint in str(caught.value.hint))
