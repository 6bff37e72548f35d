"""Groups to record: branches, failures, odd text and numbers."""

from __future__ import annotations

from ludus.core.types import Constraint, Group, Message, Segment, Status, Task, ToolCall, Trajectory


def branched(id_: str, group_id: str, reward: float | None = 1.0) -> Trajectory:
    """A question, a sampled call, its result, a sampled answer, and second attempts as branches."""
    call = ToolCall(name="look", arguments={"at": "door", "deep": [1, None, {"a": 2.5}]}, id="c1")
    return Trajectory(
        id=id_,
        group_id=group_id,
        task_id=f"task-{group_id}",
        segments=[
            Segment(-1, [5, 6, 7], None, Message(role="user", content="go to the red ball")),
            Segment(
                0,
                [8, 9],
                [-0.1, -0.7],
                Message(role="assistant", content="look", thinking="hm", tool_calls=[call]),
                policy_version=3,
                reward=0.25,
                metrics={"entropy": 0.5},
            ),
            Segment(1, [3], None, Message(role="tool", content="a door", tool_call_id="c1")),
            Segment(
                2,
                [2],
                [-0.2],
                Message(role="assistant", content="open"),
                policy_version=4,
                constraint=Constraint("start: /open/", (2,)),
            ),
            Segment(1, [], []),
            Segment(0, [4, 1], [-1e-300, -0.1 - 2**-54], policy_version=None),
        ],
        role="solver",
        policy="small",
        status=Status.COMPLETED,
        reward=reward,
        scores={"success": 1.0, "speed": 0.125},
        explanation='it opened C:\\door "\x00\ud800"',
        metrics={"seconds": 1.5},
    )


def failed(id_: str, group_id: str) -> Trajectory:
    return Trajectory(
        id=id_,
        group_id=group_id,
        task_id=f"task-{group_id}",
        status=Status.ERROR_ENV,
        error='the environment raised C:\\new "\x00\ud800"',
        dropped="error_env",
    )


def make_groups(step: int, num_groups: int = 2, size: int = 3) -> list[Group]:
    groups = []
    for g in range(num_groups):
        id_ = f"s{step}-g{g}"
        task = Task(
            id=f"task-{id_}",
            prompt=[Message(role="user", content="ü\u2028")],
            data={"seed": g, "limits": [1.0, float("inf")]},
            answer={"$float": "not one"},
            tier=f"tier-{g}",
        )
        members = [branched(f"{id_}-{n}", id_, reward=n / 2) for n in range(size - 1)]
        groups.append(Group(id_, task, [*members, failed(f"{id_}-{size - 1}", id_)]))
    return groups
