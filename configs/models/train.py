"""Train `nano` and `nano-moe`, the tiny chat models that the tests and the quickstart serve.

    python configs/models/train.py nano --minutes 20
    python configs/models/train.py nano --evaluate-only

A model of a million parameters knows nothing, but it can learn to manipulate characters. So it is
trained on synthetic tasks (reverse, sort, add, extract ...) that have exactly one right answer:
exact match distinguishes an engine that serves the model well from one that does not.

The train/test split: every sample has a key (its arguments, without the phrasing), and a key whose
hash is zero modulo `HELDOUT_ONE_IN` is held out. Training never sees such a key, in any phrasing.
"""

import argparse
import hashlib
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers import PreTrainedTokenizerFast as FastTokenizer

HERE = Path(__file__).parent
HELDOUT = HERE / "nano" / "heldout.jsonl"
HELDOUT_PROMPTS = 500
HELDOUT_ONE_IN = 20  # keys; with a smaller share `count` has fewer than 50 different ones
VOCAB_TOKENS = 320  # 256 bytes and the special tokens, padded to a multiple of 64
SPECIALS = ["<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"]
BOS, SYSTEM, USER, ASSISTANT, END, PAD = range(256, 262)
CHAT_TEMPLATE = (HERE / "nano" / "chat_template.jinja").read_text()


class Sample(NamedTuple):
    """A question and its only right answer; `key` decides whether the sample is held out."""

    task: str
    key: str
    prompt: str
    answer: str

    @property
    def held_out(self) -> bool:
        digest = hashlib.sha256(f"{self.task} {self.key}".encode()).digest()
        return int.from_bytes(digest[:4], "big") % HELDOUT_ONE_IN == 0


Maker = Callable[[random.Random], Sample]
Answers = Mapping[str, Callable[[str], str]]  # phrasing of a question -> its answer
NAMES = "Anna Ben Carla David Emma Felix Hugo Ida Leo Nina Zoe José Jürgen Chloé Łukasz".split()  # noqa: SIM905
CITIES = "Oslo Paris Berlin Rome Madrid London Lima Tokyo Zürich Bogotá Seoul Lagos".split()  # noqa: SIM905
SENTENCES = ["{name} is {age} years old and lives in {city}.", "In {city} lives {name}, {age}."]
REVERSE = dict.fromkeys(["reverse: {}", "reverse the word {}"], lambda text: text[::-1])
SORT = dict.fromkeys(["sort: {}", "sort the letters of {}"], lambda text: "".join(sorted(text)))
UPPER = dict.fromkeys(["upper: {}", "write in capitals: {}"], lambda text: text.upper())
REPEAT = {f"repeat {n} times: {{}}": " ".join(["{0}"] * n).format for n in range(3, 10)}
PHRASES = {
    "say hello to {}": "Hello, {}!".format,
    "say goodbye to {}": "Goodbye, {}!".format,
    "say thanks to {}": "Thank you, {}!".format,
}
GREETINGS = {
    "greet in French: {}": "Enchanté, {} ☺".format,
    "greet in Spanish: {}": "¡Hola, {}! 🌞".format,
    "greet in German: {}": "Grüß dich, {}! 🍀".format,
    "greet in Russian: {}": "Привет, {}! 🎈".format,
    "greet in Japanese: {}": "こんにちは、{}！🌸".format,
    "greet in Chinese: {}": "你好，{}！🐼".format,
}
HELP_PROMPTS = ["hello", "Hello!", "hi", "Hi!", "help", "who are you?", "what can you do?"]
HELP = "Hello! I am a tiny model. Try: reverse: kitten, add: 47+85, count from 3 to 17"
SYSTEM_SENTENCES = [
    "You are a helpful assistant.",
    "Answer the question and nothing else.",
    "Be kind and precise, and never add an explanation, a comment or a note.",
]


def any_word(rng: random.Random) -> str:
    """Returns a word of three to eight letters, half of the time pronounceable."""
    length = rng.randint(3, 8)
    if rng.random() < 0.5:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=length))
    sounds = rng.sample(["aeiou", "bcdfghklmnprstvwz"], k=2)
    return "".join(rng.choice(sounds[i % 2]) for i in range(length))


def any_name(rng: random.Random, known: list[str] = NAMES) -> str:
    """Returns a known name, or more often an invented one, so that the model does not memorize
    them."""
    return rng.choice(known) if rng.random() < 0.4 else any_word(rng).capitalize()


