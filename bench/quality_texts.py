"""What quality is measured on: documents read in turns, and chats that ask for facts in turns.

None of it is a calibration text; the names, places and wording of the facts are other ones too.
"""

import calendar
import hashlib
import inspect
import mimetypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

from bench.documents import SOURCES
from tangram_sglang.calib.generated import Dice

MORE: dict[tuple[str, str], Callable[[], str]] = {
    ("python topic compound", "manual"): lambda: topics["compound"],
    ("python topic specialnames", "manual"): lambda: topics["specialnames"],
    ("python calendar.py", "code"): lambda: inspect.getsource(calendar),
    ("python mimetypes.py", "table"): lambda: inspect.getsource(mimetypes._default_mime_types),
}
ALL = {**SOURCES, **MORE}

# a turn is read up to its answer, of which each token is a query
FIRST_ANSWER, TURN, ANSWER, TURNS = 1536, 768, 256, 4

PEOPLE = ("Wanda", "Ulrich", "Beatriz", "Callum", "Yusuf", "Freya", "Gideon", "Hanneke")
FACTS = "The locker number of {who} is {code}."
FACTS_PER_CHAT, QUESTIONS, FILLER = 8, 4, 1700


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens of one request and what is asked of its hidden states.

    Attributes:
        name, kind: where it comes from.
        task: ``kl`` or ``facts``.
        ids: token ids.
        turns: for each turn the queries [begin, end).
        answers: for ``facts``, the tokens that these queries should predict.
    """

    name: str
    kind: str
    task: str
    ids: tuple[int, ...]
    turns: tuple[tuple[int, int], ...]
    answers: tuple[tuple[int, ...], ...] = ()

    @property
    def digest(self) -> str:
        return hashlib.sha256(",".join(map(str, self.ids)).encode()).hexdigest()[:12]


def documents(tokenizer, count: int) -> list[Text]:
    """The first ``count`` documents, each as many turns as it is long enough for."""
    found = []
    for (name, kind), read in list(ALL.items())[:count]:
        longest = FIRST_ANSWER + (TURNS - 1) * TURN + ANSWER
        ids = tokenizer(read()[: 8 * longest]).input_ids[:longest]
        turns = [
            (begin, begin + ANSWER) for begin in range(FIRST_ANSWER, len(ids) - ANSWER + 1, TURN)
        ]
        if len(turns) < 2:
            raise ValueError(f"{name} has {len(ids)} tokens, too few for a second turn")
        found.append(Text(name, kind, "kl", tuple(ids[: turns[-1][1]]), tuple(turns)))
    return found


def fact_chats(tokenizer, count: int) -> list[Text]:
    """Chats about a document in which facts are hidden, each twice; the history is the right one."""
    sources = list(ALL.items())
    chats = []
    for i in range(count):
        (name, _), read = sources[i % len(sources)]
        chats.append(_fact_chat(tokenizer, name, read(), seed=100 + i))
    return chats


def _fact_chat(tokenizer, name: str, document: str, seed: int) -> Text:
    dice = Dice(seed)
    people = dice.shuffled(PEOPLE)[:FACTS_PER_CHAT]
    codes = {who: str(1000 + dice.below(9000)) for who in people}
    facts = [FACTS.format(who=who, code=code) for who, code in codes.items()]
    ids = tokenizer(document[: 8 * FILLER]).input_ids[:FILLER]
    paragraphs = _paragraphs(tokenizer.decode(ids))
    text = "\n\n".join(_strewn(dice, paragraphs, [*facts, *facts]))
    messages, pieces, done = [], [], ""
    for number, who in enumerate(dice.shuffled(people)[:QUESTIONS]):
        question = f"What is the locker number of {who}?"
        if number == 0:
            question = f"Read this and answer questions about it.\n\n{text}\n\n{question}"
        messages.append({"role": "user", "content": question})
        said = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        before, code = FACTS.format(who=who, code="\0").split("\0")[0].rstrip(), f" {codes[who]}"
        pieces += [(said.removeprefix(done) + before, False), (code, True)]
        messages.append({"role": "assistant", "content": f"{before}{code}."})
        done = f"{said}{before}{code}"
    return _joined(tokenizer, f"facts in {name}, {seed}", pieces)


def _joined(tokenizer, name: str, pieces: Sequence[tuple[str, bool]]) -> Text:
    """One text of pieces that are tokenised one by one, so that answers are whole tokens."""
    ids: list[int] = []
    turns, answers = [], []
    for text, is_answer in pieces:
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        if is_answer:
            # the query before a token predicts it
            turns.append((len(ids) - 1, len(ids) + len(tokens) - 1))
            answers.append(tuple(tokens))
        ids += tokens
    return Text(name, "facts", "facts", tuple(ids), tuple(turns), tuple(answers))


def _paragraphs(text: str) -> list[str]:
    """Pieces of some lines each: code and tables have no paragraphs."""
    lines = text.split("\n")
    return ["\n".join(lines[i : i + 4]) for i in range(0, len(lines), 4)]


def _strewn(dice: Dice, paragraphs: list[str], facts: list[str]) -> list[str]:
    out = list(paragraphs)
    for fact in facts:
        out.insert(dice.below(len(out) + 1), fact)
    return out
