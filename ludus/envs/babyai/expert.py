"""The expert of BabyAI: minigrid's bot, in lockstep with an episode.

The bot plays on a copy of the level, regenerated from the seed, so it cannot affect the episode. It
can join an episode at any turn: the actions taken so far are replayed, and the bot replans after
each, as its authors intended for advising another agent.

On some seeds (mostly of GoToImpUnlock and UnlockToUnlock) the bot gives up or plans endlessly; both
become NoExpert. Endless planning is cut after a number of plans, not after a time, so the outcome
is deterministic. Two kinds of level that the bot does not support get a corrected first plan: the
agent starts with the object to put down (PutNext...Carrying), or the key is in a box (KeyInBox).
"""

from __future__ import annotations

from typing import Any

from minigrid.utils.baby_ai_bot import BabyAIBot, DisappearedBoxError, GoNextToSubgoal, OpenSubgoal

from ludus.envs.babyai.world import Cell, cell_at, look, make_level
from ludus.envs.base import NoExpert

MAX_PLANS = 500
"""Subgoals that the bot may add before an action; about 12 suffice where planning ends."""

MAX_BOTS = 3
"""Fresh bots to try before the bot's action `done` is accepted."""

DONE = 6
"""minigrid's action `done`, without effect."""


class _EndlessPlanning(Exception):
    """The bot adds subgoals without reaching an action."""


class _Plans(list[Any]):
    """The bot's stack of subgoals; counts the subgoals added since the last action."""

    added = 0

    def append(self, plan: Any) -> None:
        self.added += 1
        if self.added > MAX_PLANS:
            raise _EndlessPlanning
        super().append(plan)


class _OpenBox(GoNextToSubgoal):  # type: ignore[misc]
    """Walk up to a box and open it; its content takes its place."""

    def replan_before_action(self) -> Any:
        if cell_at(self.bot.mission, self.datum.cur_pos) is not self.datum:
            self.bot.stack.pop()
            return None
        if self.fwd_cell is self.datum:
            return self.actions.toggle
        return super().replan_before_action()

    def replan_after_action(self, action_taken: Any) -> None:
        pass  # no action on the way needs undoing


class Expert:
    """Advises an episode of a level.

    expert = Expert("GoToLocal", seed=7)
    expert.action([])            # the first action, a minigrid action number
    expert.action([2, 2, 0])     # after the agent went forward twice and turned left
    """

    def __init__(self, level: str, seed: int) -> None:
        self.level, self.seed = level, seed
        self.world = make_level(level, seed)
        self._bot = self._new_bot()
        self._num_bots = 1
        self._fix_first_plan()
        self._num_followed = 0
        self._advice: int | None = None
        self._failure: str | None = None

    def _new_bot(self) -> Any:
        bot = BabyAIBot(self.world)
        bot.stack = _Plans(bot.stack)
        bot._process_obs = self._remember_view  # equivalent, without minigrid's grid copies
        return bot

    def _remember_view(self) -> None:
        seen = self._bot.vis_mask
        seen[tuple(self.world.agent_pos)] = True
        for cell in look(self.world):
            seen[cell.position] = True

    def _fix_first_plan(self) -> None:
        """Fix the first plan of levels with a start that the bot does not support."""
        if self.world.carrying is not None:
            del self._bot.stack[-2:]  # the subgoals "go to the object" and "pick it up"
        boxes = [cell for cell in self.world.grid.grid if getattr(cell, "contains", None)]
        if boxes:
            self._bot.stack.append(_OpenBox(self._bot, boxes[0]))
            self._bot._check_erroneous_box_opening = lambda action: None

    def action(self, taken: list[int]) -> int:
        """The bot's next action, given all actions `taken` since the episode's start.

        Errors: NoExpert if the bot gave up on this episode.
        """
        if self._advice is None:
            self._replan(None)
        while self._num_followed < len(taken):
            action = taken[self._num_followed]
            self._num_followed += 1
            self.world.step(action)
            self._replan(action)
        if self._failure is not None or self._advice is None:
            raise NoExpert(f"babyai: {self.level}, seed {self.seed}: the bot {self._failure}")
        return self._advice

    def _replan(self, action: int | None) -> None:
        if self._failure is not None:
            return
        self._bot.stack.added = 0
        try:
            self._advice = int(self._bot.replan(action))
            while self._advice == DONE and self._num_bots < MAX_BOTS:
                self._start_over()
                self._advice = int(self._bot.replan(None))
        except _EndlessPlanning:
            self._failure = "plans without end"
        except DisappearedBoxError:
            self._failure = "cannot continue after a box was opened"
        except (AssertionError, AttributeError, IndexError, KeyError, TypeError) as error:
            # The bot has no explicit way to give up: its checks and bugs raise these.
            self._failure = f"gave up ({type(error).__name__}: {error})"

    def _start_over(self) -> None:
        """Replan with a fresh bot, keeping the seen cells, when the bot is done but the mission is
        not. For example, minigrid ignores an object put down by an episode's first action.
        """
        seen, self._bot = self._bot.vis_mask, self._new_bot()
        self._bot.vis_mask = seen
        self._num_bots += 1

    def target(self) -> Cell | None:
        """The cell of the object that the bot walks to, if any."""
        plan = self._bot.stack[-1] if self._bot.stack else None
        if not isinstance(plan, GoNextToSubgoal) or plan.reason not in (None, "Open"):
            return None
        if hasattr(plan.datum, "obj_set"):
            try:
                _, position = self._bot._find_obj_pos(plan.datum)
            except AssertionError:
                return None
        else:
            position = getattr(plan.datum, "cur_pos", None)
        return None if position is None else (int(position[0]), int(position[1]))

    def passes_door(self) -> bool:
        """True if the bot is about to open a door and walk through it."""
        stack = self._bot.stack
        if len(stack) < 2 or not isinstance(stack[-1], OpenSubgoal) or stack[-1].reason is not None:
            return False
        return isinstance(stack[-2], GoNextToSubgoal)
