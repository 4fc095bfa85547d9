"""The demo's conversations: an SGLang frontend program, and chats of the OpenAI client.

All are about one document, which is in their first message. They know a server's URL and nothing of
the attention backend behind it.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# as long as one answer may take on a machine that is busy with other work
TURN_TIMEOUT_S = 600.0
SYSTEM = "You are a helpful assistant. Answer in one or two sentences."


@dataclass(frozen=True, slots=True)
class Answer:
    """One turn as the client saw it."""

    question: str
    text: str
    prompt_tokens: int
    cached_tokens: int
    latency_s: float


def frontend_program(
    url: str, document: str, questions: Sequence[str], max_tokens: int
) -> list[Answer]:
    """Runs all questions as one SGLang frontend program; its turns are separate requests."""
    import sglang as sgl

    @sgl.function
    def ask_about(s, document, questions):
        s += sgl.system(SYSTEM)
        for turn, question in enumerate(questions):
            s += sgl.user(f"{document}\n\n{question}" if turn == 0 else question)
            s += sgl.assistant(sgl.gen(f"answer{turn}", max_tokens=max_tokens, temperature=0))

    # the model's folder may have any name, so its chat format is named here
    endpoint = sgl.RuntimeEndpoint(url, chat_template_name="chatml")
    state = ask_about.run(document, questions, backend=endpoint)
    return [_program_answer(state, f"answer{turn}", q) for turn, q in enumerate(questions)]


def _program_answer(state, name: str, question: str) -> Answer:
    try:
        text = state[name]
    except KeyError:
        # state.error() is no help here: it can wait for ever on a program that has failed
        raise RuntimeError(
            "the frontend program got no answer; SGLang's warning above says why"
        ) from None
    meta = state.get_meta_info(name)
    return Answer(question, text, meta["prompt_tokens"], meta["cached_tokens"], meta["e2e_latency"])


def openai_chat(
    url: str, document: str, questions: Sequence[str], max_tokens: int
) -> Iterator[Answer]:
    """Yields each turn of a chat in which every answer becomes part of the next prompt."""
    from openai import OpenAI

    # no retries: a request that runs twice would be counted twice
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TURN_TIMEOUT_S)
    model = client.models.list().data[0].id
    messages = [{"role": "system", "content": SYSTEM}]
    for turn, question in enumerate(questions):
        content = f"{document}\n\n{question}" if turn == 0 else question
        messages.append({"role": "user", "content": content})
        start = time.monotonic()
        reply = client.chat.completions.create(
            model=model, messages=messages, temperature=0, max_tokens=max_tokens
        )
        latency_s = time.monotonic() - start
        text = reply.choices[0].message.content
        messages.append({"role": "assistant", "content": text})
        details = reply.usage.prompt_tokens_details
        cached = details.cached_tokens if details else 0
        yield Answer(question, text, reply.usage.prompt_tokens, cached, latency_s)
