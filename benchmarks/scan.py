"""Recurrences along a sequence: rlx's ops against JAX's `lax.scan` and torch's loop over the plain recurrence.

    RLX_PEERS_PYTHON=... python benchmarks/scan.py --threads 2 --json benchmarks/results/scan-2t.json

Mamba's selective scan and the gated delta net in f32, forward, and forward with all gradients. Results are compared
with float64, gradients along random directions. Prints milliseconds as median/best, how many times as fast rlx is as
each peer, and what a backward pass costs beside a forward one; `--json` keeps every round.
"""

from __future__ import annotations

import sys

from command import chosen, one_run, options, pair, print_rows
from harness import Library, Result, compare, print_end, print_heading
from scan_engines import DELTA, MAMBA, reference
from worker import Case

OURS = "rlx"
PEERS = {
    "jax": ("jax", ("jax",)),
    "torch": ("torch_loop", ("torch",)),
    "torch.compile": ("torch_compile", ("torch",)),
}
PASSES = ("forward", "forward+backward")
MAX_ERROR = 1e-4  # of the largest: 2048 tokens in f32, and sums over whole gradients


def mamba(seq: int, backward: bool, *, channels: int, state: int = 16) -> Case:
    """A token does a multiplication, two multiply-adds and a further multiplication for each element of the state."""
    dims = {"seq": seq, "channels": channels, "state": state, "backward": int(backward)}
    flops, bytes_ = 6.0 * seq * channels * state, 4.0 * seq * (3 * channels + 2 * state)
    return _case(f"{MAMBA} {seq} x {channels}, n={state}", dims, flops, bytes_, MAMBA)


def delta_net(seq: int, backward: bool, *, heads: int, state: int = 128) -> Case:
    """A token reads the matrix of a head twice and changes it once: a multiply-add each, for each of its elements."""
    dims = {"seq": seq, "heads": heads, "state": state, "backward": int(backward)}
    flops, bytes_ = 6.0 * seq * heads * state**2, 4.0 * seq * heads * (4 * state + 2)
    return _case(f"{DELTA} {seq}, {heads} x {state}", dims, flops, bytes_, DELTA)


def _case(name: str, dims: dict[str, int], flops: float, bytes_: float, subject: str) -> Case:
    """With gradients, three times the work and twice the bytes, at the least."""
    back = dims["backward"]
    return Case(f"{name} {PASSES[back]}", dims, flops * (3 if back else 1), bytes_ * (2 if back else 1), subject)


def print_table(result: Result) -> None:
    print_heading(result)
    print("\nmilliseconds and ratios as median/best; a ratio above 1 means that rlx is faster\n")
    names = (OURS, *PEERS)
    heading = ["case", *names, *(f"{OURS}/{name}" for name in PEERS), "rlx GFLOPS"]
    rows = []
    for case in result.cases:
        cells = [case.case.name]
        for name in names:
            timing = case.timings.get(name)
            cells.append(pair((timing.median * 1e3, timing.best * 1e3), 1) if timing and case.ok(name) else "-")
        both = case.ok(OURS)
        cells += [pair(case.ratio(OURS, name), 2) if both and case.ok(name) else "-" for name in PEERS]
        rows.append([*cells, pair(case.gflops(OURS), 1) if both else "-"])
    print_rows(heading, rows)
    print_end(result, summary(result))


def summary(result: Result) -> list[str]:
    """What a backward pass costs, in forward passes, and how many times as fast as each peer both are."""
    if result.busy():
        return ["no summary: other programs had the processor in most rounds"]
    cases = {(c.case.subject, c.case.dims["backward"]): c for c in result.cases if c.ok(OURS)}
    lines = []
    for subject in (MAMBA, DELTA):
        if (subject, 0) in cases and (subject, 1) in cases:
            forward, both = (cases[subject, i].timings[OURS].best for i in (0, 1))
            lines.append(f"{subject}: backward takes {both / forward - 1:.2f} times as long as forward")
        for name in PEERS:
            if (subject, 1) in cases and name in cases[subject, 1].timings and cases[subject, 1].ok(name):
                ratio = cases[subject, 1].ratio(OURS, name)[0]
                lines.append(f"{subject}: forward and backward {ratio:.1f} times as fast as {name}")
    return lines


def main() -> int:
    parser = options(__doc__, threads=1, rounds=5, peers="the peers")
    for name, default in (("seq", 2048), ("channels", 512), ("heads", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cases", default="", metavar="REGEX", help='such as "^gated.* forward$"; all unless given')
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="all unless given")
    args = parser.parse_args()
    both = [mamba(args.seq, backward, channels=args.channels) for backward in (False, True)]
    both += [delta_net(args.seq, backward, heads=args.heads) for backward in (False, True)]
    cases = chosen(both, args.cases)
    libraries = [Library(OURS, "scan_engines:rlx", ("rlx",))]
    peers = {name: PEERS[name] for name in args.peers}
    libraries += [Library(name, f"scan_engines:{f}", packages, args.python) for name, (f, packages) in peers.items()]
    result = compare(
        libraries, cases, threads=args.threads, rounds=args.rounds, reference=reference, max_error=MAX_ERROR
    )
    print_table(result)
    return one_run(result, summary(result), args.json)


if __name__ == "__main__":
    sys.exit(main())
