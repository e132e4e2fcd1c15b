"""Looking for what went wrong in programs that run: print from inside, and find where NaN and infinity begin."""

from rlx.functional.printing import print as print
from rlx.runtime.nan_switch import nans as nans
