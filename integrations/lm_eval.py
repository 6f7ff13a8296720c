# SPDX-License-Identifier: Apache-2.0
"""lm-eval (EleutherAI's lm-evaluation-harness) on packed models.

results = lm_eval.simple_evaluate(as_lm(model, tokenizer, batch_size=8), tasks=["piqa"], num_fewshot=0)
"""


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
        raise ImportError(
            f"lm-eval could not be imported ({error}). Install it: pip install hf-mxfp4[eval]"
        ) from error
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, backend="causal", **options)
