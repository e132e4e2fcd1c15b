"""The page on batch jobs shows what its code prints, on small models; its part on Ray runs under the mark ray."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_docs import executed

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
RAY = "\n## Ray\n"


def run_page(text: str, models: dict[str, Path]) -> str:
    """What the page shows, with small models in place of those that it names: workers are processes of their own."""
    for name, folder in models.items():
        text = text.replace(f'"{name}"', f'"{folder}"')
    result = executed(text, PAGE.name)
    for name, folder in models.items():
        result = result.replace(f'"{folder}"', f'"{name}"')
    return result


def check(text: str, result: str, update: bool) -> None:
    if update:
        PAGE.write_text(PAGE.read_text().replace(text, result))
    assert result == text or update


def test_the_page_on_batch_jobs_runs(
    encoder: Path, decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text().partition(RAY)[0]
    check(text, run_page(text, {"minilm-l6": encoder, "smollm2-135m": decoder}), update)


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_the_part_on_ray_runs(
    encoder: Path, decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    pytest.importorskip("ray")
    before, _, _ = PAGE.read_text().partition("\n## Output\n")
    text = before + RAY + PAGE.read_text().partition(RAY)[2]
    result = run_page(text, {"minilm-l6": encoder, "smollm2-135m": decoder})
    check(text.partition(RAY)[2], result.partition(RAY)[2], update)
