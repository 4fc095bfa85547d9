"""Further calibration texts that are generated: letters, minutes, SQL, source code.

They stand behind the others in the corpus, so plans of up to 67 windows are made from the same texts
as before there were these.
"""

from tangram_sglang.calib.generated import CITIES, GOODS, NAMES, Dice

OPENINGS = (
    "Thank you for your letter of the {day}th, which reached me only yesterday.",
    "I am writing about the {item} that we spoke of when you were in {city}.",
    "It is some weeks since I last wrote, and a good deal has happened here in {city}.",
    "You asked me to tell you how the move to {city} went, and I will try to be honest.",
)
MIDDLES = (
    "{name} has taken over the shop, and says that the {item} sells better than it ever did under me.",
    "We had the roof mended before the rain came, at a price of {price} crowns, which was less than "
    "the first man asked and more than I had put aside.",
    "The train stood for two hours outside {city}, so that {name} and I had time to finish the "
    "{item} business between us, and I believe it is settled for good.",
    "I have not heard from {name} since the spring; if you do, say that the {item} is still here and "
    "that nobody minds the delay.",
    "On the {day}th there was a small fair by the river, where I saw {name} haggle for a {item} as if "
    "it were a horse.",
    "My sister thinks we ought to sell, my brother thinks we ought to wait, and I think only that "
    "{price} crowns would be welcome by the {day}th.",
    "What you say of {name} surprised me less than you expected, because the same thing was told me "
    "in {city} a year ago, by somebody who had no reason to invent it.",
)
CLOSINGS = (
    "Write soon, and give my regards to {name}.",
    "I hope to be in {city} by the {day}th, and will bring the {item} with me.",
    "Forgive the haste of this; the post goes in an hour.",
)
POINTS = (
    "{name} reported that the order of {count} {item}s for {city} had left on the {day}th and would "
    "be invoiced at {price} each.",
    "{name} asked whether the supplier in {city} could be trusted with the {item}; {other} thought so, "
    "given that {count} pieces had come back out of all that were sold.",
    "It was agreed that {name} would write to {city} before the {day}th and that {other} would look "
    "at the figures once more.",
    "The price of the {item} was discussed at length. {name} preferred {price}, {other} a little "
    "less; no decision was taken.",
    "{other} objected to the minutes of the last meeting, which gave {count} where {price} was meant. "
    "{name} will correct them.",
)
FIELDS = ("code", "owner", "city", "amount", "batch", "rank", "note", "origin", "weight", "status")


def letters(seed: int, count: int) -> str:
    """Letters of a few paragraphs each."""
    dice, out = Dice(seed), []
    for _ in range(count):
        lines = [f"{dice.one(CITIES)}, the {1 + dice.below(28)}th\n\nDear {dice.one(NAMES)},"]
        lines.append(_fill(dice, dice.one(OPENINGS)))
        picked = dice.shuffled(MIDDLES)
        for first in (0, 3):
            lines.append(" ".join(_fill(dice, x) for x in picked[first : first + 3]))
        lines.append(_fill(dice, dice.one(CLOSINGS)))
        lines.append(f"Yours,\n{dice.one(NAMES)}")
        out.append("\n\n".join(lines))
    return "\n\n\n".join(out) + "\n"


def minutes(seed: int, meetings: int) -> str:
    """Minutes of meetings with numbered points."""
    dice, out = Dice(seed), []
    for i in range(meetings):
        present = ", ".join(dice.shuffled(NAMES)[:5])
        lines = [f"Minutes of meeting {i + 1}. Present: {present}."]
        for number in range(1, 8):
            lines.append(f"{number}. {_fill(dice, dice.one(POINTS))}")
        out.append("\n".join(lines))
    return "\n\n".join(out) + "\n"


def sql_script(seed: int, tables: int) -> str:
    """Tables, rows and queries in SQL."""
    dice, out = Dice(seed), []
    for i in range(tables):
        table, fields = f"ledger_{i}", dice.shuffled(FIELDS)[:5]
        columns = ",\n".join(f"    {x} {dice.one(('TEXT', 'INTEGER', 'REAL'))}" for x in fields)
        out.append(f"CREATE TABLE {table} (\n    id INTEGER PRIMARY KEY,\n{columns}\n);")
        for row in range(8):
            values = ", ".join(
                dice.one((f"'{dice.one(CITIES)}'", str(dice.below(900)), f"{dice.below(99)}.5"))
                for _ in fields
            )
            out.append(f"INSERT INTO {table} VALUES ({row}, {values});")
        out.append(
            f"SELECT {fields[0]}, COUNT(*) AS n\nFROM {table}\nWHERE {fields[1]} IS NOT NULL\n"
            f"GROUP BY {fields[0]}\nHAVING n > {dice.below(5)}\nORDER BY n DESC;\n"
        )
    return "\n".join(out) + "\n"


def record_classes(seed: int, classes: int) -> str:
    """Python classes that read, check and add up records."""
    dice, out = Dice(seed), ['"""Records of the warehouse, generated."""\n\nimport csv\n']
    for i in range(classes):
        a, b, c = dice.shuffled(FIELDS)[:3]
        name = f"{dice.one(CITIES)}{c.capitalize()}{i}"
        limit = 10 * (1 + dice.below(90))
        out.append(
            f"class {name}:\n"
            f'    """A {c} with its {a} and {b}."""\n\n'
            f"    LIMIT = {limit}\n\n"
            f"    def __init__(self, {a}, {b}, {c}=None):\n"
            f"        if {c} is not None and len({c}) > self.LIMIT:\n"
            f'            raise ValueError(f"{c} has {{len({c})}} entries, at most {limit} fit")\n'
            f"        self.{a} = {a}\n        self.{b} = {b}\n        self.{c} = {c} or []\n\n"
            f"    @classmethod\n    def read(cls, path):\n"
            f"        with open(path, newline='') as file:\n"
            f"            rows = list(csv.DictReader(file))\n"
            f"        return [cls(row['{a}'], row['{b}']) for row in rows]\n\n"
            f"    def total_{b}(self, factor={1 + dice.below(9)}):\n"
            f"        return factor * sum(float(x.{b}) for x in self.{c})\n\n"
        )
    return "\n".join(out)


def _fill(dice: Dice, sentence: str) -> str:
    return sentence.format(
        name=dice.one(NAMES),
        other=dice.one(NAMES),
        city=dice.one(CITIES),
        item=dice.one(GOODS),
        day=4 + dice.below(16),
        price=100 + dice.below(4000),
        count=2 + dice.below(300),
    )
