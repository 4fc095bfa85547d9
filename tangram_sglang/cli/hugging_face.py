"""What a command reads of the model that ``--model`` names, a folder or a hub name."""

from typing import Any

from tangram_sglang.errors import TangramError


def load_config(model: str) -> tuple[Any, Any]:
    """Tokenizer and text config; TangramError where they cannot be loaded."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(model).get_text_config()
        return AutoTokenizer.from_pretrained(model), config
    except (OSError, ValueError) as error:
        raise not_loaded(model, error) from None


def not_loaded(model: str, error: Exception) -> TangramError:
    """For ``raise``: the first line of why."""
    reason = str(error).splitlines()[0]
    return TangramError(
        f"--model {model} cannot be loaded: {reason}; expected a Hugging Face model folder or hub name"
    )
