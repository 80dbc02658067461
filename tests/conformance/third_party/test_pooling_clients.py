"""Clients of embeddings and of ranking against pooling models; sentence-transformers is the
reference."""

from __future__ import annotations

from pathlib import Path

import cohere
import numpy as np
import pytest
from langchain_openai import OpenAIEmbeddings
from openai import OpenAI
from sentence_transformers import CrossEncoder, SentenceTransformer

pytestmark = pytest.mark.slow

TEXTS = ["a", "what is a pool?", "the quick brown fox jumps over the lazy dog.", "x y z " * 15]
TOLERANCE = 1e-5


def embeddings_of(folder: Path) -> np.ndarray:
    return SentenceTransformer(str(folder), device="cpu").encode(TEXTS)


def test_the_openai_client_gets_what_sentence_transformers_computes(
    embedder: tuple[Path, str],
) -> None:
    folder, url = embedder
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.embeddings.create(model="embedder", input=TEXTS)
    got = np.array([one.embedding for one in answer.data])
    assert np.abs(got - embeddings_of(folder)).max() < TOLERANCE
    plain = client.embeddings.create(model="embedder", input=TEXTS, encoding_format="float")
    assert [one.embedding for one in plain.data] == [one.embedding for one in answer.data]


def test_langchain_embeds_documents(embedder: tuple[Path, str]) -> None:
    folder, url = embedder
    client = OpenAIEmbeddings(
        base_url=f"{url}/v1", api_key="none", model="embedder", check_embedding_ctx_length=False
    )
    assert np.abs(np.array(client.embed_documents(TEXTS)) - embeddings_of(folder)).max() < TOLERANCE


def test_coheres_client_ranks_as_a_cross_encoder(ranker: tuple[Path, str]) -> None:
    folder, url = ranker
    judge = CrossEncoder(str(folder), device="cpu", max_length=128)
    right = judge.predict([(TEXTS[1], text) for text in TEXTS])
    client = cohere.ClientV2(api_key="none", base_url=url)
    answer = client.rerank(model="ranker", query=TEXTS[1], documents=TEXTS, top_n=3)
    assert [one.index for one in answer.results] == np.argsort(-right)[:3].tolist()
    got = np.array([one.relevance_score for one in answer.results])
    assert np.abs(got - np.sort(right)[::-1][:3]).max() < TOLERANCE
