"""The sections of config.yml that all dataset_types share, with their defaults."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from stillroom.models.precision import Precision, Quantization
from stillroom.validation import StrictModel

_KEYS_OF_KIND = {
    "local": {"kind"},
    "accelerate": {"kind", "num_processes", "strategy", "num_machines", "main_address"},
    "ray": {"kind", "num_processes", "strategy", "address"},
}
LoraChoice = (
    Literal["auto", "attention", "all-linear"]
    | Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    | None
)
"""The layers that get a LoRA adapter: a keyword or a list of names."""


class ConfigSection(StrictModel):
    """The base class of the sections of config.yml; unknown keys are errors."""


class ModelSection(ConfigSection):
    """The student: which model it is, and how it is loaded."""

    path: str
    """The student: a hub id, folder, GGUF file, run id or demo/student."""
    chat_template: Annotated[str, Field(min_length=1)] | None = None
    """The template of a base model, which its checkpoints keep: chatml, gemma, llama3, a .jinja
    file, or a model whose template is used. None: the model's own."""
    license: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """The id of the model's licence, such as apache-2.0, where its own files name none."""
    qlora_rank: Annotated[int, Field(ge=0, le=1024)] = 32
    """The rank of the LoRA adapter; 0 trains all weights instead."""
    qlora_alpha: Annotated[int, Field(ge=1)] | None = None
    """The numerator of the LoRA scale; None: twice the rank."""
    lora_targets: LoraChoice = None
    """The layers with a LoRA adapter: attention (all token mixers), all-linear (MLPs and experts
    too) or a list of names; auto or None: all but experts."""
    name: str | None = None
    description: str | None = None
    precision: Precision = "auto"
    quantization: Quantization = None
    """nf4 loads the base model in 4 bits under a LoRA adapter; the trained adapter also fits the
    unquantised base."""
    gradient_checkpointing: bool = False
    """Whether layers are recomputed in the backward pass: less memory for a third more time."""
    microbatch_tokens: Annotated[int, Field(ge=1)] | None = None
    """The maximum number of tokens per forward pass; None: as many as fit into memory."""
    max_length: Annotated[int, Field(ge=8)] | None = None
    """The maximum number of tokens of a row (sft, dpo); longer rows are skipped and counted. None:
    the model's context length."""

    @field_validator("lora_targets")
    @classmethod
    def _normalise_auto(cls, value: LoraChoice) -> LoraChoice:
        """Returns None for auto, as earlier versions recorded it."""
        return None if value == "auto" else value

    @model_validator(mode="after")
    def _check_lora_targets(self) -> "ModelSection":
        if self.lora_targets is not None and self.qlora_rank == 0:
            raise ValueError("lora_targets needs an adapter, but qlora_rank: 0 trains all weights")
        return self

    @model_validator(mode="after")
    def _check_quantization(self) -> "ModelSection":
        if self.quantization is not None and self.qlora_rank == 0:
            raise ValueError(
                "quantization needs an adapter, since 4-bit weights cannot be trained: set "
                "qlora_rank, e.g. 32"
            )
        return self

    def max_row_length(self, context: int) -> int:
        """Returns the maximum number of tokens of a row, for a model with this context length."""
        return min(self.max_length or context, context)

    @property
    def student_precision(self) -> Precision:
        """The precision in which the student's weights are loaded; fp32, not auto, without LoRA."""
        # Full fine-tuning needs fp32: small updates would be lost to bf16's rounding.
        needs_fp32 = self.precision == "auto" and self.qlora_rank == 0
        return "fp32" if needs_fp32 else self.precision

    @property
    def alpha(self) -> int:
        """The numerator of the LoRA scale alpha / rank."""
        return self.qlora_alpha or 2 * self.qlora_rank


class StudentSection(ModelSection):
    """The student of distill, which is sampled on prompts."""

    system: str | None = None
    """The student's system message, which replaces that of the prompt rows (distill and its evals);
    "": none. None: the rows' own."""


