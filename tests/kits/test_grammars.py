"""SGLang's grammar kits (xgrammar), on a random model: only the grammar makes its answers valid."""

import json

import pytest

from tests.kits.case import OnThird, OnWhole
from tests.kits.wheel import EBNFConstrainedMixin, JSONConstrainedMixin, RegexConstrainedMixin

pytestmark = pytest.mark.server


class Grammars(JSONConstrainedMixin, RegexConstrainedMixin, EBNFConstrainedMixin):
    # the kit's schema with ends to its strings and numbers: a random model finds none by itself
    json_schema = json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[a-z]{1,9}$"},
                "population": {"type": "integer", "minimum": 0, "maximum": 9999},
            },
            "required": ["name", "population"],
            "additionalProperties": False,
        }
    )
    # letters without end as well, and these have no setting
    test_regex_generate_complex_json = None
    test_regex_generate_custom_log_format = None
    test_ebnf_generate_complex_json = None
    test_ebnf_generate_custom_log_format = None


class TestGrammarsWhole(Grammars, OnWhole):
    pass


class TestGrammarsThird(Grammars, OnThird):
    pass
