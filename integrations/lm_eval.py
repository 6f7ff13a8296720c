# SPDX-License-Identifier: Apache-2.0
"""lm-eval (EleutherAI's lm-evaluation-harness) on packed models.

results = lm_eval.simple_evaluate(as_lm(model, tokenizer, batch_size=8), tasks=["piqa"], num_fewshot=0)
"""

import math
from pathlib import Path

_PREFERRED = ("acc_norm", "acc", "exact_match")  # metrics


def as_lm(model, tokenizer, batch_size: int | str = 1, **options):
    """A loaded causal LM, packed or not, as lm-eval takes it.

    Args:
        model (`PreTrainedModel`): stays where it is, on its device and in its dtypes.
        tokenizer (`PreTrainedTokenizerBase`): the model's tokenizer.
        batch_size (`int` or `str`, *optional*, defaults to 1): rows of a forward pass, or `"auto"`.
        options: further arguments of `HFLM`, such as `max_length` or `add_bos_token`.

    Returns:
        `lm_eval.models.huggingface.HFLM`.

    Raises:
        ImportError: if lm-eval is not installed.
    """
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise _missing(error) from error
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, backend="causal", **options)


def find_tasks(names: list[str]):
    """lm-eval's task manager, and the tasks behind names.

    Args:
        names (`list[str]`): tasks, groups, or folders of task YAMLs.

    Returns:
        `(lm_eval.tasks.TaskManager, dict)`: the tasks by name, with their data read.

    Raises:
        ValueError: for unknown names.
        ImportError: if lm-eval is not installed.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise _missing(error) from error
    folders = [name for name in names if Path(name).is_dir()]
    found = [name for name in names if name not in folders]
    if folders:
        found += TaskManager(include_path=folders, include_defaults=False).all_subtasks
    manager = TaskManager(include_path=folders or None, include_defaults=len(folders) < len(names))
    unknown = sorted(set(found) - set(manager.all_tasks))
    if unknown or not found:
        raise ValueError(
            f"lm-eval has no task {', '.join(unknown) or 'in ' + ', '.join(names)}; see lm-eval ls tasks."
        )
    return manager, manager.load(found)["tasks"]


def scores_of(lm, tasks: list[str], manager, limit: int | None = None) -> dict[str, dict]:
    """One score of each task.

    Args:
        lm (`HFLM`): of `as_lm`.
        tasks (`list[str]`), manager (`TaskManager`): of `find_tasks`.
        limit (`int`, *optional*): only so many questions of each task.

    Returns:
        `dict[str, dict]`: by task `{"metric", "mean", "error", "samples"}`: `acc_norm`, else `acc`, else what the task
        has; `error` is the standard error, left out where lm-eval gives none.
    """
    from lm_eval import simple_evaluate

    # Errors of means are exact; without any iterations lm-eval leaves them out, too.
    results = simple_evaluate(lm, tasks=tasks, task_manager=manager, limit=limit, bootstrap_iters=1000)
    found = {}
    for task in tasks:
        row = {name.partition(",")[0]: value for name, value in results["results"][task].items() if "," in name}
        values = {name: value for name, value in row.items() if not name.endswith("_stderr")}
        metric = next((name for name in _PREFERRED if name in values), next(iter(values)))
        error = row.get(f"{metric}_stderr")
        found[task] = {"metric": metric, "mean": float(values[metric])}
        found[task] |= {"error": error} if isinstance(error, float) and math.isfinite(error) else {}
        found[task]["samples"] = results["n-samples"][task]["effective"]
    return found


def _missing(error: ImportError) -> ImportError:
    return ImportError(f"lm-eval could not be imported ({error}). Install it: pip install hf-mxfp4[eval]")
