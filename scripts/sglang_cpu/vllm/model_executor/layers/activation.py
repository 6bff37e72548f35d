"""SGLang's own layers: its module, which imports this one last, has defined them by then."""

from sglang.srt.layers.activation import GeluAndMul as GeluAndMul
from sglang.srt.layers.activation import SiluAndMul as SiluAndMul
