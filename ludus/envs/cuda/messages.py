"""What an author of kernels writes and reads: the kernel in a message, and what was found."""

from __future__ import annotations

import re
from ludus.envs.cuda.languages import Language, SourceError

MAX_MESSAGE = 200_000
"""Characters of a message that are read."""

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
    kernels = [text for label, text in blocks if label in language.fences and text.strip()]
    if not kernels:
        label = blocks[-1][0] or "empty"
        raise SourceError(f"the code block is {label}: write the kernel in a block {fence}")
    return kernels[-1]


def message_of(kernel: str, language: Language) -> str:
    """The message in which an expert writes a kernel."""
    bare = kernel.strip()
    return f"```{language.label}\n{bare}\n```" if language.label else bare
