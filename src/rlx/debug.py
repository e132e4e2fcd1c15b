"""Debugging of running programs: print from inside compiled code, and find where NaN and infinity first appear."""

from rlx.functional.printing import print as print
from rlx.runtime.nan_switch import nans as nans
