"""Routes of pooling models, over the whole path in one process."""

from __future__ import annotations

import base64
from array import array
from typing import Any

import pytest
import torch
from openai import BadRequestError, OpenAI

from tests.conformance.in_process_server import start_in_process_server
from tests.support.deadlines import HANG_S
from tests.support.weights.pooled_models import TEXTS, make, pooled

pytestmark = pytest.mark.slow

MEAN = {"pooling_mode_mean_tokens": True}
SETTINGS = {"model.max_model_len": 100, "cache.memory_bytes": 10_000_000, "model.name": "pool"}
TOLERANCE = 1e-5


def post(server, path: str, status: int = 200, **body: Any) -> Any:
    answer = server.client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedder")
    model = make(folder, "bert", modes=MEAN, normalizes=True)
    with start_in_process_server(folder, **SETTINGS) as server:
        server.model = model
        yield server


@pytest.fixture(scope="module")
def ranker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranker")
    model = make(folder, "bert", head="ForSequenceClassification", num_labels=1)
    with start_in_process_server(folder, **SETTINGS) as server:
        server.model = model
        yield server


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    labels = {0: "bad", 1: "fair", 2: "good"}
    model = make(folder, "xlm-roberta", head="ForSequenceClassification", id2label=labels)
    with start_in_process_server(folder, **SETTINGS) as server:
        server.model = model
        yield server


def ids_of(server, text: str) -> list[int]:
    return post(server, "/tokenize", prompt=text)["tokens"]


def reference(server, texts) -> torch.Tensor:
    rows = [pooled(server.model, "mean", ids_of(server, text)) for text in texts]
    return torch.nn.functional.normalize(torch.stack(rows), dim=-1)


def embeddings(answer: Any) -> torch.Tensor:
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    return torch.tensor([one["embedding"] for one in answer["data"]])


def test_texts_and_token_ids_in_every_form(embedder):
    right = reference(embedder, TEXTS)
    answer = post(embedder, "/v1/embeddings", model="pool", input=TEXTS)
    torch.testing.assert_close(embeddings(answer), right, rtol=0, atol=TOLERANCE)
    ids = [ids_of(embedder, text) for text in TEXTS]
    by_ids = post(embedder, "/v1/embeddings", input=ids)
    torch.testing.assert_close(embeddings(by_ids), right, rtol=0, atol=TOLERANCE)
    for one in (TEXTS[1], ids[1]):
        answer = post(embedder, "/v1/embeddings", input=one)
        torch.testing.assert_close(embeddings(answer), right[1:2], rtol=0, atol=TOLERANCE)
    count = sum(map(len, ids))
    assert by_ids["usage"]["prompt_tokens"] == by_ids["usage"]["total_tokens"] == count
    assert by_ids["usage"]["completion_tokens"] == 0
    assert by_ids["object"] == "list" and by_ids["data"][0]["object"] == "embedding"
    embedder.wait_idle()


def test_base64_dimensions_and_normalize(embedder):
    right = reference(embedder, TEXTS[:2])
    answer = post(embedder, "/v1/embeddings", input=TEXTS[:2], encoding_format="base64")
    values = [array("f", base64.b64decode(one["embedding"])) for one in answer["data"]]
    torch.testing.assert_close(torch.tensor(values), right, rtol=0, atol=TOLERANCE)
    answer = post(embedder, "/v1/embeddings", input=TEXTS[:2], dimensions=10)
    cut = torch.nn.functional.normalize(right[:, :10], dim=-1)
    torch.testing.assert_close(embeddings(answer), cut, rtol=0, atol=TOLERANCE)
    answer = post(embedder, "/v1/embeddings", input=TEXTS[1], normalize=False)
    plain = pooled(embedder.model, "mean", ids_of(embedder, TEXTS[1]))
    torch.testing.assert_close(embeddings(answer)[0], plain, rtol=1e-5, atol=TOLERANCE)


