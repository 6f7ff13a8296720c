# SPDX-License-Identifier: Apache-2.0
"""hf_mxfp4: 4-bit floating point (MXFP4, NVFP4) for Hugging Face Transformers.

Importing the package registers `FP4Config` and its quantizer with transformers; then

    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=FP4Config())

gives a model whose linears and fused experts stay packed in 4 bits; `load` gives one from a checkpoint that another
tool packed. The folder `integrations/` of the source tree (PEFT, TRL, optimum, lm-eval) is imported as
`hf_mxfp4.integrations`.
"""

from hf_mxfp4.config import FP4Config, quantize
from hf_mxfp4.formats import MXFP4, NVFP4, QuantizedTensor
from hf_mxfp4.fusion import fuse_projections, unfuse_projections
from hf_mxfp4.loading import load
from hf_mxfp4.modules import FP4Experts, FP4Linear
from hf_mxfp4.ops import dequantize
from hf_mxfp4.plugins import load_plugins
from hf_mxfp4.quantizer import FP4HfQuantizer, register

__version__ = "0.1.0"
__all__ = [
    "MXFP4",
    "NVFP4",
    "FP4Config",
    "FP4Experts",
    "FP4HfQuantizer",
    "FP4Linear",
    "QuantizedTensor",
    "dequantize",
    "fuse_projections",
    "load",
    "quantize",
    "unfuse_projections",
]

register()
load_plugins()
