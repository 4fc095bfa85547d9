"""Calibration texts that are generated: tables, logs, support chats, retrieval.

The same on every machine and Python version: only ``random()`` is drawn from, whose sequence for a
seed Python guarantees.
"""

import json
import random
from collections.abc import Sequence

Messages = tuple[tuple[str, str], ...]

NAMES = (
    *("Amara", "Bogdan", "Chiara", "Dmitri", "Esther", "Farid", "Greta", "Hiro", "Ines", "Jonas"),
    *("Kofi", "Lucia", "Mehmet", "Nadia", "Olga", "Pavel", "Quentin", "Rosa", "Sanjay", "Tereza"),
)
CITIES = (
    *("Aarhus", "Bergen", "Cadiz", "Dresden", "Edirne", "Florence", "Ghent", "Haifa", "Izmir"),
    *("Jaipur", "Kyoto", "Lima", "Malmo", "Nantes", "Oulu", "Porto", "Quito", "Riga", "Seville"),
)
GOODS = (
    *("desk lamp", "steel kettle", "wool blanket", "garden hose", "bicycle pump", "oak shelf"),
    *("wall clock", "rain jacket", "coffee grinder", "folding chair", "bread knife", "tool box"),
)
FAULTS = (
    ("arrived with a crack", "send it back free of charge or keep it at half the price"),
    ("has not arrived at all", "get a second one sent today or your money back"),
    ("is the wrong colour", "swap it in any of our shops or send it back with the label enclosed"),
    ("makes a rattling noise", "have it repaired, which takes about nine days, or exchanged"),
    ("lacks two of its screws", "have the screws by post tomorrow or pick them up in a shop"),
    ("was charged twice", "see the second charge reversed within three working days"),
)
SERVICES = ("gateway", "billing", "search", "mailer", "thumbnailer", "auth")
EVENTS = (
    ("INFO", "request served"),
    ("INFO", "cache refreshed"),
    ("WARN", "slow upstream, retrying"),
    ("ERROR", "connection reset by peer"),
    ("DEBUG", "lease renewed"),
)


class Dice:
    """A seeded source of choices."""

    def __init__(self, seed: int):
        self._random = random.Random(seed).random

    def below(self, n: int) -> int:
        return int(self._random() * n)

    def one(self, items: Sequence):
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence) -> list:
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in range(len(left))]


def markdown_table(rows: int, seed: int = 1) -> str:
    """Orders as a Markdown table with a running total."""
    dice, total = Dice(seed), 0
    lines = [
        "Orders of the third quarter, by date of dispatch.\n",
        "| order | customer | city | item | pieces | price each | sum | running total |",
        "|---|---|---|---|---:|---:|---:|---:|",
    ]
    for i in range(rows):
        pieces, price = 1 + dice.below(9), 250 + 5 * dice.below(1900)
        total += pieces * price
        money = " | ".join(f"{x / 100:.2f}" for x in (price, pieces * price, total))
        who = f"{dice.one(NAMES)} | {dice.one(CITIES)} | {dice.one(GOODS)}"
        lines.append(f"| Q3-{1000 + 7 * i} | {who} | {pieces} | {money} |")
    return "\n".join(lines) + "\n"


def measurements_csv(rows: int, seed: int = 2) -> str:
    """Hourly readings of weather stations as CSV."""
    dice = Dice(seed)
    lines = ["station,date,hour,temperature_c,humidity_pct,wind_m_s,rain_mm,quality"]
    for i in range(rows):
        day, hour = divmod(i, 24)
        values = (
            f"{dice.below(320) / 10 - 4:.1f},{35 + dice.below(65)},{dice.below(140) / 10:.1f},"
            f"{max(0, dice.below(60) - 45) / 10:.1f},{dice.one('AAAAB')}"
        )
        lines.append(f"{dice.one(CITIES).lower()},2024-03-{day + 1:02},{hour:02},{values}")
    return "\n".join(lines) + "\n"


def json_log(rows: int, seed: int = 3) -> str:
    """Log lines of a few services, one JSON object a line."""
    dice, clock, lines = Dice(seed), 1_700_000_000, []
    for _ in range(rows):
        clock += 1 + dice.below(40)
        level, event = dice.one(EVENTS)
        record = {
            "ts": clock,
            "level": level,
            "service": dice.one(SERVICES),
            "msg": event,
            "user": dice.one(NAMES).lower(),
            "ms": dice.below(900),
            "trace": f"{dice.below(1 << 32):08x}",
        }
        lines.append(json.dumps(record))
    return "\n".join(lines) + "\n"


def support_chat(cases: int, seed: int = 4) -> Messages:
    """One long chat in which an assistant handles order after order."""
    dice, messages = Dice(seed), [("system", "You are the support assistant of a household shop.")]
    for _ in range(cases):
        name, city, item = dice.one(NAMES), dice.one(CITIES), dice.one(GOODS)
        (fault, remedy), order = dice.one(FAULTS), 10_000 + dice.below(90_000)
        days = 2 + dice.below(12)
        messages += [
            ("user", f"Hello, this is {name} from {city}. The {item} of order {order} {fault}."),
            (
                "assistant",
                f"I'm sorry about that, {name}. I have order {order} here, sent to {city} {days} "
                f"days ago. For the {item} you can {remedy}. Which would you like?",
            ),
            ("user", dice.one(("The first, please.", "The second one.", "What is quicker?"))),
            (
                "assistant",
                f"Noted for order {order}: the {item} that {fault}. You'll get a confirmation by "
                f"e-mail within the hour, and nothing else to do until then.",
            ),
        ]
    return tuple(messages)


def retrieval(seed: int, filler: Sequence[str], facts: int) -> Messages:
    """Facts strewn over other text, then questions about them with their answers.

    Args:
        seed: chooses facts, their places and their order.
        filler: paragraphs to hide them in.
        facts: at most as many as there are names.
    """
    dice = Dice(seed)
    people = dice.shuffled(NAMES)[:facts]
    codes = {who: f"{dice.one(CITIES)}-{1000 + dice.below(9000)}" for who in people}
    hidden = [f"Remember this: the access code of {who} is {codes[who]}." for who in people]
    document = "\n\n".join(dice.shuffled([*filler, *hidden]))
    messages = [("user", f"Read this and answer my questions about it.\n\n{document}")]
    for who in dice.shuffled(people):
        if len(messages) > 1:
            messages.append(("user", f"And the code of {who}?"))
        else:
            messages[0] = ("user", f"{messages[0][1]}\n\nWhat is the access code of {who}?")
        messages.append(("assistant", f"The access code of {who} is {codes[who]}."))
    return tuple(messages)
