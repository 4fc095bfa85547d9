"""A tokenizer of one word a token, for models with made-up weights.

SGLang's client counts a token only when its text is not empty, and its conversations go through
text: here every token has a text, and text and tokens say the same. The tokenizer of another model
would show nothing for tokens beyond its own vocabulary, and read back others than were written.
"""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
# no other words: a message of n words is a prompt of n tokens
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Token ``i`` is the word ``w<i>``; the first four are special."""
    words = [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), vocabulary))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )


def save_word_tokenizer(vocabulary: int, folder: Path) -> None:
    """Write the tokenizer's files into a model folder."""
    word_tokenizer(vocabulary).save_pretrained(folder)
