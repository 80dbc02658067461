"""Log probabilities as the API reports them: exact bytes, true offsets, finite numbers."""

from __future__ import annotations

import json
import math
import random
from bisect import bisect_right
from itertools import accumulate
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.cluster.api.answers.logprobs import (
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs_body,
)
from swell.cluster.client.requests.output_processor import OutputProcessor
from swell.cluster.client.requests.outputs import LogprobTable, RequestOutput, RequestOutputKind
from swell.cluster.text.params.sampling_params import SamplingParams
from swell.cluster.text.tokens.detokenizer import Detokenizer
from swell.cluster.text.tokens.token_texts import TokenTexts
from swell.engine.wire import EngineCoreOutput, FinishReason
from swell.worker.sampler_wire import PromptLogprobs, TokenLogprobs
from tests.cluster.text import tokenizers_for_tests as made
from tests.support.core_requests import core_request, outputs_after

KINDS = {**made.EXACT, **made.WINDOWED}
DETOKENIZERS = {name: Detokenizer(make()) for name, make in KINDS.items()}
TEXTS = {name: TokenTexts(shared) for name, shared in DETOKENIZERS.items()}
BYTE_LEVEL = made.byte_level()
VOCAB = BYTE_LEVEL.get_vocab_size()
EMOJI = "emoji 😀😃🎉 family 👨‍👩‍👧 flag 🇩🇪"


# ---------------------------------------------------------------- texts of tokens


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, VOCAB + 2), max_size=40))
def test_bytes_of_byte_level_tokens_make_up_the_text(ids: list[int]) -> None:
    whole = b"".join(TEXTS["byte_level"][i] for i in ids)
    assert whole.decode(errors="replace") == BYTE_LEVEL.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", ["byte_level", "llama2", "gemma", "metaspace", "words"])
@pytest.mark.parametrize("line", sorted(set(made.CORPUS)))
def test_token_bytes_of_an_encoded_text_join_to_that_text(name: str, line: str) -> None:
    """The bytes of the tokens join to the text, except for the leading space that some decoders
    drop."""
    tokenizer = KINDS[name]()
    ids = tokenizer.encode(line).ids
    whole = b"".join(TEXTS[name][i] for i in ids).decode()
    assert whole.strip(" ") == tokenizer.decode(ids, skip_special_tokens=False).strip(" ")


def test_a_part_of_a_character_has_its_own_bytes_and_shows_as_replaced() -> None:
    ids = BYTE_LEVEL.encode("👩").ids
    assert len(ids) > 1
    texts = TEXTS["byte_level"]
    assert b"".join(texts[i] for i in ids) == "👩".encode()
    assert {texts.text(i) for i in ids} == {"\ufffd"}


@pytest.mark.parametrize("name", sorted(made.EXACT))
def test_special_tokens_have_text_and_unknown_ids_have_none(name: str) -> None:
    tokenizer = KINDS[name]()
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        assert TEXTS[name].text(token_id).strip() == token.content
    assert TEXTS[name][tokenizer.get_vocab_size() + 5] == b""


def test_without_a_tokenizer_there_is_no_text() -> None:
    texts = TokenTexts(Detokenizer(None))
    assert (texts[5], texts.text(5), texts.offsets([5, 6]).offsets) == (b"", "", [0, 0])


# ---------------------------------------------------------------- tables


ROWS = st.lists(
    st.tuples(
        st.integers(0, VOCAB - 1),
        st.floats(-30, 0),
        st.lists(st.tuples(st.integers(0, VOCAB - 1), st.floats(-30, 0)), max_size=4),
    ),
    max_size=8,
)


def table_of(rows: list[tuple[int, float, list[tuple[int, float]]]]) -> LogprobTable:
    table = LogprobTable(TEXTS["byte_level"])
    for place, (token_id, logprob, best) in enumerate(rows):
        ids, values = [i for i, _ in best], [value for _, value in best]
        table.append(TokenLogprobs([token_id, *ids], [logprob, *values], place + 1), 3 * place)
    return table


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(0, 8), st.integers(0, 8))
def test_a_table_is_cut_and_joined_like_a_list(rows: Any, first: int, second: int) -> None:
    table = table_of(rows)
    low, high = sorted((first, second))
    assert list(table[low:high]) == list(table)[low:high]
    joined = table[:low]
    joined.extend(table[low:])
    assert joined == table
    assert [next(iter(position or {})) for position in table] == [row[0] for row in rows]


def test_the_actual_token_comes_first_with_its_own_rank() -> None:
    """This holds even if another token is as likely and was listed first."""
    table = LogprobTable(TEXTS["byte_level"], [[5, 6, 5]], [[-1.0, -1.0, -1.0]], [1], [0])
    (position,) = table
    assert position is not None
    assert [(i, entry.rank) for i, entry in position.items()] == [(5, 1), (6, 1)]


