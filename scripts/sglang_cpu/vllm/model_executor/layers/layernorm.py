"""SGLang's own layers: its module, which imports this one last, has defined them by then."""

from sglang.srt.layers.layernorm import GemmaRMSNorm as GemmaRMSNorm
from sglang.srt.layers.layernorm import RMSNorm as RMSNorm
