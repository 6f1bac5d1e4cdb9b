"""Maps training arguments to the keys of a DeepSpeed configuration that they fill in."""

from __future__ import annotations

from typing import Any

from fzero._utils.arguments import plain_numbers
from fzero.errors import FzeroTypeError

_NEEDED = (
    "world_size per_device_train_batch_size gradient_accumulation_steps max_grad_norm learning_rate adam_beta1 "
    "adam_beta2 adam_epsilon weight_decay fp16 bf16"
)


@plain_numbers
def from_arguments(args: Any, num_steps: int | None = None) -> dict[str, Any]:
    """Converts the TrainingArguments of Hugging Face's Trainer to values for `load_config(auto=...)`.

    The Trainer fills in these keys if they are "auto", and compares them otherwise. Three more keys, bucket sizes
    that the Trainer computes from a model's width, have no effect in fzero, and may stay "auto".

    Args:
        args: TrainingArguments, or any object with the necessary attributes.
        num_steps: the number of steps of the entire run, if a schedule needs it.

    Raises:
        FzeroTypeError: attributes are missing; the error lists them.

    Example:
        >>> import fzero as fz
        >>> from types import SimpleNamespace
        >>> args = SimpleNamespace(world_size=2, per_device_train_batch_size=4, gradient_accumulation_steps=1)
        >>> vars(args).update(max_grad_norm=1.0, learning_rate=3e-5, weight_decay=0.0, fp16=False, bf16=True)
        >>> vars(args).update(adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8)
        >>> fz.deepspeed.from_arguments(args)["train_batch_size"]
        8
    """
    if missing := [name for name in _NEEDED.split() if not hasattr(args, name)]:
        fix = "give the TrainingArguments, or write load_config(auto={path: value})"
        raise FzeroTypeError("deepspeed.from_arguments", f"{type(args).__name__} lacks", missing, fix)
    rows, parts = args.per_device_train_batch_size, args.gradient_accumulation_steps
    filled = {
        "train_batch_size": args.world_size * rows * parts,
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": parts,
        "gradient_clipping": args.max_grad_norm,
        "optimizer.params.lr": args.learning_rate,
        "optimizer.params.betas": [args.adam_beta1, args.adam_beta2],
        "optimizer.params.eps": args.adam_epsilon,
        "optimizer.params.weight_decay": args.weight_decay,
        "scheduler.params.warmup_min_lr": 0.0,  # the value that the Trainer uses; there is no argument for it
        "scheduler.params.warmup_max_lr": args.learning_rate,
        "fp16.enabled": bool(args.fp16 or getattr(args, "fp16_full_eval", False)),
        "bf16.enabled": bool(args.bf16 or getattr(args, "bf16_full_eval", False)),
    }
    if num_steps is not None:
        filled["scheduler.params.total_num_steps"] = num_steps
        if hasattr(args, "get_warmup_steps"):
            filled["scheduler.params.warmup_num_steps"] = max(1, args.get_warmup_steps(num_steps))
    return filled