def test_the_openai_client(embedder):
    client = OpenAI(base_url=f"{embedder.url}/v1", api_key="none", timeout=HANG_S, max_retries=0)
    answer = client.embeddings.create(model="pool", input=TEXTS, dimensions=12)
    assert [len(one.embedding) for one in answer.data] == [12] * len(TEXTS)
    assert answer.usage.total_tokens > len(TEXTS)
    with pytest.raises(BadRequestError, match="dimensions=0 must be between 1 and"):
        client.embeddings.create(model="pool", input="a", dimensions=0)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"input": "a" * 150}, "length is 100 tokens. However, there are 152 tokens in input"),
        ({"input": ["a", "b" * 150]}, r"there are 152 tokens in input[1]"),
        ({"input": []}, "input=[] is empty"),
        ({"input": "", "add_special_tokens": False}, "input=[] is empty"),
        ({"input": ["a", "b", "", "c"], "add_special_tokens": False}, "input[2]=[] is empty"),
        ({"input": ["a"] * 7 + ["b" * 150] + ["a"] * 42}, "there are 152 tokens in input[7]"),
        ({"input": "a" * 150, "truncate": "NONE"}, "there are 152 tokens in input"),
        ({"input": "a", "truncate": "middle"}, "truncate"),
        ({"input": "a", "truncate": "END", "truncate_prompt_tokens": 5}, "both set"),
        ({"input": "a", "input_type": "quary"}, "input_type"),
        ({"input": "a", "input_type": "query", "prompt_name": "a"}, "both select"),
        ({"input": "a", "embedding_type": "binary"}, "embedding_type"),
        ({"input": ["a", 3]}, "mixes its forms"),
        ({"input": [5000]}, "5000"),
        ({"input": ["a"] * 1025}, "input holds 1025 prompts; at most 1024"),
        ({"input": "a", "dimensions": 65}, "dimensions=65 must be between 1 and"),
        ({"input": "a", "prompt_name": "query"}, "prompt_name='query' is not the name of a prompt"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        (
            {"input": "a", "truncate_prompt_tokens": 101},
            "1 to 100 tokens for the prompt (max_model_len=100)",
        ),
        (
            {"input": "a", "truncate_prompt_tokens": 2},
            "token of each text in addition to 2 special",
        ),
        ({"input": "a", "truncation_side": "left"}, "has no effect without truncate_prompt_tokens"),
        ({"input": "a", "priority": 1, "model": "other"}, "the model 'other' does not exist"),
        ({"input": "a", "data_parallel_rank": -1}, "data_parallel_rank=-1 must be at least 0"),
        ({"input": "a", "data_parallel_rank": 7}, "the active engines are [0]"),
        ({"input": "a", "cache_salt": "x" * 5000}, "cache_salt has 5000 characters"),
        ({"input": "a", "late_chunking": True}, "late_chunking=True is not supported"),
    ],
)
def test_inputs_that_cannot_be_embedded_are_refused_by_name(embedder, body, reason):
    error = post(embedder, "/v1/embeddings", 404 if "model" in body else 400, **body)["error"]
    assert reason in error["message"]
    embedder.wait_idle()


def test_an_empty_text_is_embedded_with_its_special_tokens(embedder):
    """sentence-transformers does the same. The other texts of the batch get the embeddings that
    they get separately."""
    texts = [*TEXTS[:2], "", *TEXTS[2:], ""]
    assert ids_of(embedder, "") == ids_of(embedder, "a")[::2], "[CLS] [SEP]"
    answer = post(embedder, "/v1/embeddings", input=texts)
    torch.testing.assert_close(
        embeddings(answer), reference(embedder, texts), rtol=0, atol=TOLERANCE
    )
    assert post(embedder, "/v1/embeddings", input="")["usage"]["prompt_tokens"] == 2
    embedder.wait_idle()


def test_an_empty_text_is_ranked(ranker):
    answer = post(ranker, "/rerank", query="a b", documents=["a", "", "b c"])
    assert sorted(one["index"] for one in answer["results"]) == [0, 1, 2]
    ranker.wait_idle()


@pytest.mark.parametrize(
    ("truncate", "side"), [("END", "right"), ("end", "right"), (True, "right"), ("START", "left")]
)
def test_a_request_selects_the_side_of_truncation(embedder, truncate, side):
    """TEI, NIM and Cohere define the field `truncate` this way."""
    texts = ["a b", " ".join("abcdefgh" * 30)]
    right = post(
        embedder, "/v1/embeddings", input=texts, truncate_prompt_tokens=-1, truncation_side=side
    )
    answer = post(embedder, "/v1/embeddings", input=texts, truncate=truncate)
    assert answer["data"] == right["data"] and answer["usage"] == right["usage"]
    assert answer["usage"]["prompt_tokens"] == 100 + len(ids_of(embedder, "a b"))
    embedder.wait_idle()


@pytest.mark.parametrize(("mode", "side"), [("end", "right"), ("start", "left")])
def test_the_configuration_selects_the_side_of_truncation(embedder, tmp_path, mode, side):
    """The setting applies to every endpoint where the request does not choose, and changes nothing
    else."""
    make(tmp_path, "bert", modes=MEAN, normalizes=True)
    long, given = " ".join("abcdefgh" * 30), {"truncate_prompt_tokens": -1, "truncation_side": side}
    with start_in_process_server(
        tmp_path, **SETTINGS, **{"serve.truncate_prompts": mode}
    ) as server:
        texts = [long, "a", "", long]
        answer = post(server, "/v1/embeddings", input=texts)
        assert answer["usage"]["prompt_tokens"] == 100 + 3 + 2 + 100
        assert answer["data"] == post(server, "/v1/embeddings", input=texts, **given)["data"]
        score = post(server, "/score", text_1="a", text_2=[long])
        assert score["data"] == post(server, "/score", text_1="a", text_2=[long], **given)["data"]
        post(server, "/v1/embeddings", 400, input=texts, truncate="none")
        cut = post(server, "/v1/embeddings", input=long, truncate_prompt_tokens=7)
        assert cut["usage"]["prompt_tokens"] == 7
        server.wait_idle()


