"""Trajectories and scores for the tests of judges."""

from ludus.core.types import Message, Segment, Spec, Task, Trajectory
from ludus.judges import JUDGES


def said(*texts, thinking=None, num_tokens=1):
    """An episode in which the assistant said the texts, each sampled as `num_tokens` tokens."""
    trajectory = Trajectory(id="t", group_id="g", task_id="q")
    trajectory.segments = [Segment(-1, [1], message=Message(role="user", content="?"))]
    for index, text in enumerate(texts):
        message = Message(role="assistant", content=text, thinking=thinking)
        ids = [2] * num_tokens
        trajectory.segments.append(Segment(index, ids, [-0.1] * num_tokens, message=message))
    return trajectory


async def score(name, text, answer, **args):
    judge = JUDGES.build(Spec(name=name, args=args))
    return await judge(Task(id="q", answer=answer), said(text))
