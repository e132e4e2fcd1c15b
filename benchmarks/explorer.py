"""How the explorer page of a graph of 10,000 nodes behaves in a browser: first paint, scrolling, search, links.

The page of a decoder with stages, and of one without, is written by rlx and opened in headless Chromium. First paint is
the browser's own figure, from the start of the navigation. While rows are scrolled, searched, picked and unfolded, the
longest time between two frames is the longest stall that a user could see.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import rlx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from browser import CHROMIUM, Browser

# Runs an action while frames are counted, and gives the longest time between two of them, in milliseconds.
STALL = """(async action => {
  let last = performance.now(), longest = 0, done = false;
  const frame = now => { longest = Math.max(longest, performance.now() - last); last = performance.now();
    if (!done) requestAnimationFrame(frame); };
  await new Promise(requestAnimationFrame);
  last = performance.now();
  requestAnimationFrame(frame);
  await action();
  await new Promise(requestAnimationFrame); await new Promise(requestAnimationFrame);
  done = true;
  return longest;
})"""
NEXT = "await new Promise(requestAnimationFrame)"
ACTIONS = {
    "scroll all levels to the end": f"""async () => {{
        for (let i = 1; i <= 40; i++) {{
          for (const c of columns) c.view.scrollTop = c.view.scrollHeight * i / 40; {NEXT}; }} }}""",
    "type a search": f"""async () => {{
        for (const word of ['r', 'rm', 'rms', 'rms_', 'rms_norm', '%9', '']) {{
          find.value = word; search(); {NEXT}; }} }}""",
    "step through 100 hits": f"""async () => {{
        find.value = 'attention'; search(); for (let i = 0; i < 100; i++) {{ go(1); {NEXT}; }}
        find.value = ''; search(); }}""",
    "pick 40 lines": f"""async () => {{
        for (let i = 0; i < 40; i++) {{
          const c = columns[1 + i % 3]; pick(c, Math.floor(c.count * (i + 1) / 42)); {NEXT}; }}
        unpick(); }}""",
    "pick a kernel of every layer": f"""async () => {{
        const c = columns.find(c => c.title === 'Kernels'); pick(c, 0); {NEXT}; unpick(); }}""",
    "show what passes did": f"async () => {{ show(columns.at(-1)); {NEXT}; }}",
    "unfold everything": f"async () => {{ for (const c of columns) {{ c.setAll(true); {NEXT}; }} }}",
    "scroll everything unfolded": f"""async () => {{
        for (let i = 40; i >= 0; i--) {{
          for (const c of columns) c.view.scrollTop = c.view.scrollHeight * i / 40; {NEXT}; }} }}""",
}


def decoder(nodes: int, *, stages: bool) -> rlx.Graph:
    """A decoder of at least so many nodes; the sizes of its weights do not matter to a page."""
    g = rlx.Graph("decoder")
    x = g.input("x", ("batch", "seq", 64))
    layer = 0
    while len(g) < nodes:
        at = f"layers.{layer}"

        def part(name: str, at: str = at) -> Any:
            return rlx.stage(f"{at}.{name}") if stages else nullcontext()

        def linear(value: rlx.Value, name: str, rows: int, columns: int, at: str = at) -> rlx.Value:
            return value @ g.param(f"{at}.{name}", (rows, columns))

        with part("attn"):
            normed = x.rms_norm(g.param(f"{at}.attn_norm", (64,)), eps=1e-6)
            q, k, v = (g.reshape(linear(normed, n, 64, 64), ("batch", "seq", 4, 16)) for n in "qkv")
            seen = g.attention(q, k, v, num_heads=4, head_dim=16, mask_kind=rlx.MaskKind.CAUSAL)
            x = x + linear(g.reshape(seen, ("batch", "seq", 64)), "o", 64, 64)
        with part("ffn"):
            normed = x.rms_norm(g.param(f"{at}.ffn_norm", (64,)), eps=1e-6)
            x = x + linear(linear(normed, "gate", 64, 128).silu() * linear(normed, "up", 64, 128), "down", 128, 64)
        layer += 1
    return g.set_outputs([x])


def measure(page: Path, repetitions: int) -> dict[str, Any]:
    """Milliseconds until the first paint, and of the longest stall in each action."""
    paints, interactive, stalls = [], [], {name: [] for name in ACTIONS}  # type: ignore[var-annotated]
    with Browser() as browser:
        for _ in range(repetitions):
            browser.open(page)
            paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
            while (painted := browser.evaluate(paint)) is None:
                browser.frames(1)
            paints.append(painted)
            interactive.append(
                browser.evaluate("performance.timing.domInteractive - performance.timing.navigationStart")
            )
            for name, action in ACTIONS.items():
                stalls[name].append(browser.evaluate(f"{STALL}({action})"))
            rows = browser.evaluate("columns.reduce((n, c) => n + c.count, 0)")
            elements = browser.evaluate("document.querySelectorAll('*').length")
        version = browser.send("Browser.getVersion")["product"]
        if browser.complaints or len(browser.requests) != 1:
            raise RuntimeError(f"the page loads or complains: {browser.requests} {browser.complaints}")
    return {
        "browser": version, "rows": rows, "elements_when_unfolded": elements,
        "first_paint_ms": _figures(paints), "parsed_ms": _figures(interactive),
        "longest_stall_ms": {name: _figures(each) for name, each in stalls.items()},
    }  # fmt: skip


def _figures(values: list[float]) -> dict[str, float]:
    return {"median": round(median(values), 1), "best": round(min(values), 1), "worst": round(max(values), 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    if CHROMIUM is None:
        print("there is no Chromium", file=sys.stderr)
        return 1
    import harness

    from rlx.backends.base import backend
    from rlx.inspect.page import graph_page

    machine = backend("cpu").target()
    runs = []
    for stages in (True, False):
        graph = decoder(args.nodes, stages=stages)
        begin = time.perf_counter()
        text = graph_page(graph, machine)
        seconds = time.perf_counter() - begin
        with tempfile.TemporaryDirectory(prefix="rlx-bench-") as folder:
            page = Path(folder, "page.html")
            page.write_text(text, "utf-8")
            measured = measure(page, args.repetitions)
        about = {"graph": "with stages" if stages else "without stages", "nodes": len(graph)}
        runs.append(about | {"page_bytes": len(text.encode()), "written_in_seconds": round(seconds, 2)} | measured)
        print(f"{about['graph']}: {len(graph)} nodes, {measured['rows']} rows, page of {len(text) / 1e6:.1f} MB")
        print(f"  first paint {measured['first_paint_ms']['median']} ms (worst {measured['first_paint_ms']['worst']})")
        for name, figures in measured["longest_stall_ms"].items():
            print(f"  {name}: longest stall {figures['median']} ms (worst {figures['worst']})")
    if args.json:
        about_run = {"date": harness.timestamp(), "command": harness.command()}
        harness.write_json(args.json, {"machine": harness.describe_machine() | about_run, "runs": runs})
    return 0


if __name__ == "__main__":
    sys.exit(main())