def test_embedding_type_and_encodings_of_other_servers(embedder):
    plain = post(embedder, "/v1/embeddings", input="a")["data"]
    for body in (
        {"embedding_type": "float"},
        {"encoding_format": "float", "output_dtype": "float", "embedding_types": ["float"]},
        {"encoding_format": None, "input_type": "search_document"},
        {"input_type": "QUERY"},
    ):
        assert post(embedder, "/v1/embeddings", input="a", **body)["data"] == plain, body
    base64s = [
        post(embedder, "/v1/embeddings", input="a", **{name: "base64"})["data"]
        for name in ("embedding_type", "encoding_format")
    ]
    assert base64s[0] == base64s[1] != plain
    cut = [
        post(embedder, "/v1/embeddings", input="a", **{name: 9})["data"]
        for name in ("output_dimension", "dimensions")
    ]
    assert cut[0] == cut[1] != plain
    embedder.wait_idle()


def test_a_text_is_cut_between_its_special_tokens(embedder):
    long = " ".join("abcdefgh" * 30)
    ids = ids_of(embedder, long[:60])
    for count, kept in ((10, ids[:9]), (-1, None)):
        body = {"input": long, "truncate_prompt_tokens": count, "encoding_format": "float"}
        answer = post(embedder, "/v1/embeddings", **body)
        assert answer["usage"]["prompt_tokens"] == (count if count > 0 else 100)
        if kept is not None:
            vector = pooled(embedder.model, "mean", [*kept, 3])
            right = torch.nn.functional.normalize(vector, dim=-1)
            torch.testing.assert_close(embeddings(answer)[0], right, rtol=0, atol=TOLERANCE)
    body = {"input": long, "truncate_prompt_tokens": 4, "truncation_side": "left"}
    answer = post(embedder, "/v1/embeddings", **body)
    right = reference(embedder, ["g h"])
    torch.testing.assert_close(embeddings(answer), right, rtol=0, atol=TOLERANCE)


def test_a_pooling_model_refuses_to_generate(embedder, classifier):
    messages = [{"role": "user", "content": "a"}]
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": messages, "max_tokens": 3, "model": "pool"}),
    ):
        error = post(embedder, path, 400, **body)["error"]
        assert "generates no text; use POST /v1/embeddings" in error["message"]
    error = post(embedder, "/classify", 400, input="a")["error"]
    assert "returns embeddings and has no classes" in error["message"]
    error = post(classifier, "/v1/embeddings", 400, input="a")["error"]
    assert "returns no embeddings" in error["message"]
    error = post(classifier, "/score", 400, text_1="a", text_2="b")["error"]
    assert "has 3 classes" in error["message"]


def test_a_generating_model_refuses_to_pool():
    with start_in_process_server() as server:
        for path, body in (
            ("/v1/embeddings", {"input": "a"}),
            ("/classify", {"input": "a"}),
            ("/score", {"text_1": "a", "text_2": "b"}),
            ("/rerank", {"query": "a", "documents": ["b"]}),
        ):
            error = post(server, path, 400, **body)["error"]
            assert "does not support pooling" in error["message"]
        server.answers()


def test_scores_of_embeddings_are_cosines(embedder):
    right = reference(embedder, TEXTS)
    answer = post(embedder, "/v1/score", text_1=TEXTS[0], text_2=TEXTS)
    got = torch.tensor([one["score"] for one in answer["data"]])
    torch.testing.assert_close(got, right @ right[0], rtol=0, atol=TOLERANCE)
    for activates in (False, True):
        same = post(embedder, "/v1/score", text_1=TEXTS[0], text_2=TEXTS, use_activation=activates)
        assert [one["score"] for one in same["data"]] == [one["score"] for one in answer["data"]]
        ranked = post(
            embedder, "/v1/rerank", query=TEXTS[0], documents=TEXTS, use_activation=activates
        )
        found = {one["index"]: one["relevance_score"] for one in ranked["results"]}
        assert found == {one["index"]: one["score"] for one in answer["data"]}
    answer = post(embedder, "/score", queries=TEXTS, documents=TEXTS)
    got = torch.tensor([one["score"] for one in answer["data"]])
    torch.testing.assert_close(got, torch.ones(len(TEXTS)), rtol=0, atol=TOLERANCE)
    error = post(embedder, "/score", 400, text_1=["a", "b"], text_2=["c"])["error"]
    assert "text_1 has 2 texts and text_2 has 1" in error["message"]
    error = post(embedder, "/score", 400, text_1="a")["error"]
    assert "send either 'text_2' or 'documents'" in error["message"]


