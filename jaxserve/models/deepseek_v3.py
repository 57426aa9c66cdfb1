"""DeepSeek-V3, R1 and what copies their architecture: V2 with routing by sigmoids, and a bias that balances experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.layers.params import LayerContext
from jaxserve.models.deepseek_v2 import DeepseekCausalLM, latent_decoder, router_config

ARCHITECTURES = ("DeepseekV3ForCausalLM",)


def create(config: Mapping[str, Any], context: LayerContext) -> DeepseekCausalLM:
    """Experts are chosen among the best groups (``noaux_tc``) unless ``topk_method`` says otherwise."""
    interleaved = config.get("rope_interleave")
    router = router_config({"norm_topk_prob": True, **config}, "noaux_tc", "sigmoid")
    decoder = latent_decoder(config, router, interleaved=interleaved is None or bool(interleaved))
    return DeepseekCausalLM(decoder, context)
