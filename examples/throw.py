"""Fit a simulation to data: find the drag and the launch angle of a thrown ball by differentiating through its flight.

    python examples/throw.py
    python examples/throw.py --drag 0.6 --angle 35 --noise 0.05 --plot throw.svg

The flight is a loop of Runge-Kutta steps (`rlx.scan`). Drag is proportional to velocity, so the exact flight is known,
and both the simulation and its gradient are compared with it.
"""

import argparse

import numpy as np
from chart import chart

import rlx

SPEED, GRAVITY, STEPS, DT = 20.0, np.array([0.0, -9.81]), 60, 0.04


def flight(drag, angle):
    """Positions [STEPS, 2] of the ball, simulated."""

    def motion(state):  # d/dt of position and velocity
        return np.stack([state[1], GRAVITY - drag * state[1]])

    def step(state, _):
        k1 = motion(state)
        k2 = motion(state + DT / 2 * k1)
        k3 = motion(state + DT / 2 * k2)
        k4 = motion(state + DT * k3)
        state = state + DT / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return state, state[0]

    start = np.stack([np.zeros(2), SPEED * np.stack([np.cos(angle), np.sin(angle)])])
    return rlx.scan(step, start, length=STEPS)[1]


def exact_flight(drag, angle):
    """The same from the solution of the equation of motion."""
    t = DT * np.arange(1, STEPS + 1)[:, None]
    fall = GRAVITY / drag
    return fall * t + (SPEED * np.stack([np.cos(angle), np.sin(angle)]) - fall) * (1 - np.exp(-drag * t)) / drag


def exact_slope(drag, angle):
    """The derivative of the distance at the end of the flight, differentiated on paper."""
    t = DT * STEPS
    return SPEED * np.cos(angle) * ((1 + drag * t) * np.exp(-drag * t) - 1) / drag**2


@rlx.jit
def improve(params, seen):
    """One Gauss-Newton step towards the params whose flight was seen; and the mean squared error before it."""
    misses = lambda p: (flight(p[0], p[1]) - seen).ravel()
    error, slopes = misses(params), rlx.jacfwd(misses)(params)  # [2 STEPS], [2 STEPS, 2]
    (a, b), (_, d) = slopes.T @ slopes
    inverse = np.stack([np.stack([d, -b]), np.stack([-b, a])]) / (a * d - b * b)
    return params - inverse @ (slopes.T @ error), np.mean(error**2)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drag", type=float, default=0.4, help="true drag, per second (default: %(default)s)")
    parser.add_argument("--angle", type=float, default=50.0, help="true launch angle in degrees (default: %(default)s)")
    parser.add_argument("--noise", type=float, default=0.0, help="error of each measurement, in metres")
    parser.add_argument("--plot", help="SVG file for the flights")
    args = parser.parse_args(argv)
    truth = np.array([args.drag, np.radians(args.angle)])

    slope = rlx.grad(lambda drag: flight(drag, truth[1])[-1, 0])(truth[0])
    print(f"metres of distance per unit of drag: {slope:.4f}, exact {exact_slope(*truth):.4f}")

    seen = exact_flight(*truth) + args.noise * np.random.default_rng(0).normal(size=(STEPS, 2))
    params = first = np.array([0.1, np.radians(30.0)])
    for i in range(5):
        params, error = improve(params, seen)
        print(f"step {i}: error {np.sqrt(error):8.5f} m, then drag {params[0]:.4f}, angle {np.degrees(params[1]):.2f}°")
    if args.plot:
        chart(args.plot, "A thrown ball (metres)", {
            "seen": seen, "first guess": flight(*first), "fitted": flight(*params)}, dots=("seen",))  # fmt: skip
    return params


if __name__ == "__main__":
    main()