@torch.no_grad()
def logits_of_pairs(server, query: str, documents) -> torch.Tensor:
    rows = []
    for document in documents:
        first, second = ids_of(server, query), ids_of(server, document)[1:]
        types = torch.tensor([[0] * len(first) + [1] * len(second)])
        rows.append(server.model(torch.tensor([first + second]), token_type_ids=types).logits[0])
    return torch.stack(rows)


def test_a_cross_encoder_ranks(ranker):
    documents = TEXTS[1:6]
    right = torch.sigmoid(logits_of_pairs(ranker, TEXTS[0], documents))[:, 0]
    answer = post(ranker, "/rerank", query=TEXTS[0], documents=documents, top_n=3)
    order = right.argsort(descending=True)[:3].tolist()
    assert [one["index"] for one in answer["results"]] == order
    scores = torch.tensor([one["relevance_score"] for one in answer["results"]])
    torch.testing.assert_close(scores, right[order], rtol=0, atol=TOLERANCE)
    assert [one["document"]["text"] for one in answer["results"]] == [documents[i] for i in order]
    for path in ("/v1/rerank", "/v2/rerank"):
        body = {"query": TEXTS[0], "documents": [{"text": text} for text in documents]}
        plain = post(ranker, path, **body, return_documents=False)["results"]
        assert [one["index"] for one in plain] == right.argsort(descending=True).tolist()
        assert "document" not in plain[0]
    answer = post(ranker, "/score", text_1=TEXTS[0], text_2=documents, use_activation=False)
    got = torch.tensor([one["score"] for one in answer["data"]])
    right = logits_of_pairs(ranker, TEXTS[0], documents)[:, 0]
    torch.testing.assert_close(got, right, rtol=1e-5, atol=TOLERANCE)
    ranker.wait_idle()


def test_a_long_pair_is_refused_or_cut(ranker):
    query, document = "abc", "d" * 120
    error = post(ranker, "/rerank", 400, query=query, documents=["a", document])["error"]
    assert "documents[1]" in error["message"] and "100 tokens" in error["message"]
    answer = post(ranker, "/score", text_1=query, text_2=document, truncate_prompt_tokens=20)
    right = torch.sigmoid(logits_of_pairs(ranker, query, ["d" * 14]))[0]
    assert answer["usage"]["prompt_tokens"] == 20
    got = torch.tensor([answer["data"][0]["score"]])
    torch.testing.assert_close(got, right, rtol=0, atol=TOLERANCE)
    for body, reason in (
        ({"query": "a", "documents": []}, "documents=[] is empty"),
        ({"query": "a", "documents": ["b"], "top_n": -1}, "top_n=-1 must be at least 0"),
    ):
        assert reason in post(ranker, "/rerank", 400, **body)["error"]["message"]


@torch.no_grad()
def test_a_classifier_returns_classes(classifier):
    answer = post(classifier, "/classify", input=TEXTS)
    for one, text in zip(answer["data"], TEXTS, strict=True):
        logits = classifier.model(torch.tensor([ids_of(classifier, text)])).logits[0]
        right = torch.softmax(logits, -1)
        torch.testing.assert_close(torch.tensor(one["probs"]), right, rtol=0, atol=TOLERANCE)
        assert one["label"] == ["bad", "fair", "good"][right.argmax()]
        assert one["num_classes"] == 3
    plain = post(classifier, "/v1/classify", input=TEXTS[0], use_activation=False)["data"][0]
    logits = classifier.model(torch.tensor([ids_of(classifier, TEXTS[0])])).logits[0]
    torch.testing.assert_close(torch.tensor(plain["probs"]), logits, rtol=1e-5, atol=TOLERANCE)


def test_a_pooling_request_has_a_history_and_metrics(embedder):
    id = {"x-request-id": "pool-42"}
    body = {"input": TEXTS, "include_timings": True}
    answer = embedder.client.post("/v1/embeddings", json=body, headers=id).json()
    assert answer["timings"]
    (story,) = embedder.client.get("/admin/requests/pool-42").json()["requests"]
    assert story["operation"] == "embeddings"
    before = embedder.client.get("/metrics").text
    post(embedder, "/v1/embeddings", input=TEXTS[0])
    after = embedder.client.get("/metrics").text

    def prompt_tokens(text: str) -> float:
        lines = [line for line in text.splitlines() if line.startswith("swell_prompt_tokens_total")]
        return sum(float(line.split()[-1]) for line in lines)

    assert prompt_tokens(after) - prompt_tokens(before) == len(ids_of(embedder, TEXTS[0]))