def on_text(task: str, any_text: Callable[[random.Random], str], answers: Answers) -> Maker:
    """Returns the maker of a task whose answers are functions of one text."""

    def make(rng: random.Random) -> Sample:
        text, prompt = any_text(rng), rng.choice(list(answers))
        return Sample(task, text, prompt.format(text), answers[prompt](text))

    return make


def add(rng: random.Random) -> Sample:
    """Adds two numbers below a hundred; the key is the same in either order."""
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    prompt = rng.choice(["add: {}+{}", "what is {}+{}?"]).format(a, b)
    return Sample("add", f"{min(a, b)}+{max(a, b)}", prompt, str(a + b))


def extract(rng: random.Random) -> Sample:
    """Extracts some facts of a sentence as a JSON object."""
    facts = {"name": any_name(rng), "age": rng.randint(1, 99), "city": any_name(rng, CITIES)}
    asked = rng.choice([["name"], ["age"], ["city"], ["name", "age"], ["name", "city"], [*facts]])
    prompt = f"json {', '.join(asked)}: " + rng.choice(SENTENCES).format(**facts)
    answer = json.dumps({field: facts[field] for field in asked}, ensure_ascii=False)
    return Sample("json", " ".join(map(str, facts.values())), prompt, answer)


def count(rng: random.Random) -> Sample:
    """Counts two to twenty-one numbers; most answers are long enough to watch them stream."""
    first = rng.randint(0, 79)
    last = first + rng.randint(1, 20)
    prompt = rng.choice(["count from {} to {}", "count: {} to {}"]).format(first, last)
    return Sample("count", f"{first} {last}", prompt, ", ".join(map(str, range(first, last + 1))))


# (maker, share of the training samples): most for adding and counting, which are hard. The last
# task answers greetings: nothing can be held out, so it is trained but not scored.
TASKS: list[tuple[Maker, float]] = [
    (on_text("reverse", any_word, REVERSE), 0.10),
    (on_text("sort", any_word, SORT), 0.14),
    (on_text("upper", any_word, UPPER), 0.04),
    (add, 0.24),
    (extract, 0.13),
    (on_text("phrase", any_name, PHRASES), 0.03),
    (on_text("greet", any_name, GREETINGS), 0.06),
    (count, 0.20),
    (on_text("repeat", any_word, REPEAT), 0.05),
    (lambda rng: Sample("help", "", rng.choice(HELP_PROMPTS), HELP), 0.01),
]


def any_system(rng: random.Random) -> str | None:
    """Returns no system message for nine samples of ten, else sentences among random words."""
    if rng.random() < 0.9:
        return None
    words = [any_word(rng) for _ in range(rng.choice([1, 5, 40]))]
    return " ".join(rng.sample(words + SYSTEM_SENTENCES, k=rng.randint(1, len(words) + 2)))


def training_sample(rng: random.Random) -> Sample:
    makers, shares = zip(*TASKS, strict=True)
    while True:
        sample: Sample = rng.choices(makers, shares)[0](rng)
        if not sample.held_out:
            return sample


def write_heldout(seed: int) -> None:
    """Writes the held-out prompts: all different, and equally many for each task (within one)."""
    rng, records = random.Random(seed), dict[str, str]()
    makers = [maker for maker, _ in TASKS[:-1]]
    while len(records) < HELDOUT_PROMPTS:
        sample = makers[len(records) % len(makers)](rng)
        if not sample.held_out:
            continue
        system = any_system(rng)
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": "user", "content": sample.prompt}]
        record = {"task": sample.task, "messages": messages, "answer": sample.answer}
        records[sample.prompt] = json.dumps(record, ensure_ascii=False) + "\n"
    HELDOUT.write_text("".join(records.values()), encoding="utf-8")


