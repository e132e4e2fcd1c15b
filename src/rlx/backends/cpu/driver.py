"""The driver: machine code that walks launch records, on the calling thread or on all threads of a pool.

`driver_text` is its LLVM IR for a target. Records and job blocks are plain memory that Python fills; the constants
below are their layout. Threads that wait spin for a while and then sleep in the kernel, by inline system calls, so
the object has no undefined symbols.

Threads share a launch by claiming parts of it. Each thread has a slice of the units, claims chunks of its own slice
first and then chunks of slices whose owners are late; a barrier waits until all units are done, not until all threads
have arrived. So a worker that is still waking up, or shares its core with another program, delays nothing but the chunk
it has in hand. Who computes a unit does not change its result.

A worker is *inside* a run while it may touch the run's memory. It goes outside to wait at a barrier, and looks whether
the run is still going on when it comes back; the caller returns as soon as all units are done and nobody is inside.

Loops and branches are records too. A thread that enters a loop copies the arguments of the launches in it to its own
scratch, and moves the addresses in its copy from step to step: so threads need not agree on more than the data they
share, and the next run finds the arguments as they were.
"""

from __future__ import annotations

from rlx.backends.cpu.targets import CpuTarget

# The functions of the object:
#   execute(job, tid, threads, run)  walk all records of a run as thread `tid` of `threads`
#   call(job, request)           run the records of a request; returns how many threads shared them
#   repeat(self, inputs)         `call` as a function of CPython, see repeat.py
#   worker(job, tid)             the life of a pool thread, until `stop`
#   stop(job) -> 1, or 0 where a run is going on; after it, every run stays on the thread that calls
#   spin(count)                  that many pauses, to measure how long one is
#   clock()                      the counter that ticks are read from
SYMBOLS = ("execute", "call", "repeat", "worker", "stop", "spin", "clock")

# A record: three words and flags. Records are numbered from 0.
#   LAUNCH  the function's address, the address of its arguments, its units
#   ENTER   -, the address of a loop block
#   NEXT    -, the address of a loop block: moves the arguments, and goes back to the first record of the loop
#   TEST    the record to go to where the predicate is false, the address of the predicate's address
#   JUMP    the record to go to
#   LEAVE   the record that entered, for the trace
#   AHEAD   the address of weights, the bytes of a unit, the units of the launch that reads them: what a thread that
#           waits before that launch reads ahead
RECORD_WORDS = 4
BARRIER_AFTER = 1  # flag: no thread starts the next record before all units of this one and those before are done
PRIVATE = 2  # flag: the arguments are in the thread's scratch, the address is an offset in it
SOLO = 4  # flag of ENTER and LEAVE: the first thread runs the loop alone, the others wait for it
ENDS = 8  # flag of NEXT: records of the loop follow that are run once, after the last step
LAUNCH, ENTER, NEXT, TEST, JUMP, LEAVE, AHEAD = range(0, 112, 16)  # the kind, among the flags
KIND = 112

# A loop block. `HOME` is the place in a thread's scratch where the loop counts its steps and then has its copy of
# the arguments; `SOURCE`, with `IS_PRIVATE`, is where they are copied from. `MOVES` are pairs, the offset from `HOME`
# of an argument and how far it moves: by as much with each step, or, those after them, there and back.
COUNT_STEPS, SOURCE, IS_PRIVATE, HOME, WORDS, MOVES, LINEAR, ALTERNATING, FIRST, EXIT, END = range(0, 88, 8)
LOOP_WORDS = 11

# The head of each thread's scratch: what went wrong (kernels set it), and the number, from 1, of the first record that
# did; how far it has read ahead, and how far it may. Heads are zero before the first run. A thread clears its own, but
# may come too late for that, so scratch in which a fault was reported is not used again.
STATUS, FAILED, READ_TO, READ_END = range(0, 32, 8)
HEAD_BYTES = 32
READ_AHEAD = 256 << 10  # bytes at most: they must still be in a core's own cache when they are wanted
READ_STEP = 256  # bytes between two looks at what a thread waits for

# A request of `call`. The last words are the notes of the driver, 0 at first: the ticks of the shortest run, times its
# threads; the average ticks of the last runs that threads shared, whether the next of them begins a new average, and
# the fewest ticks of one of them; the fewest ticks of a run alone since workers were last late; until when runs are
# shared whatever happens, and for how long that was.
RECORDS, COUNT, SCRATCH, STRIDE, TRACE, SLOTS, SHORTEST, *NOTES = range(0, 104, 8)
TOGETHER, ANEW, BEST_TOGETHER, APART, TRUSTED, TRUSTED_FOR = NOTES
REQUEST_WORDS = 13
COPIED_WORDS = 6  # a job block begins with these words of its request

