"""Steps that are measured, in a process of one side: how long they take, and in how much memory."""

import resource
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from beside_trl.models import draw_adapter

WARMUP = 1
LEARNING_RATE = 1e-5


class Meter:
    """CPU seconds and loss of each step, and the peak of memory."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.begun = 0.0

    def begin(self) -> None:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self.begun = cpu_seconds()

    def end_step(self) -> None:
        now = cpu_seconds()
        self.seconds.append(now - self.begun)
        self.begun = now

    def reported(self, tokens: Sequence[int], extra_s: float = 0.0) -> dict[str, Any]:
        counted = sum(self.seconds[WARMUP:]) + extra_s * len(self.seconds[WARMUP:])
        return {
            "tokens_per_cpu_s": round(sum(tokens[WARMUP:]) / counted, 1),
            "step_cpu_s": [round(s, 2) for s in self.seconds],
            "peak_mb": round(status_mb("VmHWM")),
            "losses": [round(loss, 6) for loss in self.losses],
        }


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def status_mb(key: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def options(batch: int, steps: int) -> dict[str, Any]:
    """Returns what all of the peer's trainers are told."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": batch,
        "max_steps": steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": [],
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def trl_run(trainer: Any) -> Meter:
    """Returns what one of the peer's trainers took."""
    draw_adapter(trainer.model)
    meter = Meter()

    class Told(transformers.TrainerCallback):
        def on_train_begin(self, *_args: Any, **_more: Any) -> None:
            meter.begin()

        def on_step_end(self, *_args: Any, **_more: Any) -> None:
            meter.end_step()

        def on_log(
            self, _args: Any, _state: Any, _control: Any, logs: Any = None, **_more: Any
        ) -> None:
            if logs and "loss" in logs:
                meter.losses.append(float(logs["loss"]))

    trainer.add_callback(Told())
    trainer.train()
    return meter


def be_quiet() -> None:
    """One thread, and no word but the measurement."""
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