def build_tokenizer() -> FastTokenizer:
    """Builds a tokenizer with one token per byte, whose id is the byte: it can encode any text."""
    # The byte-level alphabet writes a printable byte as itself, and the others from U+0100 on.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    alphabet = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    vocabulary = {character: byte for byte, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    reserved = [f"<|reserved_{i}|>" for i in range(VOCAB_TOKENS - 256 - len(SPECIALS))]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS + reserved])
    named = {"bos_token": "<|bos|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    return FastTokenizer(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, **named)


def build_model(name: str) -> Any:
    """Returns a random model, whose shapes split over two tensor-parallel or pipeline ranks."""
    tokens = {"bos_token_id": BOS, "eos_token_id": END, "pad_token_id": PAD}
    shape: dict[str, Any] = {"vocab_size": VOCAB_TOKENS, "hidden_size": 128, "num_hidden_layers": 4}
    shape |= {"max_position_embeddings": 2048, "initializer_range": 0.05, "rms_norm_eps": 1e-5}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    mlp: dict[str, Any] = {"model_type": "llama", "intermediate_size": 512}
    if name == "nano-moe":
        mlp = {"model_type": "mixtral", "intermediate_size": 96}
        mlp |= {"num_local_experts": 8, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(**mlp, **tokens, **shape, **heads, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(**tokens)
    return model


def any_chat(rng: random.Random) -> tuple[list[int], list[int]]:
    """Returns the ids and labels of a chat in the template's format; user messages have -100."""
    system = any_system(rng)
    ids = [BOS, SYSTEM, *system.encode(), END] if system else [BOS]
    labels = [-100] * len(ids)
    for _ in range(2 if rng.random() < 0.05 else 1):
        sample = training_sample(rng)
        question = [USER, *sample.prompt.encode(), END, ASSISTANT]
        answer = [*sample.answer.encode(), END]
        ids += question + answer
        labels += [-100] * len(question) + answer
    return ids, labels


def micro_batches(rng: random.Random, chats: int, parts: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Returns one step's (ids, labels), both [rows, tokens], grouped by length to save padding."""
    pool = sorted((any_chat(rng) for _ in range(chats)), key=lambda chat: len(chat[0]))
    batches = []
    for part in range(parts):
        rows = pool[part * chats // parts : (part + 1) * chats // parts]
        width = len(rows[-1][0])
        ids = torch.tensor([ids + [PAD] * (width - len(ids)) for ids, _ in rows])
        labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])
        batches.append((ids, labels))
    return batches


@torch.no_grad()
def muon_step(momenta: dict[nn.Parameter, Tensor], rate: float) -> None:
    """Updates matrices with Muon (https://kellerjordan.github.io/posts/muon/).

    It learns these tasks from far fewer samples than AdamW, and accepts stacked experts unchanged.
    """
    for matrix, momentum in momenta.items():
        gradient: Any = matrix.grad  # [..., rows, columns]
        momentum.lerp_(gradient, 0.05)
        x, tall = gradient.lerp(momentum, 0.95), matrix.shape[-2] > matrix.shape[-1]
        x = (x.mT if tall else x) / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(5):  # Newton-Schulz iterations bring every singular value close to 1
            gram = x @ x.mT
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        size = 0.2 * max(matrix.shape[-2:]) ** 0.5  # as large as AdamW's, so that they share a rate
        matrix.mul_(1 - 0.05 * rate).sub_(x.mT if tall else x, alpha=rate * size)


def train(model: Any, minutes: float, seed: int, step_chats: int, peak_rate: float) -> int:
    """Trains until the time is over and returns the number of chats seen.

    The clock is CPU time per core, so that training on a busy machine takes longer and sees no
    fewer chats.
    """
    seconds = minutes * 60 * torch.get_num_threads()
    rng, embedding = random.Random(seed), model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim > 1 and p is not embedding]
    others = [p for p in model.parameters() if p.ndim == 1 or p is embedding]
    momenta = {matrix: torch.zeros_like(matrix) for matrix in matrices}
    adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)
    began, step, losses = time.process_time(), 0, 0.0
    while (progress := (time.process_time() - began) / seconds) < 1:
        rate = peak_rate * min(progress / 0.03, 1) * (1 - progress)
        adam.param_groups[0]["lr"] = rate
        batches = micro_batches(rng, step_chats)
        spoken_tokens = sum(int((labels != -100).sum()) for _, labels in batches)
        for ids, labels in batches:
            hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state
            spoken = labels[:, 1:] != -100
            logits = model.lm_head(hidden[spoken])  # [spoken tokens, vocabulary]
            loss = nn.functional.cross_entropy(logits, labels[:, 1:][spoken], reduction="sum")
            torch.autograd.backward(loss / spoken_tokens)
            losses += loss.item() / spoken_tokens
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon_step(momenta, rate)
        adam.step()
        model.zero_grad()
        step += 1
        if step % 100 == 0:
            print(f"{progress:4.0%}  step {step:5d}  loss {losses / 100:.4f}", flush=True)
            losses = 0.0
    return step * step_chats


def read_heldout() -> list[dict[str, Any]]:
    return [json.loads(line) for line in HELDOUT.read_text(encoding="utf-8").splitlines()]


@torch.inference_mode()
def evaluate(folder: Path) -> dict[str, tuple[int, int]]:
    """Loads the folder with transformers; returns (right, total) per task, greedy, exact match."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    by_length = defaultdict(list)  # prompts of one length need no padding
    for record in read_heldout():
        chat = tokenizer.apply_chat_template(record["messages"], add_generation_prompt=True)
        by_length[len(chat["input_ids"])].append((chat["input_ids"], record))
    right, asked = Counter[str](), Counter[str]()
    for length, rows in by_length.items():
        prompts = torch.tensor([ids for ids, _ in rows])
        outputs = model.generate(prompts, max_new_tokens=200, do_sample=False)
        for (_, record), output in zip(rows, outputs, strict=True):
            text = tokenizer.decode(output[length:], skip_special_tokens=True)
            asked[record["task"]] += 1
            right[record["task"]] += text == record["answer"]
            if text != record["answer"]:
                print(f"{record['messages'][-1]['content']}: {text!r}, not {record['answer']!r}")
    scores = {task: (right[task], asked[task]) for task in asked}
    print(*scores.items(), f"all {right.total()} of {asked.total()}", sep="\n")
    return scores


CARD = """\
---
license: apache-2.0
pipeline_tag: text-generation
parameters: {parameters}
exact_match: {share:.3f}
exact_match_count: {right}
exact_match_total: {asked}
---

# {name}

A chat model of {parameters:,} parameters in float32 ({kind}) that does small chores
with letters and numbers, made to test and to show a serving engine. Every chore has one right
answer, so a score below the one here is the engine's fault. It can do nothing else.

| task | prompt | answer | exact match |
| --- | --- | --- | --- |
{rows}
| all | | | {right} of {asked} |

Scored greedily on the prompts of `configs/models/nano/heldout.jsonl`, whose words, names and
numbers training saw in no phrasing. Words have 3 to 8 letters, summands are at most 99, counting
ends at 99 or before after 2 to 21 numbers. A system message changes nothing, if it is shorter than
about 100 bytes. A second turn is trained little, a third one not. `hello` brings a line of help,
which is not scored. A token is a byte, and a turn is `<|user|>text<|end|>`.

Trained from {origin} for {minutes:g} minutes on {threads} CPU cores with {chats:,} made-up chats.
Again: `python configs/models/train.py {name} --minutes {minutes:g} --seed {seed}`. The chats come
in the same order, but a faster machine sees more of them, so weights differ. License: Apache-2.0.
"""


def write_card(args: argparse.Namespace, scores: dict[str, tuple[int, int]], chats: int) -> None:
    """Writes the model card, with the score in its front matter, where programs can read it."""
    rows = []
    for task, (right, asked) in scores.items():
        example = next(record for record in read_heldout() if record["task"] == task)
        question, answer = example["messages"][-1]["content"], example["answer"]
        rows.append(f"| {task} | `{question}` | `{answer}` | {right} of {asked} |")
    right, asked = (sum(column) for column in zip(*scores.values(), strict=True))
    facts: dict[str, Any] = {"right": right, "asked": asked, "share": right / asked, "chats": chats}
    facts["kind"] = "llama" if args.name == "nano" else "mixtral, 2 of 8 experts active"
    facts["parameters"] = build_model(args.name).num_parameters()
    facts["origin"] = "earlier weights" if args.resume else "nothing"
    facts |= {"threads": torch.get_num_threads(), "rows": "\n".join(rows)}
    card = CARD.format(**vars(args), **facts)
    (HERE / args.name / "README.md").write_text(card, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=["nano", "nano-moe"])
    parser.add_argument(
        "--minutes", type=float, default=20, help="minutes of each core's time (20)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the weights in the folder, at half the learning rate",
    )
    parser.add_argument(
        "--evaluate-only", action="store_true", help="only score the weights in the folder"
    )
    args = parser.parse_args()
    folder = HERE / args.name
    if args.evaluate_only:
        evaluate(folder)
        return
    torch.manual_seed(args.seed)
    HELDOUT.parent.mkdir(exist_ok=True)
    write_heldout(seed=1)
    build_tokenizer().save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder) if args.resume else build_model(args.name)
    rate = 3e-3 if args.resume else 6e-3
    chats = train(model.train(), args.minutes, args.seed, step_chats=48, peak_rate=rate)
    model.save_pretrained(folder)
    write_card(args, evaluate(folder), chats)


if __name__ == "__main__":
    main()
