r"""Calls of GLM 4.5, 4.6 and 4.7; the last without newlines.

content\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>
"""

from __future__ import annotations

from swell.cluster.text.parsers.formats.hermes import CLOSE, OPEN
from swell.cluster.text.parsers.notations.markup import MarkupParser
from swell.cluster.text.parsers.notations.markup_grammar import Markup

GLM_KEY, GLM_KEY_END = "<arg_key>", "</arg_key>"
GLM_VALUE, GLM_VALUE_END = "<arg_value>", "</arg_value>"


class GlmParser(MarkupParser):
    markers = (OPEN, CLOSE, GLM_KEY, GLM_KEY_END, GLM_VALUE, GLM_VALUE_END)
    start_markers = (OPEN, "\n" + OPEN)
    section = OPEN
    calls_share_section = False
    markup = Markup(
        name_end="",
        key_begin=GLM_KEY,
        key_ends=(GLM_KEY_END,),
        value_begin=GLM_VALUE,
        value_end=GLM_VALUE_END,
        call_ends=(CLOSE,),
    )
