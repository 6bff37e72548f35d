"""Terminal display of runs and rollouts.

Each function returns a rich renderable. A rollout is shown turn by turn; lines sampled by the
policy are green and begin with `+`, like additions in a diff, so they differ without colour too:

    [1] user
          go to the red ball
    [2] assistant, turn 1: sampled 4 tokens, policy 3, logprob mean -0.31, least -0.92 ("left")
        + turn left

Text comes from models and tasks, so it is untrusted: control characters are escaped, and markup is
not interpreted.
"""

from ludus.store.show.episodes import NEWEST, find_place, render_step
from ludus.store.show.rollout import Decode, render_trajectory, render_turns, render_verdict
from ludus.store.show.runs import render_run, render_runs
from ludus.store.show.tables import make_table, plain

__all__ = [
    "NEWEST",
    "Decode",
    "find_place",
    "make_table",
    "plain",
    "render_run",
    "render_runs",
    "render_step",
    "render_trajectory",
    "render_turns",
    "render_verdict",
]