# ---------------------------------------------------------------- the API's shapes


def answered(
    prompt: list[int], answer: list[int], kind: RequestOutputKind, **fields: Any
) -> list[RequestOutput]:
    """Returns the engine outputs for `prompt` and `answer`, token by token. The last one finishes
    the answer."""
    params = SamplingParams(logprobs=2, prompt_logprobs=2, **fields)
    out = OutputProcessor(DETOKENIZERS["byte_level"])
    request = core_request(params, prompt_token_ids=prompt)
    out.add_request(request, params, kind=kind)

    def of(token_id: int) -> tuple[list[int], list[float]]:
        return [token_id, token_id, (token_id + 1) % VOCAB], [-0.5, -0.5, -2.0 - token_id]

    ids, values = zip(*map(of, prompt[1:]), strict=True) if prompt[1:] else ((), ())
    extras: list[Any] = [PromptLogprobs(1, list(ids), list(values), [1] * len(ids))]
    given_out = []
    for place, token_id in enumerate(answer):
        extras.append(TokenLogprobs(*of(token_id), 1))
        reason = FinishReason.LENGTH if place == len(answer) - 1 else None
        output = EngineCoreOutput(request.request_id, [token_id], reason, extras=extras)
        given_out += outputs_after(out, [output])
        extras = []
    return given_out


def logprobs_of(output: RequestOutput) -> LogprobTable:
    table = output.outputs[0].logprobs
    assert table is not None
    return table


def places(text: str, ids: list[int]) -> list[int]:
    """Returns, for each token, the number of characters that end before its first byte."""
    sizes = [len(TEXTS["byte_level"][i]) for i in ids]
    ends = list(accumulate(len(char.encode()) for char in text))
    assert sum(sizes) == ends[-1]
    return [bisect_right(ends, sum(sizes[:place])) for place in range(len(ids))]


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
@pytest.mark.parametrize("prompt", ["the quick ", EMOJI])
@pytest.mark.parametrize("answer", sorted(set(made.CORPUS)))
@pytest.mark.parametrize("echo", [False, True])
def test_a_completions_offsets_point_into_its_text(
    answer: str, prompt: str, echo: bool, kind: RequestOutputKind
) -> None:
    prompt_ids, ids = BYTE_LEVEL.encode(prompt).ids, BYTE_LEVEL.encode(answer).ids
    parts = []
    for output in answered(prompt_ids, ids, kind):
        first = echo and output.prompt_logprobs is not None
        part = completion_logprobs(
            logprobs_of(output),
            2,
            echo=output.prompt_logprobs if first else None,
            echoed_chars=len(prompt) if echo else 0,
        )
        parts.append(part)
    text, all_ids = (prompt + answer, prompt_ids + ids) if echo else (answer, ids)
    tokens = [token for part in parts for token in part.tokens]
    offsets = [offset for part in parts for offset in part.text_offset]
    assert tokens == [TEXTS["byte_level"].name(i) for i in all_ids]
    assert offsets == places(text, all_ids)
    values = [value for part in parts for value in part.token_logprobs]
    assert values == [None if echo and i == 0 else -0.5 for i in range(len(all_ids))]
    tops = [top for part in parts for top in part.top_logprobs]
    assert (tops[0] is None) == echo
    for token, top in zip(tokens[1:], tops[1:], strict=True):
        assert top is not None and top[token] == -0.5 and len(top) <= 2


def test_special_tokens_have_an_offset_but_no_length() -> None:
    end = BYTE_LEVEL.token_to_id("<|im_end|>")
    ids = [end, *BYTE_LEVEL.encode("fox").ids, end]
    (output,) = answered(ids, ids, RequestOutputKind.FINAL_ONLY)
    part = completion_logprobs(logprobs_of(output), 0, echo=output.prompt_logprobs, echoed_chars=3)
    assert output.outputs[0].text == "fox"
    half = len(ids)
    assert part.tokens == [*part.tokens[:half]] * 2
    assert part.tokens[0] == part.tokens[-1] == "<|im_end|>"
    assert part.text_offset[:2] == [0, 0] and part.text_offset[half - 1] == 3
    assert part.text_offset[half:] == [offset + 3 for offset in part.text_offset[:half]]


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(0, 5))
def test_a_chats_tokens_have_exact_bytes_and_their_top_alternatives(rows: Any, top: int) -> None:
    body = json.loads(msgspec.json.encode(chat_logprobs(table_of(rows), top)))
    assert body["refusal"] is None
    texts = TEXTS["byte_level"]

    def shape(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": texts.text(token_id),
            "logprob": logprob,
            "bytes": list(texts[token_id]),
        }

    assert body["content"] == [
        {**shape(token_id, logprob), "top_logprobs": [shape(*one) for one in best[:top]]}
        for token_id, logprob, best in rows
    ]