class RowsSection(ConfigSection):
    """The rows or pairs to train on (sft, dpo)."""

    train_file: str = "train.jsonl"
    """The file of rows, relative to the folder of config.yml."""
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """The rows (sft) or pairs (dpo) per optimiser step."""
    val_split: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of rows that are held out, split by prompt, and evaluated after every epoch."""

    @field_validator("train_file", mode="before")
    @classmethod
    def _check_single_file(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            raise ValueError("a list of files needs dataset_type distill: put the rows in one file")
        return value

    @property
    def train_files(self) -> tuple[str, ...]:
        """The name of the file of rows, in a tuple."""
        return (self.train_file,)


class PromptsSection(ConfigSection):
    """The prompts that the student is sampled on (distill)."""

    train_file: str | tuple[str, ...] = "train.jsonl"
    """The file of prompts, relative to the folder of config.yml, or a list of files, from which
    every iteration takes prompts in proportion to their sizes."""
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 32
    """The prompts per iteration."""
    group_size: Annotated[int, Field(ge=1, le=64)] = 1
    """The number of rollouts per prompt in an iteration; 4 if it is not set and rewards compare
    the rollouts of a prompt."""

    @field_validator("train_file")
    @classmethod
    def _check_files(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if isinstance(value, tuple) and (not value or len(set(value)) < len(value)):
            raise ValueError("it must name at least one file, and no file twice")
        return value

    @property
    def train_files(self) -> tuple[str, ...]:
        """The names of the files of prompts, in a tuple."""
        return (self.train_file,) if isinstance(self.train_file, str) else self.train_file


class TrainerSection(ConfigSection):
    """The optimiser and how long it runs."""

    num_epochs: Annotated[int, Field(ge=1)] = 1
    max_minutes: Annotated[float, Field(gt=0)] | None = None
    """The minutes after which the run ends, at the end of a step and with a checkpoint. Loading
    models counts, and a resumed run has the same minutes again. The decay of the learning rate ends
    with the time. None: no limit."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    save_step: int = -1
    """The number of steps between two checkpoints; -1: a checkpoint at the end only."""
    keep_checkpoints: Annotated[int, Field(ge=1)] | None = None
    """The number of latest checkpoints to keep, besides the best one; None: all of them."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """The decay of the learning rate to a tenth by the end of the run; constant: no decay."""
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    """The number of steps of linear warmup; at most a tenth of the run's steps."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    adam_beta2: Annotated[float, Field(gt=0, lt=1)] = 0.95
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    seed: int = 0
    tensorboard: bool = False
    """Whether metrics are also written to the run's tensorboard folder; events.jsonl always has
    them."""
    wandb_project: str | None = None
    """The Weights & Biases project to send metrics to; without WANDB_API_KEY they are written to
    the run's folder instead. None: W&B is not used."""
    trackio_project: str | None = None
    """The trackio project to write metrics to, in runs/trackio unless TRACKIO_DIR names another
    folder. None: trackio is not used."""
    wandb_name: str | None = None
    """The run's name in Weights & Biases; None: the run's id."""

    @model_validator(mode="after")
    def _check_wandb_name(self) -> "TrainerSection":
        if self.wandb_name is not None and self.wandb_project is None:
            raise ValueError("wandb_name is the run's name in W&B: set trainer.wandb_project too")
        return self


class RowsTrainer(TrainerSection):
    """The optimiser of sft and dpo."""

    early_stop: Annotated[int, Field(ge=1)] | None = None
    """The number of consecutive validations without a lower val_loss after which the run stops and
    keeps the best step; None: no early stopping."""


class DistillTrainer(TrainerSection):
    """The optimiser of distill; without early stopping, since rollouts have no val_loss."""

    early_stop: ClassVar[None] = None
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """The maximum number of iterations, if num_epochs would give more."""


class DpoSection(ConfigSection):
    """The loss on preference pairs."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    nll_coef: Annotated[float, Field(ge=0)] = 0.0
    """The weight of the chosen answer's negative log-likelihood per token, added to the loss."""


