"""The status of an episode that an error ended."""

from ludus.core.errors import EpisodeError, EpisodeTimeout, SamplerError, ToolError, Unscorable
from ludus.core.types import Status

_STATUS_OF: dict[type[EpisodeError], Status] = {
    ToolError: Status.ERROR_TOOL,
    SamplerError: Status.ERROR_SAMPLER,
    EpisodeTimeout: Status.ERROR_TIMEOUT,
    Unscorable: Status.UNSCORABLE,
}


def status_of(error: EpisodeError) -> Status:
    """The status of an episode that an error ended; what has no other is the environment's."""
    kinds = (status for kind, status in _STATUS_OF.items() if isinstance(error, kind))
    return next(kinds, Status.ERROR_ENV)