@pytest.mark.parametrize("logprob", [-math.inf, math.nan, -1e30])
def test_json_holds_finite_numbers(logprob: float) -> None:
    table = table_of([(5, logprob, [(6, logprob)])])
    for body in (
        completion_logprobs(table, 1),
        chat_logprobs(table, 1),
        prompt_logprobs_body(table),
    ):
        text = msgspec.json.encode(body).decode()
        assert text.count("-9999.0") >= 2
        assert "null" not in text.replace('"refusal":null', "") and "inf" not in text.lower()


def test_parts_of_a_character_are_listed_by_their_bytes() -> None:
    first, second = BYTE_LEVEL.encode("👩").ids[:2]
    part = completion_logprobs(table_of([(first, -3.0, [(second, -0.1)])]), 1)
    names = [
        "bytes:" + "".join(f"\\x{byte:02x}" for byte in TEXTS["byte_level"][i])
        for i in (first, second)
    ]
    assert part.tokens == names[:1] and names[0].startswith("bytes:\\xf0")
    assert part.top_logprobs == [{names[0]: -3.0, names[1]: -0.1}]


def test_two_tokens_with_one_text_are_both_listed() -> None:
    """Two ids here have an empty text. The second one is listed under its id."""
    unknown = VOCAB + 7
    part = completion_logprobs(table_of([(unknown, -3.0, [(unknown + 1, -0.1)])]), 1)
    assert part.top_logprobs == [{"": -3.0, f"token_id:{unknown + 1}": -0.1}]


def is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("name", sorted(KINDS))
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_every_likely_token_of_a_completion_is_found(name: str, data: st.DataObject) -> None:
    """Each token has its own name, and its bytes can be read from that name."""
    texts, size = TEXTS[name], KINDS[name]().get_vocab_size()
    parts_first = sorted(range(size), key=lambda id: is_text(texts[id]))
    few = st.sampled_from(parts_first[:8]) | st.integers(0, size + 2)
    ids = data.draw(st.lists(few, min_size=1, max_size=7))
    logprobs = [-float(id) for id in ids]
    table = LogprobTable(texts, [ids], [logprobs], [1], [0])
    (listed,) = completion_logprobs(table, len(ids) - 1).top_logprobs
    assert listed is not None
    assert sorted(listed.values()) == sorted(set(logprobs))
    for told, logprob in listed.items():
        id = round(-logprob)
        if told.startswith("bytes:\\x"):
            assert bytes.fromhex(told.removeprefix("bytes:").replace("\\x", "")) == texts[id]
        elif told != f"token_id:{id}":
            assert told.encode() == texts[id]


def test_prompt_logprobs_are_keyed_by_token_id() -> None:
    (output,) = answered([5, 6, 7], [8], RequestOutputKind.FINAL_ONLY)
    assert output.prompt_logprobs is not None
    body = json.loads(msgspec.json.encode(prompt_logprobs_body(output.prompt_logprobs)))
    texts = TEXTS["byte_level"]
    assert body == [
        None,
        *(
            {
                str(i): {"logprob": -0.5, "rank": 1, "decoded_token": texts.text(i)},
                str(i + 1): {"logprob": -2.0 - i, "rank": 2, "decoded_token": texts.text(i + 1)},
            }
            for i in (6, 7)
        ),
    ]


@pytest.mark.parametrize("name", ["llama2", "gemma"])
def test_offsets_never_decrease(name: str) -> None:
    """Each byte that is not part of a valid character counts as one replacement character."""
    tokenizer, texts, draw = KINDS[name](), TEXTS[name], random.Random(0)
    run = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in (0x51, 0x87, 0xE4)]
    word = tokenizer.token_to_id("on")
    assert texts.offsets([word, *run, word]).offsets == [0, 2, 3, 4, 5]
    for _ in range(300):
        ids = [draw.randrange(3, 275) for _ in range(draw.randint(1, 12))]
        offsets = texts.offsets(ids).offsets
        assert offsets == sorted(offsets)
        assert offsets[-1] <= len(tokenizer.decode(ids))


@pytest.mark.parametrize("skip", [False, True])
def test_a_token_that_the_tokenizer_added_has_no_length_in_the_prompt(skip: bool) -> None:
    for sent in ("the</s>on", "<s>the", "the on"):
        ids = made.llama2().encode(sent).ids
        offsets = TEXTS["llama2"].offsets(ids, skip, sent).offsets
        tokens = [TEXTS["llama2"].text(token_id).strip() for token_id in ids]
        last = max(place for place, token in enumerate(tokens) if token in ("on", "the", "he", "n"))
        assert sent[offsets[last] :].strip().startswith(tokens[last])
        assert offsets[:2] == [0, len("<s>") if sent.startswith("<s>") else 0]