class EvalSection(ConfigSection):
    """An evaluation on a file of prompts, run every `step` steps and after the last step."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    """The evaluation's name in its metrics, such as eval/NAME/pass1."""
    step: Annotated[int, Field(ge=1)]
    """The number of steps between two evaluations."""
    file: str | None = None
    """The file of prompts, relative to the folder of config.yml; None: NAME.jsonl."""
    n: Annotated[int, Field(ge=1)] | None = None
    """The number of prompts from the start of the file; None: all of them."""
    pass1: bool = True
    pass1_temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    pass4: bool = False
    """Whether to measure pass@4: the share of prompts with at least one correct sample of four."""
    pass4_temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    pass8: bool = False
    pass8_temperature: Annotated[float, Field(gt=0, le=2)] = 1.0

    @model_validator(mode="after")
    def _check_pass_at_k(self) -> "EvalSection":
        if not self.temperature_of_k:
            raise ValueError("an evaluation needs pass1, pass4 or pass8")
        return self

    @property
    def prompts_file(self) -> str:
        """The file with the prompts, relative to the folder of config.yml."""
        return self.file or f"{self.name}.jsonl"

    @property
    def temperature_of_k(self) -> dict[int, float]:
        """The sampling temperature for each k whose pass@k is measured."""
        settings = {
            1: (self.pass1, self.pass1_temperature),
            4: (self.pass4, self.pass4_temperature),
            8: (self.pass8, self.pass8_temperature),
        }
        return {k: temperature for k, (is_on, temperature) in settings.items() if is_on}

    def is_due(self, step: int, total: int) -> bool:
        """Returns whether the evaluation is due after step `step` of `total`."""
        return step % self.step == 0 or step == total


class LauncherSection(ConfigSection):
    """The processes that train a run; `launcher: accelerate` sets `kind` alone."""

    kind: Literal["local", "accelerate", "ray"] = "local"
    """How training processes are started; local: the run's own process trains."""
    num_processes: Annotated[int, Field(ge=1, le=4096)] | None = None
    """The total number of processes on all machines; None (accelerate): one per GPU."""
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    """ddp: each process holds the whole model; fsdp2: weights and optimiser state are sharded over
    the processes."""
    num_machines: Annotated[int, Field(ge=1, le=1024)] = 1
    """The number of machines (accelerate); the run waits for the other machines, and its notes have
    the command to start on each."""
    main_address: str | None = None
    """The host:port at which the other machines reach this one (accelerate on several machines)."""
    address: str | None = None
    """The Ray cluster: host:port, ray://…, auto, or local for a new one on this machine (ray)."""

    @model_validator(mode="before")
    @classmethod
    def _expand_kind(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_ignored_keys(self) -> "LauncherSection":
        for key in sorted(self.model_fields_set - _KEYS_OF_KIND[self.kind]):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(
                    f"launcher.{key} has no effect with kind: {self.kind}; leave {key} out"
                )
        if self.kind == "ray" and (self.address is None or self.num_processes is None):
            raise ValueError(
                "launcher.kind: ray needs address (host:port, auto, or local for a cluster on this "
                "machine) and num_processes"
            )
        if self.num_machines > 1 and split_address(self.main_address or "") is None:
            raise ValueError(
                "launcher.num_machines needs main_address: host:port at which the other machines "
                "reach this one"
            )
        if self.num_processes is not None and self.num_processes % self.num_machines:
            raise ValueError("launcher.num_processes must be a multiple of num_machines")
        return self

    @property
    def is_sharded(self) -> bool:
        """Whether weights and optimiser state are sharded over the processes."""
        return self.kind != "local" and self.strategy == "fsdp2"


def split_address(address: str) -> tuple[str, int] | None:
    """Returns the host and port of `host:port` or `ray://host:port`; None for any other text."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    return (host, int(port)) if host and port.isdecimal() else None
