"""The columns of the table of families, and how far from plain transformers a cell that says yes may be."""

SFT_FULL, SFT_LORA, DPO, DISTILL = "SFT, all weights", "SFT, LoRA", "DPO", "distill"
GENERATE, EVALUATE = "generate with tools", "evaluate"
MERGED, ADAPTER = "export merged", "export adapter"
COLUMNS = (SFT_FULL, SFT_LORA, DPO, DISTILL, GENERATE, EVALUATE, MERGED, ADAPTER)
LOSS, DPO_LOSS = 2e-5, 2e-4
"""The largest relative differences of losses."""
GRADIENT = 2e-3
"""The largest difference of gradients, as a share of the largest number."""
LOGPROB = 1e-3
"""The largest difference of log-probabilities, in nats."""
WEIGHTS = 1e-4
"""The largest difference of the logits of exported weights, as a share of the largest."""
