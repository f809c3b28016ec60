"""What config.yml of other systems may ask for and is not done here: named, never ignored."""

from stillroom.models.scoring import OFF_POLICY_ROUTE

_HOSTED = "it belongs to a hosted service"
_CHAT_ONLY = ("openai", "openrouter", "anthropic", "google", "ollama")

UNSUPPORTED: dict[str, tuple[str, str]] = {
    "max_billing": (_HOSTED, "leave it out: training here runs on your own machine"),
    "teacher.agentic": ("the student alone acts", "leave it out"),
    "data.packing": (
        "rows are packed wherever the model can run packs, and never attend to each other",
        "leave it out",
    ),
    "packing": (
        "rows are packed wherever the model can run packs, and never attend to each other",
        "leave it out",
    ),
    "trainer.gradient_accumulation_steps": (
        "data.batch_size counts the rows of an optimiser step, run in as many passes as it takes",
        "leave it out; model.microbatch_tokens makes the passes smaller",
    ),
    "wandb_project": ("it belongs to the trainer", "write trainer.wandb_project"),
}
"""By dotted key: why, and what to do. A key that is null, false or an empty list asks nothing."""

_NO_SCORES = (
    "its API does not return the log-probability of tokens that another model wrote",
    f"take provider vllm or sglang with an open-weight teacher, or {OFF_POLICY_ROUTE}",
)

REFUSED_VALUES: dict[tuple[str, str], tuple[str, str]] = {
    **{("teacher.provider", name): _NO_SCORES for name in _CHAT_ONLY},
    ("dataset_type", "rl"): (
        "reinforcement learning from rewards alone " + _HOSTED,
        "use dataset_type distill with a teacher that scores tokens, or sft on filtered rollouts",
    ),
    ("dataset_type", "midtrain"): (
        "training on plain text " + _HOSTED,
        "use dataset_type sft with rows of messages",
    ),
}
"""By dotted key and value: why, and what to do."""
