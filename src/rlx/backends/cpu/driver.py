"""The driver: machine code that walks launch records, on the calling thread or on all threads of a pool.

`driver_text` is its LLVM IR for a target. Records and job blocks are plain memory that Python fills; the constants
below are their layout. Waiting threads spin for a while and then sleep on a futex, through inline system calls, so the
object has no undefined symbols.

Threads share a launch by claiming parts of it. Each thread has a slice of the units, claims chunks of its own slice
first and then chunks of slices whose owners are late; a barrier waits until all units are done, not until all threads
have reached it. So a worker that is still waking up, or shares its core with another program, delays only the chunk it
has claimed. Results do not depend on which thread computes a unit.

A worker is *inside* a run while it may touch the run's memory. It steps outside to wait at a barrier, and checks that
the run is still in progress when it comes back; the caller returns as soon as all units are done and nobody is inside.

Loops and branches are records too. A thread that enters a loop copies the arguments of its launches to its own scratch,
and moves the addresses in its copy from step to step: threads need not synchronise on more than the data they share,
and the next run finds the arguments unchanged.
"""

from __future__ import annotations

from rlx.backends.cpu.targets import CpuTarget

# The functions of the object:
#   execute(job, tid, threads, run)  walks all records of a run as thread `tid` of `threads`
#   call(job, request)           runs the records of a request; returns how many threads shared them
#   repeat(self, inputs)         `call` as a CPython builtin, see fast_call.py
#   worker(job, tid)             main function of a pool thread, until `stop`
#   stop(job) -> 1, or 0 if a run is in progress; afterwards every run stays on its caller
#   spin(count)                  executes `count` pauses, to measure how long one takes
#   clock()                      reads the tick counter
SYMBOLS = ("execute", "call", "repeat", "worker", "stop", "spin", "clock")

# A record: three words and flags. Records are numbered from 0.
#   LAUNCH  the function's address, the address of its arguments, its units
#   ENTER   -, the address of a loop block
#   NEXT    -, the address of a loop block: moves the arguments, and goes back to the first record of the loop
#   TEST    the record to jump to if the predicate is false, the address of the predicate's address
#   JUMP    the record to jump to
#   LEAVE   the record that entered, for the trace
#   AHEAD   weights to prefetch while waiting for the launch that reads them: their address, bytes per unit, units
RECORD_WORDS = 4
BARRIER_AFTER = 1  # flag: no thread starts the next record before all units of this and earlier records are done
PRIVATE = 2  # flag: the arguments are in the thread's scratch, the address is an offset in it
SOLO = 4  # flag of ENTER and LEAVE: the first thread runs the loop alone, the others wait for it
ENDS = 8  # flag of NEXT: records follow that run once, after the last step of the loop
LAUNCH, ENTER, NEXT, TEST, JUMP, LEAVE, AHEAD = range(0, 112, 16)  # the kind, in the same word as the flags
KIND = 112

# A loop block. `HOME` is the offset in a thread's scratch where the loop counts its steps, followed by its copy of the
# arguments; `SOURCE`, with `IS_PRIVATE`, is where they are copied from. `MOVES` are pairs, an argument's offset from
# `HOME` and a distance: the `LINEAR` ones move by it with each step, the `ALTERNATING` ones forth and back.
COUNT_STEPS, SOURCE, IS_PRIVATE, HOME, WORDS, MOVES, LINEAR, ALTERNATING, FIRST, EXIT, END = range(0, 88, 8)
LOOP_WORDS = 11

# The head of each thread's scratch: the fault code (set by kernels) and the number, from 1, of the first record that
# failed; how far the thread has read ahead, and how far it may; when the caller last let Python handle signals, and a
# mask of the steps after which it looks at the clock. Heads are zero before the first run. A thread clears its own, but
# possibly too late, so scratch in which a fault was reported is not reused.
STATUS, FAILED, READ_TO, READ_END, HANDLED, LOOK_MASK = range(0, 48, 8)
HEAD_BYTES = 48
READ_AHEAD = 256 << 10  # bytes at most: they must still be in a core's own cache when they are needed
READ_STEP = 256  # bytes between two checks of what a thread waits for

# A request of `call`. The last words are the driver's statistics, initially 0: the ticks of the shortest run, times its
# threads; the average ticks of recent shared runs, whether the next one restarts the average, and the fewest ticks of
# one of them; the fewest ticks of an unshared run since workers were last late; until when runs are shared
# unconditionally, and for how long that was.
RECORDS, COUNT, SCRATCH, STRIDE, TRACE, SLOTS, SHORTEST, *NOTES = range(0, 104, 8)
SHARED_AVERAGE, RESTART_AVERAGE, SHARED_BEST, BEST_ALONE, TRUSTED, TRUSTED_FOR = NOTES
REQUEST_WORDS = 13
COPIED_WORDS = 6  # a job block begins with these words of its request

