r"""Calls as GLM 4.5, 4.6 and 4.7 write them; the last without newlines.

content\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>
"""

from __future__ import annotations

from swell.cluster.text.parsers.hermes import CLOSE, OPEN
from swell.cluster.text.parsers.markup import Markup, MarkupParser

KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


class GlmParser(MarkupParser):
    markers = (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)
    start_markers = (OPEN, "\n" + OPEN)
    section = OPEN
    calls_share_section = False
    markup = Markup(
        name_end="",
        key_begin=KEY,
        key_ends=(KEY_END,),
        value_begin=VALUE,
        value_end=VALUE_END,
        call_ends=(CLOSE,),
    )