# A job block. Words that different threads write lie 128 bytes apart, because x86 fetches cache lines in pairs.
LINE = 128
# The run that is going on: how many threads share it, its number (0 while there is none), and how many launches, units
# and tests there were in runs before. They are counted on and on, so nothing that threads share is ever reset.
THREADS, RUN, *BEFORE = range(48, 88, 8)
LAUNCHES, UNITS, TESTS = BEFORE
# Set once: threads, pauses before a sleep, pauses before a look at the slices of others, and ticks of a millisecond (0:
# every run is shared).
POOL_THREADS, SPIN, LOOK, MILLISECOND = range(88, 120, 8)
SLICE_CHUNKS = 120  # of the run that is going on: the chunks of a slice
BUSY = 1 * LINE  # 1 while a run has the pool; what follows in this line belongs to its caller (AFTER: the next BEFORE)
RUNS, ENDED, SLEPT, ALL_SLEPT, ALL_TAKEN, *LATENESS = range(BUSY + 8, BUSY + 104, 8)
ALONE_UNTIL, ALONE_RUNS, ALONE_FOR, KEPT_UP, *AFTER = LATENESS  # KEPT_UP: ticks of shared runs since workers were late
DONE = 2 * LINE  # units that are done, as all threads add them up
SLEEPERS, WAKES = DONE + 8, DONE + 12  # 1 where threads may sleep until more are, and the word that they sleep on
TESTED = 3 * LINE  # twice the number of the last test, and its outcome
FAULT = TESTED + 8  # the launch, counted as LAUNCHES are, in which a kernel first reported a fault; 0 for none
PASSED = 4 * LINE  # units that are done, as of the last barrier: what threads look at where there are many
FEW = 4  # threads that look at DONE itself: it is in their caches sooner, but who adds must fetch it from all who look
SEATS = 5 * LINE  # for each thread: a line with its seat, one with the claims on its slice, one with its cores
SEAT, INSIDE, THREAD, CONFINED, CLAIMED, CORES, SEAT_BYTES = 0, 4, 8, 16, LINE, 2 * LINE, 3 * LINE
CORES_BYTES = LINE  # a bit for each core that a thread may use; CONFINED: it may use fewer until it is awake

# A slice is claimed chunk by chunk: half of it, half of the rest, and so on. `CLAIMED` is the number of the launch,
# shifted, and how many chunks of it are claimed.
# A run of less than half a millisecond has whole slices: a worker that is not there at all is made up for, and a claim
# costs a tenth of a microsecond.
CHUNKS = 4
CLAIM_SHIFT = 8
SMALL = 2

IDLE, ASLEEP, CALLED, STOPPED = range(4)  # states of a seat; the last two end a worker's wait
OUT, IN, WATCHED = range(3)  # of INSIDE; WATCHED is IN, with a caller that sleeps until it is OUT

# Waking a worker takes about 25 microseconds of the caller's time. So a run of less than a fifth of a millisecond stays
# on its caller, if the one before ended more than a twentieth ago: by then workers sleep. In a loop they do not.
BRIEF, REST = 5, 20
# Workers are late where the caller has slept for more than an eighth of the last eight runs or so: some of them have
# units in hand but no core. A busy neighbour takes the caller's core as well, without a sleep: so they are where the
# last four runs or so took half as long again as the best one, or longer than a run alone, and where that costs a
# millisecond in eight runs. The next runs then stay on their callers for a while, `BACK_OFF` times as long each time:
# for so many milliseconds, and for one run per `LEAST_ALONE` of them, because between runs there may be pauses.
WINDOW, LATE_SHARE = 8, 8
AVERAGED = 4
FORGET = 256  # the best run counts for less with each run, by this part of it: sizes and machines change
LEAST_ALONE, MOST_ALONE, BACK_OFF = 16, 2048, 4  # milliseconds, and the factor between two pauses
# Where the best of two runs alone, or a long one, is no faster, runs are shared again however late workers are: for so
# many milliseconds and at least so many runs alone, twice as long each time.
LEAST_TRUST, MOST_TRUST, TRUST_RUNS = 1024, 16384, 32

WAIT, WAKE = 128, 129  # futex operations, private to the process
EVERYONE = (1 << 31) - 1
DEFAULT_MXCSR = 0x1F80  # nearest rounding, no traps, denormals are numbers


def job_bytes(threads: int) -> int:
    """The size of a pool's job block."""
    return SEATS + threads * SEAT_BYTES


def driver_text(target: CpuTarget) -> str:
    """The driver's LLVM IR; only the architecture of the target matters."""
    from rlx.backends.cpu.driver_code import emitted  # a driver that was compiled before needs no generator

    return emitted(target)