# A job block. Words written by different threads are 128 bytes apart, because x86 fetches cache lines in pairs.
LINE = 128
# The current run: how many threads share it, its number (0 if none), and the totals of launches, units and tests in
# earlier runs. Counters only grow, so nothing that threads share is ever reset.
THREADS, RUN, *BEFORE = range(48, 88, 8)
LAUNCHES, UNITS, TESTS = BEFORE
# Set once: threads, pauses before sleeping, pauses before looking at other threads' slices, and ticks per millisecond
# (0: every run is shared).
POOL_THREADS, SPIN, LOOK, MILLISECOND = range(88, 120, 8)
SLICE_CHUNKS = 120  # chunks per slice in the current run
BUSY = 1 * LINE  # 1 while a run owns the pool; the rest of this line belongs to its caller (AFTER: the next BEFORE)
RUNS, ENDED, SLEPT, ALL_SLEPT, ALL_TAKEN, *LATENESS = range(BUSY + 8, BUSY + 104, 8)
ALONE_UNTIL, ALONE_RUNS, ALONE_FOR, KEPT_UP, *AFTER = LATENESS  # KEPT_UP: ticks of shared runs since workers were late
SIGNALS = BUSY + 104  # set once: the address of the table of signals, or 0
DONE = 2 * LINE  # units done, summed over all threads
SLEEPERS, WAKES = DONE + 8, DONE + 12  # 1 if threads may sleep until more are done, and the word they sleep on
TESTED = 3 * LINE  # twice the number of the last test, plus its outcome
FAULT = TESTED + 8  # the launch, numbered as LAUNCHES, in which a kernel first reported a fault; 0 for none
PASSED = 4 * LINE  # units done as of the last barrier: polled instead of DONE when there are many threads
FEW = 4  # threads up to which DONE itself is polled: seen sooner, but adding must fetch the line from all pollers
SEATS = 5 * LINE  # per thread: a line for its seat, one for the claims on its slice, one for its cores
SEAT, INSIDE, THREAD, CONFINED, CLAIMED, CORES, SEAT_BYTES = 0, 4, 8, 16, LINE, 2 * LINE, 3 * LINE
CORES_BYTES = LINE  # one bit per core that a thread may use; CONFINED: restricted to fewer until it is awake

# A slice is claimed chunk by chunk: half of it, half of the rest, and so on. `CLAIMED` is the launch number, shifted,
# plus the number of claimed chunks. Runs below half a millisecond do not cut slices into chunks: absent workers are
# still made up for, and a claim costs a tenth of a microsecond.
CHUNKS = 4
CLAIM_SHIFT = 8
SMALL = 2

IDLE, ASLEEP, CALLED, STOPPED = range(4)  # states of a seat; the last two end a worker's wait
OUT, IN, WATCHED = range(3)  # values of INSIDE; WATCHED is IN with a caller that sleeps until it is OUT

# Waking a worker takes about 25 microseconds of the caller's time. So a run below a fifth of a millisecond stays on its
# caller if the previous one ended more than a twentieth of a millisecond ago: by then workers sleep. In a tight loop
# they do not.
BRIEF, REST = 5, 20
# Workers are late if the caller slept for too much of the last eight or so runs: some of them have claimed units but no
# core. With t threads, a shared run takes longer than one alone if the caller sleeps for more than 1 - 1/t of it; runs
# are tried alone from 1 - `HOPE`/t on, which is an eighth for two threads. A busy neighbour can take the caller's core
# as well, without any sleep: so workers also count as late if the last four or so runs took t times `LOSS` as long as
# the best one, or longer than an unshared run, and that costs a millisecond in eight runs. The next runs then stay on
# their callers for a while, `BACK_OFF` times as long each time: for that many milliseconds, and for one run per
# `LEAST_ALONE` of them, because there may be pauses between runs.
WINDOW = 8
HOPE, LOSS = (7, 4), (3, 4)  # as fractions
AVERAGED = 4
FORGET = 256  # the best run's weight decays by this fraction with each run: sizes and machines change
LEAST_ALONE, MOST_ALONE, BACK_OFF = 16, 2048, 4  # milliseconds, and the factor between two back-offs
# If the best of two unshared runs, or a long one, is no faster, runs are shared again however late workers are: for
# that many milliseconds and at least `TRUST_RUNS` times the unshared run, twice as long each time.
LEAST_TRUST, MOST_TRUST, TRUST_RUNS = 1024, 16384, 32

# Signals. A loop may be endless, so the caller lets Python handle signals after a step, every `SIGNAL_TICKS`. If a
# handler raises, which is what Ctrl-C does, the exception is stored in the table, tests fail from then on, loops end,
# and the run reports the fault `INTERRUPTED`. Python handles signals in its main thread only, so one table is enough.
# Its words are the ticks, four functions of CPython (`SIGNAL_FUNCTIONS`), and the exception: type, value, traceback.
SIGNAL_TICKS, ENSURE, CHECK, FETCH, RELEASE, RAISED, RAISED_VALUE, RAISED_TRACE = range(0, 64, 8)
SIGNAL_WORDS = 8
SIGNAL_FUNCTIONS = {
    ENSURE: "PyGILState_Ensure", CHECK: "PyErr_CheckSignals", FETCH: "PyErr_Fetch", RELEASE: "PyGILState_Release",
}  # fmt: skip
INTERRUPTED = 255  # fault code: a signal handler raised an exception
MOST_LOOK_MASK = 63  # steps of a loop between two looks at the clock, less one

WAIT, WAKE = 128, 129  # futex operations, private to the process
EVERYONE = (1 << 31) - 1
DEFAULT_MXCSR = 0x1F80  # nearest rounding, no traps, denormals are numbers


def job_bytes(threads: int) -> int:
    """The size of a pool's job block."""
    return SEATS + threads * SEAT_BYTES


def driver_text(target: CpuTarget) -> str:
    """The driver's LLVM IR; only the architecture of the target matters."""
    from rlx.backends.cpu.driver_code import driver_ir  # a cached driver needs no generator

    return driver_ir(target)
