"""`rlx env`, `run`, `bench`, `verify` and `inspect` on a GPU."""

from __future__ import annotations

import pytest
import stand_ins

from rlx.cli.main import main

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(stand_ins.write_chat(tmp_path_factory.mktemp("chat")))


@pytest.mark.parametrize(
    ("command", "shows"),
    [
        (["env"], "sm_"),
        (["run", "MODEL", "hello", "--max-tokens", "8", "--device", "cuda"], ""),
        (["run", "MODEL", "hello", "--max-tokens", "8", "--device", "auto"], ""),
        (["bench", "MODEL", "--device", "cuda", "--repeat", "1"], "tg"),
        (["verify", "MODEL", "--device", "cuda"], "all fine"),
        (["inspect", "MODEL", "--device", "cuda", "--level", "lir"], "launch"),
        (["inspect", "MODEL", "--device", "cuda", "--time", "--phase", "decode"], "us"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_command_runs(command: list[str], shows: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([model if word == "MODEL" else word for word in command]) == 0, capsys.readouterr().err
    assert shows in capsys.readouterr().out
