"""Messages that an author of kernels writes and reads: the kernel, and the findings."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ludus.envs.cuda.languages import Language, SourceError
from ludus.envs.cuda.measure import Efficiency
from ludus.kernels.verify.result import Speedups, Verified, VerifyStatus

MAX_MESSAGE = 200_000
"""Characters of a message that are read."""
MAX_LINES = 8
"""Findings, or errors of the compiler, that an author is told."""
MAX_TEXT = 300
"""Characters of each."""

MEND = "Correct it. Answer with the whole kernel."
OTHERWISE = "Write it without that. Answer with the whole kernel."
FASTER = "It is right: make it faster. Answer with the whole kernel."
LEANER = "It is right: make it more efficient. Answer with the whole kernel."

_FENCE = re.compile(r"^[ \t]{0,3}```[ \t]*([\w+#.-]*)[^\n]*$", re.MULTILINE)


def kernel_of(message: str, language: Language) -> str:
    """The kernel that a message holds: its last code block in the language, or all of it where it
    has no code block. A last block that is not closed ends with the message.

    Errors: SourceError with what is wrong, for the author.
    """
    if len(message) > MAX_MESSAGE:
        raise SourceError(
            f"the message has {len(message):,} characters: write a kernel of at most "
            f"{MAX_MESSAGE:,}, alone"
        )
    fence = f"```{language.label}"
    fences = list(_FENCE.finditer(message))
    blocks: list[tuple[str, str]] = []
    for opening, closing in zip(fences[::2], [*fences[1::2], None], strict=False):
        end = closing.start() if closing else len(message)
        blocks.append((opening[1].lower(), message[opening.end() + 1 : end]))
    if not blocks:
        if language.needs not in message or not message.strip():
            raise SourceError(f"the message has no kernel: write it in a block {fence}")
        return message
    fitting = [block for block in blocks if block[0] in language.fences and block[1].strip()]
    labelled = [text for label, text in fitting if label]  # blocks without a label may be prose
    kernels = labelled or [text for _, text in fitting]
    if not kernels:
        label = blocks[-1][0] or "empty"
        raise SourceError(f"the code block is {label}: write the kernel in a block {fence}")
    return kernels[-1]


def message_of(kernel: str, language: Language) -> str:
    """The message in which an expert writes a kernel."""
    bare = kernel.strip()
    return f"```{language.label}\n{bare}\n```" if language.label else bare


def report(verified: Verified, efficiency: Efficiency | None = None) -> str:
    """The findings in short plain text: the end, then lines of the compiler, of the analysis,
    of resources, and of the speed where it was timed."""
    lines = [f"{verified.status}: {_short(verified.message)}"]
    if verified.status is VerifyStatus.COMPILE_ERROR and verified.compiled is not None:
        errors = [f"line {d.line}: {d.message}" for d in verified.compiled.errors[1:] if d.line]
        lines += _listed(errors)
    told_better = verified.status is VerifyStatus.COMPILE_ERROR  # by the compiler
    found = dict.fromkeys(
        f"line {f.line}: {f.rule}: {f.reason}; {f.suggestion}"
        for f in verified.findings
        if not (told_better and f.rule == "unreadable")
    )
    lines += _listed([text for text in found if text not in verified.message])
    for use in dict.fromkeys(efficiency.uses if efficiency else ()):
        kernel = use.kernel
        spills = f", {kernel.spills} bytes of spilled registers" if kernel.spills else ""
        lines.append(
            f"- {kernel.name}: {kernel.registers} registers, {kernel.shared_bytes} bytes of shared "
            f"memory{spills}, occupancy {use.occupancy:.0%} with {use.threads} threads (limited by "
            f"{', '.join(use.limited_by)})"
        )
    if verified.speedups is not None:
        lines.append(f"- {_speed(verified.speedups)}")
    return "\n".join(lines)


def _speed(speedups: Speedups) -> str:
    text = f"speed-up {speedups.over_eager:.2f} over eager PyTorch"
    if speedups.over_compile is not None:
        text += f", {speedups.over_compile:.2f} over torch.compile"
    text += f" ({speedups.kernel_s * 1e6:.1f} us"
    if speedups.bandwidth_share is not None:
        text += f", {speedups.bandwidth_share:.0%} of the memory's bandwidth"
    if speedups.throughput is not None:
        text += f", {speedups.throughput / 1e9:,.0f} Gflop/s"
    return f"{text})"


def _listed(lines: Sequence[str]) -> list[str]:
    """Lines of a list, at most MAX_LINES of them."""
    shown = [f"- {_short(line)}" for line in lines[:MAX_LINES]]
    if len(lines) > MAX_LINES:
        shown.append(f"- and {len(lines) - MAX_LINES} more")
    return shown


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."
