"""The joined pieces equal the tokenizer's own decoding of all ids."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.cluster.text.tokens import byte_level_detokenizer, piece_detokenizer
from swell.cluster.text.tokens.detokenizer import Detokenizer, TextStart
from swell.cluster.text.tokens.incremental_detokenizer import REPLACEMENT, WindowDetokenizer
from tests.cluster.text import tokenizers_for_tests as made
from tests.model_kinds import model_kind

LAWFUL = {name: make() for name, make in made.EXACT.items()}
LAWFUL |= {
    f"kind {name}": model_kind(name).tokenizer.backend_tokenizer
    for name in ("llama2", "mistral_v3", "phi3", "gemma", "llama3", "qwen3", "deepseek_r1")
}
TOKENIZERS = {**LAWFUL, **{name: make() for name, make in made.WINDOWED.items()}}
SHARED = {name: Detokenizer(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def incremental(shared: Detokenizer, ids: list[int], skip: bool) -> str:
    text = shared.start(skip)
    return "".join(map(text.push, ids)) + text.flush()


def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    """Draws ids from the whole vocabulary and a few beyond it, with extra byte tokens and special
    tokens."""
    tokenizer = TOKENIZERS[name]
    vocab = tokenizer.get_vocab()
    rare = [i for token, i in vocab.items() if token.startswith("<0x") or len(token) == 1]
    rare += list(tokenizer.get_added_tokens_decoder())
    one = st.one_of(st.integers(0, max(vocab.values()) + 3), st.sampled_from(sorted(rare)))
    return st.lists(one, max_size=60)


@pytest.mark.parametrize("name", sorted(LAWFUL))
@pytest.mark.parametrize("skip", [True, False])
def test_pieces_are_the_decoding_of_random_ids(name: str, skip: bool) -> None:
    @settings(max_examples=80, deadline=None)
    @given(ids_of(name))
    def check(ids: list[int]) -> None:
        decoded = LAWFUL[name].decode(ids, skip_special_tokens=skip)
        assert incremental(SHARED[name], ids, skip) == decoded

    check()


def continued(shared: Detokenizer, prompt: list[int], ids: list[int], skip: bool) -> str:
    text = shared.start(skip, TextStart.CONTINUATION, prompt)
    return "".join(map(text.push, ids)) + text.flush()


def is_special(name: str, token_id: int) -> bool:
    added = TOKENIZERS[name].get_added_tokens_decoder()
    return token_id in added and added[token_id].special


@pytest.mark.parametrize("name", sorted(LAWFUL))
@pytest.mark.parametrize("skip", [True, False])
def test_a_prompt_and_its_continuation_are_the_decoding_of_both(name: str, skip: bool) -> None:
    """One exception: bytes of the answer may make bytes of the prompt invalid after the prompt's
    text was shown."""

    @settings(max_examples=60, deadline=None)
    @given(ids_of(name), ids_of(name))
    def check(prompt: list[int], ids: list[int]) -> None:
        before = SHARED[name].prompt_text(prompt, skip)
        after = continued(SHARED[name], prompt, ids, skip)
        if all(is_special(name, token_id) for token_id in prompt):
            assert after == LAWFUL[name].decode(ids, skip_special_tokens=skip)
            return
        whole = LAWFUL[name].decode(prompt + ids, skip_special_tokens=skip)
        if whole.startswith(before):
            assert before + after == whole
        else:
            assert REPLACEMENT in whole and "<0xFF>" in LAWFUL[name].get_vocab()
        unfinished = LAWFUL[name].decode(prompt, skip_special_tokens=skip)
        assert unfinished.startswith(before) or unfinished.endswith(REPLACEMENT)

    check()


@pytest.mark.parametrize("name", sorted(SHARED))
@pytest.mark.parametrize("line", sorted(set(made.CORPUS)))
def test_a_text_may_be_cut_after_every_token(name: str, line: str) -> None:
    """The split may be within a character, or far into the text."""
    tokenizer, shared = TOKENIZERS[name], SHARED[name]
    for copies, step in ((1, 1), (9, 23)):
        ids = tokenizer.encode(" ".join([line] * copies)).ids
        whole = tokenizer.decode(ids)
        for cut in range(1, len(ids), step):
            if all(is_special(name, token_id) for token_id in ids[:cut]):
                continue
            before = shared.prompt_text(ids[:cut])
            assert before + continued(shared, ids[:cut], ids[cut:], True) == whole


def test_a_continuation_keeps_the_space_that_a_beginning_drops() -> None:
    tokenizer = made.llama2()
    prompt, word = tokenizer.encode("a the").ids, tokenizer.token_to_id("▁the")
    assert continued(SHARED["llama2"], prompt, [word], True) == " the"
    assert continued(SHARED["llama2"], [], [word], True) == "the"
    assert continued(SHARED["llama2"], [tokenizer.token_to_id("<s>")], [word], True) == "the"


@pytest.mark.parametrize("name", ["byte_level", "llama2", "gemma"])
@pytest.mark.parametrize("behind", [1, 2, 3])
def test_the_answer_finishes_the_character_that_the_prompt_began(name: str, behind: int) -> None:
    tokenizer, shared = LAWFUL[name], SHARED[name]
    vocab = tokenizer.get_vocab()
    if name == "byte_level":
        run = [vocab[char] for char in "ðŁĺĢ"]
    else:
        run = [vocab[f"<0x{byte:02X}>"] for byte in "😀".encode()]
    prompt = [*tokenizer.encode("a").ids, *run, *run[:behind]]
    assert shared.prompt_text(prompt) == "a😀"
    assert continued(shared, prompt, run[behind:] + run, True) == "😀😀"


@pytest.mark.parametrize("name", ["llama2", "metaspace"])
def test_verbatim_text_keeps_the_leading_space(name: str) -> None:
    tokenizer = LAWFUL[name]
    ids = [i for i in tokenizer.encode("the fox").ids if not is_special(name, i)]
    text = SHARED[name].start(True, TextStart.VERBATIM)
    assert "".join(map(text.push, ids)) + text.flush() == " the fox"


@pytest.mark.parametrize("name", sorted(SHARED))
def test_a_long_prompt_costs_no_more_than_its_end(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    shared = Detokenizer(tokenizer)
    pushed: list[int] = []
    kind = type(shared.start())
    original = kind.push

    def push(machine: object, token_id: int) -> str:
        pushed.append(token_id)
        return original(machine, token_id)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "push", push)
        shared.start(True, TextStart.CONTINUATION, tokenizer.encode(made.CORPUS[0]).ids * 200)
    assert 0 < len(pushed) <= piece_detokenizer.MAX_RUN_TOKENS


@pytest.mark.parametrize("name", sorted(SHARED))
@pytest.mark.parametrize("line", sorted(set(made.CORPUS)))
def test_pieces_are_the_decoding_of_real_text(name: str, line: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(line).ids
    assert incremental(SHARED[name], ids, True) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", sorted(LAWFUL))
def test_known_decoders_have_an_exact_incremental_decoder(name: str) -> None:
    assert not isinstance(SHARED[name].start(True), WindowDetokenizer)
    assert not isinstance(SHARED[name].start(False), WindowDetokenizer)


@pytest.mark.parametrize("name", ["byte_level", "llama2", "gemma"])
def test_every_prefix_shown_is_a_prefix_of_the_end(name: str) -> None:
    draw, vocab = random.Random(1), LAWFUL[name].get_vocab_size()
    for _ in range(100):
        ids = [draw.randrange(vocab) for _ in range(20)]
        whole = LAWFUL[name].decode(ids, skip_special_tokens=False)
        text, shown = SHARED[name].start(False), ""
        for token_id in ids:
            shown += text.push(token_id)
            assert whole.startswith(shown)


@pytest.mark.parametrize("tokens", [["▁▁", "a"], ["▁", "▁", "a"], ["</s>", "▁", "</s>", "▁"]])
@pytest.mark.parametrize("name", ["llama2", "gemma"])
def test_only_one_leading_space_is_lost(name: str, tokens: list[str]) -> None:
    tokenizer = LAWFUL[name]
    ids = [tokenizer.token_to_id(token) for token in tokens]
    assert incremental(SHARED[name], ids, True) == tokenizer.decode(ids)


def test_a_character_is_released_with_its_last_byte() -> None:
    tokenizer = made.byte_level()
    ids = [tokenizer.token_to_id(char) for char in "ðŁĺĢ"]
    text = SHARED["byte_level"].start()
    assert [text.push(token_id) for token_id in ids] == ["", "", "", "😀"]


def test_an_incomplete_character_is_released_before_the_next_token() -> None:
    vocab, text = made.byte_level().get_vocab(), SHARED["byte_level"].start()
    begun, letter = vocab["ð"], vocab["a"]
    shown = [text.push(token_id) for token_id in (letter, begun, letter, letter)]
    assert shown == ["a", "", REPLACEMENT + "a", "a"]
    assert text.push(begun) + text.flush() + text.push(letter) == REPLACEMENT + "a"


def test_one_bad_byte_spoils_its_run_but_not_the_text_before() -> None:
    vocab = made.gemma().get_vocab()
    run = [vocab[f"<0x{byte:02X}>"] for byte in "我".encode()]
    text = SHARED["gemma"].start()
    shown = [text.push(token_id) for token_id in [vocab["a"], *run, vocab["<0xFF>"], vocab["b"]]]
    assert shown == ["a", "", "", "", "", "\ufffd" * 4 + "b"]


def test_a_long_run_is_not_held_forever() -> None:
    vocab = made.gemma().get_vocab()
    run = [vocab[f"<0x{byte:02X}>"] for byte in "我".encode()] * 200
    text, held = SHARED["gemma"].start(), 0
    for count, token_id in enumerate(run, 1):
        held += len(text.push(token_id))
        assert count - 3 * held <= piece_detokenizer.MAX_RUN_TOKENS
    assert held + len(text.flush()) == 200


def test_a_rule_over_the_whole_text_falls_back_to_a_window() -> None:
    tokenizer = made.replaced_after_fusing()
    shared = Detokenizer(tokenizer)
    assert isinstance(shared.start(), WindowDetokenizer)
    ids = tokenizer.encode("the▁fox▁a").ids
    assert incremental(shared, ids, True) == tokenizer.decode(ids)


def test_an_incremental_decoder_that_disagrees_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_level_detokenizer, "to_bytes", lambda token: token.encode())
    assert isinstance(Detokenizer(made.byte_level()).start(), WindowDetokenizer)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 430), max_size=40))
def test_a_window_is_exact_if_its_text_was_final(ids: list[int]) -> None:
    """This holds even for invalid UTF-8, for which a window may be wrong in the middle."""
    tokenizer = made.byte_level()
    text, shown = (
        WindowDetokenizer(lambda part: tokenizer.decode(part, skip_special_tokens=True)),
        "",
    )
    for token_id in ids:
        shown += text.push(token_id)
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    if whole.startswith(shown):
        assert shown + text.flush() == whole


def test_tokens_without_text_keep_the_context_of_a_window() -> None:
    tokenizer = made.llama2()
    the, blank = tokenizer.token_to_id("▁the"), tokenizer.token_to_id("</s>")
    ids = [the, *[blank] * 50, the]
    text = WindowDetokenizer(lambda part: tokenizer.decode(part, skip_special_tokens=True))
    assert "".join(map(text.push, ids)) + text.flush() == "the the"


@pytest.mark.parametrize("name", ["byte_level", "llama2", "suffix_bpe"])
def test_cost_of_a_token_does_not_grow_with_the_answer(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(made.CORPUS[0]).ids * 300
    text = SHARED[name].start()

    def seconds(part: list[int]) -> float:
        start = time.thread_time()
        for token_id in part:
            text.push(token_id)
        return time.thread_time() - start

    third = len(ids) // 3
    early, _, late = seconds(ids[:third]), seconds(ids[third:-third]), seconds(ids[-third:])
    assert late < 4 * early + 0.01


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert incremental(Detokenizer(None), [1, 2, 3], True) == ""


def test_transformers_tokenizer_decodes_alike() -> None:
    tokenizer = made.chat_tokenizer()
    ids = tokenizer.encode("it's 12:45 , isn't it ? 我喜欢 😀")
    assert incremental(Detokenizer(tokenizer), ids, True) == tokenizer.decode(ids)
