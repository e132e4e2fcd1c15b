"""The driver: machine code that walks launch records, on the calling thread or on all threads of a pool.

`driver_text` is its LLVM IR for a target. Records and job blocks are plain memory that Python fills; the constants
below are their layout. Threads that wait spin for a while and then sleep in the kernel, by inline system calls, so
the object has no undefined symbols.

Loops and branches are records too. A thread that enters a loop copies the arguments of the launches in it to its own
scratch, and moves the addresses in its copy from step to step: so threads need not agree on more than the data they
share, and the next run finds the arguments as they were.
"""

from __future__ import annotations

from rlx.target import Target

# The functions of the object:
#   execute(job, tid, threads)   walk all records as thread `tid` of `threads`
#   run(job, records, count, scratch, stride, trace, slots) -> how many threads took part
#   call(job, request)           `run` with its other arguments in memory: two words cross over from Python, not seven
#   repeat(self, inputs)         `call` as a function of CPython, see repeat.py
#   worker(job, tid)             the life of a pool thread, until `stop`
#   stop(job) -> 1, or 0 where a run is going on; after it, every run stays on the thread that calls
#   spin(count)                  that many pauses, to measure how long one is
SYMBOLS = ("execute", "run", "call", "repeat", "worker", "stop", "spin")

REQUEST_WORDS = 6  # of `call`: records, count, scratch, stride, trace, slots, as in a job block

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
BARRIER_AFTER = 1  # flag: no thread starts the next record before all have finished this one
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
# did; how far it has read ahead, and how far it may.
STATUS, FAILED, READ_TO, READ_END = range(0, 32, 8)
READ_AHEAD = 256 << 10  # bytes at most: they must still be in a core's own cache when they are wanted
READ_STEP = 256  # bytes between two looks at what a thread waits for

# A job block. Words that different threads write lie 128 bytes apart, because x86 fetches cache lines in pairs.
LINE = 128
RECORDS, COUNT, SCRATCH, STRIDE, TRACE, SLOTS, THREADS, STOPS = range(0, 64, 8)  # the current run
POOL_THREADS, SPIN = 64, 72  # set once: how many threads there are, how many pauses before a sleep
BUSY = 1 * LINE  # 1 while a run has the pool
PENDING = 2 * LINE  # workers that are not done; ASLEEP_BIT is added when the caller sleeps
ARRIVED = 3 * LINE  # threads that are at the barrier
PHASE = 4 * LINE  # 2 more after each barrier; bit 0 is set when a thread sleeps at this one
SEATS = 5 * LINE  # a line for each thread: what its worker is to do

IDLE, ASLEEP, CALLED, STOPPED = range(4)  # states of a seat; the last two end a worker's wait
ASLEEP_BIT = 1 << 31
EVERYONE = (1 << 31) - 1

WAIT, WAKE = 128, 129  # futex operations, private to the process
DEFAULT_MXCSR = 0x1F80  # nearest rounding, no traps, denormals are numbers


def job_bytes(threads: int) -> int:
    """The size of a pool's job block."""
    return SEATS + threads * LINE


def driver_text(target: Target) -> str:
    """The driver's LLVM IR; only the architecture of the target matters."""
    from rlx.backends.cpu.driver_code import emitted  # a driver that was compiled before needs no generator

    return emitted(target)
